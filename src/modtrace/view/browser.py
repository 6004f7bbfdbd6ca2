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
RELOAD_GRACE_S = 3.0
"""How long a page may take to come back when it is reloaded."""
PAGE_GRACE_S = 20.0
"""How long the offline page can be reloaded: it cannot say that it is open, as it may reach no server."""


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


def open_and_serve(
    server: TraceServer,
    print_line: Callable[[str], object],
    *,
    browser: bool = True,
    keep: bool = False,
    timeout_s: float = WAIT_TIMEOUT_S,
) -> bool:
    """Open the page of a running server in the browser, and serve it as long as it is open there.

    An interrupt ends it: as an error before the page was delivered, in good order after that.

    Args:
        server: serves the page.
        print_line: shows a line to the user.
        browser: open a browser where there is one; False only tells the page's URL.
        keep: serve until an interrupt comes.
        timeout_s: seconds to wait for the browser; with `keep` it may come at any time.

    Returns:
        Whether everything was delivered in time.
    """
    if browser and has_browser():
        print_line(f"Opening {server.url}")
        # In a thread, because some browsers return only when their window is closed.
        opening = threading.Thread(target=_open, args=(server, print_line), daemon=True)
        opening.start()
    else:
        for line in _remote_instructions(server):
            print_line(line)
    print_line("Serving until Ctrl-C." if keep else "Serving until the page is closed, or Ctrl-C.")
    delivered = False
    try:
        while not (delivered := server.wait(timeout_s)) and keep:
            pass
        if delivered:
            server.wait_until_left(float("inf") if keep else RELOAD_GRACE_S if server.trace else PAGE_GRACE_S)
    except KeyboardInterrupt:
        if not delivered and not keep:
            raise
    return delivered or keep


def _open(server: TraceServer, print_line: Callable[[str], object]) -> None:
    if not webbrowser.open(server.url):
        print_line("No browser could be started.")
        for line in _remote_instructions(server):
            print_line(line)


def _remote_instructions(server: TraceServer) -> list[str]:
    return [
        f"Open {server.url}",
        "From another machine, first forward the port there (--port chooses it):",
        f"  ssh -L {server.port}:127.0.0.1:{server.port} {socket.gethostname()}",
    ]
