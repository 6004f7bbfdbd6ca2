"""The page that hands a trace over to the Perfetto UI.

It shows the UI in a frame and posts the bytes to it. That needs no click, no permission of the browser's for a public
site to reach this machine, and no particular port; the UI trusts pages of this machine without asking.
"""

from __future__ import annotations

import json
import secrets
from importlib import resources
from urllib.parse import quote

from .server import Page

__all__ = ["handover_page"]

PINNED = "^(forward|backward)\\b"
"""The names of the tracks that are put on top."""


def handover_page(trace: str, title: str, origin: str) -> Page:
    """Return the page.

    Args:
        trace: where the trace lies, relative to the page.
        title: what the trace is called.
        origin: of the Perfetto UI.
    """
    commands = [{"id": "dev.perfetto.PinTracksByRegex", "args": [PINNED]}]
    settings = {
        "origin": origin,
        "ui": f"{origin}/#!/?hideSidebar=true&startupCommands={quote(json.dumps(commands))}",
        "trace": trace,
        "title": title,
    }
    nonce = secrets.token_urlsafe(16)
    text = resources.files("modtrace.view").joinpath("handover.html").read_text(encoding="utf-8")
    # A "<" in a file's name could end the script element.
    said = json.dumps(settings).replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; "
        f"connect-src 'self'; frame-src {origin}; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )
    return Page(text.replace("__NONCE__", nonce).replace("__SETTINGS__", said).encode(), policy)
