"""Perfetto's protobuf: packets, the state of their sequences, the rules for packets, and the layout of valid slices."""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as proto

from .._arrays import Numbering
from ..formats.event_table import BEGIN as SLICE_BEGIN
from ..formats.event_table import END as SLICE_END
from ..formats.event_table import SLICE
from ..formats.packet_stream import FramingError, packet_batches, packet_bounds
from .track_layout import END, NEVER_NS, ONWARD, Fault, FlowEnds, SliceEvents, TrackKey, TrackLayout

_REASONS = {"none": "no packet starts here", "cut off": "the packet that starts here is cut off"}
_BATCH_BYTES = 1 << 19
"""Size of the packets that are parsed at a time; the parsed objects need many times as much memory."""
_MIN_SEQUENCE_CLOCK_ID = 64
"""Minimum id of a clock that is local to its sequence; lower ids are Perfetto's built-in clocks."""
_STATE_CLEARED = proto.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED


def parse_packets(blocks: Iterable[bytes], faults: list[Fault]) -> Iterator[list[Any]]:
    """Yield the packets of a trace in batches; reading stops at a framing error, which is added to `faults`."""
    try:
        for offset, batch in packet_batches(blocks, _BATCH_BYTES):
            packets, parsed_bytes = _parse(batch)
            yield packets
            if parsed_bytes < len(batch):
                message = f"byte {offset + parsed_bytes}: the packet that starts here is not a packet"
                faults.append(Fault("unreadable", message))
                return
    except FramingError as error:
        reason = _REASONS.get(error.kind, str(error))
        faults.append(Fault("unreadable", f"byte {error.offset}: {reason}"))


def _parse(data: bytes) -> tuple[list[Any], int]:
    """Parse framed packets; return the packets before the first broken one, and their size in bytes."""
    try:
        return list(proto.Trace.FromString(data).packet), len(data)
    except DecodeError:
        pass  # a packet is broken: parse the packets one by one
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
    """A clock that a sequence defines for itself."""

    unit_ns: int  # ns per tick
    is_incremental: bool  # whether timestamps are differences to the previous one
    now_ns: int  # last reading in ns
    offset_ns: int  # time of the built-in clock minus time of this clock, in ns


@dataclass(slots=True)
class PacketSequence:
    """The state that the packets of a sequence have set for later packets."""

    has_state: bool = False  # whether a packet has opened the incremental state
    default_clock_id: int = 0  # clock of packets without a clock id; 0 is the clock of the trace
    default_track: int = 0  # uuid of the track of events without a track
    clocks: dict[int, _SequenceClock] = field(default_factory=dict)  # clocks of the sequence itself, by id
    # Interned values by iid, for each field of InternedData.
    interned: defaultdict[str, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))

    def update(self, packet: Any, data: str | None) -> None:
        """Apply the settings of a packet for later packets; `data` is the packet's kind of data."""
        if packet.sequence_flags & _STATE_CLEARED:
            self.has_state = True
            self.interned.clear()
            self.default_clock_id = self.default_track = 0
        if packet.HasField("trace_packet_defaults"):
            self.default_clock_id = packet.trace_packet_defaults.timestamp_clock_id
            self.default_track = packet.trace_packet_defaults.track_event_defaults.track_uuid
        if data == "clock_snapshot":
            readings, min_id = packet.clock_snapshot.clocks, _MIN_SEQUENCE_CLOCK_ID
            builtin_ns = next((reading.timestamp for reading in readings if reading.clock_id < min_id), 0)
            for reading in (reading for reading in readings if reading.clock_id >= min_id):
                unit_ns = reading.unit_multiplier_ns or 1
                now_ns = reading.timestamp * unit_ns
                clock = _SequenceClock(unit_ns, reading.is_incremental, now_ns, builtin_ns - now_ns)
                self.clocks[reading.clock_id] = clock
        if packet.HasField("interned_data"):
            for descriptor, entries in packet.interned_data.ListFields():
                values = self.interned[descriptor.name]
                for entry in entries:
                    value = getattr(entry, "name", None) or getattr(entry, "str", "")
                    values[entry.iid] = value if isinstance(value, str) else repr(value)

    def time_ns(self, packet: Any) -> int | None:
        """Return the packet's time on the built-in clock in ns; None if its clock has not been defined.

        Call it once per packet, in file order: it advances an incremental clock.
        """
        clock_id = packet.timestamp_clock_id or self.default_clock_id
        if clock_id < _MIN_SEQUENCE_CLOCK_ID:
            return int(packet.timestamp)
        clock = self.clocks.get(clock_id)
        if clock is None:
            return None
        ticks_ns = packet.timestamp * clock.unit_ns
        clock.now_ns = clock.now_ns + ticks_ns if clock.is_incremental else ticks_ns
        return clock.now_ns + clock.offset_ns


