"""Perfetto's protobuf: the rules on packets and their sequences, and the slices and flows they draw."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as proto

from .model import Event, Violation
from .packet_sequences import Sequence, packets_of

__all__ = ["read"]

LONGEST = 2**63
LETTERS = {
    proto.TrackEvent.TYPE_SLICE_BEGIN: "B",
    proto.TrackEvent.TYPE_SLICE_END: "E",
    proto.TrackEvent.TYPE_INSTANT: "X",
}


def read(data: bytes, violations: list[Violation]) -> list[Event]:
    """Return the slices and flows of a Perfetto trace; what is wrong with its packets is appended."""
    sequences: dict[int, Sequence] = defaultdict(Sequence)
    described: set[int] = {0}
    events: list[Event] = []
    flows: list[tuple[Event, int, bool]] = []
    for position, packet in enumerate(packets_of(data, violations)):
        sequence = sequences[packet.trusted_packet_sequence_id]
        sequence.take(packet)
        if packet.HasField("track_descriptor"):
            described.add(packet.track_descriptor.uuid)
        if not packet.HasField("track_event"):
            continue
        time = sequence.time_of(packet)
        problems = list(_faults(position, packet, sequence, time))
        violations.extend(problems)
        drawn = packet.track_event
        if time is None or problems or drawn.type not in LETTERS:
            continue
        uuid = drawn.track_uuid if drawn.HasField("track_uuid") else sequence.track
        name = drawn.name or sequence.interned.get(("event_names", drawn.name_iid), "")
        event = Event(position, LETTERS[drawn.type], (uuid,), time, name=name if drawn.type != 2 else "")
        events.append(event)
        flows.extend((event, flow, False) for flow in drawn.flow_ids)
        flows.extend((event, flow, True) for flow in drawn.terminating_flow_ids)
    violations.extend(_undescribed(events, described))
    return events + list(_flow_ends(flows))


def _faults(position: int, packet: Any, sequence: Sequence, time: int | None) -> Iterator[Violation]:
    """Rules on one packet with a track event."""
    if not packet.trusted_packet_sequence_id:
        yield Violation("missing-field", "a track event without trusted_packet_sequence_id", position)
    needs = packet.sequence_flags & proto.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
    if needs and not sequence.opened:
        yield Violation("undefined", "needs the state of its sequence, which no packet has opened", position)
    if not packet.HasField("timestamp"):
        yield Violation("missing-field", "a track event without timestamp", position)
    elif time is None:
        clock = packet.timestamp_clock_id or sequence.clock
        yield Violation("undefined", f"clock {clock} is set by no snapshot before it", position)
    elif not 0 <= time < LONGEST:
        yield Violation("time-out-of-range", f"{time} ns is negative or beyond 2^63 ns", position)
    for kind, number in _interned(packet.track_event):
        if (kind, number) not in sequence.interned:
            yield Violation("undefined", f"{kind} {number} is not interned in its sequence", position)


def _interned(drawn: Any) -> Iterator[tuple[str, int]]:
    """Yield the interned values that an event speaks of."""
    if drawn.name_iid:
        yield "event_names", drawn.name_iid
    for number in drawn.category_iids:
        yield "event_categories", number
    for annotation in drawn.debug_annotations:
        if annotation.name_iid:
            yield "debug_annotation_names", annotation.name_iid
        if annotation.string_value_iid:
            yield "debug_annotation_string_values", annotation.string_value_iid


def _undescribed(events: list[Event], described: set[int]) -> Iterator[Violation]:
    """Find the first event of each track that no descriptor speaks of."""
    known = set(described)
    for event in events:
        (uuid,) = event.track
        if uuid not in known:
            known.add(int(uuid))
            yield Violation("undefined", f"track {uuid} has no descriptor", event.position)


def _flow_ends(flows: list[tuple[Event, int, bool]]) -> Iterator[Event]:
    """Turn flow ids into starts, steps and ends: here a flow starts where it is first named."""
    started: set[int] = set()
    for event, flow, terminating in sorted(flows, key=lambda named: named[0].time):
        phase = "f" if terminating else "t" if flow in started else "s"
        if not terminating:
            started.add(flow)
        yield event._replace(phase=phase, flow=(flow,))
