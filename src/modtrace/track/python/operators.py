"""Operators by the place that runs them, for the Python engine, in sampled steps.

torch's profiler from before Kineto reports them. It starts in 5 µs, sees only the thread that starts it, and reads a
clock at the start and the end of an operator. It does not change results. Only one profiler can run on a thread: so
this one starts only if no other profiler runs, and ends when another profiler starts.
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
from ..line_gaps import INNER_CALL
from ..ranges import category_of
from ..unseen import skip_all, skip_frame

_READ_NS = 200_000_000
"""Time after which the next span counts the recorded operators: each record has at least 150 bytes."""
_MAX_NS = 5_000_000_000
"""Maximum time without any span: after that, operators are not recorded any more."""
_OUTSIDE_MODULES, _IN_PASSES, _IN_OPTIMIZERS = -1, -2, -3
"""Places of operators outside all modules; the native engine uses the same values."""
_IN_LOADERS = -4
_EXIT = -5
"""A mark that is not a place: the last entered place is left."""
_PLACES = {"backward": _IN_PASSES, "optimizer": _IN_OPTIMIZERS, "data loading": _IN_LOADERS}
_as_int: Any = int
_NODE_SCOPE, _USER_SCOPE = _as_int(RecordScope.BACKWARD_FUNCTION), _as_int(RecordScope.USER_SCOPE)
_CHECKPOINT = "CheckpointFunction"
"""The node of a reentrant checkpoint: its operators belong to the modules that are called in it."""
_EVALUATE_PREFIX, _NODES, _NODES_AND_HOOKS = "autograd::engine::evaluate_function: ", "nodes", "nodes and hooks"

_autograd: Any = torch._C._autograd
# The original, not modtrace's patch of it. torch calls it deprecated: without it, no operators are counted.
_enable_profiler: Any = getattr(_autograd, "_enable_profiler_legacy", None)
_PROFILER_MODULES = ("torch.autograd", "torch.autograd.profiler", "torch.autograd.profiler_legacy")
_running: list[Any] = []
"""The `OperatorCounts` whose profiler runs: the current one, and stopped ones whose thread has not ended theirs yet."""


class OperatorCounts:
    """Counts operators by the place that runs them, on the thread that started the recording, in sampled steps.

    Attributes:
        is_running: whether the profiler runs.
        counts_gaps: whether operators between spans are counted too, of which there may be many.
    """

    def __init__(self, events: EventSink) -> None:
        self.is_running = self.counts_gaps = self._is_sampling = False
        self._is_off = _enable_profiler is None
        self._events, self._thread = events, 0
        self._gaps: Callable[..., object] = bool
        self._marks: list[tuple[int, int]] = []  # (time in ns, place) of each enter and exit while the profiler runs
        self._open: list[int] = []  # the open places at the first event that is not counted yet
        self._start_ns = 0
        self._totals: dict[tuple[int, str], list[int]] = {}

    def start(self) -> None:
        """Watch for other profilers that start, on this thread."""
        self._thread = threading.get_ident()
        _PATCH.install(_running)

    def stop(self) -> None:
        """Stop counting."""
        self._is_sampling = False
        self.end_profiler()
        if not self.is_running:
            _PATCH.uninstall()
        elif _end_stopped not in gc.callbacks:  # the profiler's thread ends it at its next garbage collection
            gc.callbacks.append(_end_stopped)

    def begin_outside(self, gaps: Callable[..., object]) -> None:
        """Start counting, if this is the thread of the recording; `gaps` is called at each boundary."""
        if threading.get_ident() == self._thread:
            self.end_profiler()
            self._totals.clear()
            self._open.clear()
            self._gaps, self._events.on_boundary, self._is_sampling = gaps, self._on_boundary, True
            self._start_profiler()

    def end_outside(self) -> list[tuple[int, str, int, int]]:
        """Stop counting; return (place: below 0 or a name id, operator, number of calls, ns) of each operator."""
        self._is_sampling = False
        self.end_profiler()
        counted = [(place, name, calls, ns) for (place, name), (calls, ns) in self._totals.items()]
        self._totals.clear()
        return counted

    def _on_boundary(self, name: str | None, *call: Any) -> None:
        self._gaps(name, *call)
        if name is None:
            self.leave()
        elif name != INNER_CALL:
            kind = name if name in _PLACES else category_of(name)
            self.enter(_PLACES.get(kind, self._open[-1] if self._open else _OUTSIDE_MODULES))

    def enter(self, place: int) -> None:
        """Note that a place is entered: a place below 0, or the module whose name has this id."""
        if self._is_sampling and threading.get_ident() == self._thread:
            self._mark(place)
            if self.is_running and (elapsed_ns := time.time_ns() - self._start_ns) > _READ_NS:
                self._is_off |= elapsed_ns > _MAX_NS
                self.end_profiler()
            self._start_profiler()

    def leave(self) -> None:
        """Note that the last entered place is left."""
        if self._is_sampling and threading.get_ident() == self._thread:
            self._mark(_EXIT)
            depth = len(self._open) + sum(-1 if place == _EXIT else 1 for _, place in self._marks)
            if not self.counts_gaps and depth <= 0:
                self.end_profiler()

    def _mark(self, place: int) -> None:
        if self.is_running:
            self._marks.append((time.time_ns(), place))  # the clock of the profiler
        else:
            self._follow(place)

    def _start_profiler(self) -> None:
        is_due = (self.counts_gaps or self._open) and not self.is_running and not self._is_off
        if not is_due or _autograd._profiler_enabled() or current_graph_task() != NO_GRAPH_TASK:
            return
        if not _profiler_affects_torch():
            self.is_running, self._start_ns = True, time.time_ns()
            _running.append(self)
            config = ProfilerConfig(ProfilerState.CPU, False, False, False, False, False, _ExperimentalConfig())
            _enable_profiler(config)

    def end_late(self) -> None:
        """End the profiler if sampling ended in a pass, or on another thread, where the profiler could not end."""
        if self.is_running and not self._is_sampling:
            self.end_profiler()

    def end_profiler(self) -> None:
        """End the profiler, if this thread runs it, and count the operators that it has recorded."""
        # While a node runs, torch would undo the end.
        if self.is_running and threading.get_ident() == self._thread and current_graph_task() == NO_GRAPH_TASK:
            self.is_running = False
            _running.remove(self)
            try:
                events_by_thread = _autograd._disable_profiler_legacy()
            except RuntimeError:  # torch had undone its start
                events_by_thread = []
            marks, self._marks = self._marks, []
            for events in events_by_thread:
                if events and events[0].kind() == "mark":  # only the profiler's own thread has a mark of its start
                    self._count(events, marks)

    def _count(self, events: list[Any], marks: list[tuple[int, int]]) -> None:
        """Add the outermost operators to the places in which they start."""
        outer_handle, node_starts, operator, mark_index = None, dict[int, int](), ("", 0), 0
        for event in events:
            is_start, handle = event.kind() == "push", event.handle()
            if outer_handle is not None:
                if handle == outer_handle and not is_start:
                    outer_handle = None
                    self._add(*operator, event)
            elif is_start and event.scope() != _USER_SCOPE and event.name() != _CHECKPOINT:
                start_ns = int(event.start_us() * 1e3)
                while mark_index < len(marks) and marks[mark_index][0] <= start_ns:
                    self._follow(marks[mark_index][1])
                    mark_index += 1
                name = event.name()
                if name.startswith(_EVALUATE_PREFIX):
                    node_starts[handle] = start_ns
                else:
                    outer_handle, operator = handle, (_NODES if event.scope() == _NODE_SCOPE else name, start_ns)
            elif not is_start and handle in node_starts:
                self._add(_NODES_AND_HOOKS, node_starts.pop(handle), event)
        for _, place in marks[mark_index:]:
            self._follow(place)

    def _add(self, name: str, start_ns: int, end: Any) -> None:
        place = self._open[-1] if self._open else _OUTSIDE_MODULES
        # A forward that runs again in a pass is a part of the pass.
        if place != _IN_LOADERS and (place == _IN_PASSES or _IN_PASSES not in self._open):
            total = self._totals.setdefault((place, name), [0, 0])
            total[0] += 1
            total[1] += int(end.start_us() * 1e3) - start_ns

    def _follow(self, place: int) -> None:
        if place != _EXIT:
            self._open.append(place)
        elif self._open:
            self._open.pop()


def _end_stopped(_phase: str, _info: object) -> None:
    """End the profiler that this thread runs for a recording that another thread has stopped."""
    for counts in tuple(_running):
        counts.end_late()


def _profiler_affects_torch() -> bool:
    """Return whether a running profiler could change torch's actions: it has compiled code, or uses RPC."""
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    rpc = sys.modules.get("torch._C._distributed_rpc")
    return any(map(callable, [*backends.values()])) or getattr(rpc, "_is_current_rpc_agent_set", bool)()


def _make_wrapper(wrapper: Wrapper) -> Callable[..., Any]:
    @skip_all
    def end_profilers() -> None:
        for counts in tuple(wrapper.observer or ()):
            counts.end_profiler()

    def enable(*args: Any, **kwargs: Any) -> Any:
        end_profilers()
        return wrapper.wrapped(*args, **kwargs)

    return skip_frame(enable)


_PATCH = Patch(
    _make_wrapper,
    tuple(
        PatchTarget(module, name)
        for module in (*map(sys.modules.get, _PROFILER_MODULES), _autograd)
        for name in ("_enable_profiler", "_enable_profiler_legacy")
        if module and name in vars(module)
    ),
)
"""The patch of the functions that start a profiler; its observer is `_running`."""
