"""The module that launched each kernel, found without modtrace: by ranges, correlation ids and sequence numbers.

Hooks open a range of torch.profiler (`record_function`) around each call, and this file reads the exported JSON. The
correlation id of a kernel gives the runtime call that launched it. That is inside the range of a call, or inside an
autograd node, whose sequence number gives the operator that made it, and that operator is inside the range of a call.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from torch import nn
from torch._C._autograd import DeviceType
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import profile, record_function

PREFIX = "truth#"
NODE = "autograd::engine::evaluate_function: "
KERNELS = {"kernel", "gpu_memcpy", "gpu_memset"}
LAUNCHES = {"cuda_runtime", "cuda_driver"}
Call = tuple[str, int]
"""A module's qualified name, and the number of the call."""
Json = dict[str, Any]


class Work(NamedTuple):
    """A kernel.

    Attributes:
        row: its device and its stream; for an operator, its process and its thread.
        start, end: times in the trace, in ns.
        calls: the calls in which it was launched, outermost first; empty outside all modules.
        phase: forward, backward or recompute.
        is_known: whether its owner was found.
    """

    row: tuple[Any, Any]
    start: int
    end: int
    calls: tuple[Call, ...]
    phase: str
    is_known: bool = True


class Frame(NamedTuple):
    """A range of a call, or the evaluation of a node, on a thread."""

    start: int
    end: int
    call: Call | None
    event: Json


def ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def extent(event: Json) -> tuple[int, int]:
    start = ns(event["ts"])
    return start, start + ns(event["dur"])


@contextmanager
def ranges_around(model: nn.Module) -> Iterator[None]:
    """Open a range, `truth#NUMBER#NAME`, around each call of a module."""
    root = type(model).__name__
    paths: dict[nn.Module, list[str]] = defaultdict(list)
    for path, module in model.named_modules(remove_duplicate=False):
        paths[module].append(f"{root}.{path}" if path else root)
    open_ranges: list[tuple[str, Any]] = []
    last_names: dict[nn.Module, str] = {}
    numbers = itertools.count()

    def enter(module: nn.Module, _inputs: object) -> None:
        outer = open_ranges[-1][0] if open_ranges else ""
        # A module that a forward makes, such as a loss of transformers, has no path, and must not be kept alive.
        name = type(module).__name__
        if module in paths:
            inside = [path for path in paths[module] if path.startswith(f"{outer}.")]
            # A recompute can start anywhere; it has the last name of the module.
            name = last_names[module] = (inside or [last_names.get(module, paths[module][0])])[0]
        range_ = record_function(f"{PREFIX}{next(numbers)}#{name}")
        range_.__enter__()
        open_ranges.append((name, range_))

    def leave(*_: object) -> None:
        open_ranges.pop()[1].__exit__(None, None, None)

    handles = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def threads_of(profiler: profile) -> dict[str, int]:
    """Return torch's number of the thread of each range, which nodes use to name the thread that made them.

    A range also has an event of the GPU, which belongs to no thread.
    """
    assert profiler.profiler is not None
    events: Any = profiler.profiler.kineto_results
    on_threads = [event for event in events.events() if event.device_type() == DeviceType.CPU]
    return {event.name(): event.start_thread_id() for event in on_threads if event.name().startswith(PREFIX)}


def read_trace(path: Path) -> Json:
    document: Json = orjson.loads(path.read_bytes())
    return document


