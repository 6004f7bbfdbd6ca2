"""Bug reports: a `.zip` with a trace, a page that shows it, a summary and the environment; private by default.

One is made from a timeline, or from a profiler's trace with the timeline in it, with as much as fits the size limit.
"""

import gzip
import io
import logging
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from .._errors import WriteError
from .._files import atomic_writer, work_folder
from .._tables import counted
from .._version import __version__
from ..read import FileKind, file_kind, load_shown, read_timeline, trace_path
from ..record_options import StepRange
from ..timeline import Timeline
from ..timeline.select import choose_slowest, last_spans, slowest_steps
from ..timeline.summary import summarize, take_steps
from ..write.html import render_html
from ..write.perfetto import write_perfetto
from .clean_profile import clean_profile, cut_profile
from .clean_timeline import clean_metadata, clean_timeline, environment_text, without_identity
from .names import AliasedNames, Redactor, ReportNames

__all__ = ["MAX_REPORT_BYTES", "Report", "report", "zip_bytes"]


class TracePart(NamedTuple):
    """The trace, or the part of it, that goes into an archive."""

    file_name: str  # of the trace's file in the archive
    data: bytes  # that file's contents
    timeline: Timeline  # what the page shows
    description: str | None  # which part it is (`the last 3 steps of 20`); None for all of it


class TimelineSource:
    """A timeline without a profiler's trace."""

    def __init__(self, timeline: Timeline, names: ReportNames, folder: Path) -> None:
        self.timeline = without_identity(clean_timeline(timeline, names))
        self.count = len(timeline.columns)
        self.notes: list[str] = []
        self._folder = folder

    def part(self, max_items: int) -> TracePart:
        """Return the slowest steps that have at most `max_items` spans, else the last `max_items` spans."""
        timeline, description = self.timeline, None
        if max_items < self.count:
            timeline, description = slowest_steps(timeline, max_items) or last_spans(timeline, max_items)
        path = self._folder / "trace.pftrace.gz"
        write_perfetto(timeline, path)
        return TracePart(path.name, path.read_bytes(), timeline, description)


class ProfileSource:
    """A profiler's trace, plain or merged.

    A plain one becomes a `.pftrace`, as `modtrace merge` makes it. A merged one stays JSON: merging it once more would
    lose what was recorded.
    """

    def __init__(self, path: str | os.PathLike[str], kind: FileKind, names: ReportNames, folder: Path) -> None:
        self._folder, self._kind = folder, kind
        self._clean = clean_profile(path, folder / "clean.json", names)
        self.timeline = _without_notes(read_timeline(self._clean.path))
        self.count = len(self._clean.times)
        self.notes = list(self._clean.notes)

    def part(self, max_items: int) -> TracePart:
        """Return the slowest steps that have at most `max_items` events, else the last `max_items` events."""
        path, timeline, description = self._clean.path, self.timeline, None
        if max_items < self.count:
            windows, description = self._slowest_steps(max_items) or self._last_events(max_items)
            path = self._folder / "part.json"
            cut_profile(self._clean, path, windows)
            timeline = _without_notes(read_timeline(path))
        if self._kind is FileKind.MERGED_JSON:
            return TracePart("trace.json.gz", gzip.compress(path.read_bytes(), 6, mtime=0), timeline, description)
        from ..profiler.merge import merge_timeline

        merged = self._folder / "trace.pftrace.gz"
        merge_timeline(path, None, merged)
        return TracePart(merged.name, merged.read_bytes(), timeline, description)

    def _slowest_steps(self, max_events: int) -> tuple[list[tuple[float, float]], str] | None:
        """Return windows of time around the slowest steps, and what these are; None if not even one step fits."""
        steps = self._clean.steps
        if len(steps) < 2:
            return None
        # What lies between the end of a step and the start of the next one belongs to the former.
        ends = np.append(steps[1:], np.inf)
        counts = np.searchsorted(self._clean.times, ends) - np.searchsorted(self._clean.times, steps)
        chosen = choose_slowest(self._clean.step_durations, counts, max_events)
        if not len(chosen):
            return None
        which = "slowest step" if len(chosen) == 1 else f"{len(chosen)} slowest steps"
        windows = [(float(steps[index]), float(ends[index])) for index in chosen.tolist()]
        return windows, f"the profiler's {which} of {len(steps)}"

    def _last_events(self, max_events: int) -> tuple[list[tuple[float, float]], str]:
        times, end = self._clean.times, self._clean.end
        since = float(times[-max_events])
        kept_ms, all_ms = (end - since) / 1e3, (end - times[0]) / 1e3
        return [(since, float("inf"))], f"the last {kept_ms:,.3f} ms of {all_ms:,.3f} ms"


ReportSource: TypeAlias = TimelineSource | ProfileSource
"""The two sources of a report; private things are already gone from them."""


def _without_notes(timeline: Timeline) -> Timeline:
    """Return the timeline of a copy, whose texts are all replaced, without the notes that reading a file adds."""
    return replace(timeline, metadata=clean_metadata(timeline.metadata))


