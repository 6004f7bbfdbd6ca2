"""A merged trace in Perfetto's own format: the profiler's events as track events, the recording as it always is."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackDescriptor

from ..formats.chrome_values import TrackKey, base_time_ns
from ..formats.escape import escaped
from ..formats.event_stream import Chunk, EventStream
from ..formats.event_table import EventTable
from ..formats.own_table import Checksum, packet_table
from ..formats.perfetto_ids import PROFILER_SEQUENCE, REALTIME_CLOCK
from ..formats.trace_file import MERGED_PACKET, metadata_json
from ..timeline.join import move_times
from ..write.atomic_file import Sink
from ..write.perfetto import PerfettoWriter
from ..write.perfetto_descriptors import TrackParents, describe_track, following_packet, serialize, track_uuid
from ..write.step_parts import part_counters
from ..write.written_parts import WrittenPart
from .event_columns import ProfilerEvents
from .overlay import Overlay
from .slice_packets import ProfilerSlices, profiler_packets
from .stream_spans import describe_slices

_THREAD_IDS = range(1, 1 << 31)
_PIDS = range(-(1 << 31), 1 << 31)
"""What Perfetto takes as the id of a thread and of a process."""


class PacketOutput:
    """Writes a merged trace in Perfetto's format, once all of the profiler's events were taken.

    Args:
        stream: the profiler's trace.
        sink: what to write to.
        table: takes the profiler's events.
    """

    def __init__(self, stream: EventStream, sink: Sink, table: EventTable) -> None:
        self._stream, self._sink = stream, Checksum(sink.write)
        self._slices = ProfilerSlices(table)

    def add(self, _chunk: Chunk, events: Sequence[Any]) -> None:
        """Take some of the profiler's events, as the table returned them."""
        self._slices.add(events)

    def notes(self, _: ProfilerEvents) -> list[str]:
        """Return what is left out."""
        return self._slices.notes()

    def finish(self, overlaid: Overlay, events: ProfilerEvents, metadata: Mapping[str, Any], table: bytes) -> None:
        """Write the recording's packets, the profiler's, and the table.

        Args:
            overlaid: the tracks to add.
            events: the profiler's.
            metadata: what the trace is to say of the merge.
            table: of what it adds.
        """
        sink, slices, base = self._sink, self._slices, base_time_ns(self._stream.keys, "")
        start = _sequence_start(base, metadata)
        sink.write(serialize(*start, *_tracks(slices, events, overlaid)))
        rows = [(track.process, track.tid, overlaid.pid_of(track.process)) for track in overlaid.drawn.tracks]
        processes = {process: _uuid("process", pid) for process, _, pid in rows}
        threads = {(process, tid): _uuid("track", (pid, tid)) for process, tid, pid in rows}
        parents = TrackParents(_uuid("process", overlaid.pid), processes, threads)
        recorded = move_times(overlaid.drawn, lambda time: time + base)
        # Sync marks are slices of the profiler's.
        recorded = replace(recorded, marks=[mark for mark in recorded.marks if mark.kind != "sync"])
        parts = [part._replace(time=part.time + base) for part in part_counters(overlaid.timeline)]
        for _, part in PerfettoWriter(parents).packets(WrittenPart(recorded, parts)):
            sink.write(part)
        spans, encoder = overlaid.devices, slices.encoder
        shown = describe_slices(spans, overlaid.timeline_with_captures, overlaid.collective_names)
        fields = [encoder.fields(one.label, one.category, one.args) for one in shown]
        sink.write(serialize(*encoder.interned_packets()))
        ranks = {events.tracks[track]: rank for rank, track in enumerate(slices.tracks)}
        for track, (key, rank) in zip(slices.tracks, ranks.items(), strict=True):
            for part in slices.packets(track, base, _uuid("track", key), _beside(key, rank, overlaid)):
                sink.write(part)
        for track in np.unique(spans.track).tolist():
            own, key = slice(*np.searchsorted(spans.track, [track, track + 1]).tolist()), events.tracks[track]
            times = spans.start[own] + base, (spans.end - spans.start)[own]
            beside = _beside(key, ranks.get(key, 0), overlaid)
            for part in profiler_packets(*times, fields[own], _uuid("modules", key), beside):
                sink.write(part)
        for packet in packet_table(table, sink.value):
            sink.write(packet)


