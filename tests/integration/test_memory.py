"""A long run with a small ring: memory stays flat after the ring was full, and every event is accounted for."""

from __future__ import annotations

import json
from pathlib import Path

from modtrace.record_options import EngineName
from tests.support.forked_python import run_forked
from tests.support.test_scale import PYTHON_IN_FULL, scaled

STEPS = scaled(60, 60, 500)
CALLS = 2_000
CAPACITY = 100_000

SCRIPT = """
import gc, json, resource, sys, tracemalloc, torch, modtrace
from torch import nn

engine, ring, steps, calls, capacity = sys.argv[1], sys.argv[2] or None, *map(int, sys.argv[3:])

class Leaf(nn.Module):
    def forward(self, x):
        return x + 1

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.leaves = nn.ModuleList(Leaf() for _ in range(calls - 1))

    def forward(self, x):
        for leaf in self.leaves:
            x = leaf(x)
        return x

def resident():
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()

torch.set_num_threads(1)
net, x = Net(), torch.ones(1, requires_grad=True)
sizes, traced = [], []
gc.freeze()  # what torch made takes a collection longer than a step
with modtrace.record(engine=engine, capacity=capacity, ring=ring) as recording:
    gc.callbacks.clear()  # every event but those of garbage collections is counted
    for step in range(steps):
        net(x).backward()
        recording.step()
        # The ring is full after 100,000 of 8,000 (native) or 6,000 (Python) events a step.
        if step >= steps // 2:
            sizes.append(resident())
        if step == steps * 3 // 4:
            tracemalloc.start()
        if step > steps * 3 // 4:
            gc.collect()
            traced.append(tracemalloc.get_traced_memory()[0])
slots = recording._require_capture().ring.read().slots
print(json.dumps({
    "sizes": sizes,
    "traced": traced,
    "recorded": slots.recorded,
    "overwritten": slots.overwritten,
    "torn": slots.torn,
    "kept": len(slots.events),
    "stats": dict(recording.timeline().stats),
    "steps": [mark.text for mark in recording.timeline().marks],
}))
"""


def run(engine: EngineName, ring: str) -> None:
    done = run_forked("-c", SCRIPT, engine, ring, STEPS, CALLS, CAPACITY)
    told = json.loads(done.stdout)

    # Two events per forward call, and a step's mark; the number of events in backward depends on the engine.
    # Before the first mark, the first pass notes that it reached parameters, as it may have ended a step.
    per_step = (told["recorded"] - 1) / STEPS
    assert per_step == int(per_step)
    assert per_step > 2 * CALLS
    assert told["recorded"] == told["overwritten"] + told["kept"]
    assert (told["kept"], told["torn"]) == (CAPACITY, 0)
    assert (told["stats"]["recorded"], told["stats"]["overwritten"]) == (told["recorded"], told["overwritten"])
    assert told["steps"][-1] == f"step {STEPS - 1}"
    before_tracing = told["sizes"][: STEPS // 4]
    assert max(before_tracing) - before_tracing[0] < 1 << 20
    assert max(told["traced"]) - min(told["traced"]) < 16 << 10


@PYTHON_IN_FULL
def test_memory_is_flat_in_memory(engine: EngineName) -> None:
    run(engine, "")


@PYTHON_IN_FULL
def test_memory_is_flat_over_a_file(engine: EngineName, tmp_path: Path) -> None:
    run(engine, str(tmp_path / "run.modtrace"))
