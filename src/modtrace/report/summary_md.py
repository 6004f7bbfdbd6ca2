"""`summary.md`: the text to paste into an issue."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .._version import __version__
from ..timeline import Timeline
from .source_trace import TracePart

__all__ = ["MAX_TABLE_ROWS", "summary_text"]

MAX_TABLE_ROWS = 30

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


def summary_text(timeline: Timeline, table: str, part: TracePart, notes: Sequence[str], *, anonymized: bool) -> str:
    """Return the text.

    Args:
        timeline: all of it, already clean.
        table: time per module of all of it, in Markdown.
        part: what the archive holds.
        notes: what the reader should know.
        anonymized: whether names are aliases.
    """
    lines = [*_describe(timeline), *notes]
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
    processes = {track.process for track in timeline.tracks}
    lines.append(
        f"{len(columns):,} spans of {len(set(timeline.names)):,} modules in {_count_text(steps, 'step')}, "
        f"{length:,.3f} ms, on {_count_text(len(timeline.tracks), 'track')} "
        f"of {_count_text(len(processes), 'process', 'processes')}."
    )
    losses = [f"{value:,} {name}" for name, value in stats.items() if value and name != "recorded"]
    incomplete = int(np.count_nonzero(~columns.complete))
    if incomplete:
        losses.append(_count_text(incomplete, "incomplete span"))
    lines.append(f"Losses: {', '.join(losses) or 'none'}.")
    return lines


def _count_text(count: int, one: str, many: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"
