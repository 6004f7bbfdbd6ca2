"""The share of backward time that a recording puts under the right module, by torch.profiler and separate hooks.

The hooks note, at each enter and exit of a call, which sequence number the thread gives next. So the number of an
autograd node, which the profiler knows, names the call that made it, and the profiler's slice of the node says when
it ran. None of this uses an engine of modtrace.

The profiler's clock wanders against the monotonic one by a few microseconds within a step. Moments that both note are
put around each forward and each backward, the offset is interpolated between them, and what is left of the wandering
is allowed for: a node's time counts as right where the right span lies within `TOLERANCE_NS`.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch._C._profiler import _RecordFunctionFast
from torch.profiler import ProfilerActivity, profile

import modtrace
from modtrace import Timeline
from modtrace.record_options import EngineName
from modtrace.timeline import BACKWARD

from .models import Workload

__all__ = ["TOLERANCE_NS", "Truth", "measure", "share_nested"]

TOLERANCE_NS = 3_000

Call = tuple[str, int]
"""A module's qualified name and the number of the call; -1 in a recomputation, whose number the hooks do not know."""
Interval = tuple[int, int]

_current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
_sequence: Callable[[], int] = torch._C._autograd._get_sequence_nr
_BACKWARD_FUNCTION = 1
_EVALUATE = "autograd::engine::evaluate_function: "
_THREAD, _PROBE = "truth.thread#", "truth.probe#"


class Truth(NamedTuple):
    """The measured shares.

    Attributes:
        nodes: autograd nodes seen by the profiler, without those that only accumulate gradients.
        nodes_right: share of their time under the right module, or under none where they belong to none.
        evaluated_right: the same for the engine's whole evaluation of a node, which also checks and sums gradients.
        exactly_right: `nodes_right` without the tolerance for the clock.
        nested: share of all spans that overlap no other one of their track partly.
        spans: backward spans.
        calls: forward calls and recomputations that the hooks saw.
    """

    nodes: int
    nodes_right: float
    evaluated_right: float
    exactly_right: float
    nested: float
    spans: int
    calls: int


class Node(NamedTuple):
    """One node in the profile, and the call that owns it; `intervals` leave out nodes that ran inside it."""

    owner: Call | None
    intervals: list[Interval]


