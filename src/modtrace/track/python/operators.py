"""Which operators run where, for the Python engine, in the few steps that are looked at.

torch notes them by the profiler that it had before Kineto. That begins in 5 µs, sees the thread that begins it, and
reads a clock where an operator begins and ends. It changes nothing of what is computed. Only one profiler can run on a
thread: so this one begins where no other runs, and ends where another one begins.
"""

import gc
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch._C._profiler import ProfilerConfig, ProfilerState, RecordScope, _ExperimentalConfig

from ..call_patch import Patch, PatchTarget, Wrapper
from ..event_sink import NO_GRAPH_TASK, EventSink, current_graph_task
from ..ranges import category_of
from ..unseen import skip_all, skip_frame

_READ_NS = 200_000_000
"""After so long the noted operators are counted, where a span begins: each takes 150 bytes or more."""
_MAX_NS = 5_000_000_000
"""After so long without any span, none are noted any more."""
_OUTSIDE, _IN_PASSES, _IN_OPTIMIZERS = -1, -2, -3
"""The places of operators that are in no module, as the native engine has it."""
_IN_LOADERS = -4
_LEFT = -5
"""In place of a place: the one that was entered last is left."""
_PLACES = {"backward": _IN_PASSES, "optimizer": _IN_OPTIMIZERS, "data loading": _IN_LOADERS}
_scope: Any = int
_NODE, _USERS = _scope(RecordScope.BACKWARD_FUNCTION), _scope(RecordScope.USER_SCOPE)
_CHECKPOINT = "CheckpointFunction"
"""A reentrant checkpoint: its operators are those of the modules that are called in it."""
_EVALUATED, _NODES, _WITH_HOOKS = "autograd::engine::evaluate_function: ", "nodes", "nodes and hooks"

_autograd: Any = torch._C._autograd
# Not what is put in its place. torch calls it deprecated: where it is gone, no operators are counted.
_begin_noting: Any = getattr(_autograd, "_enable_profiler_legacy", None)
_BEGIN_PROFILERS = ("torch.autograd", "torch.autograd.profiler", "torch.autograd.profiler_legacy")
_running: list[Any] = []
"""The counts whose profiler runs: one, and those whose thread has not ended theirs yet."""


