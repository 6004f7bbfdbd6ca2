"""A local HTTP server that shows a browser a trace in the Perfetto UI, or a page, and the start of the browser.

Every user of the machine can read the command line of a browser. So the browser gets `launch_url`, which leads to the
page only once, and only for a browser of this user. The path of the page is never in a command line.
"""

from __future__ import annotations

import errno
import hmac
import html
import json
import os
import secrets
import select
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from importlib import resources
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from .._errors import ModtraceError
from .._local_server import LocalHandler, LocalServer
from ..formats.trace_file import TraceFile
from ..profiler.merge import merge_timeline
from ..read import FileKind, errors_about, extract_trace, file_kind, load_shown, read_pieces
from ..record_options import StepRange
from ..timeline import Timeline
from ..timeline.select import last_steps
from ..write import write
from ..write.html import render_html

PERFETTO_ORIGIN = "https://ui.perfetto.dev"
STALL_TIMEOUT_S = 60.0
"""Time without a byte in seconds after which a connection is closed."""
_POLL_INTERVAL_S = 0.5
"""Maximum duration of a single wait in seconds: a Ctrl-C just before the wait does not wake the condition."""


class Page(NamedTuple):
    """A page to serve."""

    body: bytes  # HTML of the page
    policy: str | None = None  # Content-Security-Policy header; None if the HTML contains the policy


class TraceServer:
    """Serves a page at an unguessable path of 127.0.0.1, and a trace at `trace` below this path, in a with block.

    Only this page can fetch the trace: requests with a foreign Host or Origin are refused.

    Args:
        page: the page.
        trace: the trace's file; None if the page contains all data.
        port: the port to listen on; 0 for any free port.

    Attributes:
        url: the page's URL.
        launch_url: a URL for a command line that leads to the page once.
        port: the port of the server.

    Raises:
        ModtraceError: the server cannot listen on the port, or cannot read the trace.
    """

    def __init__(self, page: Page, trace: str | Path | None = None, *, port: int = 0) -> None:
        self.page = page
        self.trace = None if trace is None else Path(trace)
        self._delivered = threading.Event()
        self._transfers = 0
        self._open_pages = 0
        self._has_new_delivery = False
        self._closing = False
        self._changed = threading.Condition()
        try:
            if self.trace is not None:
                with self.trace.open("rb"):
                    pass
            self._server = _Server(self, port)
        except OSError as error:
            subject = f"at port {port}" if port and error.errno == errno.EADDRINUSE else trace or "the page"
            raise ModtraceError(f"cannot serve {subject}: {error.strerror or error}") from error
        self.port = self._server.server_port
        self.path = f"/{secrets.token_urlsafe(24)}/"
        self.url = f"http://127.0.0.1:{self.port}{self.path}"
        self.launch_path = f"/{secrets.token_urlsafe(24)}"
        self.launch_url = f"http://127.0.0.1:{self.port}{self.launch_path}"
        self._launches = [None]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    def __enter__(self) -> TraceServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def use_launch_path(self) -> bool:
        """Return whether this is the first use of `launch_url`."""
        try:
            self._launches.pop()  # atomic, so that only one thread succeeds
        except IndexError:
            return False
        return True

    def wait(self, timeout_s: float) -> bool:
        """Wait until everything was delivered; return False after `timeout_s` seconds without any transfer."""
        with self._changed:
            deadline = time.monotonic() + timeout_s
            while not self._delivered.is_set():
                if self._transfers:
                    # The duration of a transfer is limited by STALL_TIMEOUT_S instead.
                    self._changed.wait(_POLL_INTERVAL_S)
                    deadline = time.monotonic() + timeout_s
                elif (remaining_s := deadline - time.monotonic()) > 0:
                    self._changed.wait(min(remaining_s, _POLL_INTERVAL_S))
                else:
                    break
            return self._delivered.is_set()

    def wait_until_left(self, grace_s: float) -> None:
        """Wait until no page was open and nothing was transferred for `grace_s` seconds, the time for a reload.

        Only a page with a trace keeps a connection open; for other pages each delivery counts.
        """
        with self._changed:
            deadline = time.monotonic() + grace_s
            while (remaining_s := deadline - time.monotonic()) > 0:
                self._changed.wait(min(remaining_s, _POLL_INTERVAL_S))
                if self._transfers or self._open_pages or self._has_new_delivery:
                    self._has_new_delivery = False
                    deadline = time.monotonic() + grace_s

    def hold_open(self, connection: socket.socket) -> None:
        """Hold a connection until the page closes it; the page counts as open meanwhile."""
        with self._changed:
            self._open_pages += 1
        try:
            while not self._closing:
                if select.select([connection], [], [], _POLL_INTERVAL_S)[0] and not connection.recv(1):
                    return
        finally:
            with self._changed:
                self._open_pages -= 1
                self._changed.notify_all()

    @contextmanager
    def tracking_transfer(self, final: bool) -> Iterator[None]:
        """Count a transfer while it runs; when the `final` transfer is complete, everything was delivered."""
        with self._changed:
            self._transfers += 1
        try:
            yield
            if final:
                self._delivered.set()
                self._has_new_delivery = True
        finally:
            with self._changed:
                self._transfers -= 1
                self._changed.notify_all()


