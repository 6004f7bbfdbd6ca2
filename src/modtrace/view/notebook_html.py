"""A timeline in a notebook: the offline page in a frame of its own."""

from __future__ import annotations

import html

from ..timeline import Timeline
from ..timeline.tail import last_steps
from ..write.html import render_html

__all__ = ["frame"]

MOST = 20_000
"""Spans in a frame: about half a megabyte in the notebook's file, which keeps every output."""


def frame(timeline: Timeline) -> str:
    """Return HTML that shows the timeline, of a long one its last steps, of a huge step only what it is.

    The page can run its own scripts and nothing else: not reach the notebook, nor the network.
    """
    columns = timeline.columns
    note = ""
    if len(columns) > MOST:
        shortened = last_steps(timeline, MOST)
        if shortened is None:
            return _said(f"{timeline!r} has too many spans in one step to be shown here. {_ALL}")
        timeline = shortened.timeline
        note = _said(f"{len(timeline.columns):,} of {len(columns):,} spans: {shortened.what}. {_ALL}")
    page = html.escape(render_html(timeline).decode())
    return (
        f'{note}<iframe title="modtrace timeline" sandbox="allow-scripts" srcdoc="{page}" '
        'style="width: 100%; height: 480px; border: 0"></iframe>'
    )


_ALL = 'To see all of it: timeline.save("timeline.html"), or .pftrace.'


def _said(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"
