"""The share of kernel time that `modtrace.merge` puts under the right module, on many architectures."""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import orjson
import torch
from scripts.benches.gpu.architectures import model_makers
from scripts.benches.gpu.pretended_kernels import with_kernels
from scripts.benches.gpu.profile_truth import (
    Json,
    Work,
    extent,
    ranges_around,
    read_trace,
    threads_of,
    works_of,
)
from scripts.benches.gpu.subject import Subject
from torch.profiler import ProfilerActivity, profile

import modtrace

MIN_SHARE = 0.999


class Share(NamedTuple):
    """The kernels' time by its attribution, in ns.

    Attributes:
        right: time under the innermost module that launched the kernel, in the same phase; or under no module if no
            module launched it.
        wrong: time under another module, in another phase, or under no module.
        unknown: time of kernels whose module the trace does not show; it counts as not right.
        kernels: number of kernels.
    """

    right: int
    wrong: int
    unknown: int
    kernels: int

    @property
    def ratio(self) -> float:
        total = self.right + self.wrong + self.unknown
        return self.right / total if total else 0.0


def judge(works: Sequence[Work], merged: Json) -> Share:
    """Compare kernels with the rows of modules above their streams in a merged trace."""
    rows = module_rows(merged["traceEvents"])
    right = wrong = unknown = 0
    for work in works:
        length = work.end - work.start
        if not work.is_known:
            unknown += length
            continue
        owner = (work.calls[-1][0], work.phase) if work.calls else None
        overlaps = [(min(work.end, end) - max(work.start, start), name) for start, end, name in _over(rows, work)]
        right_ns = sum(ns for ns, name in overlaps if name == owner)
        if owner is None:
            right_ns = length - sum(ns for ns, _ in overlaps)
        right += right_ns
        wrong += length - right_ns
    return Share(right, wrong, unknown, len(works))


Piece = tuple[int, int, tuple[str, str]]
"""Start, end, and the innermost module then with its phase."""


def module_rows(events: Sequence[Json]) -> dict[Any, list[Piece]]:
    """Return the intervals with their innermost modules, by device and stream."""
    streams = {}
    for event in events:
        if event.get("name") == "thread_name":
            match = re.fullmatch(r"modules · .*stream (\d+)", str(event["args"]["name"]))
            if match:
                streams[event["pid"], event["tid"]] = (event["pid"], int(match[1]))
    slices: dict[Any, list[Json]] = defaultdict(list)
    for event in events:
        row = streams.get((event.get("pid"), event.get("tid")))
        if event.get("ph") == "X" and row is not None and "fqn" in event["args"]:
            slices[row].append(event)
    return {row: list(_pieces(row_slices)) for row, row_slices in slices.items()}


def _pieces(slices: list[Json]) -> Iterator[Piece]:
    stack: list[tuple[int, tuple[str, str]]] = []
    since = 0
    for event in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
        start, end = extent(event)
        while stack and stack[-1][0] <= start:
            if since < stack[-1][0]:
                yield since, stack[-1][0], stack[-1][1]
                since = stack[-1][0]
            stack.pop()
        if stack and since < start:
            yield since, start, stack[-1][1]
        since = start
        stack.append((end, (event["args"]["fqn"], event["cat"])))
    while stack:
        if since < stack[-1][0]:
            yield since, stack[-1][0], stack[-1][1]
            since = stack[-1][0]
        stack.pop()


def _over(rows: dict[Any, list[Piece]], work: Work) -> Iterator[Piece]:
    pieces = rows.get(work.row, [])
    index = max(0, bisect.bisect_right(pieces, work.start, key=lambda piece: piece[0]) - 1)
    for piece in pieces[index:]:
        if piece[0] >= work.end:
            return
        if piece[1] > work.start:
            yield piece


def measure(subject: Subject, model: torch.nn.Module, loss: Callable[[], torch.Tensor], folder: Path) -> Share:
    """Profile and record a few steps, merge, and judge."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if subject.is_gpu else [])]
    loss().backward()
    subject.synchronize()
    profiled, merged = folder / "profile.json", folder / "merged.json"
    with ExitStack() as stack:
        recording = stack.enter_context(modtrace.record(engine="native"))
        profiler = stack.enter_context(profile(activities=activities))
        stack.enter_context(ranges_around(model))
        for _ in range(subject.steps):
            loss().backward()
            recording.step()
        subject.synchronize()
    profiler.export_chrome_trace(str(profiled))
    document = read_trace(profiled)
    if not subject.is_gpu:
        document = with_kernels(document)
        profiled.write_bytes(orjson.dumps(document))
    modtrace.merge(profiled, recording.timeline(), merged)
    return judge(works_of(document, threads_of(profiler)), read_trace(merged))


def run(subject: Subject) -> list[str]:
    """Print the shares; return those below the bound."""
    faults = []
    if not subject.is_gpu:
        print("kernels are simulated: each operator that calls no other launches a kernel of its own duration\n")
    print("| model | kernels | right | wrong | unknown | |\n| --- | --- | --- | --- | --- | --- |")
    for name, make in model_makers(subject).items():
        if subject.models and not any(part.lower() in name.lower() for part in subject.models):
            continue
        torch.manual_seed(0)
        with TemporaryDirectory() as folder, torch.device(subject.device):
            share = measure(subject, *make(), Path(folder))
        total = max(1, share.right + share.wrong + share.unknown)
        is_enough = share.ratio >= MIN_SHARE
        print(
            f"| {name} | {share.kernels} | {share.ratio:.4%} | {share.wrong / total:.4%} |"
            f" {share.unknown / total:.4%} | {'' if is_enough else 'short'} |",
            flush=True,
        )
        faults += [] if is_enough else [f"{name}: {share.ratio:.4%} under the right module"]
    return faults
