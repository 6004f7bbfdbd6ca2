"""Implements `modtrace.merge` of a recording and a torch.profiler trace, and `modtrace.load` of such a trace.

Each chunk of the trace goes to the output and to the collector of events for attribution. Then `overlay` aligns and
attributes, and the output gets the new tracks.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .._errors import TraceError, WriteError
from .._files import Sink, atomic_writer
from .._interrupts import cached_property
from .._version import __version__
from ..formats.chrome_values import base_time_ns
from ..formats.event_stream import EventStream, garbage_collection_paused
from ..formats.table_bytes import pack_table
from ..formats.trace_file import MERGED, Progress, TraceFile
from ..timeline import Summary, Timeline
from ..timeline.summary import summarize
from .event_collector import EventCollector
from .merged_json import JsonOutput
from .overlay import Overlay, Trace, overlay

if TYPE_CHECKING:
    from .merged_perfetto import PacketOutput

_Path = str | os.PathLike[str]


@dataclass(frozen=True)
class MergeResult:
    """The result of a merge: the file, notes on events left out, and the accuracy of the alignment.

    Attributes:
        path: the file that was written.
        alignment: a sentence on the accuracy of the alignment; empty if there was no recording.
        spans: number of spans above the process' threads.
        gpu_spans: number of spans above the streams of GPUs.
        notes: notes for the user.
        metadata: the merge's metadata in the trace; JSON values.
    """

    path: str
    alignment: str
    spans: int
    gpu_spans: int
    _timeline: Timeline = field(repr=False)
    notes: list[str] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def summary(self) -> Summary:
        """The time of each module."""
        return summarize(self._timeline)

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.spans} spans above threads, {self.gpu_spans} above GPU streams"]
        return "\n".join([*lines, *([self.alignment] if self.alignment else []), *self.notes])


def merge_timeline(
    profiler_trace: _Path,
    timeline: Timeline | None,
    out: _Path,
    *,
    capture: _Path | None = None,
    progress: Progress | None = None,
) -> MergeResult:
    """Merge as `modtrace.merge`, which documents the arguments, with a recording that was already read.

    Raises TraceError if the trace cannot be read, or has no moment in common with the recording. Raises WriteError if
    `out` cannot be written; an existing file there is intact.
    """
    name = os.fspath(out)
    if not name.lower().endswith((".json", ".json.gz", ".pftrace", ".pftrace.gz")):
        raise WriteError(f"cannot write {name}: a merged trace ends in .json, .json.gz, .pftrace or .pftrace.gz")
    with TraceFile(profiler_trace, progress) as source, garbage_collection_paused():
        if os.path.exists(name) and os.path.samefile(name, profiler_trace):
            raise WriteError(f"cannot write {name}: it is the profiler's trace itself; give another name")
        capture_trace = None
        if capture is not None:
            with TraceFile(capture) as file:
                capture_stream, capture_events = _read_events(file)
            capture_trace = Trace(capture_events.events(), capture_stream.keys, file.path)
        with atomic_writer(name) as sink:
            stream, collector = EventStream(source), EventCollector(all_arrows=not _is_json(name))
            output = _new_output(name, stream, sink, collector)
            for chunk in stream.chunks():
                output.add(chunk, collector.add(chunk.events))
            if MERGED in stream.keys:
                raise TraceError(
                    source.path,
                    "this trace was merged before and contains its recording: open it as it is, or merge the "
                    "profiler's own trace",
                )
            events = collector.events()
            overlaid = overlay(timeline, events, stream.keys, source.path, capture_trace)
            result = _make_result(overlaid, stream, [*output.notes(events), *collector.notes()], name)
            base, left_out = base_time_ns(stream.keys, source.path), stream.dropped + collector.malformed
            recording = overlaid.recording(events, base, left_out)
            output.finish(overlaid, events, result.metadata, pack_table(recording))
            return result


def load_profile(path: _Path) -> Timeline:
    """Make a timeline from a trace's own information on modules, with `notes`; raises TraceError if it is no trace."""
    with TraceFile(path) as source:
        stream, collector = _read_events(source)
    base, events = base_time_ns(stream.keys, source.path), collector.events()
    overlaid = overlay(None, events, stream.keys, source.path)
    timeline = overlaid.recording(events, base, stream.dropped + collector.malformed)
    notes = [*overlaid.notes, *stream.notes(), *collector.notes()]
    return replace(timeline, metadata={**timeline.metadata, "notes": notes})


def _is_json(path: str) -> bool:
    return path.lower().endswith((".json", ".json.gz"))


def _new_output(path: str, stream: EventStream, sink: Sink, table: EventCollector) -> "JsonOutput | PacketOutput":
    """Return the writer for the format of a path's suffix."""
    if _is_json(path):
        return JsonOutput(stream, sink)
    from .merged_perfetto import PacketOutput  # importing protobuf is slow

    return PacketOutput(stream, sink, table)


def _read_events(source: TraceFile) -> tuple[EventStream, EventCollector]:
    """Read all events of a trace; return their stream and collector."""
    stream, collector = EventStream(source), EventCollector()
    for chunk in stream.chunks():
        collector.add(chunk.events)
    return stream, collector


def _make_result(overlaid: Overlay, stream: EventStream, output_notes: Sequence[str], out: str) -> MergeResult:
    """Return the result of the merge, with the trace's metadata."""
    notes = [*overlaid.notes, *output_notes, *stream.notes()]
    if overlaid.attributed_count < overlaid.node_count:
        outside_count = overlaid.node_count - overlaid.attributed_count
        notes.append(f"{outside_count} of {overlaid.node_count} autograd nodes ran outside all modules")
    if overlaid.attributed_work < overlaid.work:
        reasons = ", ".join(f"{count} {reason}" for reason, count in overlaid.unattributed.items())
        notes.append(
            f"{overlaid.work - overlaid.attributed_work} of {overlaid.work} kernels, memcpys and memsets have no "
            f"module: {reasons}"
        )
    if overlaid.straddling_count and overlaid.alignment is not None:
        notes.append(
            f"{overlaid.straddling_count} forward operations lie partly outside a call, by at most "
            f"{overlaid.max_straddle_ns} ns: the alignment may be off by that much"
        )
    metadata = {
        "version": __version__,
        "recording": "reconstructed from the trace" if overlaid.alignment is None else "recorded",
        "alignment": None if overlaid.alignment is None else overlaid.alignment.metadata(),
        "profiler_events": stream.count,
        "nodes": overlaid.node_count,
        "attributed_nodes": overlaid.attributed_count,
        "gpu_work": overlaid.work,
        "attributed_gpu_work": overlaid.attributed_work,
        "gpu_work_without_module": overlaid.unattributed,
        "straddling_ops": overlaid.straddling_count,
        "max_straddle_ns": overlaid.max_straddle_ns,
        "notes": notes,
    }
    return MergeResult(
        path=out,
        alignment="" if overlaid.alignment is None else str(overlaid.alignment),
        spans=len(overlaid.timeline.columns),
        gpu_spans=len(overlaid.stream_spans),
        _timeline=overlaid.unique_thread_timeline,
        notes=notes,
        metadata=metadata,
    )
