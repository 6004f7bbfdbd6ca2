"""A server for one browser on this machine: one page, and with it one trace, until it was taken."""

from __future__ import annotations

import hmac
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

from .._errors import ModtraceError

__all__ = ["PERFETTO", "Page", "TraceServer"]

PERFETTO = "https://ui.perfetto.dev"
"""The origin of the Perfetto UI."""
STALLED = 60.0
"""Seconds after which a connection that does not move is closed."""
_NOTICED = 0.5
"""Seconds until an interrupt is noticed that came just before a wait began: until then it wakes nobody."""


class Page(NamedTuple):
    """A page to serve: its bytes, and its Content-Security-Policy; None where it says that itself."""

    body: bytes
    policy: str | None = None


class TraceServer:
    """Serves `page` at an unguessable path of 127.0.0.1, and `trace` below it.

    The trace goes to that page alone, which posts it to the Perfetto UI. It serves in a with block.

    Args:
        page: what is shown.
        trace: the file that it takes, from `trace` below its own path; None where the page has all in itself.

    Attributes:
        url: where the page is.
        port: on which it listens.

    Raises:
        ModtraceError: it cannot listen, or the trace cannot be read.
    """

    def __init__(self, page: Page, trace: str | Path | None = None) -> None:
        self.page = page
        self.trace = None if trace is None else Path(trace)
        self._taken = threading.Event()
        self._busy = 0
        self._changed = threading.Condition()
        try:
            if self.trace is not None:
                with self.trace.open("rb"):
                    pass
            self._server = _Server(self)
        except OSError as error:
            raise ModtraceError(f"cannot serve {trace or 'the page'}: {error.strerror or error}") from error
        self.port = self._server.server_port
        self.path = f"/{secrets.token_urlsafe(24)}/"
        self.url = f"http://127.0.0.1:{self.port}{self.path}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    def __enter__(self) -> TraceServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def wait(self, timeout: float) -> bool:
        """Wait until all was taken, or for `timeout` seconds in which nothing moves; return whether it was taken."""
        with self._changed:
            end = time.monotonic() + timeout
            while not self._taken.is_set():
                if self._busy:
                    # What is on its way has its own limit, STALLED.
                    self._changed.wait(_NOTICED)
                    end = time.monotonic() + timeout
                elif (left := end - time.monotonic()) > 0:
                    self._changed.wait(min(left, _NOTICED))
                else:
                    break
            return self._taken.is_set()

    @contextmanager
    def sending(self, last: bool) -> Iterator[None]:
        """Count what is on its way; the whole `last` of it is what the server is there for."""
        with self._changed:
            self._busy += 1
        try:
            yield
            if last:
                self._taken.set()
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, serving: TraceServer) -> None:
        self.serving = serving
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of browsers that close a connection or leave it, as they like."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = STALLED

    def do_GET(self) -> None:
        """Answer with the page or with the trace."""
        serving = self.server.serving
        if not self._for_us(serving.port):
            self.send_error(HTTPStatus.FORBIDDEN, "another Host")
        elif _same(self.path, serving.path):
            self._page(serving)
        elif serving.trace is not None and _same(self.path, f"{serving.path}trace"):
            self._trace(serving, serving.trace)
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _for_us(self, port: int) -> bool:
        """Whether the one Host is this machine: a name that was rebound to 127.0.0.1 is another."""
        return self.headers.get_all("Host", []) in ([f"127.0.0.1:{port}"], [f"localhost:{port}"])

    def _page(self, serving: TraceServer) -> None:
        if self.headers.get_all("Origin"):
            self.send_error(HTTPStatus.FORBIDDEN, "another Origin")
            return
        with serving.sending(last=serving.trace is None):
            self._head("text/html; charset=utf-8", len(serving.page.body))
            if serving.page.policy is not None:
                self.send_header("Content-Security-Policy", serving.page.policy)
            self.end_headers()
            self.wfile.write(serving.page.body)

    def _trace(self, serving: TraceServer, trace: Path) -> None:
        # A browser says where a request comes from. Our page's has no Origin, nor has a program's.
        if self.headers.get_all("Origin") or self.headers.get_all("Sec-Fetch-Site") != ["same-origin"]:
            self.send_error(HTTPStatus.FORBIDDEN, "another Origin")
            return
        with trace.open("rb") as file, serving.sending(last=True):
            size = file.seek(0, 2)
            file.seek(0)
            self._head("application/octet-stream", size)
            self.end_headers()
            if self.connection.sendfile(file) != size:
                raise ConnectionError("the trace became shorter while it was sent")
            self.connection.shutdown(socket.SHUT_WR)

    def _head(self, kind: str, size: int) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(size))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")

    def version_string(self) -> str:
        """Return what the Server header says: no versions."""
        return "modtrace"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (http.server's name)
        """Say nothing: the path is a secret."""


def _same(path: str, ours: str) -> bool:
    return hmac.compare_digest(path.encode("utf-8", "replace"), ours.encode())
