"""Perfetto's own format: `.pftrace` and `.pftrace.gz`, track events as protobuf."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackEvent

from ..formats.escape import EscapedOriginals, escaped
from ..formats.header import escape_late_texts, escaped_names
from ..formats.perfetto_ids import SequenceIds
from ..timeline import Timeline
from .atomic_file import atomic_writer
from .flows import CollectiveFlows
from .lanes import Lanes
from .perfetto_descriptors import InternTable, TrackDescriptors, TrackParents, sequence_start, serialize
from .perfetto_events import CHUNK, SpanPackets
from .progress import show_progress
from .protobuf_columns import interleave, message_field_tag, track_event_packets, varint
from .slices import perfetto_slices

__all__ = ["perfetto_packets", "write_perfetto"]

_COUNTER_VALUE = message_field_tag(TrackEvent, "counter_value")


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
    escaped_originals: EscapedOriginals = {}
    names = escaped_names(timeline, escaped_originals)
    escape_late_texts(timeline, escaped_originals)
    lanes = Lanes.from_timeline(timeline)
    interned = InternTable(timeline, names)
    sequences = SequenceIds(len(lanes.lanes))
    tracks = TrackDescriptors(timeline, lanes, escaped_originals, sequences.metadata, parents)
    yield 0, serialize(interned.description())
    for packet in tracks.packets():
        yield 0, serialize(packet)
    yield 0, _marks(timeline, tracks, sequences.marks)
    for index in range(len(timeline.counters)):
        for part in _counter(timeline, tracks, index, sequences.counter(index)):
            yield 0, part
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


def _counter(timeline: Timeline, tracks: TrackDescriptors, index: int, sequence: int) -> Iterator[bytes]:
    counter = timeline.counters[index]
    if not len(counter.time):
        return
    yield serialize(sequence_start(sequence, tracks.counter(index), int(counter.time[0])))
    sequence_field = TracePacket(trusted_packet_sequence_id=sequence).SerializeToString()
    kind = TrackEvent(type=TrackEvent.TYPE_COUNTER).SerializeToString()
    for first in range(0, len(counter.time), CHUNK):
        part = slice(first, first + CHUNK)
        delta = np.diff(counter.time[part], prepend=counter.time[max(first - 1, 0)])
        event = [varint(counter.value[part], kind + _COUNTER_VALUE)]
        yield interleave([(np.arange(len(delta)), track_event_packets(delta, sequence_field, event))], len(delta))