_BEGIN, _END, _INSTANT = (
    proto.TrackEvent.TYPE_SLICE_BEGIN,
    proto.TrackEvent.TYPE_SLICE_END,
    proto.TrackEvent.TYPE_INSTANT,
)
_PHASES = np.array([0, SLICE_BEGIN, SLICE_END, SLICE], np.uint8)
"""The phase in `SliceEvents` for each of these types."""
_TRACK_BITS = 30
_TYPE_ONLY_BYTES = 2
"""Size of a track event with a type and no other field, such as most ends of slices."""
_NEEDS_STATE = proto.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE


class PerfettoPackets:
    """Checks single packets, and collects the valid ones for the rules between events."""

    def __init__(self) -> None:
        self._names, self._tracks = Numbering[str](), Numbering[TrackKey]()
        _ = self._names[""]  # 0: no name
        # The valid events of `SliceEvents` and `FlowEnds`. An event is three numbers: time, position, and a code of
        # name, track and type. One array for all three is faster to append to than three arrays.
        self._events = array("q")
        self._flow_phase, self._flow, self._flow_event = bytearray(), array("Q"), array("q")
        self._position = 0
        self._sequences: dict[int, PacketSequence] = defaultdict(PacketSequence)
        self._described_tracks: set[int] = {0}
        self._faults: list[Fault] = []

    def add(self, packets: list[Any]) -> None:
        """Check the next packets of the file."""
        for position, packet in enumerate(packets, self._position):
            sequence = self._sequences[packet.trusted_packet_sequence_id]
            # Asking for the packet's kind of data is far cheaper than checking each field.
            data = packet.WhichOneof("data")
            sequence.update(packet, data)
            if data == "track_event":
                self._add_event(position, packet, packet.track_event, sequence, sequence.time_ns(packet))
            elif data == "track_descriptor":
                self._described_tracks.add(packet.track_descriptor.uuid)
        self._position += len(packets)

    def faults(self) -> list[Fault]:
        """Return the faults of the packets, in file order, then the tracks without a descriptor."""
        events, faults = self._slice_events(), self._faults[:]
        for track, (uuid,) in enumerate(self._tracks):
            if uuid not in self._described_tracks:
                position = int(events.position[np.argmax(events.track == track)])
                faults.append(Fault("undefined", f"track {uuid} has no descriptor", position))
        return faults

    def layout(self) -> TrackLayout:
        """Return the slices and flows of all packets without a fault."""
        events = self._slice_events()
        row = np.frombuffer(self._flow_event, np.int64)
        flow, flow_phase = np.frombuffer(self._flow, np.uint64), np.frombuffer(self._flow_phase, np.uint8)
        ends = FlowEnds(
            events.position[row], events.time_ns[row], events.track[row], flow, flow_phase, np.zeros(len(row), np.bool_)
        )
        return TrackLayout([*self._names], [*self._tracks], events, ends)

    def _slice_events(self) -> SliceEvents:
        time, position, key = np.frombuffer(self._events, np.int64).reshape(-1, 3).T
        name, track = (key >> 2 + _TRACK_BITS).astype(np.int32), (key >> 2 & (1 << _TRACK_BITS) - 1).astype(np.int32)
        return SliceEvents(track, _PHASES[key & 3], time, np.broadcast_to(np.int64(0), len(time)), position, name)

    def _add_event(self, position: int, packet: Any, event: Any, sequence: PacketSequence, time: int | None) -> None:
        event_type = event.type
        # Half of all packets are the end of a slice, and most of these have no other field.
        is_plain_end = event_type == _END and event.ByteSize() == _TYPE_ONLY_BYTES
        faults: list[Fault] = []
        # A packet that passes this quick check obeys all rules for packets.
        is_valid = sequence.has_state and time is not None and 0 <= time <= NEVER_NS
        if not (is_valid and packet.trusted_packet_sequence_id and packet.HasField("timestamp")):
            faults += _packet_faults(position, packet, sequence, time)
        if not is_plain_end:
            faults += _undefined_references(position, event, sequence)
        if faults:
            self._faults += faults
            return
        if time is None or event_type not in (_BEGIN, _END, _INSTANT):
            return
        uuid = event.track_uuid if not is_plain_end and event.HasField("track_uuid") else sequence.default_track
        track = self._tracks[uuid,]
        if event_type == _END:
            self._events.extend((time, position, track << 2 | _END))
            if is_plain_end:
                return
        else:
            name = self._names[event.name or sequence.interned["event_names"].get(event.name_iid, "")]
            self._events.extend((time, position, (name << _TRACK_BITS | track) << 2 | event_type))
        for flows, phase in (
            (event.flow_ids, ONWARD),
            (event.flow_ids_old, ONWARD),
            (event.terminating_flow_ids, END),
            (event.terminating_flow_ids_old, END),
        ):
            if flows:  # far cheaper than iterating over an empty field
                self._flow.extend(flows)
                self._flow_phase += bytes([phase]) * len(flows)
                self._flow_event.extend([len(self._events) // 3 - 1] * len(flows))


def _packet_faults(position: int, packet: Any, sequence: PacketSequence, time: int | None) -> Iterator[Fault]:
    """Apply the rules for the packet around a track event."""
    if not packet.trusted_packet_sequence_id:
        yield Fault("missing-field", "a track event without trusted_packet_sequence_id", position)
    if not sequence.has_state and packet.sequence_flags & _NEEDS_STATE:
        yield Fault("undefined", "needs the state of its sequence, which no packet has opened", position)
    if not packet.HasField("timestamp"):
        yield Fault("missing-field", "a track event without timestamp", position)
    elif time is None:
        clock_id = packet.timestamp_clock_id or sequence.default_clock_id
        yield Fault("undefined", f"no snapshot before it sets clock {clock_id}", position)
    elif not 0 <= time <= NEVER_NS:
        yield Fault("time-out-of-range", f"{time} ns is negative or beyond 2^63 ns", position)


def _undefined_references(position: int, event: Any, sequence: PacketSequence) -> Iterator[Fault]:
    """Find references of a track event to interned values that its sequence has not defined."""
    interned = sequence.interned
    if event.name_iid and event.name_iid not in interned["event_names"]:
        yield _undefined("event_names", event.name_iid, position)
    categories = interned["event_categories"]
    for iid in event.category_iids:
        if iid not in categories:
            yield _undefined("event_categories", iid, position)
    if not event.debug_annotations:  # far cheaper than iterating over an empty field
        return
    names, texts = interned["debug_annotation_names"], interned["debug_annotation_string_values"]
    for annotation in event.debug_annotations:
        if (iid := annotation.name_iid) and iid not in names:
            yield _undefined("debug_annotation_names", iid, position)
        if (iid := annotation.string_value_iid) and iid not in texts:
            yield _undefined("debug_annotation_string_values", iid, position)


def _undefined(field_name: str, iid: int, position: int) -> Fault:
    return Fault("undefined", f"{field_name} {iid} is not interned in its sequence", position)
