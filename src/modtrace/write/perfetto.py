"""Perfetto's own format: `.pftrace` and `.pftrace.gz`, track events as protobuf."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackEvent

from ..formats.escape import Originals, shown
from ..formats.header import shown_names, shown_texts
from ..timeline import Timeline
from .atomic_file import replacing
from .lanes import Lanes
from .perfetto_descriptors import Numbering, Sequences, Tracks, encoded, sequence_start
from .perfetto_events import CHUNK, Events
from .progress import with_progress
from .protobuf_columns import joined, length, varint

__all__ = ["perfetto_packets", "write_perfetto"]


def write_perfetto(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write a trace of track events, as Perfetto reads it; its timestamps are Unix nanoseconds.

    Raises:
        WriteError: spans of a track overlap partly, or the file cannot be written; an existing file is intact.
    """
    what = f"writing {os.path.basename(path)}"
    with replacing(path) as file:
        for part in with_progress(perfetto_packets(timeline), what, len(timeline.columns)):
            file.write(part)


def perfetto_packets(timeline: Timeline) -> Iterator[tuple[int, bytes]]:
    """Yield the trace in parts: how many spans have ended in each, and whole packets."""
    originals: Originals = {}
    names = shown_names(timeline, originals)
    shown_texts(timeline, originals)
    lanes = Lanes.of(timeline, originals)
    numbering = Numbering(timeline, names)
    sequences = Sequences(len(lanes.lanes))
    tracks = Tracks(timeline, lanes, originals, sequences.about)
    yield 0, encoded(numbering.description())
    for packet in tracks.packets():
        yield 0, encoded(packet)
    yield 0, _marks(timeline, tracks, sequences.marks)
    for index in range(len(timeline.counters)):
        for part in _counter(timeline, tracks, index, sequences.counter(index)):
            yield 0, part
    events = Events(timeline, lanes, numbering)
    for index, rows in enumerate(lanes.rows(timeline)):
        if len(rows):
            sequence = sequences.lane(index)
            yield 0, encoded(sequence_start(sequence, tracks.lane(index), int(timeline.columns.start[rows[0]])))
            for packet in numbering.interned(sequence):
                yield 0, encoded(packet)
            yield from events.of_lane(index, sequence, rows)


def _marks(timeline: Timeline, tracks: Tracks, sequence: int) -> bytes:
    if not timeline.marks:
        return b""
    time = timeline.marks[0].time_ns
    packets = [sequence_start(sequence, tracks.marks, time)]
    for mark in timeline.marks:
        packet = TracePacket(trusted_packet_sequence_id=sequence, timestamp=mark.time_ns - time)
        packet.track_event.type = TrackEvent.TYPE_INSTANT
        packet.track_event.name = shown(mark.text)
        packet.track_event.categories.append(mark.kind)
        packets.append(packet)
        time = mark.time_ns
    return encoded(*packets)


def _counter(timeline: Timeline, tracks: Tracks, index: int, sequence: int) -> Iterator[bytes]:
    counter = timeline.counters[index]
    if not len(counter.time):
        return
    yield encoded(sequence_start(sequence, tracks.counter(index), int(counter.time[0])))
    numbered = TracePacket(trusted_packet_sequence_id=sequence).SerializeToString()
    kind = TrackEvent(type=TrackEvent.TYPE_COUNTER).SerializeToString()
    for first in range(0, len(counter.time), CHUNK):
        part = slice(first, first + CHUNK)
        delta = np.diff(counter.time[part], prepend=counter.time[max(first - 1, 0)])
        count = len(delta)
        event = [varint(counter.value[part], kind + b"\xf0\x01")]
        packet = [varint(delta, b"\x40"), varint(length(event), numbered + b"\x5a"), *event]
        whole = [varint(length(packet), b"\x0a"), *packet]
        yield joined([(np.arange(count), whole)], count)
