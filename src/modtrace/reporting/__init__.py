"""Bug reports: a `.zip` with a trace, a page that shows it, a summary and the environment; private by default.

A report is made from a timeline, or from a profiler's trace, and contains as much of it as the size limit allows.
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

    file_name: str  # name of the trace's file in the archive
    data: bytes  # contents of the file
    timeline: Timeline  # timeline that the page shows
    description: str | None  # description of the part (`the last 3 steps of 20`); None for the whole trace


class TimelineSource:
    """A timeline without a profiler's trace."""

    def __init__(self, timeline: Timeline, names: ReportNames, folder: Path) -> None:
        self.timeline = without_identity(clean_timeline(timeline, names))
        self.count = len(timeline.columns)
        self.notes: list[str] = []
        self._folder = folder

    def part(self, max_items: int) -> TracePart:
        """Return the slowest steps with up to `max_items` spans in total, or the last `max_items` spans."""
        timeline, description = self.timeline, None
        if max_items < self.count:
            timeline, description = slowest_steps(timeline, max_items) or last_spans(timeline, max_items)
        path = self._folder / "trace.pftrace.gz"
        write_perfetto(timeline, path)
        return TracePart(path.name, path.read_bytes(), timeline, description)


class ProfileSource:
    """A profiler's trace, plain or merged.

    A plain trace becomes a `.pftrace`, as with `modtrace merge`. A merged trace stays JSON, since another merge would
    lose its recording.
    """

    def __init__(self, path: str | os.PathLike[str], kind: FileKind, names: ReportNames, folder: Path) -> None:
        self._folder, self._kind = folder, kind
        self._clean = clean_profile(path, folder / "clean.json", names)
        self.timeline = _without_notes(read_timeline(self._clean.path))
        self.count = len(self._clean.start_us)
        self.notes = list(self._clean.notes)

    def part(self, max_items: int) -> TracePart:
        """Return the slowest steps with up to `max_items` events in total, or the last `max_items` events."""
        path, timeline, description = self._clean.path, self.timeline, None
        if max_items < self.count:
            windows, description = self._slowest_steps(max_items) or self._last_events(max_items)
            path = self._folder / "part.json"
            cut_profile(self._clean, path, windows)
            timeline = _without_notes(read_timeline(path))
        if self._kind is FileKind.MERGED_JSON:
            return TracePart("trace.json.gz", gzip.compress(path.read_bytes(), 6, mtime=0), timeline, description)
        from ..profiler.merge import merge_timeline

        packed = self._folder / "trace.pftrace.gz"
        merge_timeline(path, None, packed)
        return TracePart(packed.name, packed.read_bytes(), timeline, description)

    def _slowest_steps(self, max_events: int) -> tuple[list[tuple[float, float]], str] | None:
        """Return windows of time around the slowest steps, and their description; None if not even one step fits."""
        steps = self._clean.step_start_us
        if len(steps) < 2:
            return None
        # The time between the end of a step and the start of the next belongs to the first.
        ends = np.append(steps[1:], np.inf)
        counts = np.searchsorted(self._clean.start_us, ends) - np.searchsorted(self._clean.start_us, steps)
        slowest = choose_slowest(self._clean.step_duration_us, counts, max_events)
        if not len(slowest):
            return None
        subject = "slowest step" if len(slowest) == 1 else f"{len(slowest)} slowest steps"
        windows = [(float(steps[index]), float(ends[index])) for index in slowest.tolist()]
        return windows, f"the profiler's {subject} of {len(steps)}"

    def _last_events(self, max_events: int) -> tuple[list[tuple[float, float]], str]:
        times, end = self._clean.start_us, self._clean.end_us
        start = float(times[-max_events])
        part_ms, total_ms = (end - start) / 1e3, (end - times[0]) / 1e3
        return [(start, float("inf"))], f"the last {part_ms:,.3f} ms of {total_ms:,.3f} ms"


ReportSource: TypeAlias = TimelineSource | ProfileSource
"""The two sources of a report; both are already cleaned of private data."""


def _without_notes(timeline: Timeline) -> Timeline:
    """Return the timeline of a clean copy without the notes that reading its file adds."""
    return replace(timeline, metadata=clean_metadata(timeline.metadata))


_EARLIEST_DATE = (1980, 1, 1, 0, 0, 0)
"""The earliest date in a ZIP file: the real date is private, and would make equal reports differ."""
_CREATED_ON_UNIX = 3
_FILE_MODE = 0o100644 << 16


def zip_bytes(files: Mapping[str, bytes]) -> bytes:
    """Return a ZIP file of the files by name, in their order, without any date, user or machine."""
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
        lines.append(f"**Cut to fit:** the trace and the page have {part.description}; the table covers all.")
    lines.append(f"Drop `{part.file_name}` onto https://ui.perfetto.dev, or open `viewer.html` in a browser.")
    lines += [_ALIASED_NOTE if anonymized else _KEPT_NOTE, _REPLACED_NOTE]
    return "\n".join(["### modtrace report", "", *(f"- {line}" for line in lines), "", table])


