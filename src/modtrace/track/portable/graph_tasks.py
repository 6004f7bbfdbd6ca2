"""Writing the backward events of the portable engine: whose nodes run now, and the ends of graph tasks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from ...ring import Kind, WriteSlot
from ...ring.slot_format import ABANDONED_BIT, CALL_KEY_BITS, CALL_KEY_MASK, KIND_SHIFT, NO_NAME
from ..event_sink import OnError
from ..skip_dynamo import skip_all
from .pass_depth import backward_nesting_depth
from .thread_state import NO_CALL_ID, GraphTask, ThreadState

__all__ = ["NO_GRAPH_TASK", "GraphTasks", "current_graph_task"]

current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
NO_GRAPH_TASK = -1
"""What `current_graph_task` returns outside of backward."""

_CALL_BACKWARD, _BACKWARD_OVER = Kind.CALL_BACKWARD << KIND_SHIFT, Kind.BACKWARD_OVER << KIND_SHIFT


class GraphTasks:
    """Follows the graph tasks of all threads and writes their events.

    Args:
        write: writes an event.
        thread_state: returns the state of the thread that calls.
        on_error: called with what went wrong inside.

    Attributes:
        active: False makes the hooks that live graphs still hold no-ops.
    """

    def __init__(self, write: WriteSlot, thread_state: Callable[[], ThreadState], on_error: OnError) -> None:
        self._write = write
        self._thread_state = thread_state
        self._on_error = on_error
        self._running: set[int] = set()
        self.active = False

    def make_segment_hook(self, local: Any) -> Callable[[int, Tensor], None]:
        """Return what is called with a call's id when its nodes start to run; `local.thread` is a thread's state."""
        # Run for every hook, and so a closure: what it looks up on itself is a tenth of its cost.
        write, begin = self._write, self._begin

        @skip_all
        def on_segment_start(call_id: int, _gradient: Tensor) -> None:
            if not self.active:
                return
            try:
                graph_task_id = current_graph_task()
                try:
                    thread: ThreadState = local.thread
                except AttributeError:
                    thread = self._thread_state()
                graph_tasks = thread.graph_tasks
                if not graph_tasks or graph_tasks[-1].id != graph_task_id:
                    if graph_task_id == NO_GRAPH_TASK:
                        return
                    begin(thread, graph_task_id)
                running = graph_tasks[-1]
                if running.call_id != call_id:
                    running.call_id = call_id
                    write(
                        _CALL_BACKWARD | thread.bits | call_id >> CALL_KEY_BITS,
                        graph_task_id << CALL_KEY_BITS | call_id & CALL_KEY_MASK,
                    )
            except Exception as error:
                self._on_error(error)

        return on_segment_start

    def begin_compiled(self, thread: ThreadState) -> None:
        """Write that the whole backward of the thread's last outermost call begins: compiled autograd runs it."""
        call_id = thread.last_call_id
        if call_id != NO_CALL_ID:
            self._write(
                _CALL_BACKWARD | thread.bits | call_id >> CALL_KEY_BITS,
                current_graph_task() << CALL_KEY_BITS | call_id & CALL_KEY_MASK,
            )

    def end_compiled(self, thread: ThreadState) -> None:
        """Write that it is over."""
        if thread.last_call_id != NO_CALL_ID:
            self._write(_BACKWARD_OVER | thread.bits | NO_NAME, current_graph_task())

    def end_all(self, thread: ThreadState) -> None:
        """Write the ends of a thread's graph tasks; called outside of backward, so they ended by an exception."""
        while thread.graph_tasks:
            self._abandon(thread)

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

    def _abandon(self, thread: ThreadState) -> None:
        """Write the end of the thread's last graph task, which ended by an exception: for these torch calls nobody."""
        graph_task_id = thread.graph_tasks[-1].id
        # Written first: where an interrupt comes in between it is written again, and the first one counts.
        if graph_task_id in self._running:
            self._write(_BACKWARD_OVER | thread.bits | NO_NAME, graph_task_id | ABANDONED_BIT)
            self._running.discard(graph_task_id)
        thread.graph_tasks.pop()

    @skip_all
    def _end(self, graph_task_id: int) -> None:
        if self.active:
            try:
                self._write(_BACKWARD_OVER | self._thread_state().bits | NO_NAME, graph_task_id)
            except Exception as error:
                self._on_error(error)
        self._running.discard(graph_task_id)
