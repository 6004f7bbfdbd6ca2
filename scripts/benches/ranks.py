"""The time that recording adds to a collective, and the error of clocks that are read over loopback.

Collectives run on torch's fake group, which does nothing, and on gloo with one rank. Blocks of the engines alternate;
each figure is the time per collective in the fastest block, minus that in a process that has not recorded yet.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import modtrace
from modtrace.track.job_clocks import PingClient, PingServer
from modtrace.track.native.library import is_built

Call = Callable[[], object]


def subjects() -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "python": lambda: modtrace.record(engine="python", capacity=1 << 14),
        "after a recording": nullcontext,
    }
    if is_built():
        contexts["native"] = lambda: modtrace.record(engine="native", capacity=1 << 14)
    return contexts


def fastest(call: Call, count: int, blocks: int) -> float:
    """Return the ns per call in the fastest block."""
    best_ns = float("inf")
    for _ in range(blocks):
        start_ns = time.perf_counter_ns()
        for _ in range(count):
            call()
        best_ns = min(best_ns, (time.perf_counter_ns() - start_ns) / count)
    return best_ns


def measure(backend: str, rounds: int) -> None:
    store = FakeStore() if backend == "fake" else dist.FileStore(tempfile.mkstemp()[1], 1)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=2 if backend == "fake" else 1)
    tensor = torch.ones(256)

    def call() -> None:
        dist.all_reduce(tensor)

    base_ns = min(fastest(call, 100, 5) for _ in range(rounds))
    contexts = subjects()
    best = dict.fromkeys(contexts, float("inf"))
    for _ in range(rounds):
        for subject, context in contexts.items():
            with context():
                call()
                best[subject] = min(best[subject], fastest(call, 100, 5))
    added = ", ".join(f"{subject} {(ns - base_ns) / 1e3:+.2f} µs" for subject, ns in best.items())
    print(f"{backend}, all_reduce: {base_ns / 1e3:.2f} µs; {added}")
    dist.destroy_process_group()


def measure_clocks(readings: int) -> None:
    server = PingServer("127.0.0.1")
    client = PingClient(server.address, server.token)
    start_ns = time.perf_counter_ns()
    offsets = [client.read() for _ in range(readings)]
    reading_ms = (time.perf_counter_ns() - start_ns) / 1e6 / readings
    client.close()
    server.close()
    errors = sorted(abs(reading.offset_ns) for reading in offsets)
    bounds = statistics.median(reading.bound_ns for reading in offsets)
    print(
        f"clocks over loopback, {readings} readings of 64 pings: error median {statistics.median(errors):.0f} ns, "
        f"worst {errors[-1]} ns; bound median {bounds / 1e3:.1f} µs; {reading_ms:.1f} ms a reading"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--backend", choices=("fake", "gloo"), help="measure only collectives of this backend")
    parser.add_argument("--readings", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.backend:
        measure(options.backend, options.rounds)
        return
    for backend in ("fake", "gloo"):
        # Each backend in its own process, which has not recorded yet.
        subprocess.run([sys.executable, __file__, "--backend", backend, "--rounds", str(options.rounds)], check=True)
    measure_clocks(options.readings)


if __name__ == "__main__":
    main()
