"""Measures this host's clock against the others of the job while a recording runs.

One process per clock does it, the first that comes. It finds the one that its clock is measured against through the
job's store, and asks it over TCP: at the start, every minute, and at the stop. Who has no children never listens.
"""

import contextlib
import itertools
import json
import logging
import os
import queue
import socket
import threading
import time
from typing import Any

import torch

from .._rank import world_size_in
from ..ring import NameTable
from ..ring.clock_tree import Measurement, clock_id, measurement_record, parent_number
from .pings import PingClient, PingServer

INTERVAL_S = 60.0
_POLL_S, _LATER_POLL_S, _POLLS_BEFORE_LATER = 0.2, 2.0, 50
_STOP_TIMEOUT_S = 5.0
_log = logging.getLogger("modtrace")
_sessions = itertools.count()


class JobClocks:
    """Writes the offsets of this host's clock into a ring, from `start` to `stop`.

    Args:
        names: the ring's name table.
        clock: the id of this process's clock; else `clock_id()`.
    """

    def __init__(self, names: NameTable, clock: str | None = None) -> None:
        self._names = names
        self._clock = clock or clock_id()
        # Of C: an interrupt inside of threading.Event leaves its lock taken, and who sets it next waits for ever.
        self._stopped: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._server: PingServer | None = None
        self._client: PingClient | None = None
        self._parent = ""

    def start(self) -> None:
        """Note which clock this is, and begin where the process is one of a distributed job."""
        # On a full disk the next event says so.
        with contextlib.suppress(OSError):
            self._names.note({"kind": "clock", "clock": self._clock})
        if torch.distributed.is_available() and world_size_in(os.environ) > 1:
            prefix = f"modtrace/clocks/{next(_sessions)}"
            self._thread = threading.Thread(target=self._run, args=(prefix,), name="modtrace-clocks", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Read the parent's clock a last time, and end; afterwards nothing listens."""
        self._stopped.put(None)
        thread, self._thread = self._thread, None
        # A thread that an interrupt kept from being started is not waited for.
        if thread is not None and thread is not threading.current_thread() and thread.is_alive():
            thread.join(_STOP_TIMEOUT_S)

    def after_fork(self) -> None:
        """End in a forked child, where the threads do not exist and the connections are its parent's."""
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
        """Read the parent's clock when it is due, and answer children once there are some, until `stop`.

        Args:
            store: the job's.
            prefix: of the keys in it.
            number: which clock of the job this is, from 0, the root.
        """
        try:
            parent = parent_number(number)
            if parent is not None:
                store.add(f"{prefix}/{parent}/children", 1)
            due = time.monotonic()
            for poll in itertools.count():
                if self._server is None and store.check([f"{prefix}/{number}/children"]):
                    self._server = PingServer(_job_host())
                    told = {"address": self._server.address, "token": self._server.token, "clock": self._clock}
                    store.set(f"{prefix}/{number}/address", json.dumps(told))
                if parent is not None and self._client is None and store.check([f"{prefix}/{parent}/address"]):
                    told = json.loads(store.get(f"{prefix}/{parent}/address"))
                    self._parent = told["clock"]
                    self._client = PingClient(tuple(told["address"]), told["token"])
                if self._client is not None and time.monotonic() >= due:
                    due = time.monotonic() + INTERVAL_S
                    self._read()
                searching = self._server is None or (parent is not None and self._client is None)
                pause = _pause_s(poll) if searching else INTERVAL_S
                if self._client is not None:
                    pause = min(pause, max(due - time.monotonic(), 0.0))
                if self._is_stopped_within(pause):
                    break
            self._read()
        finally:
            if self._client is not None:
                self._client.close()
            if self._server is not None:
                self._server.close()

    def _is_stopped_within(self, seconds: float) -> bool:
        """Wait for `stop`, for so long at most, and return whether it was called; after that no one asks again."""
        try:
            self._stopped.get(timeout=seconds)
        except queue.Empty:
            return False
        return True

    def _read(self) -> None:
        """Read the parent's clock once; where it is gone, the readings so far stay."""
        if self._client is None:
            return
        try:
            reading = self._client.read()
        except ValueError:
            return  # a clock jumped; the next reading tells the truth again
        self._names.note(measurement_record(Measurement(self._clock, self._parent, reading)))


def _pause_s(poll: int) -> float:
    return _POLL_S if poll < _POLLS_BEFORE_LATER else _LATER_POLL_S


def _own_connection(store: Any) -> Any:
    """Return a connection of our own to the job's store, if there is one, so that no other thread waits for ours."""
    try:
        return store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):
        return store


def _job_host() -> str:
    """Return the address of this host that the others of the job reach it by; loopback where all are on one."""
    master = os.environ.get("MASTER_ADDR")
    if not master:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing
        host: str = probe.getsockname()[0]
        return host
