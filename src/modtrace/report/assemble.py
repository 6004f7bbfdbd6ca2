"""Assemble a report: its files, and as much of the trace as fits the size limit."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from .._errors import WriteError
from .._system.work_folder import work_folder
from ..read import FileKind, file_kind, load, trace_path
from ..timeline import Timeline
from ..write.html import render_html
from .aliases import AliasedNames, ReportNames
from .archive import write_archive, zip_bytes
from .redact import Redactor
from .source_trace import ProfileSource, ReportSource, TimelineSource, TracePart
from .summary_md import MAX_TABLE_ROWS, summary_text
from .system_info import environment_text

__all__ = ["MAX_REPORT_BYTES", "Report", "report_file", "report_timeline", "write_report"]

MAX_REPORT_BYTES = 25_000_000
"""What GitHub accepts as one attachment."""
_RETRY_FRACTION = 0.9
"""How much of what should fit is tried next: compressed bytes do not quite follow the number of spans."""
_SAMPLED_ABOVE = 200_000
"""Of more spans or events a sample says first how many will fit: to compress them all in vain takes longest."""
_SAMPLE = 1 / 16
_ONLY_MODULES_NOTE = (
    "The profiler's own events are left out: of a merged trace in Perfetto's format only the modules can be told. "
    "A report of the same in JSON has them."
)
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


def report_timeline(timeline: Timeline, *, anonymize: bool = False, max_bytes: int = MAX_REPORT_BYTES) -> Report:
    """Make the report of a timeline.

    Args:
        timeline: what to report.
        anonymize: replace names of modules and classes by aliases.
        max_bytes: size limit of the archive.

    Raises:
        WriteError: not even one span fits.
    """
    names = _report_names(anonymize)
    with work_folder() as folder:
        source = TimelineSource(timeline, names, folder)
        return _fit(source, None, names, max_bytes)


def report_file(path: str | os.PathLike[str], *, anonymize: bool = False, max_bytes: int = MAX_REPORT_BYTES) -> Report:
    """Make the report of any file that `modtrace.load` reads.

    Args:
        path: the file.
        anonymize: replace names of modules and classes by aliases.
        max_bytes: size limit of the archive.

    Raises:
        RingError: a ring file is damaged beyond reading.
        TraceError: it is no trace, or broken.
        WriteError: not even one span fits.
    """
    names = _report_names(anonymize)
    with trace_path(path) as trace, work_folder() as folder:
        kind = file_kind(trace)
        source: ReportSource
        if kind in (FileKind.PROFILE, FileKind.MERGED_JSON):
            source = ProfileSource(trace, kind, names, folder)
        else:
            source = TimelineSource(load(trace), names, folder)
        if kind is FileKind.MERGED_PERFETTO:
            source.notes.append(_ONLY_MODULES_NOTE)
        return _fit(source, _gpu_table(trace, names), names, max_bytes)


def write_report(
    timeline: Timeline,
    path: str | os.PathLike[str],
    *,
    anonymize: bool = False,
    max_bytes: int = MAX_REPORT_BYTES,
) -> None:
    """Write the report of a timeline: what `Timeline.save` does for a `.zip`.

    Logs a warning where only a part of the timeline fits.

    Args:
        timeline: what to report.
        path: the archive.
        anonymize: replace names of modules and classes by aliases.
        max_bytes: size limit of the archive.

    Raises:
        WriteError: not even one span fits, or the file cannot be written; an existing file is intact.
    """
    report = report_timeline(timeline, anonymize=anonymize, max_bytes=max_bytes)
    write_archive(report.files, path)
    if report.cut is not None:
        _log.warning("%s holds %s, so that it has no more than %d MB", os.fspath(path), report.cut, max_bytes // 10**6)


def _report_names(anonymize: bool) -> ReportNames:
    redact = Redactor.of_this_machine()
    return AliasedNames(redact) if anonymize else ReportNames(redact)


def _gpu_table(path: str | os.PathLike[str], names: ReportNames) -> str | None:
    """Return the table of a merged trace, which has GPU times; None for any other."""
    from ..profiler import read_merged_summary
    from ..profiler.attribute.gpu_work import Reason, no_module_name

    summary = read_merged_summary(path)
    if summary is None:
        return None
    no_module = {no_module_name(reason) for reason in Reason}
    rows = []
    for row in summary.rows:
        if row.fqn not in no_module:
            fqn, module_class = names.module(row.fqn, row.module_class)
            row = row._replace(fqn=fqn, module_class=module_class)
        rows.append(row)
    return replace(summary, rows=rows).sort_by(limit=MAX_TABLE_ROWS).to_markdown()


def _fit(source: ReportSource, table: str | None, names: ReportNames, max_bytes: int) -> Report:
    """Return the report with as much of the trace as fits."""
    environment = environment_text(source.timeline.metadata).encode()
    table = table or source.timeline.summary().sort_by(limit=MAX_TABLE_ROWS).to_markdown()

    def attempt(max_items: int) -> tuple[dict[str, bytes], TracePart, int]:
        part = source.part(max_items)
        anonymized = isinstance(names, AliasedNames)
        files = _files(
            part, summary_text(source.timeline, table, part, source.notes, anonymized=anonymized), environment
        )
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


def _files(part: TracePart, summary: str, environment: bytes) -> dict[str, bytes]:
    return {
        "summary.md": summary.encode(),
        "environment.txt": environment,
        part.file_name: part.data,
        "viewer.html": render_html(part.timeline),
    }
