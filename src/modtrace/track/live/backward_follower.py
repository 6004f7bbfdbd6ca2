"""The backward half of following: the call whose nodes run, and the user's hooks around its backward."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from ..portable.backward_hooks import SegmentHooks
from ..portable.graph_tasks import NO_GRAPH_TASK, current_graph_task
from ..portable.pass_depth import backward_nesting_depth
from .state import Call, LiveGraphTask, LiveThread

__all__ = ["BackwardFollower", "Hook"]

_current_node: Callable[[], Any] = torch._C._current_autograd_node

Hook = Callable[..., object]


class BackwardFollower(SegmentHooks):
    """Knows, on the thread that asks, the calls whose backward runs.

    Args:
        follow_graphs_after_exit: when not `active` any more, still follow the backward of graphs made before.

    Attributes:
        active: whether it follows.
        pre_bw: called with (module or None, gradients of outputs) when the backward of a call began.
        post_bw: called with (module or None, gradients of inputs) when all gradients of its inputs are known, at the
            latest when its backward ends.
    """

    def __init__(self, follow_graphs_after_exit: bool) -> None:
        self._local = threading.local()
        self._running: dict[int, list[LiveGraphTask]] = {}
        self._follow_graphs_after_exit = follow_graphs_after_exit
        self.on_segment_start = self._on_node
        self.active = False
        self.pre_bw: Hook | None = None
        self.post_bw: Hook | None = None

    def _thread(self) -> LiveThread:
        try:
            thread: LiveThread = self._local.thread
        except AttributeError:
            thread = self._local.thread = LiveThread()
        return thread

    def backward_calls(self, thread: LiveThread) -> Iterator[Call]:
        """Yield the calls whose backward runs on this thread, innermost first."""
        if not thread.graph_tasks or current_graph_task() == NO_GRAPH_TASK:
            return
        last = thread.graph_tasks[-1]
        for task in reversed(thread.graph_tasks):
            if task.call is not None and not task.ended and (task is last or task.nesting_depth < last.nesting_depth):
                yield from task.call.chain()

    def _on_node(self, call: Call | None, gradient: Tensor) -> None:
        if not (self.active or self._follow_graphs_after_exit):
            return
        thread = self._thread()
        graph_task_id = current_graph_task()
        if not thread.graph_tasks or thread.graph_tasks[-1].id != graph_task_id:
            if graph_task_id == NO_GRAPH_TASK:
                return
            self._begin_graph_task(thread, graph_task_id)
        task = thread.graph_tasks[-1]
        if task.call is not call:
            if self.pre_bw is None and self.post_bw is None:
                task.call = call
            else:
                self._switch_call(task, call, gradient)

    def _begin_graph_task(self, thread: LiveThread, graph_task_id: int) -> None:
        tasks, depth = thread.graph_tasks, backward_nesting_depth()
        # The engine's own threads run tasks by turns. On others one runs inside of another or follows it, also where
        # the one before ended by an exception; for that the engine calls nobody.
        tasks[:] = [
            task
            for task in tasks
            if not task.ended and (task.id == graph_task_id or task.nesting_depth < depth or depth == 0)
        ]
        for task in tasks:
            if task.id == graph_task_id:
                tasks.remove(task)
                tasks.append(task)
                return
        task = LiveGraphTask(graph_task_id, depth)
        tasks.append(task)
        running = self._running.get(graph_task_id)
        if running is None:
            self._running[graph_task_id] = [task]
            Variable._execution_engine.queue_callback(partial(self._end_graph_task, graph_task_id))
        else:
            running.append(task)

    def _end_graph_task(self, graph_task_id: int) -> None:
        thread = self._thread()
        for task in self._running.pop(graph_task_id, ()):
            if task not in thread.graph_tasks:
                # It ran on another thread; the user's hooks are called on this one, and find its calls open.
                thread.graph_tasks.append(task)
            while task.call is not None:
                self._end_backward(task, None)
            task.ended = True
        thread.graph_tasks[:] = [task for task in thread.graph_tasks if not task.ended]

    def _switch_call(self, task: LiveGraphTask, call: Call | None, gradient: Tensor) -> None:
        """End the backward of calls that are not around `call`, and begin that of those that are."""
        around = set() if call is None else set(call.chain())
        while task.call is not None and task.call not in around:
            self._end_backward(task, gradient)
        opening: list[Call] = []
        while call is not task.call:
            assert call is not None
            opening.append(call)
            call = call.outer
        for inner in reversed(opening):
            task.call = inner
            if self.pre_bw is not None:
                self.pre_bw(inner.module(), (gradient,))

    def _end_backward(self, task: LiveGraphTask, gradient: Tensor | None) -> None:
        call = task.call
        assert call is not None
        known = task.gradients.pop(call, None)
        if call not in task.notified and self.post_bw is not None:
            if gradient is not None and call.inputs:
                # The node that runs now can be the one whose gradient was waited for.
                running_edge = (_current_node()._sequence_nr(), 0)
                known = [gradient if edge == running_edge else None for edge in call.inputs] if known is None else known
            self.post_bw(call.module(), () if known is None else (known,))
        task.notified.discard(call)
        task.call = call.outer

    def on_input_gradient(self, call: Call, index: int, gradient: Tensor) -> None:
        """Take the gradient of `call.inputs[index]`; with the last of them `post_bw` is called."""
        tasks = self._thread().graph_tasks
        if self.post_bw is None or not tasks or tasks[-1].id != current_graph_task():
            return
        task = tasks[-1]
        if task.call is None or call in task.notified or call not in set(task.call.chain()):
            return
        known = task.gradients.setdefault(call, [None] * len(call.inputs))
        known[index] = gradient
        if all(value is not None for value in known):
            task.notified.add(call)
            del task.gradients[call]
            self.post_bw(call.module(), (known,))
