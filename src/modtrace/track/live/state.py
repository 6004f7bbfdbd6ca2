"""What the live trackers know: calls as the graph remembers them, and what each thread is doing."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ...ring.slot_format import NO_NAME
from ..portable.backward_hooks import StretchFrame

__all__ = ["Call", "Frame", "InputPlace", "Task", "Thread"]

InputPlace = tuple[int, int]
"""Where an input's gradient comes from: its node's sequence number (-1 for a leaf), and which output of it."""


class Call:
    """One call of a module, as the graph remembers it; it keeps neither the module nor a tensor alive.

    Attributes:
        name: the fully qualified name.
        module: whose call it is.
        outer: the call around it.
        depth: how many calls are around it.
        inputs: the inputs whose gradients are waited for.
    """

    __slots__ = ("__weakref__", "depth", "inputs", "module", "name", "outer")

    def __init__(self, name: str, module: weakref.ref[nn.Module], outer: Call | None) -> None:
        self.name = name
        self.module = module
        self.outer = outer
        self.depth: int = 0 if outer is None else outer.depth + 1
        self.inputs: list[InputPlace] = []

    def chain(self) -> Iterator[Call]:
        """Yield the call and those around it."""
        call: Call | None = self
        while call is not None:
            yield call
            call = call.outer


class Frame(StretchFrame):
    """An open call; the frames of a thread are used again.

    Attributes:
        thread: the thread it runs on.
        module: None for the frame around all calls, and for one that is not in use.
        name: the number of its name.
    """

    __slots__ = ("module", "name", "thread")

    code: Call | None

    def __init__(self, thread: Thread, height: int) -> None:
        super().__init__(height)
        self.thread = thread
        self.module: nn.Module | None = None
        self.name = NO_NAME
        self.code = None


class Task:
    """What one thread does for one graph task.

    Attributes:
        number: the graph task.
        passes: `passes_around` where it runs.
        call: the call whose nodes run, None between calls.
        over: the task has ended.
        told: the open calls of which the user has heard already that their input gradients are known.
        gradients: those known of the open calls that wait for others.
    """

    __slots__ = ("call", "gradients", "number", "over", "passes", "told")

    def __init__(self, number: int, passes: int) -> None:
        self.number = number
        self.passes = passes
        self.call: Call | None = None
        self.over = False
        self.told: set[Call] = set()
        self.gradients: dict[Call, list[Tensor | None]] = {}


class Thread:
    """What one thread is doing.

    Attributes:
        frames: its frames, outermost first; the bottom one is around all calls.
        height: the place of the innermost open call's frame.
        tasks: its graph tasks; the last one runs, those before it are around it or run by turns with it.
        carrier: an empty tensor that carries a hook to the node it is registered on.
    """

    __slots__ = ("carrier", "frames", "height", "tasks")

    def __init__(self) -> None:
        self.frames = [Frame(self, 0)]
        self.frames[0].segment = torch._C._autograd._get_sequence_nr()
        self.height = 0
        self.tasks: list[Task] = []
        self.carrier = torch.empty(0)
