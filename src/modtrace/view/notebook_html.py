"""A timeline as HTML for a notebook: the offline page in an iframe."""

from __future__ import annotations

import html

from ..timeline import Timeline
from ..timeline.tail import last_steps
from ..write.html import render_html

__all__ = ["MAX_SPANS", "iframe_html"]

MAX_SPANS = 20_000
"""Spans in one iframe: about half a megabyte in the notebook's file, which keeps every output."""


def iframe_html(timeline: Timeline) -> str:
    """Return HTML that shows a timeline: its last steps if it is long, only its size if one step is too long.

    The page runs its own scripts and nothing else: it can reach neither the notebook nor the network.
    """
    columns = timeline.columns
    note = ""
    if len(columns) > MAX_SPANS:
        tail = last_steps(timeline, MAX_SPANS)
        if tail is None:
            return _paragraph(f"{timeline!r} has too many spans in one step to be shown here. {_SAVE_HINT}")
        timeline = tail.timeline
        note = _paragraph(f"{len(timeline.columns):,} of {len(columns):,} spans: {tail.description}. {_SAVE_HINT}")
    page = html.escape(render_html(timeline).decode())
    return (
        f'{note}<iframe title="modtrace timeline" sandbox="allow-scripts" srcdoc="{page}" '
        'style="width: 100%; height: 480px; border: 0"></iframe>'
    )


_SAVE_HINT = 'To see all of it: timeline.save("timeline.html"), or .pftrace.'


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"
