"""Backward passes for the Python engine: the state of each thread, the call whose nodes run, and the end of each pass.

torch does not report the end of a pass that raised. The Python stack shows whether a new pass runs inside the previous
pass, or follows a pass that failed.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.compiler import is_dynamo_compiling

from ...ring import Kind, WriteSlot
from ...ring.slot_format import ABANDONED_BIT, CALL_KEY_BITS, CALL_KEY_MASK, KIND_SHIFT, NO_NAME
from ..call_patch import RUN_BACKWARD, Patch, Wrapper
from ..event_sink import NO_GRAPH_TASK, OnError, current_graph_task, current_node
from ..unseen import skip_all, skip_frame, unseen_by_modes
from .segment_hooks import FrameBase, FrameStack

_will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node


def node_runs(ends: Iterable[Sequence[Any]]) -> bool:
    """Return whether the node whose hook calls this will run; if a pass ends at `ends`, maybe only the hook does."""
    node = current_node()
    for inner, _ in () if node is None else node.next_functions:
        # `_will_run` does not work for a leaf.
        leaf = getattr(inner, "variable", None)
        if any(leaf is end for tensors in ends for end in tensors) if leaf is not None else inner and _will_run(inner):
            return True
    return node is None


_RUN_BACKWARD_CODE = torch.autograd.graph._engine_run_backward.__code__


class CallFrame(FrameBase):
    """An open call. The frames of a thread are reused, since making a frame costs as much as writing an event."""

    __slots__ = ("exit_meta", "graph_task", "index_bits", "thread")

    call_id: int

    def __init__(self, thread: "ThreadState", depth: int) -> None:
        super().__init__(depth)
        self.thread = thread
        self.call_id = NO_NAME << CALL_KEY_BITS  # name and call key together
        self.graph_task = -1  # id of the graph task in which the call was entered; -1 outside backward
        self.exit_meta = 0  # first word of the slot of its exit event: kind, thread and name
        self.index_bits = 0  # call index, at its position in the value of a slot


@dataclass(slots=True)
class GraphTask:
    """A graph task that a thread runs."""

    id: int  # torch's id of the graph task
    nesting_depth: int  # value of `backward_nesting_depth` when it started
    call_id: int = -1  # id of the call whose nodes run; -1 before the first node


class ThreadState(FrameStack[CallFrame]):
    """The open calls and the graph tasks of one thread."""

    __slots__ = ("bits", "graph_tasks", "noted_sequence")

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits  # number of the thread, at its position in the first word of a slot
        self.frames = [CallFrame(self, 0)]
        self.graph_tasks: list[GraphTask] = []  # graph tasks that it runs, outermost first
        # The sequence number at the last call that was noted for `CheckpointReruns`; -1 before the first such call.
        self.noted_sequence = -1


_CALL_BACKWARD, _BACKWARD_OVER = Kind.CALL_BACKWARD << KIND_SHIFT, Kind.BACKWARD_OVER << KIND_SHIFT


def backward_nesting_depth() -> int:
    """Return the number of passes that this thread has called and that have not returned; 0 on torch's own threads."""
    count = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        count += frame.f_code is _RUN_BACKWARD_CODE
        frame = frame.f_back
    return count


