"""The clocks of a job's hosts: a host reads another's over TCP, and notes in its ring how far that is from its own.

`ClockTree` reads these notes, and converts the times of each host to those of one.
"""

import hashlib
import hmac
import os
import platform
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .clock_map import MAX_RATE, ClockMap, Offset, Reading

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
        """Close what a forked child has of it, whose thread does not exist."""
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


FAN_OUT = 32
"""How many clocks are measured against one."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TIME_NAMESPACE = Path("/proc/self/ns/time")


def clock_id() -> str:
    """Return the id of this process's monotonic clock: the same for all that read the same one.

    It is a hash of the boot and the time namespace, and says nothing else. If the system does not say both, the clock
    is the process's own.
    """
    try:
        boot = _BOOT_ID.read_text("utf-8").strip()
        text = f"{boot} {os.readlink(_TIME_NAMESPACE)}"
    except OSError:
        text = f"{platform.uname()} {os.getpid()}"
    return hashlib.sha256(f"modtrace clock {text}".encode()).hexdigest()[:16]


class Measurement(NamedTuple):
    """One reading of a parent's clock.

    Attributes:
        clock: the id of the own clock.
        parent: the id of the parent's.
        reading: how far the parent's was ahead.
    """

    clock: str
    parent: str
    reading: Reading


_READING = ("time", "offset", "bound", "round_trip")
"""What a record calls the fields of a `Reading`."""


def measurement_record(measurement: Measurement) -> dict[str, Any]:
    """Return the record of a measurement, see `ring.file_format`."""
    clock, parent, reading = measurement
    return {"kind": "offset", "clock": clock, "parent": parent, **dict(zip(_READING, reading, strict=True))}


def measurements_in(records: Iterable[Mapping[str, Any]]) -> list[Measurement]:
    """Return the measurements among the records of a ring."""
    return [
        Measurement(record["clock"], record["parent"], Reading(*(record[key] for key in _READING)))
        for record in records
        if record["kind"] == "offset"
    ]


def clock_in(records: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the id of the clock that a ring's times are of; None if it does not say."""
    return next((record["clock"] for record in records if record["kind"] == "clock"), None)


def parent_number(number: int) -> int | None:
    """Return which clock the one of this number is measured against; numbers count from 0, the root.

    Example:
        >>> parent_number(0), parent_number(32), parent_number(33)
        (None, 0, 1)
    """
    return None if number == 0 else (number - 1) // FAN_OUT


class ClockTree:
    """Converts the times of any measured clock to the root's.

    Args:
        measurements: those of all clocks, in any order; a clock's parent is that of its last one.
    """

    def __init__(self, measurements: Iterable[Measurement]) -> None:
        readings: dict[str, dict[str, list[Reading]]] = {}
        for measurement in sorted(measurements, key=lambda m: m.reading.time_ns):
            readings.setdefault(measurement.clock, {}).setdefault(measurement.parent, []).append(measurement.reading)
        self._offsets: dict[str, tuple[str, ClockMap]] = {}
        for clock, by_parent in readings.items():
            parent, found = max(by_parent.items(), key=lambda item: item[1][-1].time_ns)
            self._offsets[clock] = (parent, ClockMap(found))

    def root_of(self, clock: str) -> str:
        """Return the clock at the end of a clock's chain of parents; itself if it was not measured."""
        return self._chain(clock)[-1]

    def to_root(self, clock: str, time_ns: npt.ArrayLike) -> Offset:
        """Return what to add to times of a clock to get the root's, and how far that is off at most.

        Args:
            clock: whose times these are.
            time_ns: its monotonic nanoseconds.
        """
        time = np.atleast_1d(np.asarray(time_ns, np.int64))
        offset, bound = np.zeros(len(time), np.int64), np.zeros(len(time), np.int64)
        for step in self._chain(clock)[:-1]:
            found = self._offsets[step][1].at(time + offset)
            offset, bound = offset + found.offset_ns, bound + found.bound_ns
        return Offset(offset, bound)

    def largest_bound(self, clock: str, first_ns: int, last_ns: int) -> int:
        """Return how far what `to_root` returns is off at most in a range of a clock's monotonic nanoseconds."""
        bound, ends = 0, np.array([first_ns, last_ns], np.int64)
        for step in self._chain(clock)[:-1]:
            offsets = self._offsets[step][1]
            bound += offsets.largest_bound(*ends.tolist())
            ends = ends + offsets.at(ends).offset_ns
        return bound

    def _chain(self, clock: str) -> list[str]:
        chain = [clock]
        # A file can be edited so that clocks are each other's parents.
        while (found := self._offsets.get(chain[-1])) is not None and found[0] not in chain:
            chain.append(found[0])
        return chain
