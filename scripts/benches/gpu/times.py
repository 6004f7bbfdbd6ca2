"""Device times of a recording against the kernels of a profile of the same steps: durations, and the clock."""

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

MOST, MOST_PER_CALL_NS = 0.02, 2_000
"""A module's time may be off by a fiftieth, or by this, where a gap between two kernels is more than that."""

AHEAD_CYCLES = 200_000_000
"""Before each step, some 0.1 s, in which the host launches what the stream then has to do."""

Key = tuple[str, str]
"""A module's qualified name, and the phase."""


class Compared(NamedTuple):
    """A module's time on the device in one phase, ns.

    Attributes:
        calls: how many.
        ours: by the recording's device times.
        reach: by the profile, from the start of the first kernel to the end of the last one of each call.
        kernels: the kernels alone.
    """

    calls: int
    ours: int
    reach: int
    kernels: int

    @property
    def is_good(self) -> bool:
        return abs(self.ours - self.reach) <= max(MOST * self.reach, MOST_PER_CALL_NS * self.calls)


def by_call(works: Sequence[Work]) -> dict[tuple[str, int, str], list[Work]]:
    """Return the kernels of each call in each phase, those of the calls inside it too."""
    kernels: dict[tuple[str, int, str], list[Work]] = defaultdict(list)
    for work in works:
        for name, number in work.calls:
            kernels[name, number, work.phase].append(work)
    return kernels


def compare(spans: Sequence[Span], works: Sequence[Work]) -> dict[Key, Compared]:
    """Add up both by module and phase; modules without a span or without a kernel are left out."""
    ours: dict[Key, int] = defaultdict(int)
    for span in spans:
        ours[span.fqn, span.phase] += span.end_ns - span.start_ns
    truth: dict[Key, list[list[Work]]] = defaultdict(list)
    for (name, _, phase), of_call in by_call(works).items():
        truth[name, phase].append(of_call)
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
    """How far spans' edges lie outside the gap between two kernels in which they have to be, ns.

    Attributes:
        errors: 0 within the gap; before it negative.
        gaps: how long these are: an error below that is not seen.
    """

    errors: list[int]
    gaps: list[int]


def edge_errors(spans: Sequence[Span], works: Sequence[Work], base_ns: int) -> Edges:
    """Hold the begin and the end of each forward call's span against the kernels of the call and those beside them."""
    calls = by_call(works)
    rows: dict[Any, list[Work]] = defaultdict(list)
    for work in works:
        rows[work.row].append(work)
    starts = {row: [work.start for work in of_row] for row, of_row in rows.items()}
    edges = Edges([], [])

    def note(moment: int, lowest: int, highest: int) -> None:
        edges.errors.append(min(0, moment - lowest) + max(0, moment - highest))
        edges.gaps.append(highest - lowest)

    for span in spans:
        own = calls.get((span.fqn, span.call, span.phase))
        if span.phase != "forward" or not own:
            continue
        row = own[0].row
        first = bisect.bisect_left(starts[row], own[0].start)
        last = bisect.bisect_right(starts[row], own[-1].start) - 1
        if first > 0:
            note(span.start_ns - base_ns, rows[row][first - 1].end, own[0].start)
        if last + 1 < len(rows[row]):
            note(span.end_ns - base_ns, own[-1].end, rows[row][last + 1].start)
    return edges


def profiled(subject: Subject, folder: Path) -> tuple[modtrace.Timeline, list[Work], int]:
    """Record some steps with device times under the profiler; return both and the base of the profiler's times."""
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
                # The stream is not to wait for the host, which the profiler slows down.
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
    """Print modules beside each other, and the clocks; return what is out of bounds, on the CPU nothing."""
    with TemporaryDirectory() as folder:
        timeline, works, base_ns = profiled(subject, Path(folder))
    spans = [span for span in timeline.spans if span.track.startswith("gpu ") or not subject.is_gpu]
    compared = compare(spans, works)
    print("| module | phase | calls | ours, ms | reach of its kernels | off by | kernels alone | |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    short = []
    for (name, phase), one in compared.items():
        off = one.ours / one.reach - 1 if one.reach else 0.0
        said = "" if one.is_good or not subject.is_gpu else "off"
        print(
            f"| {name} | {phase} | {one.calls} | {one.ours / 1e6:.3f} | {one.reach / 1e6:.3f} | {off:+.2%} |"
            f" {one.kernels / 1e6:.3f} | {said} |"
        )
        short += [] if one.is_good else [f"{name} {phase} off by {off:+.2%}"]
    if not compared:
        return ["no module has both a span and a kernel"]
    edges = edge_errors(spans, works, base_ns)
    if not edges.errors:
        return [*short, "no edge of a span is beside a kernel of its call"]
    errors = sorted(abs(error) for error in edges.errors)
    bound: Any = timeline.metadata.get("device_clock_bound_ns")
    print(f"\nlost: {', '.join(f'{k} {v}' for k, v in timeline.metadata.items() if k.startswith('device_events_'))}")
    print(
        f"clock: {len(errors)} edges, outside their gap between two kernels by {statistics.median(errors):.0f} ns "
        f"median, {errors[-1]} ns at most, all to one side by {statistics.median(edges.errors):+.0f} ns median; gaps "
        f"{statistics.median(edges.gaps):.0f} ns median; told: {bound} ns at most"
    )
    if not subject.is_gpu:
        print("spans are those of the thread, kernels are operators that call no other; not judged: this is the CPU")
        return []
    if bound is None or errors[-1] > bound:
        short.append(f"an edge is off by {errors[-1]} ns, bound {bound}")
    return short
