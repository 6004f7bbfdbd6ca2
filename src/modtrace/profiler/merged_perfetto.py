"""A merged trace in Perfetto's own format: the profiler's events as track events, the recording as it always is."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackDescriptor

from .._typing import Int64Array
from ..formats.chrome_values import TrackKey, base_time_ns
from ..formats.escape import UNNAMED, escaped
from ..formats.event_stream import Chunk, EventStream
from ..formats.merge_metadata import END_PACKET, MERGED_PACKET, metadata_json
from ..formats.perfetto_ids import PROFILER_SEQUENCE, REALTIME_CLOCK
from ..timeline import PHASES
from ..timeline.rewrite import move_times
from ..write.atomic_file import Sink
from ..write.perfetto import perfetto_packets
from ..write.perfetto_descriptors import TrackParents, serialize
from ..write.step_parts import part_counters
from .device_work import NO_MODULE, NoModuleReason
from .event_columns import ProfilerEvents
from .overlay import Overlay
from .slice_packets import EventEncoder, ProfilerSlices, sequence_packet, slice_packets
from .stream_spans import collective_name

_THREAD_IDS = range(1, 1 << 31)
_PIDS = range(-(1 << 31), 1 << 31)
"""What Perfetto takes as the id of a thread and of a process."""


class PacketOutput:
    """Writes a merged trace in Perfetto's format, once all of the profiler's events were taken.

    Args:
        stream: the profiler's trace.
        sink: what to write to.
    """

    def __init__(self, stream: EventStream, sink: Sink) -> None:
        self._stream, self._sink = stream, sink
        self._slices = ProfilerSlices()

    def add(self, chunk: Chunk) -> None:
        """Take some of the profiler's events."""
        self._slices.add(chunk.events)

    def notes(self) -> list[str]:
        """Return how many events are left out."""
        skipped = self._slices.skipped
        return [f"{skipped} of the profiler's events are of a kind that .pftrace has no place for"] if skipped else []

    def finish(self, overlaid: Overlay, events: ProfilerEvents, metadata: Mapping[str, Any]) -> None:
        """Write everything.

        Args:
            overlaid: the tracks to add.
            events: the profiler's.
            metadata: what the trace is to say of the merge.
        """
        sink, slices, base = self._sink, self._slices, base_time_ns(self._stream.keys, "")
        start = _sequence_start(base, {**metadata, "end": END_PACKET})
        sink.write(serialize(*start, *_tracks(slices, events, overlaid)))
        threads = {track.tid: _uuid("track", (overlaid.pid, track.tid)) for track in overlaid.drawn.tracks}
        parents = TrackParents(_uuid("process", overlaid.pid), threads)
        recorded = move_times(overlaid.drawn, lambda time: time + base)
        # Sync marks are slices of the profiler's.
        recorded = replace(recorded, marks=[mark for mark in recorded.marks if mark.kind != "sync"])
        parts = [part._replace(time=part.time + base) for part in part_counters(overlaid.timeline)]
        for _, part in perfetto_packets(recorded, parts, parents):
            sink.write(part)
        with_modules = np.unique(overlaid.devices.track).tolist()
        stream_slices = {track: _stream_slices(overlaid, track, slices.encoder) for track in with_modules}
        sink.write(serialize(*slices.encoder.interned_packets()))
        ranks = {key: rank for rank, key in enumerate(slices.tracks)}
        for key, rank in ranks.items():
            for part in slices.packets(key, base, _uuid("track", key), _beside(key, rank, overlaid)):
                sink.write(part)
        for track, (begin, duration, names, fields) in stream_slices.items():
            key = events.tracks[track]
            beside = _beside(key, ranks.get(key, 0), overlaid)
            for part in slice_packets(begin + base, duration, names, fields, _uuid("modules", key), beside):
                sink.write(part)
        end = sequence_packet()
        end.chrome_events.metadata.add(name=END_PACKET, bool_value=True)
        sink.write(serialize(end))


