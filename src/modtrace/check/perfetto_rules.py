"""Perfetto's protobuf: the rules on packets and their sequences, and the slices and flows that they draw."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as proto

from .flow_ends import END, ONWARD
from .model import Violation
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
        self._violations: list[Violation] = []

    def add(self, packets: list[Any]) -> None:
        """Check the next packets of the file."""
        for position, packet in enumerate(packets, self._position):
            sequence = self._sequences[packet.trusted_packet_sequence_id]
            sequence.update(packet)
            if packet.HasField("track_event"):
                self._add_event(position, packet, packet.track_event, sequence, sequence.time_ns(packet))
            elif packet.HasField("track_descriptor"):
                self._described_tracks.add(packet.track_descriptor.uuid)
        self._position += len(packets)

    def violations(self) -> list[Violation]:
        """Return what is wrong with the packets, in file order, then the tracks without a descriptor."""
        undescribed = [
            Violation("undefined", f"track {uuid} has no descriptor", events.first_position())
            for (uuid,), events in self.layout.tracks.items()
            if uuid not in self._described_tracks
        ]
        return [*self._violations, *undescribed]

    def _add_event(self, position: int, packet: Any, event: Any, sequence: PacketSequence, time: int | None) -> None:
        event_type = event.type
        # Half of all packets are the end of a slice, and most of these nothing else.
        is_plain_end = event_type == _END and event.ByteSize() == _BYTES_OF_TYPE
        if not _is_ordinary(packet, sequence, time) or not (is_plain_end or _has_plain_references(event, sequence)):
            problems = [
                *_packet_violations(position, packet, sequence, time),
                *_undefined_references(position, event, sequence),
            ]
            self._violations.extend(problems)
            if problems:
                return
        if time is None or event_type not in (_BEGIN, _END, _INSTANT):
            return
        uuid = event.track_uuid if not is_plain_end and event.HasField("track_uuid") else sequence.default_track
        track = self.layout.track((uuid,))
        if event_type == _END:
            track.add_half(False, time, position, 0)
            if is_plain_end:
                return
        else:
            name = self.layout.names[event.name or sequence.interned["event_names"].get(event.name_iid, "")]
            if event_type == _BEGIN:
                track.add_half(True, time, position, name)
            else:
                track.add_slice(time, 0, position, name)
        for flows in (event.flow_ids, event.flow_ids_old):
            if flows:  # far cheaper than to iterate over none
                for flow in flows:
                    self.layout.flows.add(position, ONWARD, track.index, time, flow)
        for flows in (event.terminating_flow_ids, event.terminating_flow_ids_old):
            if flows:
                for flow in flows:
                    self.layout.flows.add(position, END, track.index, time, flow)


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


def _has_plain_references(event: Any, sequence: PacketSequence) -> bool:
    """Return whether a track event obviously refers to nothing undefined: it has a name and one category that are."""
    interned, categories = sequence.interned, event.category_iids
    return (
        len(categories) == 1
        and categories[0] in interned["event_categories"]
        and event.name_iid in interned["event_names"]
        and not event.debug_annotations
    )


def _undefined_references(position: int, event: Any, sequence: PacketSequence) -> Iterator[Violation]:
    """Find interned values that a track event refers to and its sequence has not defined."""
    interned = sequence.interned
    if event.name_iid and event.name_iid not in interned["event_names"]:
        yield _not_interned("event_names", event.name_iid, position)
    for iid in event.category_iids:
        if iid not in interned["event_categories"]:
            yield _not_interned("event_categories", iid, position)
    for annotation in event.debug_annotations:
        if annotation.name_iid and annotation.name_iid not in interned["debug_annotation_names"]:
            yield _not_interned("debug_annotation_names", annotation.name_iid, position)
        value = annotation.string_value_iid
        if value and value not in interned["debug_annotation_string_values"]:
            yield _not_interned("debug_annotation_string_values", value, position)


def _not_interned(field: str, iid: int, position: int) -> Violation:
    return Violation("undefined", f"{field} {iid} is not interned in its sequence", position)
