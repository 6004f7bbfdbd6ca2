"""A report: its files, and what had to be cut so that they fit."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from .._errors import WriteError
from ..read.any_trace import Kind, kind_of, timeline_of
from ..timeline import Timeline
from ..write.html import render_html
from .aliases import Aliases, Names
from .archive import archive
from .redact import Redactor
from .source_trace import Material, OfProfile, OfTimeline, Part
from .summary_md import ROWS, summary_text
from .system_info import environment

__all__ = ["LIMIT", "Report", "report_of_timeline", "report_of_trace"]

LIMIT = 25_000_000
"""Bytes; what GitHub takes as one attachment."""
_MARGIN = 0.9
"""How much of what should fit is tried next: bytes do not quite follow the number of spans."""
_ONLY_MODULES = (
    "The profiler's own events are left out: of a merged trace in Perfetto's format only the modules can be told. "
    "A report of the same in JSON has them."
)


@dataclass(frozen=True)
class Report:
    """What a report holds.

    Attributes:
        files: bytes by name.
        cut: which part of the trace it holds (`the last 3 of 20 steps`); None for all.
        size: bytes of the archive.
    """

    files: Mapping[str, bytes]
    cut: str | None = None
    size: int = 0
    notes: list[str] = field(default_factory=list)


def report_of_timeline(timeline: Timeline, *, anonymize: bool = False, limit: int = LIMIT) -> Report:
    """Make the report of a timeline.

    Args:
        timeline: what it is about.
        anonymize: replace names of modules and classes by aliases.
        limit: bytes that the archive may have.

    Raises:
        WriteError: nothing of it fits.
    """
    names = _names(anonymize)
    with tempfile.TemporaryDirectory(prefix="modtrace-") as folder:
        material = OfTimeline(timeline, names, Path(folder))
        return _fitted(material, None, names, limit)


def report_of_trace(path: str | os.PathLike[str], *, anonymize: bool = False, limit: int = LIMIT) -> Report:
    """Make the report of a file: a ring, what modtrace saved or merged, or a trace of torch.profiler.

    Args:
        path: the file.
        anonymize: replace names of modules and classes by aliases.
        limit: bytes that the archive may have.

    Raises:
        RingError: a ring file is damaged beyond reading.
        TraceError: it is no trace, or broken.
        WriteError: nothing of it fits.
    """
    names = _names(anonymize)
    kind = kind_of(path)
    with tempfile.TemporaryDirectory(prefix="modtrace-") as folder:
        material: Material
        if kind in (Kind.PROFILE, Kind.MERGED):
            material = OfProfile(path, kind, names, Path(folder))
        else:
            material = OfTimeline(timeline_of(path, kind), names, Path(folder))
        if kind is Kind.MERGED_PACKETS:
            material.notes.append(_ONLY_MODULES)
        return _fitted(material, _totals(path, names), names, limit)


def _names(anonymize: bool) -> Names:
    redact = Redactor.of_this_machine()
    return Aliases(redact) if anonymize else Names(redact)


def _totals(path: str | os.PathLike[str], names: Names) -> str | None:
    """Return the table of a merged trace, which has GPU times; None of any other."""
    from ..profiler import module_totals
    from ..profiler.attribute.module_times import NO_MODULE

    totals = module_totals(path)
    if totals is None:
        return None
    rows = [
        row
        if row.fqn == NO_MODULE
        else row._replace(fqn=names.fqn(row.fqn), module_class=names.module_class(row.module_class))
        for row in totals.rows
    ]
    return replace(totals, rows=rows).top(limit=ROWS).to_markdown()


def _fitted(material: Material, table: str | None, names: Names, limit: int) -> Report:
    """Return the report with as much of the end of the trace as fits."""
    about = environment(names.text).encode()
    table = table or material.timeline.summary().top(limit=ROWS).to_markdown()
    most = material.count
    while True:
        part = material.end(most)
        text = summary_text(material.timeline, table, part, material.notes, anonymized=isinstance(names, Aliases))
        files = _files(part, text, about)
        size = len(archive(files))
        if size <= limit:
            return Report(files, part.what, size, material.notes)
        most = min(int(most * _MARGIN * limit / size), most - 1)
        if most < 1:
            raise WriteError(f"a report of {limit:,} bytes cannot hold even one slice of this trace")


def _files(part: Part, text: str, about: bytes) -> dict[str, bytes]:
    return {
        "summary.md": text.encode(),
        "environment.txt": about,
        part.name: part.trace,
        "viewer.html": render_html(part.timeline),
    }