def _sequence_start(base: int, metadata: Mapping[str, Any]) -> Iterator[TracePacket]:
    """Yield the packets that begin the profiler's sequence and say how the trace was made."""
    first = following_packet(PROFILER_SEQUENCE)
    first.sequence_flags |= TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
    first.trace_packet_defaults.timestamp_clock_id = REALTIME_CLOCK
    # Without slices of modules nothing else says that the trace's time is this clock, and a reader drops all.
    first.clock_snapshot.primary_trace_clock = REALTIME_CLOCK
    first.clock_snapshot.clocks.add(clock_id=REALTIME_CLOCK, timestamp=base)
    yield first
    about = following_packet(PROFILER_SEQUENCE)
    about.chrome_events.metadata.add(name=MERGED_PACKET, string_value=metadata_json(metadata).decode())
    yield about


def _tracks(slices: ProfilerSlices, events: ProfilerEvents, overlaid: Overlay) -> Iterator[TracePacket]:
    """Yield descriptors: of processes and devices, their threads and streams, and ours above the streams.

    A process is one group, which holds the recording's tracks too: below each thread, above its operators.
    """
    with_modules = {events.tracks[track] for track in np.unique(overlaid.devices.track).tolist()}
    recorded: dict[TrackKey, str] = {
        (overlaid.pid_of(track.process), track.tid): track.thread for track in overlaid.drawn.tracks
    }
    keys = list(dict.fromkeys([*(events.tracks[track] for track in slices.tracks), *with_modules, *recorded]))
    for pid in dict.fromkeys(
        [overlaid.pid, *overlaid.pids.values(), *(pid for pid, _ in keys if isinstance(pid, int))]
    ):
        packet = describe_track(PROFILER_SEQUENCE, _uuid("process", pid))
        descriptor = packet.track_descriptor
        descriptor.child_ordering = TrackDescriptor.EXPLICIT
        if _is_process(pid, events, overlaid):
            descriptor.process.pid = pid
            descriptor.process.process_name = escaped(events.process_names.get(pid, "python"))
        else:
            descriptor.name = f"GPU {pid}" if isinstance(pid, int) else escaped(pid) or "profiler"
        yield packet
    for rank, key in enumerate(keys):
        pid, tid = key
        # What belongs to no process, as the profiler's own spans, is shown with the one that was profiled.
        process = _uuid("process", _shown_in(pid, overlaid))
        packet = describe_track(PROFILER_SEQUENCE, _uuid("track", key), process)
        descriptor = packet.track_descriptor
        is_process = _is_process(pid, events, overlaid)
        unnamed = str(tid) if is_process or not isinstance(pid, int) else f"stream {tid}"
        name = escaped(events.thread_names.get(key, recorded.get(key, unnamed))).strip() or "profiler"
        if is_process and isinstance(tid, int) and tid in _THREAD_IDS:
            descriptor.thread.pid, descriptor.thread.tid, descriptor.thread.thread_name = int(pid), tid, name
        else:
            descriptor.name = name
            descriptor.sibling_order_rank = 3 * rank + 1
        yield packet
        if key in with_modules:
            yield describe_track(PROFILER_SEQUENCE, _uuid("modules", key), process, 3 * rank, f"modules · {name}")


def _shown_in(pid: int | str, overlaid: Overlay) -> int | str:
    """Return the pid of the process in which a viewer shows what a trace has of a pid."""
    return pid if isinstance(pid, int) or pid in overlaid.pids.values() else overlaid.pid


def _is_process(pid: int | str, events: ProfilerEvents, overlaid: Overlay) -> bool:
    """Whether a pid is a process' and no device's."""
    return (
        isinstance(pid, int)
        and pid in _PIDS
        and (pid in events.cpu_pids or pid == overlaid.pid or pid in overlaid.pids.values())
    )


def _beside(key: TrackKey, rank: int, overlaid: Overlay) -> Callable[[int], TracePacket]:
    """Return what describes the rows for slices of a track that partly overlap others, by their numbers."""

    def describe(row: int) -> TracePacket:
        process = _uuid("process", _shown_in(key[0], overlaid))
        name = escaped(f"{key[1]} · overlapping slices")
        return describe_track(PROFILER_SEQUENCE, _uuid("beside", key, row), process, 3 * rank + 2, name)

    return describe


def _uuid(*what: object) -> int:
    return track_uuid(repr(what))