class _Server(LocalServer):
    def __init__(self, owner: TraceServer, port: int) -> None:
        self.owner = owner
        super().__init__(port, _Handler)


class _Handler(LocalHandler):
    server: _Server
    timeout = STALL_TIMEOUT_S

    def do_GET(self) -> None:  # noqa: N802 (http.server's name)
        """Answer a request with the page or with the trace."""
        owner = self.server.owner
        # The check stops DNS rebinding: a foreign name that resolves to 127.0.0.1 is another Host.
        if self.headers.get_all("Host", []) not in ([f"127.0.0.1:{owner.port}"], [f"localhost:{owner.port}"]):
            self.send_error(HTTPStatus.FORBIDDEN, "the Host header must be 127.0.0.1 or localhost with this port")
        elif _equal(self.path, owner.launch_path):
            self._send_to_page(owner)
        elif _equal(self.path, owner.path):
            self._send_page(owner)
        elif owner.trace is not None and _equal(self.path, f"{owner.path}trace"):
            self._send_trace(owner, owner.trace)
        elif owner.trace is not None and _equal(self.path, f"{owner.path}open"):
            # The page keeps this request open as long as the page is open.
            if self._is_own_page():
                self.server.note_served(self.connection)
                self._send_content_headers("text/plain", 1)
                owner.hold_open(self.connection)
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send_to_page(self, owner: TraceServer) -> None:
        if not self.is_own_user():
            self.send_error(HTTPStatus.FORBIDDEN, "another user")
        elif not owner.use_launch_path():
            self.send_error(HTTPStatus.GONE, "this link works once; modtrace has printed one that stays")
        else:
            self._send_headers(HTTPStatus.SEE_OTHER, 0, {"Location": owner.path})

    def _send_page(self, owner: TraceServer) -> None:
        if self.headers.get_all("Origin"):
            self.send_error(HTTPStatus.FORBIDDEN, "another Origin")
            return
        with owner.tracking_transfer(final=owner.trace is None):
            self._send_content_headers("text/html; charset=utf-8", len(owner.page.body), owner.page.policy)
            self.wfile.write(owner.page.body)

    def _send_trace(self, owner: TraceServer, trace: Path) -> None:
        if not self._is_own_page():
            return
        self.server.note_served(self.connection)
        with trace.open("rb") as file, owner.tracking_transfer(final=True):
            size = file.seek(0, 2)
            file.seek(0)
            self._send_content_headers("application/octet-stream", size)
            if self.connection.sendfile(file) != size:
                raise ConnectionError("the trace became shorter while it was sent")
            self.connection.shutdown(socket.SHUT_WR)

    def _is_own_page(self) -> bool:
        """Return whether the request comes from modtrace's page, which sends no Origin; refuse it otherwise."""
        if self.headers.get_all("Origin") or self.headers.get_all("Sec-Fetch-Site") != ["same-origin"]:
            self.send_error(HTTPStatus.FORBIDDEN, "another Origin")
            return False
        return True

    def _send_headers(self, status: HTTPStatus, size: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        private = {"Content-Length": str(size), "Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
        for name, value in (*headers.items(), *private.items()):
            self.send_header(name, value)
        self.end_headers()

    def _send_content_headers(self, content_type: str, size: int, policy: str | None = None) -> None:
        """Send the headers of a response with content and, if `policy` is given, a Content-Security-Policy."""
        security = {"Cross-Origin-Resource-Policy": "same-origin", "X-Content-Type-Options": "nosniff"}
        security |= {} if policy is None else {"Content-Security-Policy": policy}
        self._send_headers(HTTPStatus.OK, size, {"Content-Type": content_type, **security})


def _equal(path: str, expected: str) -> bool:
    """Compare in constant time: the path is a secret."""
    return hmac.compare_digest(path.encode("utf-8", "replace"), expected.encode())


WAIT_TIMEOUT_S = 600.0
"""Time in seconds for which the server waits for a browser."""
RELOAD_GRACE_S = 3.0
"""Time in seconds that a page has for a reload."""
PAGE_GRACE_S = 20.0
"""Time in seconds for a reload of the offline page, whose policy allows no open connection to the server."""


def has_browser(environ: Mapping[str, str] = os.environ, platform: str = sys.platform) -> bool:
    """Return whether a browser started by this process appears on the user's screen."""
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

    An interrupt ends the function, with an error if the page was not delivered yet. Without a browser only the page's
    URL is printed. With `keep`, the function serves until an interrupt. It returns whether everything was delivered in
    time.
    """
    if browser and has_browser():
        print_line(f"Opening {server.url}")
        # In a thread, because the command of some browsers returns only when the window is closed.
        threading.Thread(target=_open, args=(server, print_line), daemon=True).start()
    else:
        for line in _remote_instructions(server):
            print_line(line)
    delivered = False
    try:
        print_line("Serving until Ctrl-C." if keep else "Serving until the page is closed, or Ctrl-C.")
        while not (delivered := server.wait(timeout_s)) and keep:
            pass
        if delivered:
            grace_s = RELOAD_GRACE_S if server.trace else PAGE_GRACE_S
            server.wait_until_left(float("inf") if keep else grace_s)
    except KeyboardInterrupt:
        delivered = server.wait(0)  # the delivery may have ended just now
        if not delivered and not keep:
            raise
    return delivered or keep


def _open(server: TraceServer, print_line: Callable[[str], object]) -> None:
    if not webbrowser.open(server.launch_url):
        print_line("No browser could be started.")
        for line in _remote_instructions(server):
            print_line(line)


def _remote_instructions(server: TraceServer) -> list[str]:
    return [
        f"Open {server.url}",
        "On another machine, first forward the port there (--port chooses it):",
        f"  ssh -L {server.port}:127.0.0.1:{server.port} {socket.gethostname()}",
    ]


def ensure_viewable(
    path: str | os.PathLike[str], folder: Path, steps: StepRange | None = None
) -> tuple[Path, list[str]]:
    """Return a file with module tracks for the Perfetto UI, made in `folder` if needed, and notes for the user.

    Another tool's trace in Perfetto's format is returned as it is. Raises RingError or TraceError if the file is not a
    trace, or broken.
    """
    trace, converted = extract_trace(path, folder), folder / "viewable.pftrace"
    with errors_about(path, trace):
        kind = file_kind(trace)
        if kind is FileKind.PROFILE and steps is None:
            return converted, merge_timeline(trace, None, converted).notes
        if kind in (FileKind.RING, FileKind.OTHER) or steps is not None:
            if steps == (None, None):
                write(read_pieces(trace), converted)
                return converted, []
            timeline, notes = load_shown(trace, steps)
            write(timeline, converted)
            return converted, notes
        with TraceFile(trace) as source:
            for _ in source.blocks() if source.gzipped else ():
                pass  # raises if the file unpacks to more than the limit, which a browser should not do either
    return trace, []


PINNED_TRACKS = ("^steps and marks\\b", "^(forward|backward)\\b")
"""Regular expressions for the names of tracks that are pinned to the top, in this order."""

OPENED_GROUPS = "^(?!System$)"
"""Regular expression for the names of groups that are opened: all except `System`, which has readings of clocks. By
default the UI opens a group only if it is the only group of a trace."""


def handover_page(trace: str, title: str, origin: str) -> Page:
    """Return the page that passes the trace at the relative URL `trace` to the Perfetto UI at `origin`."""
    commands = [
        # Without "name", the UI from version 53 on asks the user whether a pattern is for names or paths.
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
    # "<" is escaped, because a file's name could end the script element.
    settings_json = json.dumps(settings).replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; "
        f"connect-src 'self'; frame-src {origin}; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )
    return Page(text.replace("__NONCE__", nonce).replace("__SETTINGS__", settings_json).encode(), policy)


MAX_SPANS = 20_000
"""Maximum number of spans in an iframe: they add half a megabyte to the notebook's file, which keeps every output."""


def iframe_html(timeline: Timeline) -> str:
    """Return HTML that shows a timeline, or its last steps if it is long, or its size if a single step is too long.

    The page only runs its own scripts: it can reach neither the notebook nor the network.
    """
    columns = timeline.columns
    notice = ""
    if len(columns) > MAX_SPANS:
        tail = last_steps(timeline, MAX_SPANS)
        if tail is None:
            return _paragraph(f"{timeline!r} has too many spans in one step to be shown here. {_SAVE_HINT}")
        timeline = tail.timeline
        notice = _paragraph(f"{len(timeline.columns):,} of {len(columns):,} spans: {tail.description}. {_SAVE_HINT}")
    page = html.escape(render_html(timeline).decode())
    return (
        f'{notice}<iframe title="modtrace timeline" sandbox="allow-scripts" srcdoc="{page}" '
        'style="width: 100%; height: 480px; border: 0"></iframe>'
    )


_SAVE_HINT = 'To see the whole timeline: timeline.save("timeline.html"), or .pftrace.'


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"
