"""The packets of a Perfetto trace, and what each sequence of them has said so far."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as proto

from .model import Violation

__all__ = ["Sequence", "packets_of"]

PACKET_TAG = 0x0A
FIRST_OF_SEQUENCE_CLOCKS = 64
"""Clock ids from here on mean something in their own sequence only."""


def packets_of(data: bytes, violations: list[Violation]) -> Iterator[Any]:
    """Parse packet by packet; stops, with a violation, at the first byte that belongs to none."""
    at = 0
    while at < len(data):
        start = at
        if data[at] != PACKET_TAG:
            violations.append(Violation("unreadable", f"byte {at}: no packet starts here"))
            return
        length, at = _varint(data, at + 1)
        if length is None or at + length > len(data):
            violations.append(Violation("unreadable", f"byte {start}: the packet that starts here is cut off"))
            return
        try:
            yield proto.TracePacket.FromString(data[at : at + length])
        except DecodeError:
            violations.append(Violation("unreadable", f"byte {start}: the packet that starts here is no packet"))
            return
        at += length


def _varint(data: bytes, at: int) -> tuple[int | None, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    return None, at


@dataclass(slots=True)
class Clock:
    """A clock of one sequence: deltas of `unit` ns where it is incremental, and where it stood last."""

    unit: int
    incremental: bool
    now: int
    ahead: int
    """What its readings lack to the built-in clock it was compared with, in ns."""


@dataclass(slots=True)
class Sequence:
    """What the packets of one sequence said that later ones build on.

    Attributes:
        opened: whether a packet has opened the incremental state that others need.
        clock: the default clock; 0 is the trace's own.
        track: the default track.
        clocks: those of the sequence itself.
        interned: the interned values by (field of InternedData, id).
    """

    opened: bool = False
    clock: int = 0
    track: int = 0
    clocks: dict[int, Clock] = field(default_factory=dict)
    interned: dict[tuple[str, int], str] = field(default_factory=dict)

    def take(self, packet: Any) -> None:
        """Take in what the packet says about the packets after it."""
        if packet.sequence_flags & proto.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED:
            self.opened = True
            self.interned.clear()
            self.clock = self.track = 0
        if packet.HasField("trace_packet_defaults"):
            self.clock = packet.trace_packet_defaults.timestamp_clock_id
            self.track = packet.trace_packet_defaults.track_event_defaults.track_uuid
        if packet.HasField("clock_snapshot"):
            self._compare(packet.clock_snapshot.clocks)
        if packet.HasField("interned_data"):
            for kind, entries in packet.interned_data.ListFields():
                for entry in entries:
                    value = getattr(entry, "name", None) or getattr(entry, "str", "")
                    self.interned[kind.name, entry.iid] = value if isinstance(value, str) else repr(value)

    def _compare(self, readings: Any) -> None:
        wall = next((reading.timestamp for reading in readings if reading.clock_id < FIRST_OF_SEQUENCE_CLOCKS), 0)
        for reading in readings:
            if reading.clock_id >= FIRST_OF_SEQUENCE_CLOCKS:
                unit = reading.unit_multiplier_ns or 1
                stands = reading.timestamp * unit
                self.clocks[reading.clock_id] = Clock(unit, reading.is_incremental, stands, wall - stands)

    def time_of(self, packet: Any) -> int | None:
        """Return the packet's time in ns of the built-in clocks; None where its clock has never been set."""
        number = packet.timestamp_clock_id or self.clock
        if number < FIRST_OF_SEQUENCE_CLOCKS:
            return int(packet.timestamp)
        clock = self.clocks.get(number)
        if clock is None:
            return None
        if clock.incremental:
            clock.now += packet.timestamp * clock.unit
        else:
            clock.now = packet.timestamp * clock.unit
        return clock.now + clock.ahead
