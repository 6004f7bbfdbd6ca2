"""Open a page in the user's browser, or say how to reach it from where the browser is."""

from __future__ import annotations

import os
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable, Mapping

from .server import TraceServer

__all__ = ["WAIT_TIMEOUT_S", "has_browser", "open_and_serve"]

WAIT_TIMEOUT_S = 600.0
"""How long the server waits for a browser to come."""


def has_browser(environ: Mapping[str, str] = os.environ, platform: str = sys.platform) -> bool:
    """Return whether a browser opened from this process shows up where the user sits.

    Args:
        environ: the environment variables.
        platform: as `sys.platform`.
    """
    if environ.get("BROWSER"):
        return True
    if environ.get("SSH_CONNECTION") or environ.get("SSH_TTY"):
        return False
    return platform in ("darwin", "win32") or bool(environ.get("DISPLAY") or environ.get("WAYLAND_DISPLAY"))


def open_and_serve(server: TraceServer, print_line: Callable[[str], object], timeout_s: float = WAIT_TIMEOUT_S) -> bool:
    """Open the page of a running server in the browser, and wait until it was delivered.

    Args:
        server: serves the page.
        print_line: shows a line to the user.
        timeout_s: seconds to wait for the browser.

    Returns:
        Whether everything was delivered in time.
    """
    if has_browser():
        print_line(f"Opening {server.url}")
        # In a thread, because some browsers return only when their window is closed.
        opening = threading.Thread(target=_open, args=(server, print_line), daemon=True)
        opening.start()
    else:
        print_line(_remote_instructions(server))
    return server.wait(timeout_s)


def _open(server: TraceServer, print_line: Callable[[str], object]) -> None:
    if not webbrowser.open(server.url):
        print_line(f"No browser could be started. {_remote_instructions(server)}")


def _remote_instructions(server: TraceServer) -> str:
    return (
        f"Open {server.url}\n"
        "From another machine, first forward the port there:\n"
        f"  ssh -L {server.port}:127.0.0.1:{server.port} {socket.gethostname()}"
    )