_EARLIEST_DATE = (1980, 1, 1, 0, 0, 0)
"""The earliest date that a ZIP can hold: the real one would say when and make archives differ."""
_CREATED_ON_UNIX = 3
_FILE_MODE = 0o100644 << 16


def zip_bytes(files: Mapping[str, bytes]) -> bytes:
    """Return a ZIP file of the files by name, in their order, without any time, user or machine in it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, _EARLIEST_DATE)
            entry.create_system = _CREATED_ON_UNIX
            entry.external_attr = _FILE_MODE
            entry.compress_type = zipfile.ZIP_STORED if name.endswith(".gz") else zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return buffer.getvalue()


_MAX_TABLE_ROWS, _TABLE_WIDTH = 30, 120

_REPLACED_NOTE = (
    "Replaced: texts of marks, names of threads, counters and annotations, by numbers; ids of processes and threads; "
    "the time of the recording, which begins in 2000. Left out: source code, command lines, program names, hosts, "
    "paths, environment variables, and all that is not known to be harmless."
)
_KEPT_NOTE = (
    "Kept: names of modules, classes, operations and kernels; shapes; ranks; versions and hardware of the recording."
)
_ALIASED_NOTE = (
    "Kept: names of torch's own operations and kernels; shapes; ranks; versions and hardware of the recording. Names "
    "of modules and classes are aliases."
)
_VERSION_KEYS = ("modtrace", "torch", "python", "engine")


def _summary_text(source: ReportSource, table: str, part: TracePart, *, anonymized: bool) -> str:
    """Return the text of `summary.md`, to paste into an issue."""
    lines = [*_describe(source.timeline), *source.notes]
    if part.description is not None:
        lines.append(f"**Cut to fit:** the trace and the page hold {part.description}; the table is of all.")
    lines.append(f"Drop `{part.file_name}` onto https://ui.perfetto.dev, or open `viewer.html` in a browser.")
    lines += [_ALIASED_NOTE if anonymized else _KEPT_NOTE, _REPLACED_NOTE]
    return "\n".join(["### modtrace report", "", *(f"- {line}" for line in lines), "", table])


def _describe(timeline: Timeline) -> list[str]:
    columns, stats = timeline.columns, timeline.stats
    versions = [f"{key} {timeline.metadata[key]}" for key in _VERSION_KEYS if key in timeline.metadata]
    recorded = f"Recorded with {', '.join(versions)}; reported" if versions else "Reported"
    lines = [f"{recorded} by modtrace {__version__}."]
    if not len(columns):
        return [*lines, "No module spans."]
    length = (int(columns.end.max()) - int(columns.start[0])) / 1e6
    steps = len(np.unique(columns.step))
    modules = len({timeline.names[name] for name in set(columns.name.tolist())})
    processes = {track.process for track in timeline.tracks}
    lines.append(
        f"{len(columns):,} spans of {modules:,} modules in {counted(steps, 'step')}, "
        f"{length:,.3f} ms, on {counted(len(timeline.tracks), 'track')} "
        f"of {len(processes):,} {'process' if len(processes) == 1 else 'processes'}."
    )
    losses = [f"{value:,} {name}" for name, value in stats.items() if value and name != "recorded"]
    incomplete = int(np.count_nonzero(~columns.complete))
    if incomplete:
        losses.append(counted(incomplete, "incomplete span"))
    lines.append(f"Losses: {', '.join(losses) or 'none'}.")
    return lines


MAX_REPORT_BYTES = 25_000_000
"""The largest attachment that GitHub accepts."""
_RETRY_FRACTION = 0.9
"""The fraction of the items that should fit that is tried next: bytes do not quite follow the number of spans."""
_SAMPLED_ABOVE = 200_000
"""With more spans or events, a sample first says how many will fit: compressing them all in vain takes longest."""
_SAMPLE = 1 / 16
_ONLY_MODULES_NOTE = (
    "The profiler's own events are left out: of a merged trace in Perfetto's format only the modules can be told. "
    "A report of the same in JSON has them."
)
_PROFILES = (FileKind.PROFILE, FileKind.MERGED_JSON, FileKind.MERGED_PERFETTO)
_log = logging.getLogger("modtrace")


@dataclass(frozen=True)
class Report:
    """A report's contents.

    Attributes:
        files: contents by file name, in their order in the archive.
        cut: which part of the trace it holds (`the last 3 steps of 20`); None for all of it.
        size: bytes of the archive.
        notes: what the reader should know about the trace.
        texts: by kind (`module`, `mark`, `thread`, …) every name and text in it that does not come from modtrace.
    """

    files: Mapping[str, bytes]
    cut: str | None = None
    size: int = 0
    notes: list[str] = field(default_factory=list)
    texts: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the archive; raises WriteError if it cannot be written; an existing file at `path` is intact."""
        with atomic_writer(path) as file:
            file.write(zip_bytes(self.files))


