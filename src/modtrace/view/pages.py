"""What is shown: any file in the Perfetto UI, the page that hands it over, and a timeline in a notebook."""

from __future__ import annotations

import html
import json
import os
import secrets
from importlib import resources
from pathlib import Path
from urllib.parse import quote

from ..formats.trace_file import TraceFile
from ..profiler.merge import merge_timeline
from ..read import FileKind, errors_about, extract_trace, file_kind
from ..read.ring_file import Steps, load_shown, read_pieces
from ..timeline import Timeline
from ..timeline.select import last_steps
from ..write import write
from ..write.html import render_html
from .server import Page


def ensure_viewable(path: str | os.PathLike[str], folder: Path, steps: Steps | None = None) -> tuple[Path, list[str]]:
    """Return a file that the Perfetto UI draws module tracks of, made in `folder` if needed, and what to tell users.

    Another tool's trace in Perfetto's format is such a file. Raises RingError or TraceError if the file is none, or
    broken.
    """
    trace, made = extract_trace(path, folder), folder / "viewable.pftrace"
    with errors_about(path, trace):
        kind = file_kind(trace)
        if kind is FileKind.PROFILE and steps is None:
            return made, merge_timeline(trace, None, made).notes
        if kind in (FileKind.RING, FileKind.OTHER) or steps is not None:
            if steps == (None, None):
                write(read_pieces(trace), made)
                return made, []
            timeline, notes = load_shown(trace, steps)
            write(timeline, made)
            return made, notes
        with TraceFile(trace) as source:
            for _ in source.blocks() if source.gzipped else ():
                pass  # what no reader of ours would unpack is not for a browser either
    return trace, []


PINNED_TRACKS = ("^steps and marks\\b", "^(forward|backward)\\b")
"""Regular expressions: tracks of these names are pinned to the top, in this order."""

OPENED_GROUPS = "^(?!System$)"
"""A regular expression: groups of these names are open; `System` holds readings of clocks. By itself the UI opens a
group only where it is the only one of a trace."""


def handover_page(trace: str, title: str, origin: str) -> Page:
    """Return the page, with the trace's name as its title, that hands a relative URL to the Perfetto UI at `origin`."""
    commands = [
        # From version 53 on, the UI asks the user what a pattern is for unless it is told: for names, not paths.
        *({"id": "dev.perfetto.PinTracksByRegex", "args": [tracks, "name"]} for tracks in PINNED_TRACKS),
        {"id": "dev.perfetto.ExpandTracksByRegex", "args": [OPENED_GROUPS, "name"]},
    ]
    settings = {
        "origin": origin,
        "ui": f"{origin}/#!/?hideSidebar=true&startupCommands={quote(json.dumps(commands))}",
        "trace": trace,
        "title": title,
    }
    nonce = secrets.token_urlsafe(16)
    text = resources.files("modtrace.view").joinpath("handover.html").read_text(encoding="utf-8")
    # Without "<", because a file's name could end the script element.
    settings_json = json.dumps(settings).replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; "
        f"connect-src 'self'; frame-src {origin}; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )
    return Page(text.replace("__NONCE__", nonce).replace("__SETTINGS__", settings_json).encode(), policy)


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
