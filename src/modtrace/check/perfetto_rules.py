"""Perfetto's protobuf: the rules on packets and their sequences, and the slices and flows that they draw."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as proto

from .model import CheckedEvent, Violation
from .packet_sequences import PacketSequence, parse_packets

__all__ = ["read_perfetto"]

_MAX_TIME_NS = 2**63
_PHASES = {
    proto.TrackEvent.TYPE_SLICE_BEGIN: "B",
    proto.TrackEvent.TYPE_SLICE_END: "E",
    proto.TrackEvent.TYPE_INSTANT: "X",
}
"""Chrome's letter for each type of track event that is checked."""


def read_perfetto(data: bytes, violations: list[Violation]) -> list[CheckedEvent]:
    """Return the slices and flows of a Perfetto trace.

    Args:
        data: the trace.
        violations: takes what is wrong with its packets; events with a fault are left out of the result.
    """
    sequences: dict[int, PacketSequence] = defaultdict(PacketSequence)
    described_tracks: set[int] = {0}
    events: list[CheckedEvent] = []
    flows: list[tuple[CheckedEvent, int, bool]] = []
    for position, packet in enumerate(parse_packets(data, violations)):
        sequence = sequences[packet.trusted_packet_sequence_id]
        sequence.update(packet)
        if packet.HasField("track_descriptor"):
            described_tracks.add(packet.track_descriptor.uuid)
        if not packet.HasField("track_event"):
            continue
        time = sequence.time_ns(packet)
        problems = list(_packet_violations(position, packet, sequence, time))
        violations.extend(problems)
        track_event = packet.track_event
        if time is None or problems or track_event.type not in _PHASES:
            continue
        uuid = track_event.track_uuid if track_event.HasField("track_uuid") else sequence.default_track
        name = track_event.name or sequence.interned.get(("event_names", track_event.name_iid), "")
        phase = _PHASES[track_event.type]
        event = CheckedEvent(position, phase, (uuid,), time, name="" if phase == "E" else name)
        events.append(event)
        flows.extend((event, flow, False) for flow in track_event.flow_ids)
        flows.extend((event, flow, True) for flow in track_event.terminating_flow_ids)
    violations.extend(_undescribed_tracks(events, described_tracks))
    return events + list(_flow_ends(flows))


def _packet_violations(position: int, packet: Any, sequence: PacketSequence, time: int | None) -> Iterator[Violation]:
    """Apply the rules on one packet with a track event."""
    if not packet.trusted_packet_sequence_id:
        yield Violation("missing-field", "a track event without trusted_packet_sequence_id", position)
    needs_state = packet.sequence_flags & proto.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
    if needs_state and not sequence.has_state:
        yield Violation("undefined", "needs the state of its sequence, which no packet has opened", position)
    if not packet.HasField("timestamp"):
        yield Violation("missing-field", "a track event without timestamp", position)
    elif time is None:
        clock_id = packet.timestamp_clock_id or sequence.default_clock_id
        yield Violation("undefined", f"clock {clock_id} is set by no snapshot before it", position)
    elif not 0 <= time < _MAX_TIME_NS:
        yield Violation("time-out-of-range", f"{time} ns is negative or beyond 2^63 ns", position)
    for field, iid in _interned_references(packet.track_event):
        if (field, iid) not in sequence.interned:
            yield Violation("undefined", f"{field} {iid} is not interned in its sequence", position)


def _interned_references(track_event: Any) -> Iterator[tuple[str, int]]:
    """Yield the interned values that an event refers to, as (field of InternedData, iid)."""
    if track_event.name_iid:
        yield "event_names", track_event.name_iid
    for iid in track_event.category_iids:
        yield "event_categories", iid
    for annotation in track_event.debug_annotations:
        if annotation.name_iid:
            yield "debug_annotation_names", annotation.name_iid
        if annotation.string_value_iid:
            yield "debug_annotation_string_values", annotation.string_value_iid


def _undescribed_tracks(events: list[CheckedEvent], described_tracks: set[int]) -> Iterator[Violation]:
    """Find the first event of each track that has no descriptor."""
    known = set(described_tracks)
    for event in events:
        (uuid,) = event.track
        if uuid not in known:
            known.add(int(uuid))
            yield Violation("undefined", f"track {uuid} has no descriptor", event.position)


def _flow_ends(flows: list[tuple[CheckedEvent, int, bool]]) -> Iterator[CheckedEvent]:
    """Turn flow ids on events into starts, steps and ends: a Perfetto flow starts where its id first appears."""
    started: set[int] = set()
    for event, flow, terminating in sorted(flows, key=lambda flow_end: flow_end[0].time):
        phase = "f" if terminating else "t" if flow in started else "s"
        if not terminating:
            started.add(flow)
        yield event._replace(phase=phase, flow=(flow,))