def works_of(document: Json, threads: dict[str, int], operators: bool = False) -> list[Work]:
    """Return the kernels of a trace, in start order, with their owners.

    Args:
        document: the trace.
        threads: the result of `threads_of`.
        operators: use operators that call no other operator instead of kernels.
    """
    events = [event for event in document["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    owners = Owners(events, threads)
    pairs: list[tuple[Json, Json | None]]
    if operators:
        leaves = leaf_operators(events)
        pairs = [(leaf, leaf) for leaf in leaves]
    else:
        launches = {
            event["args"]["correlation"]: event
            for event in events
            if event.get("cat") in LAUNCHES and "correlation" in event["args"]
        }
        kernels = [event for event in events if event.get("cat") in KERNELS]
        pairs = [(kernel, launches.get(kernel["args"].get("correlation"))) for kernel in kernels]
    works = []
    for event, launch in pairs:
        start, end = extent(event)
        owner = None if launch is None else owners.at((launch["pid"], launch["tid"]), ns(launch["ts"]))
        calls, phase = owner or ((), "")
        works.append(Work((event["pid"], event["tid"]), start, end, calls, phase, owner is not None))
    return sorted(works, key=lambda work: work.start)


def leaf_operators(events: Sequence[Json]) -> list[Json]:
    """Return the operators that call no other operator."""
    threads: dict[Any, list[Json]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op" and not event["name"].startswith((NODE, "modtrace.sync#")):
            threads[event["pid"], event["tid"]].append(event)
    leaves = []
    for operators in threads.values():
        operators.sort(key=lambda e: (e["ts"], -e["dur"]))
        for event, following in itertools.zip_longest(operators, operators[1:]):
            if following is None or ns(following["ts"]) >= extent(event)[1]:
                leaves.append(event)
    return leaves


def _innermost_calls(stack: list[Frame]) -> tuple[Call, ...]:
    """Return the calls of a stack, outermost first, that are not around an autograd node."""
    calls: list[Call] = []
    for frame in reversed(stack):
        if frame.call is None:
            break
        calls.append(frame.call)
    return tuple(calls[::-1])


class Owners:
    """Finds the calls that a thread was in at a moment."""

    def __init__(self, events: Sequence[Json], threads: dict[str, int]) -> None:
        self._frames: dict[Any, list[Frame]] = defaultdict(list)
        self._makers: dict[tuple[Any, int], int] = {}
        self._thread_ids: dict[int, Any] = {}
        self._accumulated: dict[int, Frame | None] = {}
        self._known: dict[Any, tuple[list[Frame], list[int], list[int]]] = {}
        calls: Counter[str] = Counter()
        for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            thread, args = (event["pid"], event["tid"]), event.get("args", {})
            if event.get("cat") == "user_annotation" and event["name"].startswith(PREFIX):
                name = event["name"].split("#", 2)[2]
                self._frames[thread].append(Frame(*extent(event), (name, calls[name]), event))
                calls[name] += 1
                if event["name"] in threads:
                    self._thread_ids[threads[event["name"]]] = thread
            elif event.get("cat") == "cpu_op" and event["name"].startswith(NODE):
                self._frames[thread].append(Frame(*extent(event), None, event))
            elif event.get("cat") == "cpu_op" and "Sequence number" in args and not args.get("Fwd thread id"):
                # The last operator that starts with a number makes the node.
                self._makers[thread, args["Sequence number"]] = ns(event["ts"])
        for frames in self._frames.values():
            last_node: Frame | None = None
            for frame in frames:
                if frame.call is None and "Sequence number" in frame.event.get("args", {}):
                    last_node = frame
                elif frame.call is None:
                    self._accumulated[id(frame.event)] = last_node

    def at(self, thread: Any, moment: int) -> tuple[tuple[Call, ...], str] | None:
        """Return the calls and the phase; None if they are not known."""
        stack = self._stack(thread, moment)
        calls = _innermost_calls(stack)
        in_backward = any(frame.call is None for frame in stack)
        if calls or not in_backward:
            return calls, "recompute" if in_backward else "forward"
        made = self._made_in(stack[-1])
        return None if made is None else (made, "backward")

    def _made_in(self, node: Frame | None) -> tuple[Call, ...] | None:
        """Return the calls in which a node was made; for AccumulateGrad, the calls of the node before it."""
        if node is not None and "Sequence number" not in node.event.get("args", {}):
            node = self._accumulated[id(node.event)]
        if node is None:
            return None
        args = node.event["args"]
        thread = self._thread_ids.get(args.get("Fwd thread id"))
        moment = self._makers.get((thread, args["Sequence number"]))
        if moment is None:
            return None
        return _innermost_calls(self._stack(thread, moment))

    def _stack(self, thread: Any, moment: int) -> list[Frame]:
        """Return the open frames of a thread, outermost first."""
        frames, starts, parents = self._lookup(thread)
        index = bisect.bisect_right(starts, moment) - 1
        frames_open = []
        while index >= 0:
            if moment < frames[index].end:
                frames_open.append(frames[index])
            index = parents[index]
        return frames_open[::-1]

    def _lookup(self, thread: Any) -> tuple[list[Frame], list[int], list[int]]:
        """Return a thread's frames in start order, their starts, and the index of the frame parents each, or -1."""
        if thread not in self._known:
            frames = self._frames.get(thread, [])
            parents: list[int] = []
            open_: list[int] = []
            for index, frame in enumerate(frames):
                while open_ and frames[open_[-1]].end <= frame.start:
                    open_.pop()
                parents.append(open_[-1] if open_ else -1)
                open_.append(index)
            self._known[thread] = frames, [frame.start for frame in frames], parents
        return self._known[thread]
