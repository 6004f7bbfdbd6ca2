"""Hooks on the inputs of calls: called when the inputs' gradients are known."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor

from ..._weak_map import WeakMap
from ..portable.backward_hooks import node_of
from ..tensors import tensors_in
from .state import Call, GradientEdge

__all__ = ["InputHooks"]

_MIN_PRUNE_LENGTH = 8
"""How many calls wait on a tensor before those that are dead are removed."""

OnGradient = Callable[[Call, int, Tensor], None]


class InputHooks:
    """Waits for gradients, with one hook on each tensor however many calls it goes into.

    Args:
        on_gradient: called with a call, the index in `Call.inputs`, and the gradient.
    """

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
        self.edge = edge
        self._on_gradient = on_gradient
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