class GraphTasks:
    """Follows the graph tasks of all threads and writes their events."""

    def __init__(self, write: WriteSlot, thread_state: Callable[[], ThreadState], on_error: OnError) -> None:
        self._write, self._thread_state, self._on_error = write, thread_state, on_error
        self._running: set[int] = set()
        self.active = False  # if False, hooks that living graphs still hold are no-ops

    def make_segment_hook(self, local: Any, ends_early: dict[int, Sequence[Any]]) -> Callable[[int, Tensor], None]:
        """Return the hook function: torch calls it, with the call's id, when the call's nodes start to run."""
        # Every hook runs it, so it is a closure: attributes of an object would cost a tenth more.
        write, begin = self._write, self._begin

        @skip_all
        def on_segment_start(call_id: int, _gradient: Tensor) -> None:
            if not self.active:
                return
            try:
                graph_task_id = current_graph_task()
                try:
                    thread: ThreadState = local.value
                except AttributeError:
                    thread = self._thread_state()
                graph_tasks = thread.graph_tasks
                if not graph_tasks or graph_tasks[-1].id != graph_task_id:
                    if graph_task_id == NO_GRAPH_TASK:
                        return
                    begin(thread, graph_task_id)
                running = graph_tasks[-1]
                if running.call_id != call_id and (not ends_early or node_runs(list(ends_early.values()))):
                    running.call_id = call_id
                    write(
                        _CALL_BACKWARD | thread.bits | call_id >> CALL_KEY_BITS,
                        graph_task_id << CALL_KEY_BITS | call_id & CALL_KEY_MASK,
                    )
            except Exception as error:
                self._on_error(error)

        return on_segment_start

    def _begin(self, thread: ThreadState, graph_task_id: int) -> None:
        graph_tasks, depth = thread.graph_tasks, backward_nesting_depth()
        while (
            graph_tasks
            and graph_tasks[-1].id != graph_task_id
            and (graph_tasks[-1].id not in self._running or graph_tasks[-1].nesting_depth >= depth > 0)
        ):
            self._abandon(thread)
        if graph_tasks and graph_tasks[-1].id == graph_task_id:
            return
        if graph_task_id not in self._running:
            self._running.add(graph_task_id)
            Variable._execution_engine.queue_callback(partial(self._end, graph_task_id))
        graph_tasks.append(GraphTask(graph_task_id, depth))

    def abandon_all(self, thread: ThreadState) -> None:
        """Write the ends of the thread's graph tasks, which ended by an exception: the thread runs none now."""
        while thread.graph_tasks:
            self._abandon(thread)

    def _abandon(self, thread: ThreadState) -> None:
        """Write the end of the thread's last graph task, which ended by an exception: torch has no callback for it."""
        self._write_over(thread, thread.graph_tasks[-1].id, ABANDONED_BIT)
        thread.graph_tasks.pop()

    def end_failed(self, thread: ThreadState, *, is_alone: bool) -> None:
        """Write the ends of the graph tasks of a pass that raised; if `is_alone`, also of those on device threads."""
        if self._running:
            depth = backward_nesting_depth()
            while thread.graph_tasks and thread.graph_tasks[-1].nesting_depth > depth:
                self._write_over(thread, thread.graph_tasks[-1].id)
                thread.graph_tasks.pop()
            for graph_task_id in list(self._running) if is_alone else ():
                self._write_over(thread, graph_task_id)

    def _write_over(self, thread: ThreadState, graph_task_id: int, bit: int = 0) -> None:
        # Write first: after an interrupt in between, the event is written again, and readers use the first.
        if graph_task_id in self._running:
            self._write(_BACKWARD_OVER | thread.bits | NO_NAME, graph_task_id | bit)
            self._running.discard(graph_task_id)

    @skip_all
    def _end(self, graph_task_id: int) -> None:
        if self.active:
            try:
                self._write(_BACKWARD_OVER | self._thread_state().bits | NO_NAME, graph_task_id)
            except Exception as error:
                self._on_error(error)
        self._running.discard(graph_task_id)


_functorch_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level
_PROXY = torch._C._TorchDispatchModeKey.PROXY


@skip_all
def _is_tracing() -> bool:
    """Return whether torch.compile traces now: the pass that it runs on fake tensors is not the user's."""
    return torch._C._get_dispatch_mode(_PROXY) is not None


def make_pass_wrapper(wrapper: Wrapper) -> Callable[..., Any]:
    """Return a wrapper of `_engine_run_backward` that reports each pass to its observer, such as a `PythonEngine`."""

    def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = __traceback_hide__ = True
        engine = wrapper.observer
        if engine is None or is_dynamo_compiling() or _is_tracing():
            return wrapper.wrapped(*args, **kwargs)
        number = engine.next_pass()
        try:
            engine.begin_pass(number, args[:1], args[4] if len(args) > 4 and not kwargs.get("accumulate_grad") else ())
            result = wrapper.wrapped(*args, **kwargs)
            engine.end_pass(number)
            engine.note_gradients(args, kwargs)
            return result
        except BaseException:
            engine.end_pass(number)  # a second call, if an interrupt came after the first, has no effect
            raise

    return skip_frame(_engine_run_backward)


def gives_gradients(args: tuple[Any, ...]) -> bool:
    """Return whether a pass gives gradients to leaves and builds no graph, except the one that `torch.func` drops."""
    if len(args) < 5:
        return False
    inputs = args[4]
    level = _functorch_level()
    with unseen_by_modes():
        has_leaf = not inputs or any(isinstance(tensor, torch.Tensor) and tensor.is_leaf for tensor in inputs)
    return has_leaf and (not args[3] if level is None else level == 1)


PASS_PATCH = Patch(make_pass_wrapper, RUN_BACKWARD)
"""The patch of both modules that hold the function; its observer is a `PythonEngine`."""
