"""A page shown in the user's browser, or how to reach it from where the browser is."""

from __future__ import annotations

import os
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable, Mapping

from .server import TraceServer

__all__ = ["has_browser", "show"]

PATIENCE = 600.0
"""Seconds that the server waits for somebody to come."""


def has_browser(environ: Mapping[str, str] = os.environ, platform: str = sys.platform) -> bool:
    """Whether a browser that is opened from here shows up where the user sits."""
    if environ.get("BROWSER"):
        return True
    if environ.get("SSH_CONNECTION") or environ.get("SSH_TTY"):
        return False
    return platform in ("darwin", "win32") or bool(environ.get("DISPLAY") or environ.get("WAYLAND_DISPLAY"))


def show(server: TraceServer, say: Callable[[str], object], timeout: float = PATIENCE) -> bool:
    """Open the page of a running server and wait until all was taken; return whether it was.

    Args:
        server: serves the page.
        say: takes lines for the user.
        timeout: seconds to wait for the browser.
    """
    if has_browser():
        say(f"Opening {server.url}")
        # Some browsers return only when their window is closed.
        opening = threading.Thread(target=_open, args=(server, say), daemon=True)
        opening.start()
    else:
        say(_elsewhere(server))
    return server.wait(timeout)


def _open(server: TraceServer, say: Callable[[str], object]) -> None:
    if not webbrowser.open(server.url):
        say(f"No browser could be started. {_elsewhere(server)}")


def _elsewhere(server: TraceServer) -> str:
    return (
        f"Open {server.url}\n"
        "From another machine, first forward the port there:\n"
        f"  ssh -L {server.port}:127.0.0.1:{server.port} {socket.gethostname()}"
    )
