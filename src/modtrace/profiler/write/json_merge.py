"""`modtrace.merge`: a recording over a torch.profiler trace."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

from ..._errors import WriteError
from ..._version import __version__
from ...timeline import Timeline
from ...write.atomic_file import Sink, replacing
from ..attribute.overlay import Laid, lay_over
from ..result import Merged, Path, closing, refuse_merged
from ..trace.event_columns import Events, Gatherer
from ..trace.event_stream import EventStream
from ..trace.trace_file import Progress, Source
from .append import add_recording
from .double_safe_nesting import step_of
from .json_events import DEEPEST, device_events, row_events, timeline_events
from .trace_rows import device_rows, free_tids, marks_row, timeline_rows

__all__ = ["merge"]


def merge(
    profiler_trace: Path,
    timeline: Timeline | Path | None = None,
    out: Path | None = None,
    *,
    attribute: bool = True,
    progress: Progress | None = None,
) -> Merged:
    """Lay a recording over a trace of torch.profiler.

    The profiler's events are kept byte for byte, and its file is never written. What is broken in it is mended or left
    out, and the result says so. Module tracks lie above the threads of the process; above each stream of a GPU lies a
    track of the modules whose kernels ran.

    Args:
        profiler_trace: `.json` or `.json.gz`, as `export_chrome_trace` writes it.
        timeline: the recording, or a file of one; None makes module tracks from what the trace knows of modules.
        out: `.json`, `.json.gz`, `.pftrace` or `.pftrace.gz`.
        attribute: False adds the recording without looking at the trace's events: no GPU tracks, and backward slices
            as they were recorded, in the time that copying takes.
        progress: called with the number of bytes of the trace that were read since the last call.

    Raises:
        TraceError: the trace cannot be read, or has no moment in common with the recording.
        WriteError: `out` cannot be written; an existing file there is intact.
    """
    if out is None:
        raise WriteError("say where to write the merged trace: merge(trace, recording, out)")
    name = os.fspath(out)
    packets = name.lower().endswith((".pftrace", ".pftrace.gz"))
    if not packets and not name.lower().endswith((".json", ".json.gz")):
        raise WriteError(f"cannot write {name}: a merged trace ends in .json, .json.gz, .pftrace or .pftrace.gz")
    if packets and not attribute:
        raise WriteError(f"cannot write {name}: without attribution a recording can only be added to .json")
    if timeline is None and not attribute:
        raise WriteError(f"cannot write {name}: without a recording and without attribution there is nothing to add")
    with Source(profiler_trace, progress) as source, _no_collection():
        if os.path.exists(name) and os.path.samefile(name, profiler_trace):
            raise WriteError(f"cannot write {name}: it is the profiler's trace itself; give another name")
        if timeline is not None and not isinstance(timeline, Timeline):
            timeline = _loaded(timeline)
        if timeline is not None and not attribute:
            return add_recording(source, timeline, name)
        if packets:
            from .perfetto import write_packets  # protobuf takes time to import

            return write_packets(source, timeline, name)
        with replacing(name) as sink:
            return _stream(source, timeline, name, sink)


def _loaded(path: Path) -> Timeline:
    from ... import load  # a Timeline can be merged without any reader of files

    timeline: Timeline = load(path)
    return timeline


def _stream(source: Source, timeline: Timeline | None, out: str, sink: Sink) -> Merged:
    stream = EventStream(source)
    gatherer = Gatherer()
    sink.write(b'{"traceEvents":[' if stream.bare else stream.head)
    comma = b""
    for chunk in stream.chunks():
        gatherer.add(chunk.events)
        sink.write(comma)
        sink.write(chunk.raw)
        comma = b","
    refuse_merged(stream.keys, source.path)
    events = gatherer.events()
    laid = lay_over(timeline, events, stream.keys, source.path)
    for text in _our_events(laid, events):
        sink.write(comma + b"\n" + text)
        comma = b","
    merged = describe(laid, stream, out)
    sink.write(closing(merged.metadata, b"" if stream.bare else stream.tail, stream.keys, stream.head))
    return merged


def _our_events(laid: Laid, events: Events) -> Iterator[bytes]:
    tids = free_tids(events.tids)
    rows = timeline_rows(laid.timeline, laid.pid, tids)
    marks = marks_row(laid.timeline, laid.pid, tids)
    devices = device_rows(set(laid.devices.track.tolist()), events.tracks, events.thread_names, tids)
    step = step_of(max(events.last, int(laid.timeline.columns.end.max(initial=0))))
    yield from row_events([*rows, *devices.values()])
    yield from timeline_events(laid.timeline, rows, marks, step)
    yield from device_events(laid.timeline, laid.devices, devices, step)


def describe(laid: Laid, stream: EventStream, out: str) -> Merged:
    """Say what was done, for the caller and for the trace's metadata."""
    notes = [*laid.notes, *stream.notes]
    if stream.mended or stream.dropped:
        notes.append(f"of the profiler's events {stream.mended} were mended and {stream.dropped} left out")
    if laid.nodes_placed < laid.nodes:
        notes.append(f"{laid.nodes - laid.nodes_placed} of {laid.nodes} autograd nodes belong to no known call")
    if laid.work_placed < laid.work:
        notes.append(
            f"{laid.work - laid.work_placed} of {laid.work} kernels, memcpys and memsets were launched outside of "
            "any known call"
        )
    if laid.cut_ops and laid.alignment is not None:
        notes.append(
            f"{laid.cut_ops} forward operations lie partly outside a call, by at most {laid.worst_cut_ns} ns: "
            "the alignment may be off by that much"
        )
    deep = int((laid.timeline.columns.depth >= DEEPEST).sum())
    if deep:
        notes.append(f"{deep} slices lie more than {DEEPEST} levels deep, which no viewer shows, and were left out")
    metadata = {
        "version": __version__,
        "recording": "reconstructed from the trace" if laid.alignment is None else "recorded",
        "alignment": None if laid.alignment is None else laid.alignment.metadata(),
        "nodes": laid.nodes,
        "nodes_placed": laid.nodes_placed,
        "gpu_work": laid.work,
        "gpu_work_placed": laid.work_placed,
        "cut_ops": laid.cut_ops,
        "worst_cut_ns": laid.worst_cut_ns,
        "notes": notes,
        "modules": laid.totals.as_json(),
    }
    return Merged(
        path=out,
        alignment="" if laid.alignment is None else str(laid.alignment),
        slices=len(laid.timeline.columns) - deep,
        device_slices=len(laid.devices),
        totals=laid.totals,
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
