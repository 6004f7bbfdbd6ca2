"""`summary.md`: what one pastes into an issue."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .._version import __version__
from ..timeline import Timeline
from .source_trace import Part

__all__ = ["ROWS", "summary_text"]

ROWS = 30
"""Modules in the table."""

_LEFT_OUT = (
    "Left out: source code, command lines, names of users and machines, paths, values of the environment, and all that "
    "is not known to be harmless."
)
_ALIASED = " Names of modules and classes are aliases."


def summary_text(timeline: Timeline, table: str, part: Part, notes: Sequence[str], *, anonymized: bool) -> str:
    """Return the text.

    Args:
        timeline: the whole, with nothing private in it.
        table: what each module took, in Markdown; of the whole too.
        part: what the archive holds.
        notes: what the reader should know.
        anonymized: whether names are aliases.
    """
    lines = [*_metadata(timeline), *notes]
    if part.what is not None:
        lines.append(f"**Cut to fit:** the trace and the page hold {part.what}; the table is of all.")
    lines.append(f"Drop `{part.name}` onto https://ui.perfetto.dev, or open `viewer.html` in a browser.")
    lines.append(_LEFT_OUT + (_ALIASED if anonymized else ""))
    return "\n".join(["### modtrace report", "", *(f"- {line}" for line in lines), "", table])


def _metadata(timeline: Timeline) -> list[str]:
    columns, stats = timeline.columns, timeline.stats
    versions = [f"{key} {value}" for key, value in timeline.metadata.items() if key != "capacity"]
    recorded = f"Recorded with {', '.join(versions)}; reported" if versions else "Reported"
    lines = [f"{recorded} by modtrace {__version__}."]
    if not len(columns):
        return [*lines, "No module slices."]
    length = (int(columns.end.max()) - int(columns.start[0])) / 1e6
    steps = len(np.unique(columns.step))
    processes = {track.process for track in timeline.tracks}
    lines.append(
        f"{len(columns):,} slices of {len(set(timeline.names)):,} modules in {_many(steps, 'step')}, {length:,.3f} ms, "
        f"on {_many(len(timeline.tracks), 'track')} of {_many(len(processes), 'process', 'processes')}."
    )
    losses = [f"{value:,} {name}" for name, value in stats.items() if value and name != "recorded"]
    incomplete = int(np.count_nonzero(~columns.complete))
    if incomplete:
        losses.append(_many(incomplete, "incomplete slice"))
    lines.append(f"Losses: {', '.join(losses) or 'none'}.")
    return lines


def _many(count: int, one: str, many: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"
