"""How exactly a recording lies over torch.profiler's trace of the same steps, on the CPU, held against two truths.

The first is of the trace alone: hooks open a range of the profiler's around each forward, so it is known in which
call each operator ran. Of live profiles of 14 architectures, by engine, steps, with and without stacks, and with busy
processes beside it:

- time: the share of forward operators' time that lies inside our slice of their call;
- whole: the share of forward operators that lie wholly inside it, and by how much the worst does not;
- backward: the share of the time of autograd nodes that lies inside our slices of the call that made them;
- told: what the merge says of how exact it is.

The second is of traces that are made from a recording, on a clock with known offset, drift, wandering and steps: the
true error at each edge of a call, beside what is told.

Exits with 1 where less than 99.9 % of the time or 99.5 % of the operators are inside, the median true error is above
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
LEAST_TIME, LEAST_WHOLE, MOST_ERROR_NS = 0.999, 0.995, 500
Slice = tuple[int, int]


class Inside(NamedTuple):
    """What of a trace lies inside our slices.

    Attributes:
        time: share of the forward operators' time.
        whole: share of the forward operators that lie wholly inside.
        operators: how many there are.
        worst_ns: by how much one lies outside at most.
        backward: share of the autograd nodes' time.
    """

    time: float
    whole: float
    operators: int
    worst_ns: int
    backward: float


def open_ranges(model: nn.Module) -> None:
    """Make each forward open a range that only the profiler sees, and that aligning does not use: an annotation."""
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
    """Profile and record some steps of a model, merge, and compare."""
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
    inside, total, whole, operators, worst = inside_forward(events, ours)
    backward, nodes = inside_backward(events, ours)
    return Inside(inside / total, whole / operators, operators, worst, backward / nodes), result.metadata["alignment"]


def ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def extent(event: dict[str, Any]) -> Slice:
    start = ns(event["ts"])
    return start, start + ns(event["dur"])


def module_slices(events: list[dict[str, Any]]) -> list[Slice]:
    return sorted(extent(e) for e in events if e["name"] == CALL)


def call_slices(ours: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Our forward and recompute spans, in start order: the n-th is the call of the n-th range."""
    return sorted((e for e in ours if e["cat"] in ("forward", "recompute")), key=lambda e: (e["ts"], -e["dur"]))


def innermost(slices: list[Slice], time: int) -> int:
    at = bisect.bisect_right(slices, (time, 1 << 62)) - 1
    while at >= 0 and slices[at][1] <= time:
        at -= 1
    return at


def overlap(a: Slice, b: Slice) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))


def inside_forward(events: list[dict[str, Any]], ours: list[dict[str, Any]]) -> tuple[int, int, int, int, int]:
    """Return ns inside, ns, operators wholly inside, operators, and by how many ns the worst lies outside."""
    modules, calls = module_slices(events), call_slices(ours)
    assert len(modules) == len(calls), (len(modules), len(calls))
    inside = total = whole = operators = worst = 0
    for event in events:
        if event["cat"] != "cpu_op" or event["name"].startswith(("modtrace.sync#", NODE)):
            continue
        op = extent(event)
        at = innermost(modules, op[0])
        if at >= 0 and not event["args"].get("Fwd thread id"):
            call = extent(calls[at])
            inside += overlap(op, call)
            total += op[1] - op[0]
            operators += 1
            whole += call[0] <= op[0] and op[1] <= call[1]
            worst = max(worst, call[0] - op[0], op[1] - call[1])
    return inside, total, whole, operators, worst


def inside_backward(events: list[dict[str, Any]], ours: list[dict[str, Any]]) -> tuple[int, int]:
    modules, calls = module_slices(events), call_slices(ours)
    of_call: dict[tuple[str, int], list[Slice]] = {}
    for event in ours:
        if event["cat"] == "backward":
            of_call.setdefault((event["args"]["fqn"], event["args"]["call"]), []).append(extent(event))
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
        at = innermost(modules, makers[number])
        if at >= 0:
            args = calls[at]["args"]
            node = extent(event)
            inside += max((overlap(node, s) for s in of_call.get((args["fqn"], args["call"]), [])), default=0)
            total += node[1] - node[0]
    return inside, total


