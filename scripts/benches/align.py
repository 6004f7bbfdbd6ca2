"""The accuracy of a recording over torch.profiler's trace of the same steps, on the CPU, by two sources of truth.

The first is in the trace: hooks open a range of the profiler around each forward, which shows the call of each
operator. Live profiles of 14 architectures give these values, by engine and number of steps, with and without stacks,
and with busy processes:

- time: the share of forward operators' time inside modtrace's slice of their call;
- whole: the share of forward operators completely inside it, and the largest excess;
- backward: the share of the time of autograd nodes inside modtrace's slices of the call that made them;
- reported: the error that the merge reports.

The second is traces that are made from a recording, on a clock with known offset, drift, wandering and steps: the true
error at each edge of a call, and the reported error.

Exits with 1 if less than 99.9 % of the time or 99.5 % of the operators are inside, or if the median true error is above
0.5 µs on a clock that was not set.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tests.support.drifting_trace import DriftingClock, call_edges, make_trace, with_marks
from tests.support.models import ARCHITECTURES
from torch import nn
from torch.profiler import ProfilerActivity, record_function

import modtrace
from modtrace import Timeline
from modtrace.profiler.alignment import OperatorFit
from modtrace.profiler.event_collector import EventCollector
from modtrace.profiler.overlay import overlay

NODE = "autograd::engine::evaluate_function: "
CALL = "call#"
MIN_TIME_SHARE, MIN_OPERATOR_SHARE, MAX_ERROR_NS = 0.999, 0.995, 500
Slice = tuple[int, int]


class Inside(NamedTuple):
    """The part of a trace inside modtrace's slices.

    Attributes:
        time: share of the forward operators' time.
        whole: share of the forward operators that are completely inside.
        operators: number of forward operators.
        worst_ns: longest time by which an operator exceeds its slice.
        backward: share of the autograd nodes' time.
    """

    time: float
    whole: float
    operators: int
    worst_ns: int
    backward: float


def open_ranges(model: nn.Module) -> None:
    """Make each forward open an annotation, which only the profiler sees, and which the alignment does not use."""
    ranges: list[Any] = []

    def enter(*_: object) -> None:
        ranges.append(record_function(CALL))
        ranges[-1].__enter__()

    def leave(*_: object) -> None:
        ranges.pop().__exit__(None, None, None)

    for module in model.modules():
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)


def measure(engine: Any, name: str, steps: int, stacks: bool, folder: Path) -> tuple[Inside, dict[str, Any]]:
    """Profile and record `steps` steps of a model, merge, and compare."""
    torch.manual_seed(0)
    workload = ARCHITECTURES[name]()
    open_ranges(workload.model)
    workload.loss().backward()
    profiled, merged = folder / "profile.json", folder / "merged.json"
    with (
        modtrace.record(engine=engine) as recording,
        torch.profiler.profile(activities=[ProfilerActivity.CPU], with_stack=stacks) as profiler,
    ):
        for _ in range(steps):
            workload.loss().backward()
            recording.step()
    profiler.export_chrome_trace(str(profiled))
    result = modtrace.merge(profiled, recording.timeline(), merged)
    document = json.loads(profiled.read_text())
    events = [e for e in document["traceEvents"] if e.get("ph") == "X" and e.get("cat") != "Trace"]
    added = json.loads(merged.read_text())["traceEvents"][len(document["traceEvents"]) :]
    ours = [e for e in added if e["ph"] == "X"]
    inside, total, whole_count, operators, worst = inside_forward(events, ours)
    backward, nodes = inside_backward(events, ours)
    return Inside(inside / total, whole_count / operators, operators, worst, backward / nodes), result.metadata[
        "alignment"
    ]


def ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def extent(event: dict[str, Any]) -> Slice:
    start = ns(event["ts"])
    return start, start + ns(event["dur"])


def module_slices(events: list[dict[str, Any]]) -> list[Slice]:
    return sorted(extent(e) for e in events if e["name"] == CALL)


def call_slices(ours: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return modtrace's forward and recompute spans, in start order: the n-th span is the call of the n-th range."""
    return sorted((e for e in ours if e["cat"] in ("forward", "recompute")), key=lambda e: (e["ts"], -e["dur"]))


