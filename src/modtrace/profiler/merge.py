"""A torch.profiler trace alone, as `modtrace.load` reads it, or below a recording: what `modtrace.merge` does.

Each chunk of the trace goes to the output and to the collector of what attribution needs. Then `overlay` aligns and
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
    """A merged trace: its file, what was left out, and how exactly the recording is aligned with the trace.

    Attributes:
        path: the file it wrote.
        alignment: how well the recording fits the trace; empty if there was no recording.
        spans: how many spans were written above the process' threads.
        gpu_spans: how many above the streams of GPUs.
        notes: what the user should know.
        metadata: what the trace's metadata says; JSON values.
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
    """Do what `modtrace.merge` does, which documents the arguments, for a recording that was read.

    Raises TraceError if the trace cannot be read, or has no moment in common with the recording; WriteError if `out`
    cannot be written; an existing file there is intact.
    """
    name = os.fspath(out)
    if not name.lower().endswith((".json", ".json.gz", ".pftrace", ".pftrace.gz")):
        raise WriteError(f"cannot write {name}: a merged trace ends in .json, .json.gz, .pftrace or .pftrace.gz")
    with TraceFile(profiler_trace, progress) as source, garbage_collection_paused():
        if os.path.exists(name) and os.path.samefile(name, profiler_trace):
            raise WriteError(f"cannot write {name}: it is the profiler's trace itself; give another name")
        captured = None
        if capture is not None:
            with TraceFile(capture) as file:
                capture_stream, capture_events = _read_events(file)
            captured = Trace(capture_events.events(), capture_stream.keys, file.path)
        with atomic_writer(name) as sink:
            stream, collector = EventStream(source), EventCollector(all_arrows=not _is_json(name))
            output = _new_output(name, stream, sink, collector)
            for chunk in stream.chunks():
                output.add(chunk, collector.add(chunk.events))
            if MERGED in stream.keys:
                raise TraceError(
                    source.path,
                    "this trace was merged before and holds its recording: open it as it is, or merge the profiler's "
                    "own trace",
                )
            events = collector.events()
            overlaid = overlay(timeline, events, stream.keys, source.path, captured)
            merged = _describe(overlaid, stream, [*output.notes(events), *collector.notes()], name)
            base, left_out = base_time_ns(stream.keys, source.path), stream.dropped + collector.malformed
            recording = overlaid.recording(events, base, left_out)
            output.finish(overlaid, events, merged.metadata, pack_table(recording))
            return merged


def load_profile(path: _Path) -> Timeline:
    """Make a timeline of what a profiler noted of modules, with `notes` of the rest; raises TraceError for none."""
    with TraceFile(path) as source:
        stream, collector = _read_events(source)
    base, events = base_time_ns(stream.keys, source.path), collector.events()
    made = overlay(None, events, stream.keys, source.path)
    timeline = made.recording(events, base, stream.dropped + collector.malformed)
    return replace(
        timeline, metadata={**timeline.metadata, "notes": [*made.notes, *stream.notes(), *collector.notes()]}
    )


def _is_json(path: str) -> bool:
    return path.lower().endswith((".json", ".json.gz"))


def _new_output(path: str, stream: EventStream, sink: Sink, table: EventCollector) -> "JsonOutput | PacketOutput":
    """Return what writes the format of a path's suffix."""
    if _is_json(path):
        return JsonOutput(stream, sink)
    from .merged_perfetto import PacketOutput  # protobuf takes time to import

    return PacketOutput(stream, sink, table)


def _read_events(source: TraceFile) -> tuple[EventStream, EventCollector]:
    """Return all events of a trace, and the stream that they came in."""
    stream, collector = EventStream(source), EventCollector()
    for chunk in stream.chunks():
        collector.add(chunk.events)
    return stream, collector


def _describe(overlaid: Overlay, stream: EventStream, output_notes: Sequence[str], out: str) -> MergeResult:
    """Say what was done, for the caller and for the trace's metadata."""
    notes = [*overlaid.notes, *output_notes, *stream.notes()]
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
    }
    return MergeResult(
        path=out,
        alignment="" if overlaid.alignment is None else str(overlaid.alignment),
        spans=len(overlaid.timeline.columns),
        gpu_spans=len(overlaid.devices),
        _timeline=overlaid.by_thread,
        notes=notes,
        metadata=metadata,
    )
