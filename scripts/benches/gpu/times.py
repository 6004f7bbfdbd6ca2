"""Device times of a recording, compared with the kernels of a profile of the same steps: durations, and the clock."""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from scripts.benches.gpu.profile_truth import Work, ranges_around, read_trace, threads_of, works_of
from scripts.benches.gpu.subject import Subject
from torch.profiler import ProfilerActivity, profile

import modtrace
from modtrace.timeline import Span

MAX_ERROR_SHARE, MAX_CALL_ERROR_NS = 0.02, 2_000
"""Maximum error of a module's time, relative and per call; the larger one counts. A call may include a kernel gap."""

AHEAD_CYCLES = 200_000_000
"""Length of a GPU sleep before each step, about 0.1 s, in which the host launches the kernels of the step."""

Key = tuple[str, str]
"""A module's qualified name, and the phase."""


class Compared(NamedTuple):
    """A module's time on the device in one phase, in ns.

    Attributes:
        calls: number of calls.
        ours: time by the recording's device times.
        reach: time by the profile, from the start of the first kernel to the end of the last kernel of each call.
        kernels: time of the kernels only.
    """

    calls: int
    ours: int
    reach: int
    kernels: int

    @property
    def is_good(self) -> bool:
        return abs(self.ours - self.reach) <= max(MAX_ERROR_SHARE * self.reach, MAX_CALL_ERROR_NS * self.calls)


def by_call(works: Sequence[Work]) -> dict[tuple[str, int, str], list[Work]]:
    """Return the kernels of each call in each phase, including those of inner calls."""
    kernels: dict[tuple[str, int, str], list[Work]] = defaultdict(list)
    for work in works:
        for name, number in work.calls:
            kernels[name, number, work.phase].append(work)
    return kernels


def compare(spans: Sequence[Span], works: Sequence[Work]) -> dict[Key, Compared]:
    """Sum both times by module and phase; modules without a span or without a kernel are left out."""
    ours: dict[Key, int] = defaultdict(int)
    for span in spans:
        ours[span.fqn, span.phase] += span.end_ns - span.start_ns
    truth: dict[Key, list[list[Work]]] = defaultdict(list)
    for (name, _, phase), kernels in by_call(works).items():
        truth[name, phase].append(kernels)
    return {
        key: Compared(
            len(calls),
            ours[key],
            sum(max(work.end for work in call) - call[0].start for call in calls),
            sum(work.end - work.start for call in calls for work in call),
        )
        for key, calls in truth.items()
        if key in ours
    }


class Edges(NamedTuple):
    """Distances of spans' edges from the gaps between two kernels in which they must be, in ns.

    Attributes:
        errors: distance from the gap; 0 inside the gap, negative before it.
        gaps: lengths of the gaps: smaller errors are not seen.
    """

    errors: list[int]
    gaps: list[int]


def edge_errors(spans: Sequence[Span], works: Sequence[Work], base_ns: int) -> Edges:
    """Compare the edges of each forward call's span with the kernels of the call and their neighbours."""
    calls = by_call(works)
    rows: dict[Any, list[Work]] = defaultdict(list)
    for work in works:
        rows[work.row].append(work)
    starts = {row: [work.start for work in row_works] for row, row_works in rows.items()}
    edges = Edges([], [])

    def note(moment: int, lowest: int, highest: int) -> None:
        edges.errors.append(min(0, moment - lowest) + max(0, moment - highest))
        edges.gaps.append(highest - lowest)

    for span in spans:
        kernels = calls.get((span.fqn, span.call, span.phase))
        if span.phase != "forward" or not kernels:
            continue
        row = kernels[0].row
        first = bisect.bisect_left(starts[row], kernels[0].start)
        last = bisect.bisect_right(starts[row], kernels[-1].start) - 1
        if first > 0:
            note(span.start_ns - base_ns, rows[row][first - 1].end, kernels[0].start)
        if last + 1 < len(rows[row]):
            note(span.end_ns - base_ns, kernels[-1].end, rows[row][last + 1].start)
    return edges


def profiled(subject: Subject, folder: Path) -> tuple[modtrace.Timeline, list[Work], int]:
    """Record steps with device times under the profiler; return both, and the base of the profiler's times in ns."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if subject.is_gpu else [])]
    model = subject.gpt()
    step = subject.training_step(model)
    for _ in range(3):
        step()
    subject.synchronize()
    with ExitStack() as stack:
        recording = stack.enter_context(modtrace.record(engine="native", device_times=subject.is_gpu))
        profiler = stack.enter_context(profile(activities=activities))
        stack.enter_context(ranges_around(model))
        for _ in range(subject.steps):
            if subject.is_gpu:
                # So that the stream does not wait for the host, which the profiler slows down.
                torch.cuda._sleep(AHEAD_CYCLES)
            step()
            recording.step()
        subject.synchronize()
    path = folder / "profile.json"
    profiler.export_chrome_trace(str(path))
    document = read_trace(path)
    works = works_of(document, threads_of(profiler), operators=not subject.is_gpu)
    return recording.timeline(), works, int(document["baseTimeNanoseconds"])


def run(subject: Subject) -> list[str]:
    """Print a table of modules, and the clock's errors; return the values out of bounds, none on the CPU."""
    with TemporaryDirectory() as folder:
        timeline, works, base_ns = profiled(subject, Path(folder))
    spans = [span for span in timeline.spans if span.track.startswith("gpu ") or not subject.is_gpu]
    compared = compare(spans, works)
    print("| module | phase | calls | ours, ms | reach of its kernels | error | kernels only | |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    faults = []
    for (name, phase), times in compared.items():
        error = times.ours / times.reach - 1 if times.reach else 0.0
        verdict = "" if times.is_good or not subject.is_gpu else "off"
        print(
            f"| {name} | {phase} | {times.calls} | {times.ours / 1e6:.3f} | {times.reach / 1e6:.3f} | {error:+.2%} |"
            f" {times.kernels / 1e6:.3f} | {verdict} |"
        )
        faults += [] if times.is_good else [f"{name} {phase} off by {error:+.2%}"]
    if not compared:
        return ["no module has both a span and a kernel"]
    edges = edge_errors(spans, works, base_ns)
    if not edges.errors:
        return [*faults, "no edge of a span is next to a kernel of its call"]
    errors = sorted(abs(error) for error in edges.errors)
    bound: Any = timeline.metadata.get("device_clock_bound_ns")
    print(f"\nlost: {', '.join(f'{k} {v}' for k, v in timeline.metadata.items() if k.startswith('device_events_'))}")
    print(
        f"clock: {len(errors)} edges, outside their gap between two kernels by {statistics.median(errors):.0f} ns "
        f"median, {errors[-1]} ns at most, all to one side by {statistics.median(edges.errors):+.0f} ns median; gaps "
        f"{statistics.median(edges.gaps):.0f} ns median; reported bound: {bound} ns"
    )
    if not subject.is_gpu:
        print("spans are the thread's, kernels are operators that call no other; not judged: this is the CPU")
        return []
    if bound is None or errors[-1] > bound:
        faults.append(f"an edge is off by {errors[-1]} ns, bound {bound}")
    return faults
