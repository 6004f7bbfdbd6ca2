"""Ring files of two hosts whose clocks are apart and drift."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from modtrace.ring import Kind
from modtrace.ring.clocks import Measurement, Reading, measurement_record
from tests.support.event_script import EventScript

BEGIN = 10**16
"""The true time at which the jobs begin, ns; behind any machine's monotonic clock."""


SECOND = 10**9


Clock = Callable[[int], int]


def drifting(ahead_ns: int, ppm: float) -> Clock:
    """A clock that was ahead of the truth at `BEGIN`, and runs faster by some parts in a million."""
    return lambda true: true + ahead_ns + round((true - BEGIN) * ppm * 1e-6)


CLOCKS = {0: drifting(0, 0), 1: drifting(5 * SECOND, 37), 2: drifting(-7 * SECOND, -20), 3: drifting(5 * SECOND, 37)}


HOSTS = {0: "a", 1: "b", 2: "c", 3: "b"}


def write_ring(
    folder: Path,
    rank: int,
    *,
    clock: str | None,
    pings: int = 0,
    collectives: int = 20,
    name: str = "{}.modtrace",
    held: int = 0,
) -> None:
    """One second of a rank: in each step a module for 10 ms, and an all_reduce which rank 3 calls last, 1 ms late.

    In the third step tensors hold `held` bytes, in the others less.
    All ranks see that it is complete 50 µs behind the last call, rank 2 another 30 µs later.
    """
    script = EventScript(1024, folder / name.format(rank), {"rank": rank, "pid": 77}, CLOCKS[rank])
    if clock is not None:
        script.note({"kind": "clock", "clock": clock})
    script.note_group("0", "0-3", "default_pg")
    model = script.name("Net", "Net", "Net")
    for step in range(collectives):
        begin = BEGIN + step * SECOND // collectives
        if held:
            script.collective(begin, Kind.COUNTER, "allocated", held if step == 2 else held // (step + 2))
        script.enter(begin, model, step)
        script.exit(begin + 10_000_000, model, step)
        called = begin + 10_000_000 + (1_000_000 if rank == 3 else 1_000 * rank)
        text = json.dumps(["all_reduce", "0"])
        script.collective(called, Kind.COLLECTIVE_ENTER, text, step)
        script.collective(called + 2_000, Kind.COLLECTIVE_EXIT, text, 4096)
        done = begin + 11_050_000 + (30_000 if rank == 2 else 0)
        script.collective(done, Kind.COLLECTIVE_DONE, text, step)
        script.step(begin + 12_000_000, step)
    for index in range(pings):
        true = BEGIN + index * SECOND // max(pings - 1, 1)
        own = CLOCKS[rank](true)
        # What was read is 300 ns wrong, and the bound says at most 500.
        reading = Reading(own, true - own + 300, 500, 1_000)
        script.note(measurement_record(Measurement(HOSTS[rank], "a", reading)))
    script.close()
