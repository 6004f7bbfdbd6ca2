"""A recording over a torch.profiler trace: what `modtrace.merge` does once its paths are resolved."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
from collections.abc import Iterator

from ..._errors import WriteError
from ..._version import __version__
from ...timeline import Timeline
from ...write.atomic_file import Sink, atomic_writer
from ..attribute.overlay import Overlay, Trace, overlay
from ..result import MergeResult, Path, refuse_merged
from ..trace.event_collector import EventCollector
from ..trace.event_stream import EventStream
from ..trace.trace_file import Progress, TraceFile
from .double_safe_nesting import time_quantum_ns
from .json_events import device_events, recording_events
from .stream_copy import copy_chunks, write_added, write_end
from .trace_rows import RowPlaces, device_rows

__all__ = ["merge"]


def merge(
    profiler_trace: Path,
    timeline: Timeline | None,
    out: Path,
    *,
    capture: Path | None = None,
    progress: Progress | None = None,
) -> MergeResult:
    """Do what `modtrace.merge` does, which documents the arguments, for a recording that was read.

    Raises:
        TraceError: the trace cannot be read, or has no moment in common with the recording.
        WriteError: `out` cannot be written; an existing file there is intact.
    """
    name = os.fspath(out)
    packets = name.lower().endswith((".pftrace", ".pftrace.gz"))
    if not packets and not name.lower().endswith((".json", ".json.gz")):
        raise WriteError(f"cannot write {name}: a merged trace ends in .json, .json.gz, .pftrace or .pftrace.gz")
    with TraceFile(profiler_trace, progress) as source, _no_collection():
        if os.path.exists(name) and os.path.samefile(name, profiler_trace):
            raise WriteError(f"cannot write {name}: it is the profiler's trace itself; give another name")
        if packets:
            from .perfetto import write_packets  # protobuf takes time to import

            return write_packets(source, timeline, name, None if capture is None else _read_trace(capture))
        captured = None if capture is None else _read_trace(capture)
        with atomic_writer(name) as sink:
            return _stream(source, timeline, name, sink, captured)


def _read_trace(path: Path) -> Trace:
    """Read a trace of which only the events count."""
    collector = EventCollector()
    with TraceFile(path) as source:
        stream = EventStream(source)
        for chunk in stream.chunks():
            collector.add(chunk.events)
        return Trace(collector.events(), stream.keys, source.path)


def _stream(source: TraceFile, timeline: Timeline | None, out: str, sink: Sink, capture: Trace | None) -> MergeResult:
    stream = EventStream(source)
    collector = EventCollector()
    for chunk in copy_chunks(stream, sink):
        collector.add(chunk.events)
    refuse_merged(stream.keys, source.path)
    events = collector.events()
    overlaid = overlay(timeline, events, stream.keys, source.path, capture)
    places = RowPlaces(events.tids | events.int_pids, events.sort_indexes)
    quantum = time_quantum_ns(max(events.last, int(overlaid.timeline.columns.end.max(initial=0))))
    recording = recording_events(overlaid.timeline, overlaid.pid, places, quantum)
    devices = device_rows(set(overlaid.devices.track.tolist()), events.tracks, events.thread_names, places)
    added = (text for _, text in recording.events())
    write_added(sink, itertools.chain(added, device_events(overlaid, devices, quantum)), follow=stream.count > 0)
    merged = describe(overlaid, stream, out)
    write_end(sink, stream, {**merged.metadata, "header": recording.header()})
    return merged


def describe(overlaid: Overlay, stream: EventStream, out: str) -> MergeResult:
    """Say what was done, for the caller and for the trace's metadata."""
    notes = [*overlaid.notes, *stream.notes]
    if stream.repaired or stream.dropped:
        notes.append(f"of the profiler's events {stream.repaired} were repaired and {stream.dropped} left out")
    if overlaid.attributed_nodes < overlaid.nodes:
        notes.append(
            f"{overlaid.nodes - overlaid.attributed_nodes} of {overlaid.nodes} autograd nodes ran outside all modules"
        )
    if overlaid.attributed_work < overlaid.work:
        reasons = ", ".join(f"{count} {reason}" for reason, count in overlaid.unattributed.items())
        notes.append(
            f"{overlaid.work - overlaid.attributed_work} of {overlaid.work} kernels, memcpys and memsets have no "
            f"module: {reasons}"
        )
    if overlaid.straddling_ops and overlaid.alignment is not None:
        notes.append(
            f"{overlaid.straddling_ops} forward operations lie partly outside a call, by at most "
            f"{overlaid.max_straddle_ns} ns: the alignment may be off by that much"
        )
    metadata = {
        "version": __version__,
        "recording": "reconstructed from the trace" if overlaid.alignment is None else "recorded",
        "alignment": None if overlaid.alignment is None else overlaid.alignment.metadata(),
        "profiler_events": stream.count,
        "nodes": overlaid.nodes,
        "attributed_nodes": overlaid.attributed_nodes,
        "gpu_work": overlaid.work,
        "attributed_gpu_work": overlaid.attributed_work,
        "gpu_work_without_module": overlaid.unattributed,
        "straddling_ops": overlaid.straddling_ops,
        "max_straddle_ns": overlaid.max_straddle_ns,
        "notes": notes,
        "modules": overlaid.summary.to_json_values(sparse=True),
    }
    return MergeResult(
        path=out,
        alignment="" if overlaid.alignment is None else str(overlaid.alignment),
        spans=len(overlaid.timeline.columns),
        gpu_spans=len(overlaid.devices),
        summary=overlaid.summary,
        notes=notes,
        metadata=metadata,
    )


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from walking through every event there is, again and again: they hold no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
