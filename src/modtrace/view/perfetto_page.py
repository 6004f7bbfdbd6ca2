"""The page that passes a trace to the Perfetto UI.

It shows the UI in an iframe and posts the trace's bytes to it. That needs no click, no particular port, and no
permission for a public site to reach this machine; the UI accepts pages of this machine without asking.
"""

from __future__ import annotations

import json
import secrets
from importlib import resources
from urllib.parse import quote

from .server import Page

__all__ = ["handover_page"]

PINNED_TRACKS = "^(forward|backward)\\b"
"""A regular expression: tracks of these names are pinned to the top."""

OPENED_GROUPS = "^(?!System$)"
"""A regular expression: groups of these names are open; `System` holds readings of clocks. By itself the UI opens a
group only where it is the only one of a trace."""


def handover_page(trace: str, title: str, origin: str) -> Page:
    """Return the page.

    Args:
        trace: URL of the trace, relative to the page.
        title: the trace's name, shown as the title.
        origin: the Perfetto UI's origin (`https://ui.perfetto.dev`).
    """
    commands = [
        {"id": "dev.perfetto.PinTracksByRegex", "args": [PINNED_TRACKS]},
        {"id": "dev.perfetto.ExpandTracksByRegex", "args": [OPENED_GROUPS]},
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
