"""A small profile as torch.profiler writes it, and its slices before and after a merge."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modtrace import Timeline
from modtrace.timeline import Name, Process, Slices, Track
from modtrace.timeline.slices import sort_by_start
from tests.support.kineto import GPU_TRACES

NODE = "autograd::engine::evaluate_function: "


def each_trace(test: Callable[..., None]) -> Any:
    """Run a test on each trace from a GPU machine, where they are."""
    each = pytest.mark.parametrize("path", GPU_TRACES, ids=lambda path: path.name)
    return pytest.mark.usefixtures("gpu_traces")(each(test))


@cache
def document(path: Path) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return said


def slices(events: list[dict[str, Any]], *categories: str) -> list[dict[str, Any]]:
    return [event for event in events if event.get("ph") == "X" and event.get("cat") in categories]


def ns(microseconds: float) -> int:
    whole = int(microseconds)
    return whole * 1000 + round((microseconds - whole) * 1000)


def extent(event: dict[str, Any]) -> tuple[int, int]:
    return ns(event["ts"]), ns(event["ts"]) + ns(event["dur"])


@cache
def synthetic(path: Path) -> Timeline:
    """A model over each forward thread: runs of outermost operations are layers, four layers a block, all a root."""
    said = document(path)
    cpu = slices(said["traceEvents"], "cpu_op", "cuda_runtime")
    backward = {event["tid"] for event in cpu if event["name"].startswith(NODE)}
    by_thread: dict[int, list[tuple[int, int]]] = {}
    for event in cpu:
        if event["tid"] not in backward and event["tid"] > 0:
            by_thread.setdefault(event["tid"], []).append(extent(event))
    names = [Name("Net", "Net", "Net")]
    names += [Name(f"{b}: Block", f"Net.{b}", "Block") for b in range(8)]
    names += [Name(f"{i}: Layer", f"Net.{b}.{i}", "Layer") for b in range(8) for i in range(4)]
    rows: list[list[int]] = []
    tracks: list[Track] = []
    for tid, extents in by_thread.items():
        runs: list[list[int]] = []
        for begin, end in sorted(extents):
            if runs and begin < runs[-1][1]:
                runs[-1][1] = max(runs[-1][1], end)
            else:
                runs.append([begin, end])
        number = len(tracks)
        tracks.append(Track("forward", f"thread {tid}", tid, Process(cpu[0]["pid"])))
        root = len(rows)
        rows.append([runs[0][0] - 1000, runs[-1][1] + 1000, 0, number, 0, -1, 0])
        layers = [(runs[at][0], runs[min(at + 5, len(runs)) - 1][1]) for at in range(0, len(runs), 5)]
        for first in range(0, len(layers), 4):
            block, call = first // 4 % 8, first // 32
            around = len(rows)
            group = layers[first : first + 4]
            rows.append([group[0][0], group[-1][1], 1 + block, number, 1, root, call])
            rows += [[*layer, 9 + 4 * block + i, number, 2, around, call] for i, layer in enumerate(group)]
    start, end, name, track, depth, parent, call = np.array(rows, np.int64).T
    base = said.get("baseTimeNanoseconds", 0)
    count = len(rows)
    columns = Slices.of(
        start=start + base,
        end=end + base,
        name=name,
        phase=np.zeros(count),
        track=track,
        depth=depth,
        parent=parent,
        call=call,
        step=np.zeros(count),
        link=np.full(count, -1),
        complete=np.ones(count),
    )
    return Timeline(sort_by_start(columns), names, tracks)