def true_errors(timeline: Timeline, clock: DriftingClock, base: int) -> tuple[np.ndarray, OperatorFit]:
    """Return the true error at each edge of a call that was profiled, ns, and what was told of it.

    Before the first slice of the trace and behind its last one by more than a millisecond, there is nothing in it that
    an edge could be held against.
    """
    collector = EventCollector()
    slices = make_trace(timeline, clock, base, seed=0)
    collector.add(slices)
    alignment = overlay(timeline, collector.events(), {"baseTimeNanoseconds": base}, "trace").alignment
    assert alignment is not None
    assert alignment.operators is not None
    edges = call_edges(timeline, timeline.tracks[0].tid)
    begin = base + round(1000 * min(event["ts"] for event in slices))
    end = base + round(1000 * max(event["ts"] + event["dur"] for event in slices))
    edges = edges[(clock(edges) > begin - 1_000_000) & (clock(edges) < end + 1_000_000)]
    return np.abs(alignment.to_trace(edges) + base - clock(edges)), alignment.operators


def clocks(timeline: Timeline) -> dict[str, DriftingClock]:
    edges = call_edges(timeline, timeline.tracks[0].tid)
    begin = int(edges[0])
    middle = begin + (int(edges[-1]) - begin) // 2
    mark = timeline.marks[len(timeline.marks) // 2].time_ns
    return {
        "6 µs ahead": DriftingClock(begin, ahead=6000),
        "drift of 100 ppm": DriftingClock(begin, ahead=-4000, drift=100e-6),
        "wandering by ±2.5 µs": DriftingClock(begin, ahead=2000, drift=-30e-6, wander=2500, period=150e6),
        "set by 3 ms": DriftingClock(begin, ahead=3000, drift=20e-6, step_at=middle, step=3_000_000),
        "set by 3 ms within a mark": DriftingClock(begin, ahead=3000, drift=20e-6, step_at=mark - 500, step=3_000_000),
        "set by 100 µs, no mark near": DriftingClock(begin, ahead=3000, drift=20e-6, step_at=middle, step=100_000),
    }


def print_true_errors(names: list[str], steps: list[int]) -> bool:
    """Record without a profiler, and print the errors over made traces; False where one is too great."""
    good = True
    for name in names:
        for count in steps:
            workload = ARCHITECTURES[name]()
            with modtrace.record() as recording:
                for _ in range(count):
                    workload.loss().backward()
            timeline = with_marks(recording.timeline(), 5_000_000)
            base = timeline.marks[0].time_ns - 1_000_000_000
            for said, clock in clocks(timeline).items():
                if clock.step and count < 10:
                    continue  # two marks on either side are needed
                marked = replace(timeline, marks=timeline.marks[:1]) if "no mark" in said else timeline
                error, told = true_errors(marked, clock, base)
                median, worst = float(np.median(error)), int(error.max())
                right = median <= MOST_ERROR_NS or marked is not timeline
                good &= right
                print(
                    f"{name:32} {count:4} steps  {said:27} error {median:4.0f} ns median, {worst:5} worst; told "
                    f"±{told.typical_ns:4.0f} typically, about ±{told.bound_ns:5.0f} at most"
                    f"{'' if right else '  TOO MUCH'}",
                    flush=True,
                )
    return good


@contextlib.contextmanager
def load(processes: int) -> Iterator[None]:
    """Keep that many processes busy meanwhile."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def print_inside(options: argparse.Namespace) -> bool:
    """Print what of live profiles lies inside our slices; False where it is too little."""
    good = True
    for engine in options.engines:
        for name in options.models:
            for steps in options.steps:
                for stacks in (False, True):
                    with tempfile.TemporaryDirectory() as folder:
                        inside, told = measure(engine, name, steps, stacks, Path(folder))
                    right = inside.time >= LEAST_TIME and inside.whole >= LEAST_WHOLE
                    good &= right
                    fit = told["operators"]
                    print(
                        f"{engine:6} {name:32} {steps:4} steps {'stacks' if stacks else '      '}  "
                        f"time {100 * inside.time:.3f} %, whole {100 * inside.whole:.2f} % of {inside.operators}, "
                        f"worst {inside.worst_ns} ns, backward {100 * inside.backward:.2f} %; told "
                        f"±{fit['typical_ns']:.0f} ns typically, about ±{fit['bound_ns']:.0f} at most"
                        f"{'' if right else '  TOO LITTLE'}",
                        flush=True,
                    )
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 3, 100])
    parser.add_argument("--models", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES), metavar="NAME")
    parser.add_argument("--engines", nargs="+", choices=["native", "python"], default=["native", "python"])
    parser.add_argument("--load", type=int, default=0, metavar="N", help="busy processes beside it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {options.load} busy processes")
    begin = time.monotonic()
    with load(options.load):
        good = print_inside(options)
    good &= print_true_errors(options.models, options.steps)
    print(f"{'as it must be' if good else 'NOT as it must be'}, after {time.monotonic() - begin:.0f} s")
    sys.exit(not good)


if __name__ == "__main__":
    main()
