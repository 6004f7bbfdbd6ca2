"""How much kernel time `modtrace.merge` puts under the right module, on many architectures."""

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
from scripts.benches.gpu.architectures import made
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

LEAST = 0.999


class Share(NamedTuple):
    """What of the kernels' time is where, ns.

    Attributes:
        right: under the innermost module that launched it, in the same phase; under none where none did.
        wrong: under another one, another phase, or none.
        unknown: of kernels whose module the trace does not tell; it counts as not right.
        kernels: how many there are.
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
    """Hold kernels against the rows of modules that a merged trace has above their streams."""
    rows = module_rows(merged["traceEvents"])
    right = wrong = unknown = 0
    for work in works:
        length = work.end - work.start
        if not work.is_known:
            unknown += length
            continue
        own = (work.calls[-1][0], work.phase) if work.calls else None
        held = sum(min(work.end, end) - max(work.start, start) for start, end, name in _over(rows, work) if name == own)
        if own is None:
            held = length - sum(min(work.end, end) - max(work.start, start) for start, end, _ in _over(rows, work))
        right += held
        wrong += length - held
    return Share(right, wrong, unknown, len(works))


Piece = tuple[int, int, tuple[str, str]]
"""When which module is the innermost one, and in which phase."""


def module_rows(events: Sequence[Json]) -> dict[Any, list[Piece]]:
    """Return the innermost module of each moment, by device and stream."""
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
    return {row: list(_pieces(of_row)) for row, of_row in slices.items()}


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
    at = max(0, bisect.bisect_right(pieces, work.start, key=lambda piece: piece[0]) - 1)
    for piece in pieces[at:]:
        if piece[0] >= work.end:
            return
        if piece[1] > work.start:
            yield piece


def measure(subject: Subject, model: torch.nn.Module, loss: Callable[[], torch.Tensor], folder: Path) -> Share:
    """Profile and record some steps, merge, and judge."""
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
    """Print the shares; return what is below the bound."""
    short = []
    if not subject.is_gpu:
        print("kernels are pretended: each operator that calls no other launches one of its own duration\n")
    print("| model | kernels | right | wrong | unknown | |\n| --- | --- | --- | --- | --- | --- |")
    for name, make in made(subject).items():
        if subject.models and not any(part.lower() in name.lower() for part in subject.models):
            continue
        torch.manual_seed(0)
        with TemporaryDirectory() as folder, torch.device(subject.device):
            share = measure(subject, *make(), Path(folder))
        total = max(1, share.right + share.wrong + share.unknown)
        enough = share.ratio >= LEAST
        print(
            f"| {name} | {share.kernels} | {share.ratio:.4%} | {share.wrong / total:.4%} |"
            f" {share.unknown / total:.4%} | {'' if enough else 'short'} |",
            flush=True,
        )
        short += [] if enough else [f"{name}: {share.ratio:.4%} under the right module"]
    return short