def report(
    trace: Timeline | str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    anonymize: bool = False,
    max_bytes: int = MAX_REPORT_BYTES,
    steps: StepRange | None = None,
) -> Report:
    """Pack a trace for a bug report: the trace, a page that shows it, a summary and the environment.

    If only a part of the trace fits and `out` is given, a warning is logged. A ring with more than 4 million events
    has its last steps packed; `notes` says which.

    Args:
        trace: a timeline, or any file that `modtrace.load` reads.
        out: the `.zip` to write; None: write none.
        anonymize: replace names of modules and classes by aliases.
        max_bytes: size limit of the archive.
        steps: pack the modules of the steps from the first number to before the second, as `Timeline.steps` takes them.

    Raises:
        RingError: a ring file is damaged beyond reading.
        TraceError: it is not a trace, or broken.
        WriteError: not even one span fits, or the file cannot be written; an existing file is intact.

    Example:
        >>> modtrace.report("step.pftrace", "bug.zip").texts["module"]
    """
    redact = Redactor.of_this_machine()
    names = AliasedNames(redact) if anonymize else ReportNames(redact)
    with work_folder() as folder:
        if isinstance(trace, Timeline):
            chosen = trace if steps is None else take_steps(trace, *steps)
            packed = _fit(TimelineSource(chosen, names, folder), None, names, max_bytes)
        else:
            packed = _pack_file(trace, names, folder, max_bytes, steps)
    if out is not None:
        packed.save(out)
        if packed.cut is not None:
            megabytes = max_bytes // 10**6
            _log.warning("%s holds %s, so that it has no more than %d MB", os.fspath(out), packed.cut, megabytes)
    return packed


def _pack_file(
    path: str | os.PathLike[str], names: ReportNames, folder: Path, max_bytes: int, steps: StepRange | None
) -> Report:
    with trace_path(path) as trace:
        kind = file_kind(trace)
        source: ReportSource
        if kind in (FileKind.PROFILE, FileKind.MERGED_JSON) and steps is None:
            source = ProfileSource(trace, kind, names, folder)
        else:
            timeline, notes = load_shown(trace, steps)
            source = TimelineSource(timeline, names, folder)
            del timeline  # there is memory for its times once
            source.notes += notes
        if steps is not None:
            source.notes.append(_describe_steps(source.timeline, has_events=kind in _PROFILES))
        elif kind is FileKind.MERGED_PERFETTO:
            source.notes.append(_ONLY_MODULES_NOTE)
        is_merged = steps is None and kind in (FileKind.MERGED_JSON, FileKind.MERGED_PERFETTO)
        return _fit(source, _gpu_table(trace, names) if is_merged else None, names, max_bytes)


def _describe_steps(timeline: Timeline, *, has_events: bool) -> str:
    """Say which steps were chosen; `has_events`: whether the trace has events of a profiler, which are not in them."""
    step = timeline.slices.step
    left_out = "; the profiler's own events are left out" if has_events else ""
    return f"This holds steps {int(step.min()):,} to {int(step.max()):,}, which --steps chose{left_out}."


def _gpu_table(path: Path, names: ReportNames) -> str:
    """Return the table with GPU times of a merged trace."""
    from ..profiler.device_work import NoModuleReason, no_module_name

    timeline = read_timeline(path)
    no_module = {no_module_name(reason) for reason in NoModuleReason}
    work = timeline.gpu_work
    if work is not None:
        modules = [module if module[0] in no_module else names.module(*module) for module in work.modules]
        work = replace(work, modules=modules)
    summary = summarize(replace(clean_timeline(timeline, names), gpu_work=work))
    return summary.sort_by(limit=_MAX_TABLE_ROWS).to_markdown(_TABLE_WIDTH)


def _fit(source: ReportSource, table: str | None, names: ReportNames, max_bytes: int) -> Report:
    """Return the report with as much of the trace as fits."""
    environment = environment_text(source.timeline.metadata).encode()
    table = table or summarize(source.timeline).sort_by(limit=_MAX_TABLE_ROWS).to_markdown(_TABLE_WIDTH)

    def attempt(max_items: int) -> tuple[dict[str, bytes], TracePart, int]:
        part = source.part(max_items)
        anonymized = isinstance(names, AliasedNames)
        files = {
            "summary.md": _summary_text(source, table, part, anonymized=anonymized).encode(),
            "environment.txt": environment,
            part.file_name: part.data,
            "viewer.html": render_html(part.timeline),
        }
        return files, part, len(zip_bytes(files))

    max_items = source.count
    if max_items > _SAMPLED_ABOVE:
        sampled = int(max_items * _SAMPLE)
        max_items = min(max_items, int(_RETRY_FRACTION * sampled * max_bytes / attempt(sampled)[2]))
    while True:
        files, part, size = attempt(max_items)
        if size <= max_bytes:
            texts = {kind: tuple(used) for kind, used in names.used.items()}
            return Report(files, part.description, size, source.notes, texts)
        max_items = min(int(max_items * _RETRY_FRACTION * max_bytes / size), max_items - 1)
        if max_items < 1:
            raise WriteError(f"a report of {max_bytes:,} bytes cannot hold even one span of this trace")