def innermost(slices: list[Slice], time: int) -> int:
    index = bisect.bisect_right(slices, (time, 1 << 62)) - 1
    while index >= 0 and slices[index][1] <= time:
        index -= 1
    return index


def overlap(a: Slice, b: Slice) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))


def inside_forward(events: list[dict[str, Any]], ours: list[dict[str, Any]]) -> tuple[int, int, int, int, int]:
    """Return ns inside, total ns, operators completely inside, number of operators, and the largest excess in ns."""
    modules, calls = module_slices(events), call_slices(ours)
    assert len(modules) == len(calls), (len(modules), len(calls))
    inside = total = whole_count = operators = worst = 0
    for event in events:
        if event["cat"] != "cpu_op" or event["name"].startswith(("modtrace.sync#", NODE)):
            continue
        op = extent(event)
        index = innermost(modules, op[0])
        if index >= 0 and not event["args"].get("Fwd thread id"):
            call = extent(calls[index])
            inside += overlap(op, call)
            total += op[1] - op[0]
            operators += 1
            whole_count += call[0] <= op[0] and op[1] <= call[1]
            worst = max(worst, call[0] - op[0], op[1] - call[1])
    return inside, total, whole_count, operators, worst


def inside_backward(events: list[dict[str, Any]], ours: list[dict[str, Any]]) -> tuple[int, int]:
    modules, calls = module_slices(events), call_slices(ours)
    slices_by_call: dict[tuple[str, int], list[Slice]] = {}
    for event in ours:
        if event["cat"] == "backward":
            slices_by_call.setdefault((event["args"]["fqn"], event["args"]["call"]), []).append(extent(event))
    makers: dict[int, int] = {}
    for event in sorted(events, key=lambda e: e["ts"]):
        args = event.get("args", {})
        if event["cat"] == "cpu_op" and "Sequence number" in args and not args.get("Fwd thread id"):
            makers[args["Sequence number"]] = ns(event["ts"])
    inside = total = 0
    for event in events:
        number = event.get("args", {}).get("Sequence number")
        if not event["name"].startswith(NODE) or number not in makers:
            continue
        index = innermost(modules, makers[number])
        if index >= 0:
            args = calls[index]["args"]
            node = extent(event)
            inside += max((overlap(node, s) for s in slices_by_call.get((args["fqn"], args["call"]), [])), default=0)
            total += node[1] - node[0]
    return inside, total


def true_errors(timeline: Timeline, clock: DriftingClock, base: int) -> tuple[np.ndarray, OperatorFit]:
    """Return the true error at each edge of a profiled call, in ns, and the reported error.

    Edges more than a millisecond before the first slice of the trace, or after its last slice, are left out.
    """
    collector = EventCollector()
    slices = make_trace(timeline, clock, base, seed=0)
    collector.add(slices)
    alignment = overlay(timeline, collector.events(), {"baseTimeNanoseconds": base}, "trace").alignment
    assert alignment is not None
    assert alignment.operators is not None
    edges = call_edges(timeline, timeline.tracks[0].tid)
    start = base + round(1000 * min(event["ts"] for event in slices))
    end = base + round(1000 * max(event["ts"] + event["dur"] for event in slices))
    edges = edges[(clock(edges) > start - 1_000_000) & (clock(edges) < end + 1_000_000)]
    return np.abs(alignment.to_trace(edges) + base - clock(edges)), alignment.operators


