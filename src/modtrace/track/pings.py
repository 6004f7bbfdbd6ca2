"""Reads the clock of another host over TCP: pings, and how far that clock is ahead by them."""

import hmac
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..ring.clock_map import MAX_RATE, Reading

TOKEN_BYTES = 32
PINGS = 64
"""How many pings one reading takes."""

_BEST_PART = 8
"""One of so many pings has a round trip that is short enough to count."""
_TIME = struct.Struct("<q")
_CONNECT_TIMEOUT_S = 2.0
_ANSWER_TIMEOUT_S = 1.0
_MAX_CONNECTIONS = 64

Clock = Callable[[], int]


class Ping(NamedTuple):
    """One question to another clock.

    Attributes:
        sent_ns: own monotonic nanoseconds just before it was sent.
        remote_ns: what the other clock showed between its arrival and the answer.
        received_ns: own monotonic nanoseconds just after the answer came.
    """

    sent_ns: int
    remote_ns: int
    received_ns: int


def estimate_offset(pings: Sequence[Ping]) -> Reading:
    """Return the median offset of the eighth with the least round trips.

    The other clock was read between sending and receiving, so each ping is a range that holds the true offset; the
    bound is by the intersection of all. In the time that they took, the clocks drift apart by at most `MAX_RATE`.

    Raises:
        ValueError: there are no pings, or a clock jumped.
    """
    if not pings:
        raise ValueError("an offset needs at least one ping")
    first = pings[0].sent_ns
    # Relative to the first, so that all fits a double.
    sent, remote, received = np.array([(p.sent_ns - first, p.remote_ns, p.received_ns - first) for p in pings]).T
    if np.any(received < sent):
        raise ValueError("a ping was answered before it was sent: the clock jumped")
    base = int(remote[0])
    remote = remote - base
    round_trip = received - sent
    best = np.argsort(round_trip, kind="stable")[: max(1, len(pings) // _BEST_PART)]
    middle = (sent + received) / 2
    time = float(np.median(middle[best]))
    offset = float(np.median((remote - middle)[best]))
    drift = MAX_RATE * np.maximum(np.abs(sent - time), np.abs(received - time))
    low, high = float(np.max(remote - received - drift)), float(np.min(remote - sent + drift))
    if low > high:
        raise ValueError("a clock jumped while it was read")
    offset = min(max(offset, low), high)
    bound = int(np.ceil(max(high - offset, offset - low))) + 1
    return Reading(first + round(time), base - first + round(offset), bound, int(round_trip[best[0]]))


class PingServer:
    """Answers with its clock, on a thread of its own, whoever knows its token.

    Args:
        host: the address to listen at; no other one.
        clock: returns nanoseconds.

    Attributes:
        address: host and port.
        token: what a client asks with, as hexadecimal digits.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, host: str, clock: Clock = time.monotonic_ns) -> None:
        self.token = secrets.token_hex(TOKEN_BYTES // 2)
        self._clock = clock
        self._socket = socket.create_server((host, 0), backlog=_MAX_CONNECTIONS)
        self._socket.setblocking(False)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._connections: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._serve, name="modtrace-clock-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and answering; both have ended when it returns."""
        self._wake_write.send(b"\0")
        self._thread.join()
        self.close_sockets()

    def close_sockets(self) -> None:
        """Close its sockets in a forked child, which does not have its thread."""
        for connection in [*self._connections, self._socket, self._wake_read, self._wake_write]:
            connection.close()
        self._selector.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                key.data(key.fileobj)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        if len(self._connections) >= _MAX_CONNECTIONS:
            connection.close()
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self._connections.add(connection)
        self._selector.register(connection, selectors.EVENT_READ, self._answer)

    def _answer(self, connection: socket.socket) -> None:
        try:
            # 32 bytes come in one piece, as they were sent.
            if hmac.compare_digest(connection.recv(TOKEN_BYTES), self.token.encode()):
                connection.send(_TIME.pack(self._clock()))
                return
        except OSError:
            pass
        self._selector.unregister(connection)
        self._connections.remove(connection)
        connection.close()


class PingClient:
    """Reads the clock of a `PingServer`.

    Args:
        address: host and port.
        token: the server's.
        clock: returns nanoseconds.

    Raises:
        OSError: there is no answer.
    """

    def __init__(self, address: tuple[str, int], token: str, clock: Clock = time.monotonic_ns) -> None:
        self._token, self._clock = token.encode(), clock
        self._socket = socket.create_connection(address, _CONNECT_TIMEOUT_S)
        self._socket.settimeout(_ANSWER_TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def read(self, pings: int = PINGS) -> Reading:
        """Ask for the other clock some times, and return how far it is ahead.

        Raises:
            OSError: the answers stopped.
            ValueError: a clock jumped.
        """
        return estimate_offset([self._ping() for _ in range(pings)])

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _ping(self) -> Ping:
        sent = self._clock()
        self._socket.send(self._token)
        answer = self._socket.recv(_TIME.size)
        received = self._clock()
        while 0 < len(answer) < _TIME.size:
            answer += self._socket.recv(_TIME.size - len(answer))
        if not answer:
            raise ConnectionResetError("the other process stopped answering")
        return Ping(sent, _TIME.unpack(answer)[0], received)
