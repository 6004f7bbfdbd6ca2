"""What recording adds to a step: wall time of groups of steps, from synchronize to synchronize, in rotated rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from scripts.benches.gpu.subject import Subject

import modtrace

NONE = "none"
BOUNDS = {
    "native": 1.005,
    "native, ring file": 1.005,
    "native, device times": 1.02,
    "native, memory": 1.05,
    # The first step, in which operators are counted, is not timed.
    "native, FLOPs": 1.005,
}


def contexts(folder: Path) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """Return what each subject runs under; the last two without a bound are there to compare with."""
    return {
        NONE: nullcontext,
        "native": lambda: modtrace.record(engine="native"),
        "native, ring file": lambda: modtrace.record(engine="native", ring=folder / "run.modtrace"),
        "native, device times": lambda: modtrace.record(engine="native", device_times=True),
        "native, memory": lambda: modtrace.record(engine="native", memory=True),
        "native, FLOPs": lambda: modtrace.record(engine="native", flops=True),
        "native, device times of all calls": lambda: modtrace.record(engine="native", device_times=64),
        "python": lambda: modtrace.record(engine="python"),
    }


def measure(subject: Subject, step: Callable[[], torch.Tensor], context: AbstractContextManager[Any]) -> float:
    """Return the ns of a group of steps, until all are done."""
    with context:
        step()
        subject.synchronize()
        begin = time.perf_counter_ns()
        for _ in range(subject.steps):
            step()
        subject.synchronize()
        return time.perf_counter_ns() - begin


def short_of(ratios: dict[str, list[float]]) -> list[str]:
    """Say which medians are above their bounds."""
    medians = {name: statistics.median(ratios[name]) for name in BOUNDS}
    return [f"{name} × {medians[name]:.4f}, bound {bound}" for name, bound in BOUNDS.items() if medians[name] > bound]


def run(subject: Subject) -> list[str]:
    """Print the ratios; return what is above its bound, which is nothing on the CPU."""
    model = subject.gpt()
    step = subject.training_step(model)
    with TemporaryDirectory() as folder:
        made = contexts(Path(folder))
        names = list(made)
        times: dict[str, list[float]] = {name: [] for name in names}
        for name in names:
            measure(subject, step, made[name]())
        for turn in range(subject.rounds):
            at = turn % len(names)
            for name in names[at:] + names[:at]:
                times[name].append(measure(subject, step, made[name]()))
    # Where the host sets the pace, a step of half the batch takes as long.
    half = subject._replace(batch=max(1, subject.batch // 2))
    half_step = half.training_step(model)
    done, of_half = statistics.median(times[NONE]), min(measure(half, half_step, nullcontext()) for _ in range(3))
    per_step = done / subject.steps / 1e6
    print(f"a step without recording: {per_step:.3f} ms, {done / of_half:.2f} times one of half the batch")
    print(f"{subject.rounds} rounds of {subject.steps} steps each\n")
    print("| | step ratio: median | quarters | bound |\n| --- | --- | --- | --- |")
    ratios = {name: [one / base for one, base in zip(times[name], times[NONE], strict=True)] for name in names[1:]}
    for name, of_context in ratios.items():
        low, middle, high = statistics.quantiles(of_context, n=4)
        print(f"| {name} | {middle:.4f} | {low:.4f}–{high:.4f} | {BOUNDS.get(name, '')} |")
    if not subject.is_gpu:
        print("\nnot judged: this is the CPU")
        return []
    idle = ["the GPU waits for the host: take a larger --batch"] if done < 1.5 * of_half else []
    return idle + short_of(ratios)
