"""Calls of modules with the inputs of an earlier call in the same step."""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from .event_sink import NO_GRAPH_TASK, current_graph_task
from .unseen import unseen_by_modes

_MAX_CALLS = 4_096
"""Maximum number of different calls that are kept for a step."""
_PLAIN = (type(None), bool, int, float, str)
"""Types of inputs that are compared by value; a call with others, whose content may change, is not compared."""


class RepeatedCalls:
    """Counts calls with the inputs of an earlier one in a step, by module. It holds none of the inputs."""

    def __init__(self) -> None:
        self._seen: dict[tuple[object, ...], list[weakref.ref[torch.Tensor]]] = {}
        self._again: dict[int, int] = {}

    def begin(self) -> None:
        """Begin a step."""
        self._seen.clear()
        self._again.clear()

    def forget_inputs(self) -> None:
        """Forget the calls so far: those after a backward pass belong to another loss, whose gradients are added."""
        self._seen.clear()

    def end(self) -> dict[int, int]:
        """Return the number of repeated calls by the id of the module."""
        again = self._again
        self._seen, self._again = {}, {}
        return again

    def note(self, module: object, inputs: tuple[Any, ...]) -> None:
        """Note a call. It counts if an earlier one had its inputs, and no input or first weight was written since."""
        if not isinstance(module, nn.Module) or current_graph_task() != NO_GRAPH_TASK:  # checkpoints run calls again
            return
        # Scripted modules lack these attributes, and weights made in inference mode have no version.
        with unseen_by_modes(), contextlib.suppress(AttributeError, TypeError, RuntimeError):
            tensors = list[torch.Tensor]()
            weights = (
                weight._version
                for part in _with_inner(module)
                for weight in [*part._parameters.values()]
                if weight is not None
            )
            key: list[object] = [id(module), torch.is_grad_enabled(), next(weights, None)]
            for value in _flat(inputs):
                # Parameters are left out: torch does not swap tensors to which there are weak references.
                if type(value) is torch.Tensor and not value.is_inference():
                    tensors.append(value)
                    key += [id(value), value._version]
                elif type(value) in _PLAIN:
                    key += [type(value), value]
                else:
                    return
            if not tensors:
                return
            known = self._seen.get(call := tuple(key))
            if known is not None and all(ref() is one for ref, one in zip(known, tensors, strict=True)):
                self._again[id(module)] = self._again.get(id(module), 0) + (not _drops(module))
            elif len(self._seen) < _MAX_CALLS:
                self._seen[call] = [*map(weakref.ref, tensors)]


def _flat(inputs: tuple[Any, ...]) -> Iterator[Any]:
    for value in inputs:
        if type(value) is tuple:
            yield from _flat(value)
        else:
            yield value


def _with_inner(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and those inside it, without calling the user's code."""
    found, waiting = set[int](), [module]
    while waiting:
        one = waiting.pop()
        if id(one) not in found:
            found.add(id(one))
            yield one
            waiting += [inner for inner in [*one._modules.values()] if inner is not None]


def _drops(module: nn.Module) -> bool:
    return any(isinstance(one, _DropoutNd) and one.training and one.p > 0 for one in _with_inner(module))