def _sequence_start(base: int, metadata: Mapping[str, Any]) -> Iterator[TracePacket]:
    """Yield the packets that begin the profiler's sequence and say how the trace was made."""
    first = sequence_packet()
    first.sequence_flags |= TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
    first.trace_packet_defaults.timestamp_clock_id = REALTIME_CLOCK
    # Without slices of modules nothing else says that the trace's time is this clock, and a reader drops all.
    first.clock_snapshot.primary_trace_clock = REALTIME_CLOCK
    first.clock_snapshot.clocks.add(clock_id=REALTIME_CLOCK, timestamp=base)
    yield first
    about = sequence_packet()
    about.chrome_events.metadata.add(name=MERGED_PACKET, string_value=metadata_json(metadata).decode())
    yield about


def _tracks(slices: ProfilerSlices, events: ProfilerEvents, overlaid: Overlay) -> Iterator[TracePacket]:
    """Yield descriptors: of processes and devices, their threads and streams, and ours above the streams.

    A process is one group, which holds the recording's tracks too: below each thread, above its operators.
    """
    with_modules = {events.tracks[track] for track in np.unique(overlaid.devices.track).tolist()}
    recorded: dict[TrackKey, str] = {(overlaid.pid, track.tid): track.thread for track in overlaid.drawn.tracks}
    keys = list(dict.fromkeys([*slices.tracks, *with_modules, *recorded]))
    for pid in dict.fromkeys([overlaid.pid, *(pid for pid, _ in keys if isinstance(pid, int))]):
        packet = _descriptor(("process", pid))
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
        packet = _descriptor(("track", key), parent=("process", pid if isinstance(pid, int) else overlaid.pid))
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
            packet = _descriptor(("modules", key), parent=("process", pid))
            packet.track_descriptor.name, packet.track_descriptor.sibling_order_rank = f"modules · {name}", 3 * rank
            yield packet


def _is_process(pid: int | str, events: ProfilerEvents, overlaid: Overlay) -> bool:
    """Whether a pid is a process' and no device's."""
    return isinstance(pid, int) and pid in _PIDS and (pid in events.cpu_pids or pid == overlaid.pid)


def _beside(key: TrackKey, rank: int, overlaid: Overlay) -> Callable[[int], TracePacket]:
    """Return what describes the rows for slices of a track that partly overlap others, by their numbers."""

    def describe(row: int) -> TracePacket:
        process = key[0] if isinstance(key[0], int) else overlaid.pid
        packet = _descriptor(("beside", key, row), parent=("process", process))
        packet.track_descriptor.name = escaped(f"{key[1]} · overlapping slices")
        packet.track_descriptor.sibling_order_rank = 3 * rank + 2
        return packet

    return describe


def _descriptor(what: tuple[object, ...], parent: tuple[object, ...] | None = None) -> TracePacket:
    packet = TracePacket(trusted_packet_sequence_id=PROFILER_SEQUENCE)
    packet.track_descriptor.uuid = _uuid(*what)
    if parent is not None:
        packet.track_descriptor.parent_uuid = _uuid(*parent)
    # Perfetto merges tracks of one name unless a field says not to.
    packet.track_descriptor.sibling_merge_behavior = TrackDescriptor.SIBLING_MERGE_BEHAVIOR_NONE
    return packet


def _stream_slices(
    overlaid: Overlay, track: int, encoder: EventEncoder
) -> tuple[Int64Array, Int64Array, list[int], list[bytes]]:
    """Return start and duration (ns from the base), names and fields of the module spans above a stream."""
    spans, timeline = overlaid.devices, overlaid.timeline_with_captures
    columns = timeline.columns
    rows = np.flatnonzero(spans.track == track)
    names, fields = [], []
    links = (spans.span, spans.work, spans.collective, spans.step, spans.reason)
    for span, work, collective, step, reason in zip(*(column[rows].tolist() for column in links), strict=True):
        args: dict[str, Any] = {"gpu_work": work}
        name = timeline.names[columns.name[span]] if span >= 0 else None
        if collective >= 0:
            name = collective_name(overlaid.collective_names[collective], name)
        category, label = "gpu", NO_MODULE if name is None else name.label or UNNAMED
        if span >= 0 and name is not None:
            category = PHASES[columns.phase[span]]
            args |= {"fqn": name.fqn, "module_class": name.module_class, "call": int(columns.call[span]), "step": step}
        else:
            args["reason"] = NoModuleReason(reason).text
        names.append(encoder.names[label])
        fields.append(encoder.fields(category, args))
    return spans.start[rows], spans.end[rows] - spans.start[rows], names, fields


def _uuid(*what: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest(), "little") or 1
