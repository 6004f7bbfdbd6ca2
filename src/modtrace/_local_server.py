"""A web server for this machine only. Other users can connect, but can neither exhaust it nor pose as this user."""

import contextlib
import os
import socket
import struct
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_MAX_WAITING = 32
_ACCEPT_PAUSE_S = 0.1


class LocalServer(ThreadingHTTPServer):
    """Serves at 127.0.0.1, each connection on a thread.

    Up to 32 connections may wait for their request; one more closes the oldest connection.
    """

    daemon_threads = True

    def __init__(self, port: int, handler: type["LocalHandler"]) -> None:
        self._waiting: dict[socket.socket, None] = {}
        self._change = threading.Lock()
        super().__init__(("127.0.0.1", port), handler)

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        """Accept a connection."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(_ACCEPT_PAUSE_S)  # the process has no free descriptor, and the server would retry at once
            raise

    def process_request(self, request: socket.socket, client_address: tuple[str, int]) -> None:  # type: ignore[override]
        """Let a thread answer."""
        with self._change:
            self._waiting[request] = None
            oldest = next(iter(self._waiting)) if len(self._waiting) > _MAX_WAITING else None
            if oldest is not None:
                del self._waiting[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no more threads
            self.shutdown_request(request)

    def note_served(self, request: socket.socket) -> None:
        """Count a connection no longer as waiting: its request is accepted."""
        with self._change:
            self._waiting.pop(request, None)

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]
        """End a connection."""
        self.note_served(request)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that close a connection or leave it idle."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class LocalHandler(BaseHTTPRequestHandler):
    """Answers requests; logs none."""

    server: LocalServer
    timeout = 10.0

    def is_own_user(self) -> bool:
        """Return whether the client belongs to this user or root, or the kernel does not report its user."""
        users = _users_of(self.client_address[:2], ("127.0.0.1", self.server.server_port))
        return not users or users <= {0, os.geteuid()}

    def parse_request(self) -> bool:
        """Read a request; refuse HTTP/0.9, which has no Host header to check."""
        is_read = super().parse_request()
        if is_read and self.request_version == "HTTP/0.9":
            self.send_error(HTTPStatus.FORBIDDEN, "no Host")
            return False
        return is_read

    def version_string(self) -> str:
        """Return the Server header, without versions."""
        return "modtrace"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (http.server's name)
        """Log nothing: a path may be a secret."""


def _users_of(client: tuple[str, int], server: tuple[str, int]) -> set[int]:
    """Return the user of a client's end of an IPv4 connection; empty if the system does not report it."""
    # The kernel writes the address as one integer in this machine's byte order, then the port.
    local, remote = (
        f"{struct.unpack('=I', socket.inet_aton(host))[0]:08X}:{port:04X}" for host, port in (client, server)
    )
    users = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):  # tcp6 lists sockets that accept both IPv4 and IPv6
        with contextlib.suppress(OSError), open(table) as lines:
            for fields in map(str.split, lines):
                if fields[1].endswith(local) and fields[2].endswith(remote):
                    users.add(int(fields[7]))
    return users