def _describe(timeline: Timeline) -> list[str]:
    columns, stats = timeline.columns, timeline.stats
    versions = [f"{key} {timeline.metadata[key]}" for key in _VERSION_KEYS if key in timeline.metadata]
    opening = f"Recorded with {', '.join(versions)}; reported" if versions else "Reported"
    lines = [f"{opening} by modtrace {__version__}."]
    if not len(columns):
        return [*lines, "No module spans."]
    duration_ms = (int(columns.end.max()) - int(columns.start[0])) / 1e6
    step_count = len(np.unique(columns.step))
    module_count = len({timeline.names[name] for name in set(columns.name.tolist())})
    processes = {track.process for track in timeline.tracks}
    lines.append(
        f"{len(columns):,} spans of {module_count:,} modules in {counted(step_count, 'step')}, "
        f"{duration_ms:,.3f} ms, on {counted(len(timeline.tracks), 'track')} "
        f"of {len(processes):,} {'process' if len(processes) == 1 else 'processes'}."
    )
    losses = [f"{value:,} {name}" for name, value in stats.items() if value and name != "recorded"]
    incomplete = int(np.count_nonzero(~columns.complete))
    if incomplete:
        losses.append(counted(incomplete, "incomplete span"))
    lines.append(f"Losses: {', '.join(losses) or 'none'}.")
    return lines


MAX_REPORT_BYTES = 25_000_000
"""Maximum size of an attachment on GitHub."""
_RETRY_FRACTION = 0.9
"""Fraction of the estimated number of items that is tried next: the size is not quite proportional to the number."""
_MAX_UNSAMPLED_ITEMS = 200_000
"""Number of spans or events above which a sample is compressed first, to estimate the number that fits."""
_SAMPLE_FRACTION = 1 / 16
_ONLY_MODULES_NOTE = (
    "The profiler's own events are left out: in a merged trace in Perfetto's format, only modules can be recognized. "
    "A report of the same merge in JSON has them."
)
_PROFILES = (FileKind.PROFILE, FileKind.MERGED_JSON, FileKind.MERGED_PERFETTO)
_log = logging.getLogger("modtrace")


@dataclass(frozen=True)
class Report:
    """A report's contents.

    Attributes:
        files: contents by file name, in their order in the archive.
        cut: description of the part of the trace in the report (`the last 3 steps of 20`); None for the whole trace.
        size: size of the archive in bytes.
        notes: notes on the trace for the reader.
        texts: by kind (`module`, `mark`, `thread`, …) every name and text in the report that is not modtrace's own.
    """

    files: Mapping[str, bytes]
    cut: str | None = None
    size: int = 0
    notes: list[str] = field(default_factory=list)
    texts: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the archive; raises WriteError if it cannot be written. An existing file at `path` is then intact."""
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

    If only a part of the trace fits and `out` is given, a warning is logged. If a ring has more than 4 million events,
    only its last steps are packed; `notes` has their numbers.

    Args:
        trace: a timeline, or any file that `modtrace.load` reads.
        out: the `.zip` to write; None: no file is written.
        anonymize: replace names of modules and classes by aliases.
        max_bytes: size limit of the archive.
        steps: pack only the modules of these steps: the first step, and the step after the last, see `Timeline.steps`.

    Raises:
        RingError: a ring file is damaged beyond reading.
        TraceError: the file is not a trace, or broken.
        WriteError: not even one span fits, or the file cannot be written; an existing file is intact.

    Example:
        >>> modtrace.report("step.pftrace", "bug.zip").texts["module"]
    """
    redact = Redactor.of_this_machine()
    names = AliasedNames(redact) if anonymize else ReportNames(redact)
    with work_folder() as folder:
        if isinstance(trace, Timeline):
            timeline = trace if steps is None else take_steps(trace, *steps)
            result = _fit(TimelineSource(timeline, names, folder), None, names, max_bytes)
        else:
            result = _pack_file(trace, names, folder, max_bytes, steps)
    if out is not None:
        result.save(out)
        if result.cut is not None:
            megabytes = max_bytes // 10**6
            _log.warning("%s has only %s, to stay within %d MB", os.fspath(out), result.cut, megabytes)
    return result


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
            del timeline  # the memory may suffice for only one copy of its times
            source.notes += notes
        if steps is not None:
            source.notes.append(_describe_steps(source.timeline, has_events=kind in _PROFILES))
        elif kind is FileKind.MERGED_PERFETTO:
            source.notes.append(_ONLY_MODULES_NOTE)
        is_merged = steps is None and kind in (FileKind.MERGED_JSON, FileKind.MERGED_PERFETTO)
        return _fit(source, _gpu_table(trace, names) if is_merged else None, names, max_bytes)


def _describe_steps(timeline: Timeline, *, has_events: bool) -> str:
    """Return a note on the chosen steps; `has_events` is whether the trace also has a profiler's events."""
    step = timeline.slices.step
    omission = "; the profiler's own events are left out" if has_events else ""
    return f"This contains steps {int(step.min()):,} to {int(step.max()):,}, which --steps chose{omission}."


def _gpu_table(path: Path, names: ReportNames) -> str:
    """Return the summary table with GPU times of a merged trace."""
    from ..profiler.device_work import NoModuleReason, no_module_name

    timeline = read_timeline(path)
    reason_names = {no_module_name(reason) for reason in NoModuleReason}
    work = timeline.gpu_work
    if work is not None:
        modules = [module if module[0] in reason_names else names.module(*module) for module in work.modules]
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
    if max_items > _MAX_UNSAMPLED_ITEMS:
        sample_items = int(max_items * _SAMPLE_FRACTION)
        max_items = min(max_items, int(_RETRY_FRACTION * sample_items * max_bytes / attempt(sample_items)[2]))
    while True:
        files, part, size = attempt(max_items)
        if size <= max_bytes:
            texts = {kind: tuple(used_texts) for kind, used_texts in names.used_texts.items()}
            return Report(files, part.description, size, source.notes, texts)
        max_items = min(int(max_items * _RETRY_FRACTION * max_bytes / size), max_items - 1)
        if max_items < 1:
            raise WriteError(f"a report of {max_bytes:,} bytes cannot hold even one span of this trace")