class Makers:
    """Hooks that note which call makes the nodes from each sequence number on."""

    def __init__(self, model: nn.Module) -> None:
        self._root = type(model).__name__
        self._paths: dict[nn.Module, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self._paths.setdefault(module, []).append(f"{self._root}.{path}" if path else self._root)
        self._last: dict[nn.Module, str] = {}
        self._local = threading.local()
        self._lock = threading.Lock()
        self._threads: list[list[tuple[int, Call | None]]] = []
        self._numbers: dict[str, int] = {}
        self.calls = 0
        for module in self._paths:
            module.register_forward_pre_hook(self._enter, prepend=True)
            module.register_forward_hook(self._leave, always_call=True)

    def reset(self) -> None:
        """Forget what was noted."""
        self._numbers.clear()
        self._threads.clear()
        self._local = threading.local()
        self.calls = 0

    def owners(self, torch_threads: dict[int, int]) -> Callable[[int, int], Call | None]:
        """Return the function (torch's forward thread, sequence number) → the call that made that node."""
        noted = {torch: self._threads[number] for number, torch in torch_threads.items()}
        numbers = {torch: [sequence for sequence, _ in steps] for torch, steps in noted.items()}

        def owner(thread: int, sequence: int) -> Call | None:
            at = bisect.bisect_right(numbers.get(thread, []), sequence) - 1
            return noted[thread][at][1] if at >= 0 else None

        return owner

    def _enter(self, module: nn.Module, _inputs: object) -> None:
        stack = self._stack()
        around = stack[-1][0] if stack else None
        paths = self._paths[module]
        inside = [path for path in paths if around is not None and path.startswith(f"{around}.")]
        # A recomputation begins anywhere; it is known by the name it had.
        fqn = (inside or [self._last.get(module, paths[0])])[0]
        self._last[module] = fqn
        if _current_graph_task() != -1:
            call = (fqn, -1)
        else:
            with self._lock:
                call = (fqn, self._numbers.get(fqn, 0))
                self._numbers[fqn] = call[1] + 1
        self.calls += 1
        stack.append(call)
        self._local.steps.append((_sequence(), call))

    def _leave(self, _module: nn.Module, _inputs: object, _output: object) -> None:
        stack = self._stack()
        stack.pop()
        self._local.steps.append((_sequence(), stack[-1] if stack else None))

    def _stack(self) -> list[Call]:
        if not hasattr(self._local, "stack"):
            self._local.stack, self._local.steps = [], []
            with self._lock:
                number = len(self._threads)
                self._threads.append(self._local.steps)
            # By this slice the profiler's number of the thread is found.
            with _RecordFunctionFast(f"{_THREAD}{number}"):
                pass
        stack: list[Call] = self._local.stack
        return stack


def measure(engine: EngineName, workload: Workload, steps: int) -> Truth:
    """Run some steps of a workload under the profiler and a recording, and compare them."""
    makers = Makers(workload.model)
    workload.loss().backward()
    makers.reset()
    with modtrace.record(engine=engine) as recording, profile(activities=[ProfilerActivity.CPU]) as profiler:
        for step in range(steps):
            probe(recording, f"{step}.0")
            loss = workload.loss()
            probe(recording, f"{step}.1")
            loss.backward()
            probe(recording, f"{step}.2")
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    timeline = recording.timeline()
    return compare(events, timeline, makers)


def compare(events: list[Any], timeline: Timeline, makers: Makers) -> Truth:
    threads = {int(e.name().removeprefix(_THREAD)): e.start_thread_id() for e in events if e.name().startswith(_THREAD)}
    owner = makers.owners(threads)
    segments = owned_segments(timeline, to_profiler_clock(events, timeline))
    nodes = list(nodes_of([event for event in events if event.scope() == _BACKWARD_FUNCTION], owner))
    evaluated = list(nodes_of([event for event in events if event.name().startswith(_EVALUATE)], owner))
    return Truth(
        nodes=len(nodes),
        nodes_right=share_right(nodes, segments, TOLERANCE_NS),
        evaluated_right=share_right(evaluated, segments, TOLERANCE_NS),
        exactly_right=share_right(nodes, segments, 0),
        nested=share_nested(timeline),
        spans=int(np.count_nonzero(timeline.columns.phase == BACKWARD)),
        calls=makers.calls,
    )


def probe(recording: modtrace.Recording, name: str) -> None:
    """Note some moments in the recording and in the profiler; the narrowest of them counts."""
    for attempt in range(3):
        with _RecordFunctionFast(text := f"{_PROBE}{name}.{attempt}"):
            recording.mark(text)


def to_profiler_clock(
    events: list[Any], timeline: Timeline
) -> Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]:
    ours = {mark.text: mark.time_ns for mark in timeline.marks if mark.text.startswith(_PROBE)}
    best: dict[str, tuple[int, int, int]] = {}
    for event in events:
        if event.name() in ours:
            place = event.name().rpartition(".")[0]
            sample = (event.duration_ns(), ours[event.name()], event.start_ns() + event.duration_ns() // 2)
            best[place] = min(best.get(place, sample), sample)
    pairs = np.array(sorted((mine, theirs) for _, mine, theirs in best.values()), np.int64)
    base = pairs[0, 0]

    def convert(time: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        offset = np.interp(time - base, pairs[:, 0] - base, pairs[:, 1] - pairs[:, 0])
        converted: npt.NDArray[np.int64] = time + np.rint(offset).astype(np.int64)
        return converted

    return convert


def nodes_of(events: list[Any], owner: Callable[[int, int], Call | None]) -> Iterator[Node]:
    """Yield each numbered node with the time that it ran itself, in no order; `events` are all nodes."""
    stacks: dict[int, list[Running]] = {}
    for event in sorted(events, key=lambda e: (e.start_ns(), -e.duration_ns())):
        stack = stacks.setdefault(event.start_thread_id(), [])
        while stack and stack[-1].end <= event.start_ns():
            yield from stack.pop().done()
        # What belongs to no module and runs inside a node counts to that.
        own = owner(event.fwd_thread_id(), event.sequence_nr()) or (stack[-1].owner if stack else None)
        running = Running(event, own)
        if stack:
            stack[-1].inner.append(running)
        stack.append(running)
    for stack in stacks.values():
        while stack:
            yield from stack.pop().done()


class Running:
    """A node that may hold a whole inner backward pass, whose time is not its own."""

    def __init__(self, event: Any, owner: Call | None) -> None:
        self.start, self.end, self.owner = event.start_ns(), event.start_ns() + event.duration_ns(), owner
        self.numbered = event.sequence_nr() >= 0
        self.inner: list[Running] = []

    def done(self) -> Iterator[Node]:
        if not self.numbered:
            return
        if not self.inner:
            yield Node(self.owner, [(self.start, self.end)])
        else:
            inner_end = max(node.end for node in self.inner)
            yield Node(self.owner, [(self.start, self.inner[0].start), (inner_end, self.end)])


def owned_segments(
    timeline: Timeline, convert: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]
) -> dict[Call | None, list[Interval]]:
    """Return when the innermost backward span was whose, on all tracks together; None where there was none."""
    columns = timeline.columns
    rows = np.flatnonzero(columns.phase == BACKWARD)
    start, end = convert(columns.start[rows]).tolist(), convert(columns.end[rows]).tolist()
    calls = [
        (timeline.names[n].fqn, c)
        for n, c in zip(columns.name[rows].tolist(), columns.call[rows].tolist(), strict=True)
    ]
    segments: dict[Call | None, list[Interval]] = {None: []}
    stack: list[int] = []
    since = -(1 << 62)

    def until(moment: int) -> None:
        nonlocal since
        call = calls[stack[-1]] if stack else None
        if moment > since:
            for key in {call, call and (call[0], -1)}:
                segments.setdefault(key, []).append((since, moment))
        since = max(since, moment)

    for at in np.lexsort((columns.depth[rows], start)).tolist():
        while stack and end[stack[-1]] <= start[at]:
            until(end[stack[-1]])
            stack.pop()
        until(start[at])
        stack.append(at)
    while stack:
        until(end[stack[-1]])
        stack.pop()
    until(1 << 62)
    return segments


def share_right(nodes: list[Node], segments: dict[Call | None, list[Interval]], tolerance: int) -> float:
    widened = {call: widen(intervals, tolerance) for call, intervals in segments.items()}
    right = total = 0
    for node in nodes:
        own = widened.get(node.owner, [])
        for start, end in node.intervals:
            total += end - start
            at = max(0, bisect.bisect_right(own, (start, 1 << 62)) - 1)
            while at < len(own) and own[at][0] < end:
                right += max(0, min(end, own[at][1]) - max(start, own[at][0]))
                at += 1
    return right / total


def widen(intervals: list[Interval], by: int) -> list[Interval]:
    """Return the intervals longer at both ends, those that then touch as one."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start - by <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end + by))
        else:
            merged.append((start - by, end + by))
    return merged


def share_nested(timeline: Timeline) -> float:
    """Return the share of spans that overlap no other span of their track partly."""
    columns = timeline.columns
    apart = np.ones(len(columns), bool)
    for track in np.unique(columns.track).tolist():
        rows = np.flatnonzero(columns.track == track)
        start, end = columns.start[rows], columns.end[rows]
        order = np.lexsort((-end, start))
        stack: list[int] = []
        for at in order.tolist():
            while stack and end[stack[-1]] <= start[at]:
                stack.pop()
            for around in stack:
                if end[around] < end[at]:
                    apart[rows[around]] = apart[rows[at]] = False
            stack.append(at)
    return float(apart.mean()) if len(apart) else 1.0