def clocks(timeline: Timeline) -> dict[str, DriftingClock]:
    edges = call_edges(timeline, timeline.tracks[0].tid)
    start = int(edges[0])
    middle = start + (int(edges[-1]) - start) // 2
    mark = timeline.marks[len(timeline.marks) // 2].time_ns
    return {
        "6 µs ahead": DriftingClock(start, ahead=6000),
        "drift of 100 ppm": DriftingClock(start, ahead=-4000, drift=100e-6),
        "wandering by ±2.5 µs": DriftingClock(start, ahead=2000, drift=-30e-6, wander=2500, period=150e6),
        "set by 3 ms": DriftingClock(start, ahead=3000, drift=20e-6, step_at=middle, step=3_000_000),
        "set by 3 ms within a mark": DriftingClock(start, ahead=3000, drift=20e-6, step_at=mark - 500, step=3_000_000),
        "set by 100 µs, no mark near": DriftingClock(start, ahead=3000, drift=20e-6, step_at=middle, step=100_000),
    }


def print_true_errors(names: list[str], steps: list[int]) -> bool:
    """Record without a profiler, and print the errors over made traces; False if an error is too large."""
    is_accurate = True
    for name in names:
        for count in steps:
            workload = ARCHITECTURES[name]()
            with modtrace.record() as recording:
                for _ in range(count):
                    workload.loss().backward()
            timeline = with_marks(recording.timeline(), 5_000_000)
            base = timeline.marks[0].time_ns - 1_000_000_000
            for clock_name, clock in clocks(timeline).items():
                if clock.step and count < 10:
                    continue  # at least two marks on each side are needed
                marked = replace(timeline, marks=timeline.marks[:1]) if "no mark" in clock_name else timeline
                error, reported = true_errors(marked, clock, base)
                median, worst = float(np.median(error)), int(error.max())
                is_right = median <= MAX_ERROR_NS or marked is not timeline
                is_accurate &= is_right
                print(
                    f"{name:32} {count:4} steps  {clock_name:27} error {median:4.0f} ns median, {worst:5} worst; "
                    f"reported ±{reported.typical_ns:4.0f} typically, about ±{reported.bound_ns:5.0f} at most"
                    f"{'' if is_right else '  TOO MUCH'}",
                    flush=True,
                )
    return is_accurate


@contextlib.contextmanager
def load(processes: int) -> Iterator[None]:
    """Keep `processes` other processes busy while the block runs."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def print_inside(options: argparse.Namespace) -> bool:
    """Print the shares of live profiles inside modtrace's slices; False if a share is too small."""
    is_accurate = True
    for engine in options.engines:
        for name in options.models:
            for steps in options.steps:
                for stacks in (False, True):
                    with tempfile.TemporaryDirectory() as folder:
                        inside, reported = measure(engine, name, steps, stacks, Path(folder))
                    is_right = inside.time >= MIN_TIME_SHARE and inside.whole >= MIN_OPERATOR_SHARE
                    is_accurate &= is_right
                    fit = reported["operators"]
                    print(
                        f"{engine:6} {name:32} {steps:4} steps {'stacks' if stacks else '      '}  "
                        f"time {100 * inside.time:.3f} %, whole {100 * inside.whole:.2f} % of {inside.operators}, "
                        f"worst {inside.worst_ns} ns, backward {100 * inside.backward:.2f} %; reported "
                        f"±{fit['typical_ns']:.0f} ns typically, about ±{fit['bound_ns']:.0f} at most"
                        f"{'' if is_right else '  TOO LITTLE'}",
                        flush=True,
                    )
    return is_accurate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 3, 100])
    parser.add_argument("--models", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES), metavar="NAME")
    parser.add_argument("--engines", nargs="+", choices=["native", "python"], default=["native", "python"])
    parser.add_argument("--load", type=int, default=0, metavar="N", help="number of other busy processes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {options.load} busy processes")
    start = time.monotonic()
    with load(options.load):
        is_accurate = print_inside(options)
    is_accurate &= print_true_errors(options.models, options.steps)
    print(f"{'as it must be' if is_accurate else 'NOT as it must be'}, after {time.monotonic() - start:.0f} s")
    sys.exit(not is_accurate)


if __name__ == "__main__":
    main()
