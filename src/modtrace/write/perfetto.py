"""Perfetto's own format: `.pftrace` and `.pftrace.gz`, track events as protobuf."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackEvent

from .._typing import Float64Array, Int64Array
from ..formats.escape import escaped, escaped_name
from ..formats.perfetto_ids import SequenceIds
from ..timeline import Timeline
from .atomic_file import atomic_writer
from .flows import CollectiveFlows
from .lanes import Lanes
from .perfetto_descriptors import InternTable, TrackDescriptors, TrackParents, sequence_start, serialize
from .perfetto_events import CHUNK, SpanPackets
from .progress import show_progress
from .protobuf_columns import FIXED64, BytesColumn, interleave, message_field_tag, track_event_packets, varint
from .slices import perfetto_slices
from .step_parts import part_counters

_COUNTER_KIND = TrackEvent(type=TrackEvent.TYPE_COUNTER).SerializeToString()
_INTEGER_VALUE = message_field_tag(TrackEvent, "counter_value")
_DOUBLE_VALUE = message_field_tag(TrackEvent, "double_counter_value", FIXED64)


def write_perfetto(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write a trace of track events, as Perfetto reads it; its timestamps are Unix nanoseconds.

    Raises:
        WriteError: spans of a track overlap partly, or the file cannot be written; an existing file is intact.
    """
    what = f"writing {os.path.basename(path)}"
    with atomic_writer(path) as file:
        for part in show_progress(perfetto_packets(timeline), what, len(timeline.columns)):
            file.write(part)


def perfetto_packets(timeline: Timeline, parents: TrackParents | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield the trace in parts: how many spans have ended in each, and whole packets.

    Args:
        timeline: what to write.
        parents: the tracks of threads where the file describes them already.
    """
    lanes = Lanes.from_timeline(timeline)
    interned = InternTable(timeline, [escaped_name(name) for name in timeline.names])
    sequences = SequenceIds(len(lanes.lanes))
    parts = part_counters(timeline)
    tracks = TrackDescriptors(timeline, lanes, sequences.metadata, parents, parts)
    yield 0, serialize(interned.description())
    for packet in tracks.packets():
        yield 0, serialize(packet)
    yield 0, _marks(timeline, tracks, sequences.marks)
    counters = [(counter.time, _integers(counter.value)) for counter in timeline.counters]
    counters += [(part.time, _doubles(part.ns / 1e6)) for part in parts]
    for index, (time, events) in enumerate(counters):
        for packets in _counter(time, tracks.counter(index), sequences.counter(index), events):
            yield 0, packets
    flows = CollectiveFlows(timeline)
    spans = SpanPackets(timeline, lanes, interned, flows)
    first_other = len(timeline.columns)
    for index, rows in enumerate(lanes.spans_by_lane(timeline)):
        sequence = sequences.lane(index)
        track = lanes.lanes[index].track
        others = first_other + np.flatnonzero(timeline.slices.track[first_other:] == track)
        if len(others) and not lanes.lanes[index].first_level:
            for part in perfetto_slices(timeline, flows, others, tracks.lane(index), sequence):
                yield 0, part
        if len(rows):
            yield 0, serialize(sequence_start(sequence, tracks.lane(index), int(timeline.columns.start[rows[0]])))
            for packet in interned.packets(sequence):
                yield 0, serialize(packet)
            yield from spans.of_lane(index, sequence, rows)


def _marks(timeline: Timeline, tracks: TrackDescriptors, sequence: int) -> bytes:
    if not timeline.marks:
        return b""
    time = timeline.marks[0].time_ns
    packets = [sequence_start(sequence, tracks.marks, time)]
    for mark in timeline.marks:
        packet = TracePacket(trusted_packet_sequence_id=sequence, timestamp=mark.time_ns - time)
        packet.track_event.type = TrackEvent.TYPE_INSTANT
        packet.track_event.name = escaped(mark.text)
        packet.track_event.categories.append(mark.kind)
        packets.append(packet)
        time = mark.time_ns
    return serialize(*packets)


def _integers(value: Int64Array) -> Callable[[slice], BytesColumn]:
    return lambda part: varint(value[part], _COUNTER_KIND + _INTEGER_VALUE)


def _doubles(value: Float64Array) -> Callable[[slice], BytesColumn]:
    text = np.empty((len(value), len(_COUNTER_KIND) + len(_DOUBLE_VALUE) + 8), np.uint8)
    text[:, :-8] = np.frombuffer(_COUNTER_KIND + _DOUBLE_VALUE, np.uint8)
    text[:, -8:] = value.astype("<f8").view(np.uint8).reshape(-1, 8)
    return lambda part: BytesColumn(text[part], None)


def _counter(time: Int64Array, track: int, sequence: int, events: Callable[[slice], BytesColumn]) -> Iterator[bytes]:
    """Yield the packets of a counter.

    Args:
        time: int64[n], of its samples.
        track: its uuid.
        sequence: the id of its packet sequence.
        events: returns the events of a range of samples.
    """
    if not len(time):
        return
    yield serialize(sequence_start(sequence, track, int(time[0])))
    sequence_field = TracePacket(trusted_packet_sequence_id=sequence).SerializeToString()
    for first in range(0, len(time), CHUNK):
        part = slice(first, first + CHUNK)
        delta = np.diff(time[part], prepend=time[max(first - 1, 0)])
        packets = track_event_packets(delta, sequence_field, [events(part)])
        yield interleave([(np.arange(len(delta)), packets)], len(delta))
