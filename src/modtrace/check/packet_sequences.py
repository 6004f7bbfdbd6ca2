"""Split a Perfetto trace into packets, and keep the state that each packet sequence builds up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as proto

from ..formats.packet_stream import FramingError, packet_batches, packet_bounds
from .model import Violation

__all__ = ["PacketSequence", "parse_packets"]

_REASONS = {"none": "no packet starts here", "cut off": "the packet that starts here is cut off"}
_BATCH_BYTES = 1 << 19
"""Bytes of packets that are parsed at a time; their objects take many times as much."""
_MIN_SEQUENCE_CLOCK_ID = 64
"""Clock ids from here on are local to their sequence; smaller ones are Perfetto's built-in clocks."""
_STATE_CLEARED = proto.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED


def parse_packets(blocks: Iterable[bytes], violations: list[Violation]) -> Iterator[list[Any]]:
    """Yield the packets of a trace some at a time, in memory that does not grow with the file.

    Args:
        blocks: the trace's bytes.
        violations: takes the first byte that belongs to no packet; reading ends there.
    """
    try:
        for offset, batch in packet_batches(blocks, _BATCH_BYTES):
            packets, parsed_to = _parse(batch)
            yield packets
            if parsed_to < len(batch):
                message = f"byte {offset + parsed_to}: the packet that starts here is no packet"
                violations.append(Violation("unreadable", message))
                return
    except FramingError as error:
        reason = _REASONS.get(error.kind, str(error))
        violations.append(Violation("unreadable", f"byte {error.offset}: {reason}"))


def _parse(data: bytes) -> tuple[list[Any], int]:
    """Parse framed packets; return those before the first that cannot be parsed, and where it starts."""
    try:
        return list(proto.Trace.FromString(data).packet), len(data)
    except DecodeError:
        pass  # one of them is broken: parse them one by one
    packets, offset = [], 0
    while bounds := packet_bounds(data, offset) if offset < len(data) else None:
        try:
            packets.append(proto.TracePacket.FromString(data[slice(*bounds)]))
        except DecodeError:
            break
        offset = bounds[1]
    return packets, offset


@dataclass(slots=True)
class _SequenceClock:
    """A clock that one sequence defines for itself.

    Attributes:
        unit_ns: ns per tick.
        incremental: timestamps are differences to the previous one.
        now_ns: its last reading.
        offset_ns: what to add to its readings to get those of the built-in clock it was compared with.
    """

    unit_ns: int
    incremental: bool
    now_ns: int
    offset_ns: int


@dataclass(slots=True)
class PacketSequence:
    """The state that the packets of one sequence have set for those after them.

    Attributes:
        has_state: a packet has opened the incremental state that others need.
        default_clock_id: for packets that name no clock; 0 is the trace's own.
        default_track: uuid of the track for events that name none.
        clocks: the clocks of the sequence itself, by id.
        interned: the interned values of each field of InternedData, by iid.
    """

    has_state: bool = False
    default_clock_id: int = 0
    default_track: int = 0
    clocks: dict[int, _SequenceClock] = field(default_factory=dict)
    interned: defaultdict[str, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))

    def update(self, packet: Any) -> None:
        """Apply what a packet sets for those after it."""
        if packet.sequence_flags & _STATE_CLEARED:
            self.has_state = True
            self.interned.clear()
            self.default_clock_id = self.default_track = 0
        if packet.HasField("trace_packet_defaults"):
            self.default_clock_id = packet.trace_packet_defaults.timestamp_clock_id
            self.default_track = packet.trace_packet_defaults.track_event_defaults.track_uuid
        if packet.HasField("clock_snapshot"):
            self._define_clocks(packet.clock_snapshot.clocks)
        if packet.HasField("interned_data"):
            for descriptor, entries in packet.interned_data.ListFields():
                values = self.interned[descriptor.name]
                for entry in entries:
                    value = getattr(entry, "name", None) or getattr(entry, "str", "")
                    values[entry.iid] = value if isinstance(value, str) else repr(value)

    def time_ns(self, packet: Any) -> int | None:
        """Return the packet's time on the built-in clock; None where its clock has never been defined.

        To be called once per packet, in file order: an incremental clock advances.
        """
        clock_id = packet.timestamp_clock_id or self.default_clock_id
        if clock_id < _MIN_SEQUENCE_CLOCK_ID:
            return int(packet.timestamp)
        clock = self.clocks.get(clock_id)
        if clock is None:
            return None
        ticks_ns = packet.timestamp * clock.unit_ns
        clock.now_ns = clock.now_ns + ticks_ns if clock.incremental else ticks_ns
        return clock.now_ns + clock.offset_ns

    def _define_clocks(self, readings: Any) -> None:
        builtin_ns = next((reading.timestamp for reading in readings if reading.clock_id < _MIN_SEQUENCE_CLOCK_ID), 0)
        for reading in readings:
            if reading.clock_id >= _MIN_SEQUENCE_CLOCK_ID:
                unit_ns = reading.unit_multiplier_ns or 1
                now_ns = reading.timestamp * unit_ns
                self.clocks[reading.clock_id] = _SequenceClock(
                    unit_ns, reading.is_incremental, now_ns, builtin_ns - now_ns
                )
