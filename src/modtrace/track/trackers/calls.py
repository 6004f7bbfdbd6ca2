"""The state of the trackers: calls that the graph keeps, the open calls of each thread, hooks on inputs of calls."""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn

from ..._interrupts import WeakMap
from ..python.segment_hooks import FrameBase, FrameStack, node_of
from ..unseen import tensors_in

GradientEdge = tuple[int, int]
"""The source of an input's gradient: its node's sequence number (-1 for a leaf), and the index of the node's output."""


class Call:
    """A call of a module, which the graph keeps; it does not keep the module or a tensor alive."""

    __slots__ = ("__weakref__", "inputs", "module", "name", "outer")

    def __init__(self, name: str, module: weakref.ref[nn.Module], outer: "Call | None") -> None:
        self.name = name
        self.module = module  # the called module
        self.outer = outer  # the call around it
        self.inputs: list[GradientEdge] = []  # the sources of the gradients that `post_bw` waits for

    def chain(self) -> "Iterator[Call]":
        """Yield the call and the calls around it, innermost first."""
        call: Call | None = self
        while call is not None:
            yield call
            call = call.outer


class LiveFrame(FrameBase):
    """An open call; the frames of a thread are reused."""

    __slots__ = ("thread",)

    call_id: Call | None

    def __init__(self, thread: "LiveThread", depth: int) -> None:
        super().__init__(depth)
        self.thread = thread
        self.call_id = None  # the call; None if `module` is None


@dataclass(slots=True, eq=False)
class LiveGraphTask:
    """The part of a graph task that runs on one thread."""

    id: int  # torch's id of the graph task
    nesting_depth: int  # value of `backward_nesting_depth` when it started
    call: Call | None = None  # call whose nodes run; None between calls
    has_ended: bool = False  # whether the graph task has ended
    # The open calls whose `post_bw` hook was called already, since all their input gradients were known.
    notified: set[Call] = field(default_factory=set)
    # The input gradients of other open calls; None for a gradient that is not known yet.
    gradients: dict[Call, list[Tensor | None]] = field(default_factory=dict)


class LiveThread(FrameStack[LiveFrame]):
    """The open calls and the graph tasks of one thread."""

    __slots__ = ("graph_tasks",)

    def __init__(self) -> None:
        super().__init__()
        self.frames = [LiveFrame(self, 0)]
        # Earlier nodes belong to no call, like the nodes between outermost calls.
        self.frames[0].segment_start_seq = 0
        # The last task runs; earlier tasks are around it, or take turns with it.
        self.graph_tasks: list[LiveGraphTask] = []


_MIN_PRUNE_LENGTH = 8
"""Minimum number of calls that wait on a tensor before the dead calls are removed."""

OnGradient = Callable[[Call, int, Tensor], None]


class InputHooks:
    """Waits for gradients, with one hook on each tensor, whatever the number of its calls."""

    def __init__(self, on_gradient: OnGradient) -> None:
        self._on_gradient = on_gradient
        self._hooks: WeakMap[Tensor, _InputHook] = WeakMap()

    def wait(self, call: Call, inputs: object) -> None:
        """Wait for the gradients of the tensors in the inputs of `call`."""
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
    """The hook on one tensor. An input can live for many steps; the calls that got it do not."""

    def __init__(self, on_gradient: OnGradient, edge: GradientEdge) -> None:
        self.edge, self._on_gradient = edge, on_gradient
        self._waiting_calls: list[tuple[weakref.ref[Call], int]] = []
        self._prune_length = _MIN_PRUNE_LENGTH

    def add(self, call: Call) -> None:
        if len(self._waiting_calls) >= self._prune_length:
            self._waiting_calls = [entry for entry in self._waiting_calls if entry[0]() is not None]
            self._prune_length = max(_MIN_PRUNE_LENGTH, 2 * len(self._waiting_calls))
        self._waiting_calls.append((weakref.ref(call), len(call.inputs)))
        call.inputs.append(self.edge)

    def __call__(self, gradient: Tensor) -> None:
        for ref, index in list(self._waiting_calls):
            call = ref()
            if call is not None:
                self._on_gradient(call, index, gradient)
