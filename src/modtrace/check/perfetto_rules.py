"""Perfetto's protobuf: the rules on packets and their sequences, and the slices and flows that they draw."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as proto

from .model import FlowEnd, TrackKey, Violation
from .packet_sequences import PacketSequence
from .track_layout import TrackLayout

__all__ = ["PerfettoPackets"]

_MAX_TIME_NS = 2**63
_BEGIN, _END, _INSTANT = (
    proto.TrackEvent.TYPE_SLICE_BEGIN,
    proto.TrackEvent.TYPE_SLICE_END,
    proto.TrackEvent.TYPE_INSTANT,
)
_BYTES_OF_TYPE = 2
"""The size of a track event that has a type and nothing else, as most ends of slices."""
_NEEDS_STATE = proto.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE


class PerfettoPackets:
    """Checks packets one by one and collects what the rules between events look at.

    Attributes:
        layout: slices and flows of the packets so far, without those that have a fault.
    """

    def __init__(self) -> None:
        self.layout = TrackLayout()
        self._position = 0
        self._sequences: dict[int, PacketSequence] = defaultdict(PacketSequence)
        self._described_tracks: set[int] = {0}
        self._first_events: dict[int, int] = {}
        self._flow_ends: list[tuple[int, int, TrackKey, int, bool]] = []
        self._violations: list[Violation] = []

    def add(self, packets: list[Any]) -> None:
        """Check the next packets of the file."""
        for position, packet in enumerate(packets, self._position):
            sequence = self._sequences[packet.trusted_packet_sequence_id]
            sequence.update(packet)
            if not packet.HasField("track_event"):
                if packet.HasField("track_descriptor"):
                    self._described_tracks.add(packet.track_descriptor.uuid)
                continue
            event = packet.track_event
            time = sequence.time_ns(packet)
            if event.ByteSize() == _BYTES_OF_TYPE and event.type == _END and _is_ordinary(packet, sequence, time):
                # As nearly half of all packets: the end of a slice, and nothing else.
                uuid = sequence.default_track
                self._first_events.setdefault(uuid, position)
                self.layout.track((uuid,)).add_half(False, time or 0, position, "")
            else:
                self._add_event(position, packet, event, sequence, time)
        self._position += len(packets)

    def violations(self) -> list[Violation]:
        """Return what is wrong with the packets, in file order, then the tracks without a descriptor."""
        self._sort_flow_ends()
        undescribed = [
            Violation("undefined", f"track {uuid} has no descriptor", position)
            for uuid, position in self._first_events.items()
            if uuid not in self._described_tracks
        ]
        return [*self._violations, *undescribed]

    def _add_event(self, position: int, packet: Any, event: Any, sequence: PacketSequence, time: int | None) -> None:
        problems = (
            [] if _is_ordinary(packet, sequence, time) else list(_packet_violations(position, packet, sequence, time))
        )
        problems += _undefined_references(position, event, sequence)
        if problems or time is None:
            self._violations.extend(problems)
            return
        event_type = event.type
        if event_type not in (_BEGIN, _END, _INSTANT):
            return
        uuid = event.track_uuid if event.HasField("track_uuid") else sequence.default_track
        self._first_events.setdefault(uuid, position)
        key = (uuid,)
        track = self.layout.track(key)
        if event_type == _END:
            track.add_half(False, time, position, "")
        else:
            name = event.name or sequence.interned.get(("event_names", event.name_iid), "")
            if event_type == _BEGIN:
                track.add_half(True, time, position, name)
            else:
                track.add_slice(time, 0, position, name)
        for flows in (event.flow_ids, event.flow_ids_old):
            if flows:  # far cheaper than to iterate over none
                self._flow_ends.extend((time, position, key, flow, False) for flow in flows)
        for flows in (event.terminating_flow_ids, event.terminating_flow_ids_old):
            if flows:
                self._flow_ends.extend((time, position, key, flow, True) for flow in flows)

    def _sort_flow_ends(self) -> None:
        """Turn flow ids on events into starts, steps and ends: a Perfetto flow starts where its id first appears."""
        started: set[int] = set()
        for time, position, key, flow, terminating in sorted(self._flow_ends, key=lambda end: end[0]):
            phase = "f" if terminating else "t" if flow in started else "s"
            if not terminating:
                started.add(flow)
            self.layout.add_flow_end(FlowEnd(position, phase, key, time, (flow,)))


def _is_ordinary(packet: Any, sequence: PacketSequence, time: int | None) -> bool:
    """Return whether the packet around a track event obviously breaks no rule."""
    return (
        sequence.has_state
        and time is not None
        and 0 <= time < _MAX_TIME_NS
        and packet.HasField("timestamp")
        and packet.trusted_packet_sequence_id != 0
    )


def _packet_violations(position: int, packet: Any, sequence: PacketSequence, time: int | None) -> Iterator[Violation]:
    """Apply the rules on the packet around a track event."""
    if not packet.trusted_packet_sequence_id:
        yield Violation("missing-field", "a track event without trusted_packet_sequence_id", position)
    if not sequence.has_state and packet.sequence_flags & _NEEDS_STATE:
        yield Violation("undefined", "needs the state of its sequence, which no packet has opened", position)
    if not packet.HasField("timestamp"):
        yield Violation("missing-field", "a track event without timestamp", position)
    elif time is None:
        clock_id = packet.timestamp_clock_id or sequence.default_clock_id
        yield Violation("undefined", f"clock {clock_id} is set by no snapshot before it", position)
    elif not 0 <= time < _MAX_TIME_NS:
        yield Violation("time-out-of-range", f"{time} ns is negative or beyond 2^63 ns", position)


def _undefined_references(position: int, event: Any, sequence: PacketSequence) -> Iterator[Violation]:
    """Find interned values that a track event refers to and its sequence has not defined."""
    interned = sequence.interned
    if event.name_iid and ("event_names", event.name_iid) not in interned:
        yield _not_interned("event_names", event.name_iid, position)
    categories = event.category_iids
    for iid in (categories[0],) if len(categories) == 1 else categories:  # iterating over a field is slow
        if ("event_categories", iid) not in interned:
            yield _not_interned("event_categories", iid, position)
    annotations = event.debug_annotations
    for annotation in annotations if len(annotations) else ():
        if annotation.name_iid and ("debug_annotation_names", annotation.name_iid) not in interned:
            yield _not_interned("debug_annotation_names", annotation.name_iid, position)
        value = annotation.string_value_iid
        if value and ("debug_annotation_string_values", value) not in interned:
            yield _not_interned("debug_annotation_string_values", value, position)


def _not_interned(field: str, iid: int, position: int) -> Violation:
    return Violation("undefined", f"{field} {iid} is not interned in its sequence", position)
