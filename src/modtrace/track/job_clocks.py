"""Measures this host's clock against other clocks of the job while a recording runs.

The first process of each clock measures. Through the job's store it finds the process of the parent clock, and sends
pings to it over TCP: at the start, every minute, and at the stop. A process without children never listens.
"""

import contextlib
import hmac
import itertools
import json
import logging
import os
import queue
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .._ranks import world_size_in
from ..ring import NameTable
from ..ring.clocks import MAX_RATE, Measurement, Reading, clock_id, measurement_record, parent_number

INTERVAL_S = 60.0
_POLL_S, _LATER_POLL_S, _POLLS_BEFORE_LATER = 0.2, 2.0, 50
_STOP_TIMEOUT_S = 5.0
_log = logging.getLogger("modtrace")
_sessions = itertools.count()


class JobClocks:
    """Writes the offsets of this host's clock into a ring, from `start` to `stop`."""

    def __init__(self, names: NameTable, clock: str | None = None) -> None:
        self._names = names
        self._clock = clock or clock_id()
        # A queue in C: after an interrupt inside threading.Event, its lock stays acquired, and `set` waits for ever.
        self._stopped: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._server: PingServer | None = None
        self._client: PingClient | None = None
        self._parent = ""

    def start(self) -> None:
        """Write the id of the clock, and start to measure if the process belongs to a distributed job."""
        # If the disk is full, the next event reports it.
        with contextlib.suppress(OSError):
            self._names.note({"kind": "clock", "clock": self._clock})
        if torch.distributed.is_available() and world_size_in(os.environ) > 1:
            prefix = f"modtrace/clocks/{next(_sessions)}"
            self._thread = threading.Thread(target=self._run, args=(prefix,), name="modtrace-clocks", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Read the parent's clock a last time, and stop listening."""
        self._stopped.put(None)
        thread, self._thread = self._thread, None
        # A thread that was not started because of an interrupt is not alive.
        if thread is not None and thread is not threading.current_thread() and thread.is_alive():
            thread.join(_STOP_TIMEOUT_S)

    def after_fork(self) -> None:
        """Stop in a forked child, in which the threads do not exist, and the connections belong to the parent."""
        self._thread = None
        if self._server is not None:
            self._server.close_sockets()
        if self._client is not None:
            self._client.close()

    def _run(self, prefix: str) -> None:
        try:
            for poll in itertools.count():
                if torch.distributed.is_initialized():
                    break
                if self._is_stopped_within(_pause_s(poll)):
                    return
            store = _own_connection(torch.distributed.distributed_c10d._get_default_store())
            if store.add(f"{prefix}/{self._clock}/processes", 1) == 1:
                self.measure(store, prefix, store.add(f"{prefix}/clocks", 1) - 1)
        except Exception as error:  # a store or a host that is gone; the training goes on
            _log.info("the clocks of the job are not measured any more: %s", error)

    def measure(self, store: Any, prefix: str, number: int) -> None:
        """Read the parent's clock when it is due, and answer children, until `stop`; the clock 0 has no parent."""
        try:
            parent = parent_number(number)
            if parent is not None:
                store.add(f"{prefix}/{parent}/children", 1)
            due_s = time.monotonic()
            for poll in itertools.count():
                if self._server is None and store.check([f"{prefix}/{number}/children"]):
                    self._server = PingServer(_job_host())
                    contact = {"address": self._server.address, "token": self._server.token, "clock": self._clock}
                    store.set(f"{prefix}/{number}/address", json.dumps(contact))
                if parent is not None and self._client is None and store.check([f"{prefix}/{parent}/address"]):
                    contact = json.loads(store.get(f"{prefix}/{parent}/address"))
                    self._parent = contact["clock"]
                    self._client = PingClient(tuple(contact["address"]), contact["token"])
                if self._client is not None and time.monotonic() >= due_s:
                    due_s = time.monotonic() + INTERVAL_S
                    self._read()
                is_searching = self._server is None or (parent is not None and self._client is None)
                pause_s = _pause_s(poll) if is_searching else INTERVAL_S
                if self._client is not None:
                    pause_s = min(pause_s, max(due_s - time.monotonic(), 0.0))
                if self._is_stopped_within(pause_s):
                    break
            self._read()
        finally:
            if self._client is not None:
                self._client.close()
            if self._server is not None:
                self._server.close()

    def _is_stopped_within(self, seconds: float) -> bool:
        """Wait up to `seconds` for `stop`, and return whether it was called; do not call this again after True."""
        try:
            self._stopped.get(timeout=seconds)
        except queue.Empty:
            return False
        return True

    def _read(self) -> None:
        """Read the parent's clock once."""
        if self._client is None:
            return
        try:
            reading = self._client.read()
        except ValueError:
            return  # a clock jumped; the next reading is right again
        self._names.note(measurement_record(Measurement(self._clock, self._parent, reading)))


def _pause_s(poll: int) -> float:
    return _POLL_S if poll < _POLLS_BEFORE_LATER else _LATER_POLL_S


def _own_connection(store: Any) -> Any:
    """Return a separate connection to the job's store, if possible, so that other threads do not wait for this one."""
    try:
        return store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):
        return store


