"""Small profiler traces and recordings, written by hand, in integer nanoseconds; and the folder of the real traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from modtrace import Timeline
from modtrace.timeline import Mark, Name, Process, Slices, Track
from tests.support.span_fields import SPAN_FIELDS

__all__ = ["BASE", "GPU_TRACES", "NET", "PID", "TID", "evaluate", "recording", "trace", "x"]

GPU_TRACES = [
    Path(__file__).parents[1] / "data" / "kineto" / f"{name}.json.gz"
    for name in ("a100-alexnet-forward", "a100-ddp-rank0", "v100-ddp-rank0-ns")
]
"""Traces from GPU machines. A source distribution has none: tests of them use the fixture `gpu_traces`."""
BASE = 1_790_857_026_000_000_000
PID, TID = 100, 101
PROCESS = Process(PID)
NET = (
    Name("Net", "Net", "Net"),
    Name("a: Linear", "Net.a", "Linear"),
    Name("b: Linear", "Net.b", "Linear"),
    Name("c: ReLU", "Net.b.c", "ReLU"),
)
Span = tuple[str, int, int, int, str] | tuple[str, int, int, int]


def x(category: str, name: str, start: int, end: int, *, pid: Any = PID, tid: Any = TID, **args: Any) -> dict[str, Any]:
    event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": start / 1000}
    return event | {"dur": (end - start) / 1000, "args": {key.replace("_", " "): value for key, value in args.items()}}


def evaluate(name: str, start: int, end: int, number: int | None, *, tid: int = TID, thread: int = 1) -> dict[str, Any]:
    args = {} if number is None else {"Sequence_number": number, "Fwd_thread_id": thread}
    return x("cpu_op", f"autograd::engine::evaluate_function: {name}", start, end, tid=tid, **args)


def trace(*events: Any, base: int | None = BASE, **keys: Any) -> bytes:
    base_time = {} if base is None else {"baseTimeNanoseconds": base}
    return json.dumps({"schemaVersion": 1, **keys, "traceEvents": events, **base_time}, indent=1).encode()


def recording(*spans: Span, names: tuple[Name, ...] = NET, marks: tuple[Mark, ...] = (), base: int = BASE) -> Timeline:
    """Return a recording of spans (label, start, end, depth, phase), parents first; forward has a track of its own."""
    stack: dict[tuple[int, int], int] = {}
    rows: list[dict[str, Any]] = []
    seen: dict[tuple[str, str], int] = {}
    labels = [name.label for name in names]
    for index, (label, start, end, depth, *rest) in enumerate(spans):
        phase = rest[0] if rest else "forward"
        track = int(phase != "forward")
        call = seen.get((label, phase), 0)
        seen[label, phase] = call + 1
        parent = stack.get((track, depth - 1), -1)
        stack[track, depth] = index
        rows.append(
            {
                "start": base + start,
                "end": base + end,
                "name": labels.index(label),
                "phase": ("forward", "backward", "recompute").index(phase),
                "track": track,
                "depth": depth,
                "parent": parent,
                "call": call,
                "step": 0,
                "link": -1,
                "complete": True,
            }
        )
    order = sorted(range(len(rows)), key=lambda at: (rows[at]["start"], rows[at]["depth"]))
    place = {old: new for new, old in enumerate(order)} | {-1: -1}
    ordered = [rows[at] | {"parent": place[rows[at]["parent"]]} for at in order]
    columns = Slices.of(None, **{field: [row[field] for row in ordered] for field in SPAN_FIELDS})
    tracks = (Track("forward", "MainThread", TID, PROCESS), Track("backward", "MainThread", TID, PROCESS))
    return Timeline(columns, names, tracks, marks=marks)
