"""Records small models without and with injected changes: a recording of 30 steps per change, in one process.

`python _recorded_changes.py ARCHITECTURE NUMBER FOLDER` writes FOLDER/CHANGE.pftrace for each change, in an order that
depends on its number. The sides of a comparison come from different processes.

`python _recorded_changes.py WORK NUMBER FOLDER` records a GPT with other work, or while other programs run, with FLOPs
and without. A JSON file next to each recording has a stopwatch's times of the steps and of the optimizer.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tests.support.injected_changes import Slowness, called_twice, recomputed, renamed, slowed
from tests.support.models import ARCHITECTURES
from tests.support.models.decoders import gpt

import modtrace
from modtrace.compare.run_times import take_samples

STEPS, CALIBRATION_STEPS, WARM_UP_STEPS = 30, 15, 3
FACTORS = (0.02, 0.05, 0.10, 0.20, 0.50)
SWAP_FACTOR = 0.2
UNCHANGED = ("base0", "base1", "base2")


class Work(NamedTuple):
    """The work in a step of the GPT, and the load of the machine.

    Attributes:
        batch: number of sequences.
        length: number of tokens in a sequence.
        micro: number of batches for each step of the optimizer.
        loops: number of calls of each layer.
        half: whether autocast computes in bfloat16.
        busy: whether another process runs on each CPU.
    """

    batch: int = 4
    length: int = 32
    micro: int = 1
    loops: int = 1
    half: bool = False
    busy: bool = False


WORK = {
    "as it is": Work(),
    "again": Work(),
    "batch x 2": Work(batch=8),
    "batch / 2": Work(batch=2),
    "sequence x 2": Work(length=64),
    "busy machine": Work(busy=True),
    "busy, batch x 2": Work(batch=8, busy=True),
    "2 micro-batches": Work(micro=2),
    "layers twice": Work(loops=2),
    "bfloat16": Work(half=True),
}


class Places(NamedTuple):
    """The modules of a model that are changed, by their paths.

    Attributes:
        slow: three modules that become slower.
        twice: a module that is called twice, and its caller.
        recompute: a module that runs again in backward.
        rename: a module, a child of it, and the child's other name.
        swap: two modules that change their speed.
    """

    slow: tuple[str, str, str]
    twice: tuple[str, str]
    recompute: str
    rename: tuple[str, str, str]
    swap: tuple[str, str]


PLACES = {
    "GPT": Places(
        ("h.1.mlp.0", "h.2.attn.c_attn", "h.0.ln_1"),
        ("h.3.mlp", "h.3"),
        "h.1.mlp",
        ("h.2", "attn", "attention"),
        ("h.0.mlp.2", "h.3.attn.c_proj"),
    ),
    "ResNet": Places(
        ("layer1.0.conv2", "layer2.0.bn1", "layer2.1.conv1"),
        ("layer1.1.conv1", "layer1.1"),
        "layer2.1",
        ("layer2.0", "conv1", "first"),
        ("layer1.1.conv2", "layer2.0.conv2"),
    ),
    "Mamba": Places(
        ("layers.0.mixer.in_proj", "layers.1.mixer.conv1d", "layers.0.mixer.out_proj"),
        ("layers.1.mixer.x_proj", "layers.1.mixer"),
        "layers.1.mixer",
        ("layers.0.mixer", "x_proj", "selective"),
        ("layers.1.mixer.in_proj", "layers.0.norm"),
    ),
}


class Slow(NamedTuple):
    """A module that becomes slower in one phase."""

    factor: float
    phase: str
    path: str

    @property
    def name(self) -> str:
        return f"slow_{round(100 * self.factor)}_{self.phase}_{self.path}"


def slow_changes(places: Places) -> list[Slow]:
    """Return the slowdowns: of two modules by 10 %, and of one by each other factor, in forward and in backward."""
    changes = []
    for number, factor in enumerate(FACTORS):
        for turn, phase in enumerate(("forward", "backward")):
            paths = (places.slow[turn], places.slow[2]) if factor == 0.1 else (places.slow[(number + turn) % 3],)
            changes += [Slow(factor, phase, path) for path in paths]
    return changes


def record(architecture: str, number: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, loss = ARCHITECTURES[architecture]()
    places = PLACES[architecture]
    slowness = {path: Slowness() for path in dict.fromkeys((*places.slow, *places.swap))}
    for path, module_slowness in slowness.items():
        slowed(model.get_submodule(path), module_slowness)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def recorded(steps: int) -> modtrace.Timeline:
        with modtrace.record(model=model) as recording:
            for _ in range(steps):
                optimizer.zero_grad()
                loss().backward()
                optimizer.step()
                recording.step()
        return recording.timeline()

    recorded(WARM_UP_STEPS)
    scale = calibrate(slowness, recorded, type(model).__name__)
    slow = {change.name: change for change in slow_changes(places)}
    changes = [*UNCHANGED, "twice", "recompute", "rename", "swap_a", "swap_b", *slow]
    random.Random(number).shuffle(changes)
    folder.mkdir(parents=True, exist_ok=True)
    for change in changes:
        for module_slowness in slowness.values():
            module_slowness.forward = module_slowness.backward = 0.0
        if change in slow:
            _, phase, path = slow[change]
            setattr(slowness[path], phase, slow[change].factor * scale[path, phase])
        elif change.startswith("swap"):
            path = places.swap[change == "swap_b"]
            slowness[path].forward = SWAP_FACTOR * scale[path, "forward"]
        with structure(change, model, places):
            recorded(STEPS).save(folder / f"{change}.pftrace")


def record_work(number: int, folder: Path) -> None:
    torch.set_num_threads(1)
    runs = [(change, flops) for change in WORK for flops in (False, True)]
    random.Random(number).shuffle(runs)
    folder.mkdir(parents=True, exist_ok=True)
    for change, flops in runs:
        work = WORK[change]
        with contextlib.ExitStack() as load:
            for _ in range((os.cpu_count() or 1) if work.busy else 0):
                hog = subprocess.Popen([sys.executable, "-c", "while True: pass"])
                load.callback(hog.wait)
                load.callback(hog.kill)
            timeline, stopwatch = recorded_work(work, flops)
        name = f"{change.replace('/', 'by')}{', FLOPs' if flops else ''}"
        (folder / f"{name}.json").write_text(json.dumps(stopwatch))
        timeline.save(folder / f"{name}.pftrace")


def recorded_work(work: Work, flops: bool) -> tuple[modtrace.Timeline, dict[str, float]]:
    """Return a recording, and a stopwatch's medians in ns for a step and for its optimizer."""
    torch.manual_seed(0)
    model, loss = gpt(batch=work.batch, time=work.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model.h = torch.nn.ModuleList([*model.h] * work.loops)  # type: ignore[misc]
    step_ns, optimizer_ns = [], []

    def step() -> None:
        start_ns = time.perf_counter_ns()
        optimizer.zero_grad()
        for _ in range(work.micro):
            with torch.autocast("cpu", torch.bfloat16, enabled=work.half):
                batch_loss = loss()
            batch_loss.backward()
        optimizer_start_ns = time.perf_counter_ns()
        optimizer.step()
        step_ns.append(time.perf_counter_ns() - start_ns)
        optimizer_ns.append(time.perf_counter_ns() - optimizer_start_ns)

    for _ in range(WARM_UP_STEPS):
        step()
    with modtrace.record(model=model, flops=flops) as recording:
        for _ in range(STEPS):
            step()
            recording.step()
    return recording.timeline(), {"step": float(np.median(step_ns)), "optimizer": float(np.median(optimizer_ns))}


def calibrate(slowness: dict[str, Slowness], recorded: object, root: str) -> dict[tuple[str, str], float]:
    """Return the factors that scale a module's own time to the time of its span."""
    for module_slowness in slowness.values():
        module_slowness.forward_ns.clear()
        module_slowness.backward_ns.clear()
    assert callable(recorded)
    self_ns = take_samples(recorded(CALIBRATION_STEPS)).self_ns
    return {
        (path, phase): float(np.quantile(self_ns[f"{root}.{path}", phase], 0.25) / np.quantile(own_ns, 0.25))
        for path, module_slowness in slowness.items()
        for phase, own_ns in (("forward", module_slowness.forward_ns), ("backward", module_slowness.backward_ns))
    }


@contextlib.contextmanager
def structure(change: str, model: torch.nn.Module, places: Places) -> Iterator[None]:
    """Change the calls of modules while the block runs."""
    find = model.get_submodule
    with contextlib.ExitStack() as stack:
        if change == "twice":
            stack.enter_context(called_twice(find(places.twice[0]), find(places.twice[1])))
        elif change == "recompute":
            stack.enter_context(recomputed(find(places.recompute)))
        elif change == "rename":
            parent, old, new = places.rename
            stack.enter_context(renamed(find(parent), old, new))
        yield


if __name__ == "__main__":
    if sys.argv[1] == "WORK":
        record_work(int(sys.argv[2]), Path(sys.argv[3]))
    else:
        record(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
