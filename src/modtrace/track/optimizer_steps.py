"""Training steps, told by the optimizers that step."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

__all__ = ["OptimizerSteps"]

_STEP_CODE = Optimizer.profile_hook_step(lambda: None).__code__
"""Of what torch puts around the `step` of each class of optimizers, and calls the hooks from."""


class OptimizerSteps:
    """Tells which training step each optimizer step belongs to.

    A training step lasts until one of its optimizers steps again, and ends with the last optimizer step before that. So
    gradients accumulated over several backward passes are one step, the two optimizers of a GAN share one, and where
    one optimizer steps five times as often as another, each of its steps is one. A step is over, too, where one of its
    optimizers is gone, and where all have stepped that did in the step before and another one comes. An optimizer that
    another one steps inside its own `step` does not count.

    Args:
        on_step: called after each optimizer step that counts, with the number of the training step it belongs to, from
            0, and whether that is complete, as far as can be told now: all optimizers have stepped that did in the step
            before; in the first step, all that there are.
    """

    def __init__(self, on_step: Callable[[int, bool], None]) -> None:
        self._on_step = on_step
        self._step = 0
        self._stepped: dict[int, weakref.ref[Optimizer]] = {}
        self._usual: set[int] | None = None
        self._complete = False
        self._hook: Any = None

    def start(self) -> None:
        """Begin."""
        self._hook = register_optimizer_step_post_hook(self._after_step)

    def stop(self) -> None:
        """End. What an interrupt came into can be done again."""
        hook, self._on_step = self._hook, _ignore
        if hook is not None:
            hook.remove()
            self._hook = None

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        if is_compiling() or _is_nested():
            return
        key, stepped = id(optimizer), self._stepped
        another = self._is_foreign(key) or any(other() is None for other in stepped.values())
        if another or key in stepped:
            # Where others come, nothing is known of which step together.
            self._usual = None if another else set(stepped)
            self._stepped = stepped = {}
            self._step += 1
        stepped[key] = weakref.ref(optimizer)
        if self._usual is None:
            complete = all(id(other) in stepped for other in _others(optimizer))
        else:
            complete = stepped.keys() >= self._usual
        self._complete = complete
        self._on_step(self._step, complete)

    def _is_foreign(self, key: int) -> bool:
        """Whether the step is complete, and this optimizer took no part in the one before."""
        return self._complete and (self._usual is None or key not in self._usual)


def _ignore(_step: int, _complete: bool) -> None:
    """Stand in for the callback of one that was stopped, and whose hook an interrupt has left behind."""


def _is_nested() -> bool:
    """Whether the optimizer whose hook runs is stepped inside the step of another one."""
    steps = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        steps += frame.f_code is _STEP_CODE
        frame = frame.f_back
    return steps > 1


def _others(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield the other optimizers that are alive, have parameters of their own, and whose steps torch tells of."""
    own = {id(parameter) for parameter in _parameters(optimizer)}
    for other in gc.get_objects():
        if (
            issubclass(type(other), Optimizer)
            and other is not optimizer
            and getattr(type(other).step, "hooked", False)
            and not any(id(parameter) in own for parameter in _parameters(other))
        ):
            yield other


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]
