"""A second process reads the ring while it is written: no event and no span is a mixture of two."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import modtrace
from modtrace.record_options import EngineName
from modtrace.ring import Kind, read_ring
from tests.support.forked_python import start_forked
from tests.support.test_scale import PYTHON_IN_FULL, scaled

SECONDS = scaled(1, 3, 30)

EVENTS = """
import sys, threading
from modtrace.recording.capture import make_engine
from modtrace.ring import Kind, Ring
from modtrace.track.event_sink import EngineOptions

path, engine, capacity, threads = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
ring = Ring(capacity, path)
for number in range(1000):
    ring.names.text(f"text {number}")
running = make_engine(engine, ring, lambda error: print(error), EngineOptions())
running.start()

def write(first):
    event, kind, value = running.write_event, Kind.COUNTER, first
    while True:
        event(kind, value % 1000, value)
        value += 2

for first in range(threads):
    threading.Thread(target=write, args=(first,), daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""

CALLS = """
import sys, threading, torch, modtrace
from torch import nn

class Leaf(nn.Module):
    def forward(self, x):
        return x * 2

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Leaf(), Leaf()

    def forward(self, x):
        return self.b(self.a(x))

def train():
    net, x = Net(), torch.ones(1, requires_grad=True)
    while True:
        net(x).backward()

torch.set_num_threads(1)
modtrace.record(engine=sys.argv[2], capacity=int(sys.argv[3]), ring=sys.argv[1]).start()
threading.Thread(target=train, daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def running(code: str, *arguments: object) -> Iterator[None]:
    process = start_forked("-c", code, *arguments, stdin=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


@PYTHON_IN_FULL
@pytest.mark.parametrize(("capacity", "threads"), [(64, 1), (1 << 12, 2), (1 << 14, 1)])
def test_no_event_is_a_mixture_of_two(engine: EngineName, capacity: int, threads: int, tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    seen = 0
    laps: set[int] = set()
    with running(EVENTS, path, engine, capacity, threads):
        until = time.monotonic() + SECONDS / 3
        while time.monotonic() < until or seen <= capacity or len(laps) <= 3:
            slots = read_ring(path).slots
            events = slots.events
            assert slots.recorded == slots.overwritten + len(events) + slots.torn
            assert (np.diff(events.serial) > 0).all()
            assert (events.kind == Kind.COUNTER).all()
            assert (events.name == events.value % 1000).all()
            for thread in np.unique(events.thread):
                own = events.thread == thread
                # Events of one thread are in order, each value and each time with its own serial number.
                assert (np.diff(events.value[own]) > 0).all()
                assert (np.diff(events.time_ns[own]) >= 0).all()
                assert (events.value[own] % 2 == events.value[own][0] % 2).all()
            if threads == 1:
                assert (events.value == 2 * events.serial).all()
            seen += len(events)
            laps.add(slots.recorded // capacity)


@PYTHON_IN_FULL
def test_no_span_is_a_mixture_of_two(engine: EngineName, tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    whole = 0
    with running(CALLS, path, engine, 256):
        until = time.monotonic() + SECONDS
        while time.monotonic() < until or whole <= 1000:
            timeline = modtrace.load(path)
            columns = timeline.columns
            complete = np.flatnonzero(columns.complete)
            parent = columns.parent[complete]
            inner = complete[(parent >= 0) & columns.complete[parent]]
            around = columns.parent[inner]
            # Each call of Net calls each leaf once, so all three have the same number, forward and backward.
            assert (columns.call[inner] == columns.call[around]).all()
            assert (columns.start[inner] >= columns.start[around]).all()
            assert (columns.end[inner] <= columns.end[around]).all()
            assert {timeline.names[name].fqn for name in columns.name[inner].tolist()} <= {"Net.a", "Net.b"}
            assert {timeline.names[name].fqn for name in columns.name[around].tolist()} <= {"Net"}
            whole += len(inner)
