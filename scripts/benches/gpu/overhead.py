"""The time that recording adds to a step: wall time of groups of steps, between synchronizations, in rotated rounds."""

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
    """Return the context of each subject; the last two have no bound, and serve as comparison."""
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
    """Return the duration of a group of steps in ns, until all kernels have ended."""
    with context:
        step()
        subject.synchronize()
        start_ns = time.perf_counter_ns()
        for _ in range(subject.steps):
            step()
        subject.synchronize()
        return time.perf_counter_ns() - start_ns


def short_of(ratios: dict[str, list[float]]) -> list[str]:
    """Return a text for each median above its bound."""
    medians = {name: statistics.median(ratios[name]) for name in BOUNDS}
    return [f"{name} × {medians[name]:.4f}, bound {bound}" for name, bound in BOUNDS.items() if medians[name] > bound]


def run(subject: Subject) -> list[str]:
    """Print the ratios; return those above their bounds, none on the CPU."""
    model = subject.gpt()
    step = subject.training_step(model)
    with TemporaryDirectory() as folder:
        makers = contexts(Path(folder))
        names = list(makers)
        times: dict[str, list[float]] = {name: [] for name in names}
        for name in names:
            measure(subject, step, makers[name]())
        for turn in range(subject.rounds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                times[name].append(measure(subject, step, makers[name]()))
    # If the host limits the speed, a step with half the batch lasts as long.
    half = subject._replace(batch=max(1, subject.batch // 2))
    half_step = half.training_step(model)
    group_ns, half_ns = statistics.median(times[NONE]), min(measure(half, half_step, nullcontext()) for _ in range(3))
    step_ms = group_ns / subject.steps / 1e6
    print(f"a step without recording: {step_ms:.3f} ms, {group_ns / half_ns:.2f} times one of half the batch")
    print(f"{subject.rounds} rounds of {subject.steps} steps each\n")
    print("| | step ratio: median | quarters | bound |\n| --- | --- | --- | --- |")
    ratios = {name: [ns / base for ns, base in zip(times[name], times[NONE], strict=True)] for name in names[1:]}
    for name, values in ratios.items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"| {name} | {middle:.4f} | {low:.4f}–{high:.4f} | {BOUNDS.get(name, '')} |")
    if not subject.is_gpu:
        print("\nnot judged: this is the CPU")
        return []
    idle = ["the GPU waits for the host: use a larger --batch"] if group_ns < 1.5 * half_ns else []
    return idle + short_of(ratios)