class OperatorCounts:
    """Counts operators by where they run, on the thread that began the recording, while a step is looked at.

    Attributes:
        is_running: whether the profiler runs.
        is_whole: whether those between spans are counted too, which may be many before the next span begins.
    """

    def __init__(self, events: EventSink) -> None:
        self.is_running = self.is_whole = self._is_looked_at = False
        self._is_off = _begin_noting is None
        self._events, self._thread = events, 0
        self._gaps: Callable[..., object] = bool
        self._marks: list[tuple[int, int]] = []  # when each place was entered or left, while it runs
        self._open: list[int] = []  # the places that are open where reading goes on
        self._began_ns = 0
        self._totals: dict[tuple[int, str], list[int]] = {}

    def start(self) -> None:
        """Be told where a profiler begins, on this thread."""
        self._thread = threading.get_ident()
        _PATCH.install(_running)

    def stop(self) -> None:
        """Count no more."""
        self._is_looked_at = False
        self.end_profiler()
        if not self.is_running:
            _PATCH.uninstall()
        elif _end_stopped not in gc.callbacks:  # another thread ends it where it collects garbage
            gc.callbacks.append(_end_stopped)

    def begin_outside(self, gaps: Callable[..., object]) -> None:
        """Count from now on, if this is the thread; `gaps` is told of each boundary."""
        if threading.get_ident() == self._thread:
            self.end_profiler()
            self._totals.clear()
            self._open.clear()
            self._gaps, self._events.on_boundary, self._is_looked_at = gaps, self._at_boundary, True
            self._begin_profiler()

    def end_outside(self) -> list[tuple[int, str, int, int]]:
        """Return the operators: where they ran, below 0 or the id of a module's name, their names, calls and ns."""
        self._is_looked_at = False
        self.end_profiler()
        counted = [(place, name, calls, ns) for (place, name), (calls, ns) in self._totals.items()]
        self._totals.clear()
        return counted

    def _at_boundary(self, begins: str | None, *call: Any) -> None:
        self._gaps(begins, *call)
        if begins is None:
            self.leave()
        else:
            kind = begins if begins in _PLACES else category_of(begins)
            self.enter(_PLACES.get(kind, self._open[-1] if self._open else _OUTSIDE))

    def enter(self, place: int) -> None:
        """Note that a place is entered, such as the module whose name has this id."""
        if self._is_looked_at and threading.get_ident() == self._thread:
            self._mark(place)
            if self.is_running and (took := time.time_ns() - self._began_ns) > _READ_NS:
                self._is_off |= took > _MAX_NS
                self.end_profiler()
            self._begin_profiler()

    def leave(self) -> None:
        """Note that what was entered last is left."""
        if self._is_looked_at and threading.get_ident() == self._thread:
            self._mark(_LEFT)
            depth = len(self._open) + sum(-1 if place == _LEFT else 1 for _, place in self._marks)
            if not self.is_whole and depth <= 0:
                self.end_profiler()

    def _mark(self, place: int) -> None:
        if self.is_running:
            self._marks.append((time.time_ns(), place))  # the clock of the profiler
        else:
            self._follow(place)

    def _begin_profiler(self) -> None:
        is_due = (self.is_whole or self._open) and not self.is_running and not self._is_off
        if is_due and not _autograd._profiler_enabled() and not _is_heeded() and current_graph_task() == NO_GRAPH_TASK:
            self.is_running, self._began_ns = True, time.time_ns()
            _running.append(self)
            config = ProfilerConfig(ProfilerState.CPU, False, False, False, False, False, _ExperimentalConfig())
            _begin_noting(config)

    def end_late(self) -> None:
        """End the profiler if the look is over: it ended in a pass, or on another thread, where it could not be."""
        if self.is_running and not self._is_looked_at:
            self.end_profiler()

    def end_profiler(self) -> None:
        """End the profiler, if this thread runs it, and count what it has noted."""
        # Where a node runs, torch would take the end back.
        if self.is_running and threading.get_ident() == self._thread and current_graph_task() == NO_GRAPH_TASK:
            self.is_running = False
            _running.remove(self)
            try:
                noted = _autograd._disable_profiler_legacy()
            except RuntimeError:  # it was begun where torch took that back
                noted = []
            marks, self._marks = self._marks, []
            for events in noted:
                if events and events[0].kind() == "mark":  # of this thread: it says that it begins
                    self._count(events, marks)

    def _count(self, events: list[Any], marks: list[tuple[int, int]]) -> None:
        """Add the operators that no other is around, where they began."""
        outer, with_hooks, begun, followed = None, dict[int, int](), ("", 0), 0
        for event in events:
            is_begin, handle = event.kind() == "push", event.handle()
            if outer is not None:
                if handle == outer and not is_begin:
                    outer = None
                    self._add(*begun, event)
            elif is_begin and event.scope() != _USERS and event.name() != _CHECKPOINT:
                began_ns = int(event.start_us() * 1e3)
                while followed < len(marks) and marks[followed][0] <= began_ns:
                    self._follow(marks[followed][1])
                    followed += 1
                name = event.name()
                if name.startswith(_EVALUATED):
                    with_hooks[handle] = began_ns
                else:
                    outer, begun = handle, (_NODES if event.scope() == _NODE else name, began_ns)
            elif not is_begin and handle in with_hooks:
                self._add(_WITH_HOOKS, with_hooks.pop(handle), event)
        for _, mark in marks[followed:]:
            self._follow(mark)

    def _add(self, name: str, began_ns: int, end: Any) -> None:
        place = self._open[-1] if self._open else _OUTSIDE
        # What runs forward again in a pass is a part of it.
        if place != _IN_LOADERS and (place == _IN_PASSES or _IN_PASSES not in self._open):
            total = self._totals.setdefault((place, name), [0, 0])
            total[0] += 1
            total[1] += int(end.start_us() * 1e3) - began_ns

    def _follow(self, place: int) -> None:
        if place != _LEFT:
            self._open.append(place)
        elif self._open:
            self._open.pop()


def _end_stopped(_phase: str, _info: object) -> None:
    """End the profiler that this thread runs for a recording that another one has stopped."""
    for counts in tuple(_running):
        counts.end_late()


def _is_heeded() -> bool:
    """Whether torch may do other things where a profiler runs: it compiles, or calls other processes."""
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    rpc = sys.modules.get("torch._C._distributed_rpc")
    return any(map(callable, [*backends.values()])) or getattr(rpc, "_is_current_rpc_agent_set", bool)()


def _make_wrapper(wrapper: Wrapper) -> Callable[..., Any]:
    @skip_all
    def end_profilers() -> None:
        for counts in tuple(wrapper.observer or ()):
            counts.end_profiler()

    def _enable_profiler(*args: Any, **kwargs: Any) -> Any:
        end_profilers()
        return wrapper.wrapped(*args, **kwargs)

    return skip_frame(_enable_profiler)


_PATCH = Patch(
    _make_wrapper,
    tuple(
        PatchTarget(module, name)
        for module in (*map(sys.modules.get, _BEGIN_PROFILERS), _autograd)
        for name in ("_enable_profiler", "_enable_profiler_legacy")
        if module and name in vars(module)
    ),
)
"""The patch of what begins a profiler; its observer is `_running`."""
