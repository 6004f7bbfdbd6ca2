"""Which autograd nodes to hook, so that one is told whose nodes run: the newest of each stretch one call made itself.

Nodes of one thread's graph run in descending order of their sequence numbers, so the newest node of a stretch is the
first of it that runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch import Tensor
from torch.autograd.graph import Node

from ..tensors import tensors_in

__all__ = ["StretchFrame", "StretchHooks", "node_of"]

_LONGEST_WALK = 20_000


class StretchFrame:
    """An open call, or what is around all calls of a thread.

    Attributes:
        code: what the hooks on its nodes are told.
        height: how many frames lie below it; 0 for what is around all calls.
        first: the thread's sequence number at enter.
        segment: the sequence number from which on nodes are its own, since its last inner call.
        pending: stretches of own nodes whose newest one is not found yet.
    """

    __slots__ = ("code", "first", "height", "pending", "segment")

    code: Any

    def __init__(self, height: int) -> None:
        self.height = height
        self.first = self.segment = 0
        self.pending: list[tuple[int, int]] = []


class _Carries(Protocol):
    """A thread's state: `carrier` is an empty tensor that carries a hook to the node it is registered on."""

    @property
    def carrier(self) -> Tensor: ...


class StretchHooks:
    """Hooks few nodes: `_when_reached(code, gradient)` is called when nodes of the call with this code begin to run."""

    _when_reached: Callable[[Any, Tensor], None]

    def _end_segment(self, thread: _Carries, frame: StretchFrame, values: object, sequence: int) -> None:
        """End the stretch of `frame`'s own nodes; the newest is most often the node of a tensor in `values`."""
        first, newest, found = frame.segment, sequence - 1, False
        frame.segment = sequence
        if type(values) is tuple and len(values) == 1:
            values = values[0]
        # Most often it is one tensor; the general walk costs more than all else here.
        for tensor in (values,) if isinstance(values, Tensor) else tensors_in(values):
            try:
                node = tensor.grad_fn
            except RuntimeError:
                # A view whose base was changed in place can refuse to say.
                continue
            if node is not None and first <= (number := node._sequence_nr()) <= newest:
                # `node.register_prehook` makes a removable handle, which is most of its cost; a tensor's own
                # dictionary of hooks registers on the node at a third of it.
                carrier = thread.carrier
                carrier._backward_hooks = {0: partial(self._when_reached, frame.code)}
                node._register_hook_dict(carrier)
                found = found or number == newest
        if not found and frame.height:
            frame.pending.append((first, newest))

    def _walk(self, thread: _Carries, frame: StretchFrame, output: object) -> None:
        """Look for the newest node of each pending stretch in the graph behind `output`."""
        best: dict[int, tuple[int, Node]] = {}
        seen: set[Node] = set()
        todo = [node for tensor in tensors_in(output) if (node := node_of(tensor)) is not None]
        while todo and len(seen) < _LONGEST_WALK:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            number = node._sequence_nr()
            if number < frame.first:
                continue
            for index, (first, newest) in enumerate(frame.pending):
                if first <= number <= newest and (index not in best or best[index][0] < number):
                    best[index] = (number, node)
            todo.extend(inner for inner, _ in node.next_functions if inner is not None)
        for _, node in best.values():
            self._hook(thread, node, frame.code)

    def _hook(self, thread: _Carries, node: Node, code: Any) -> None:
        # `node.register_prehook` makes a removable handle, which is most of its cost; a tensor's own dictionary of
        # hooks registers on the node at a third of it.
        carrier = thread.carrier
        carrier._backward_hooks = {0: partial(self._when_reached, code)}
        node._register_hook_dict(carrier)


def node_of(tensor: Tensor) -> Node | None:
    """Return the node that made `tensor`, None where there is none or it cannot be said."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        # A view whose base was changed in place can refuse to say.
        return None
