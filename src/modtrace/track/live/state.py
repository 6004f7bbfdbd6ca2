"""The state of the live trackers: calls as the graph remembers them, and what each thread is doing."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import Tensor, nn

from ...ring.slot_format import NO_NAME
from ..portable.backward_hooks import FrameBase, FrameStack, make_hook_tensor

__all__ = ["Call", "GradientEdge", "LiveFrame", "LiveGraphTask", "LiveThread"]

GradientEdge = tuple[int, int]
"""Where an input's gradient comes from: its node's sequence number (-1 for a leaf), and which output of it."""


class Call:
    """One call of a module, as the graph remembers it; it keeps neither the module nor a tensor alive.

    Attributes:
        name: the fully qualified name.
        module: whose call it is.
        outer: the call around it.
        depth: how many calls are around it.
        inputs: where the gradients come from that are waited for.
    """

    __slots__ = ("__weakref__", "depth", "inputs", "module", "name", "outer")

    def __init__(self, name: str, module: weakref.ref[nn.Module], outer: Call | None) -> None:
        self.name = name
        self.module = module
        self.outer = outer
        self.depth: int = 0 if outer is None else outer.depth + 1
        self.inputs: list[GradientEdge] = []

    def chain(self) -> Iterator[Call]:
        """Yield the call and those around it."""
        call: Call | None = self
        while call is not None:
            yield call
            call = call.outer


class LiveFrame(FrameBase):
    """An open call; the frames of a thread are used again.

    Attributes:
        thread: the thread it runs on.
        module: None for the frame around all calls, and for one that is not in use.
        name: id of its name.
        call_id: the call; None as `module`.
    """

    __slots__ = ("module", "name", "thread")

    call_id: Call | None

    def __init__(self, thread: LiveThread, depth: int) -> None:
        super().__init__(depth)
        self.thread = thread
        self.module: nn.Module | None = None
        self.name = NO_NAME
        self.call_id = None


class LiveGraphTask:
    """What one thread does for one graph task.

    Attributes:
        id: its id, as torch has it.
        nesting_depth: `backward_nesting_depth` where it runs.
        call: the call whose nodes run, None between calls.
        ended: whether the graph task has ended.
        notified: the open calls whose `post_bw` hook was called already, since their input gradients are known.
        gradients: the gradients known so far of open calls that wait for others.
    """

    __slots__ = ("call", "ended", "gradients", "id", "nesting_depth", "notified")

    def __init__(self, graph_task_id: int, nesting_depth: int) -> None:
        self.id = graph_task_id
        self.nesting_depth = nesting_depth
        self.call: Call | None = None
        self.ended = False
        self.notified: set[Call] = set()
        self.gradients: dict[Call, list[Tensor | None]] = {}


class LiveThread(FrameStack[LiveFrame]):
    """What one thread is doing.

    Attributes:
        graph_tasks: the last one runs, those before it are around it or run by turns with it.
        hook_tensor: an empty tensor that carries a hook to the node it is registered on.
    """

    __slots__ = ("graph_tasks", "hook_tensor")

    def __init__(self) -> None:
        self.frames = [LiveFrame(self, 0)]
        # Nodes from before belong to no call, as those between outermost calls do.
        self.frames[0].segment_start_seq = 0
        self.stack_depth = 0
        self.graph_tasks: list[LiveGraphTask] = []
        self.hook_tensor = make_hook_tensor()
