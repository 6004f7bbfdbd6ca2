"""The state of the trackers: calls as the graph remembers them, the work of each thread, hooks on inputs of calls."""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn

from ..._interrupts import WeakMap
from ..python.segment_hooks import FrameBase, FrameStack, node_of
from ..unseen import tensors_in

GradientEdge = tuple[int, int]
"""Where an input's gradient comes from: its node's sequence number (-1 for a leaf), and which output of it."""


class Call:
    """One call of a module, as the graph remembers it; it keeps neither the module nor a tensor alive."""

    __slots__ = ("__weakref__", "inputs", "module", "name", "outer")

    def __init__(self, name: str, module: weakref.ref[nn.Module], outer: "Call | None") -> None:
        self.name = name
        self.module = module  # whose call it is
        self.outer = outer  # the call around it
        self.inputs: list[GradientEdge] = []  # where the gradients come from that are waited for

    def chain(self) -> "Iterator[Call]":
        """Yield the call and those around it."""
        call: Call | None = self
        while call is not None:
            yield call
            call = call.outer


class LiveFrame(FrameBase):
    """An open call; the frames of a thread are used again."""

    __slots__ = ("thread",)

    call_id: Call | None

    def __init__(self, thread: "LiveThread", depth: int) -> None:
        super().__init__(depth)
        self.thread = thread
        self.call_id = None  # the call; None as `module`


@dataclass(slots=True, eq=False)
class LiveGraphTask:
    """The part of a graph task that runs on one thread."""

    id: int  # as torch has it
    nesting_depth: int  # `backward_nesting_depth` where it runs
    call: Call | None = None  # whose nodes run; None between calls
    ended: bool = False  # whether the graph task has ended
    # The open calls whose `post_bw` hook was called already, since their input gradients are known.
    notified: set[Call] = field(default_factory=set)
    # The gradients known so far of open calls that wait for others.
    gradients: dict[Call, list[Tensor | None]] = field(default_factory=dict)


class LiveThread(FrameStack[LiveFrame]):
    """The open calls and the graph tasks of one thread."""

    __slots__ = ("graph_tasks",)

    def __init__(self) -> None:
        super().__init__()
        self.frames = [LiveFrame(self, 0)]
        # Nodes from before belong to no call, as those between outermost calls do.
        self.frames[0].segment_start_seq = 0
        # The last one runs, those before it are around it or run by turns with it.
        self.graph_tasks: list[LiveGraphTask] = []


_MIN_PRUNE_LENGTH = 8
"""How many calls wait on a tensor before those that are dead are removed."""

OnGradient = Callable[[Call, int, Tensor], None]


class InputHooks:
    """Waits for gradients, with one hook on each tensor however many calls it goes into."""

    def __init__(self, on_gradient: OnGradient) -> None:
        self._on_gradient = on_gradient
        self._hooks: WeakMap[Tensor, _InputHook] = WeakMap()

    def wait(self, call: Call, inputs: object) -> None:
        """Wait for the gradients of the tensors in what goes into `call`."""
        for tensor in tensors_in(inputs):
            if not tensor.requires_grad:
                continue
            node = node_of(tensor)
            edge = (-1 if node is None else node._sequence_nr(), tensor.output_nr)
            hook = self._hooks.get(tensor)
            # An in-place operation gives a tensor another node; hooks stay on the old one.
            if hook is None or hook.edge != edge:
                hook = self._hooks[tensor] = _InputHook(self._on_gradient, edge)
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]
            hook.add(call)


class _InputHook:
    """The hook on one tensor. Inputs can live on from step to step; the calls that they went into do not."""

    def __init__(self, on_gradient: OnGradient, edge: GradientEdge) -> None:
        self.edge, self._on_gradient = edge, on_gradient
        self._waiting: list[tuple[weakref.ref[Call], int]] = []
        self._prune_length = _MIN_PRUNE_LENGTH

    def add(self, call: Call) -> None:
        if len(self._waiting) >= self._prune_length:
            self._waiting = [entry for entry in self._waiting if entry[0]() is not None]
            self._prune_length = max(_MIN_PRUNE_LENGTH, 2 * len(self._waiting))
        self._waiting.append((weakref.ref(call), len(call.inputs)))
        call.inputs.append(self.edge)

    def __call__(self, gradient: Tensor) -> None:
        for ref, index in list(self._waiting):
            call = ref()
            if call is not None:
                self._on_gradient(call, index, gradient)
