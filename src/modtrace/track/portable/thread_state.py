"""What the portable engine knows of a thread: its open calls, and the graph tasks it runs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from torch import nn

from ...ring.slot_format import CALL_KEY_BITS, NO_NAME
from .backward_hooks import FrameBase, FrameStack, Segments, make_hook_tensor

__all__ = ["NO_CALL_ID", "CallFrame", "GraphTask", "ThreadState"]

NO_CALL_ID = NO_NAME << CALL_KEY_BITS
"""The call id of what is around all calls."""
_MAX_OUTSIDE_SEGMENTS = 1024


class CallFrame(FrameBase):
    """An open call. The frames of a thread are used again, since making one costs as much as writing an event.

    Attributes:
        thread: the thread it runs on.
        module: None for the frame around all calls, and for one that is not in use.
        name: id of its name.
        call_id: name and call key together.
        graph_task: the graph task that runs where it was entered; -1 outside of backward.
        exit_meta: kind, thread and name of its exit, as a slot's first word has them.
        index_bits: its call index, where a slot's value has it.
    """

    __slots__ = ("exit_meta", "graph_task", "index_bits", "module", "name", "thread")

    call_id: int

    def __init__(self, thread: ThreadState, depth: int) -> None:
        super().__init__(depth)
        self.thread = thread
        self.module: nn.Module | None = None
        self.name = NO_NAME
        self.call_id = NO_CALL_ID
        self.graph_task = -1
        self.exit_meta = self.index_bits = 0


@dataclass(slots=True)
class GraphTask:
    """A graph task that a thread runs.

    Attributes:
        id: its id, as torch has it.
        call_id: the call whose nodes run; -1 before the first.
        nesting_depth: `backward_nesting_depth` where it runs.
    """

    id: int
    nesting_depth: int
    call_id: int = -1


class ThreadState(FrameStack[CallFrame]):
    """What one thread is doing.

    Attributes:
        bits: its id, where a slot's first word has it.
        outside_segments: segments of nodes that were made outside of all calls and that no pass ran yet; the last ones.
        graph_tasks: those it runs, outermost first.
        last_call_id: the outermost call that made nodes last; `NO_CALL_ID` before the first.
        noted_sequence: the sequence number at the last call that was noted for `CheckpointReruns`; -1 before the first.
        hook_tensor: an empty tensor that carries a hook to the node it is registered on.
    """

    __slots__ = ("bits", "graph_tasks", "hook_tensor", "last_call_id", "noted_sequence", "outside_segments")

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.frames = [CallFrame(self, 0)]
        self.stack_depth = 0
        self.outside_segments: Segments = deque(maxlen=_MAX_OUTSIDE_SEGMENTS)
        self.graph_tasks: list[GraphTask] = []
        self.last_call_id = NO_CALL_ID
        self.noted_sequence = -1
        self.hook_tensor = make_hook_tensor()