def _job_host() -> str:
    """Return the address by which other hosts of the job reach this host; loopback if there is only one host."""
    master = os.environ.get("MASTER_ADDR")
    if not master:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing
        host: str = probe.getsockname()[0]
        return host


TOKEN_BYTES = 32
PINGS = 64
"""Number of pings in a reading."""

_PINGS_PER_BEST = 8
"""One in this many pings, those with the shortest round trips, counts for the median."""
_TIME = struct.Struct("<q")
_CONNECT_TIMEOUT_S = 2.0
_ANSWER_TIMEOUT_S = 1.0
_MAX_CONNECTIONS = 64

Clock = Callable[[], int]


class Ping(NamedTuple):
    """One request to another clock, and its answer."""

    sent_ns: int  # own clock just before the request was sent
    remote_ns: int  # the other clock, between the request's arrival and the answer
    received_ns: int  # own clock just after the answer came


def estimate_offset(pings: Sequence[Ping]) -> Reading:
    """Return the median offset of the eighth of the pings with the shortest round trips.

    The other clock was read between sending and receiving, so each ping gives a range that contains the true offset.
    The bound comes from the intersection of all ranges, if the clocks drift apart by at most `MAX_RATE`.
    Raises ValueError if there are no pings, or a clock jumped.
    """
    if not pings:
        raise ValueError("an offset needs at least one ping")
    first = pings[0].sent_ns
    # Relative to the first ping, so that all values fit a double.
    sent, remote, received = np.array([(p.sent_ns - first, p.remote_ns, p.received_ns - first) for p in pings]).T
    if np.any(received < sent):
        raise ValueError("a ping was answered before it was sent: the clock jumped")
    base = int(remote[0])
    remote = remote - base
    round_trip = received - sent
    best = np.argsort(round_trip, kind="stable")[: max(1, len(pings) // _PINGS_PER_BEST)]
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
    """Sends its clock, from its own thread, to each client with its token; raises OSError if it cannot listen."""

    def __init__(self, host: str, clock: Clock = time.monotonic_ns) -> None:
        self.token = secrets.token_hex(TOKEN_BYTES // 2)  # the request of a client, in hexadecimal digits
        self._clock = clock
        self._socket = socket.create_server((host, 0), backlog=_MAX_CONNECTIONS)
        self._socket.setblocking(False)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]  # host and port
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._connections: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._serve, name="modtrace-clock-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and answering, before it returns."""
        self._wake_write.send(b"\0")
        self._thread.join()
        self.close_sockets()

    def close_sockets(self) -> None:
        """Close the sockets; a forked child, which has no thread of the server, calls this too."""
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
            # 32 bytes arrive in one piece, like they were sent.
            if hmac.compare_digest(connection.recv(TOKEN_BYTES), self.token.encode()):
                connection.send(_TIME.pack(self._clock()))
                return
        except OSError:
            pass
        self._selector.unregister(connection)
        self._connections.remove(connection)
        connection.close()


class PingClient:
    """Reads the clock of a `PingServer`."""

    def __init__(self, address: tuple[str, int], token: str, clock: Clock = time.monotonic_ns) -> None:
        self._token, self._clock = token.encode(), clock
        self._socket = socket.create_connection(address, _CONNECT_TIMEOUT_S)
        self._socket.settimeout(_ANSWER_TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def read(self, pings: int = PINGS) -> Reading:
        """Send `pings` requests, and return the offset of the other clock."""
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
