"""Changes that are put into a model: a module that takes longer, recomputes, is called twice or is called otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["Slowness", "called_twice", "recomputed", "renamed", "slowed"]


@dataclass
class Slowness:
    """The shares of its own CPU time by which a module takes longer; a busy machine does not change them.

    Attributes:
        forward: 0.1: 10 % more in forward.
        backward: the same in backward.
        forward_ns: CPU time of each forward.
        backward_ns: CPU time of each backward.
    """

    forward: float = 0.0
    backward: float = 0.0
    forward_ns: list[int] = field(default_factory=list)
    backward_ns: list[int] = field(default_factory=list)


def _clock_ns() -> int:
    moments = [time.thread_time_ns() for _ in range(1_000)]
    return (moments[-1] - moments[0]) // len(moments)


_CLOCK_NS = _clock_ns()
"""Time in ns to read the CPU clock; a wait of no time reads it once too."""


def _spin(begun_ns: int, share: float, took_ns: list[int]) -> None:
    """Note the CPU time since `begun_ns`, and be busy for a share of it."""
    own_ns = time.thread_time_ns() - begun_ns
    took_ns.append(own_ns)
    # What this function itself takes is not a part of that share: without a share it takes as long.
    extra_ns = round(share * own_ns) + (_CLOCK_NS if share else 0)
    until = time.thread_time_ns() + extra_ns
    while time.thread_time_ns() < until:
        pass


class _FirstInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, begun_ns: list[int]) -> Tensor:
        ctx.begun_ns = begun_ns
        # What follows may change it in place, which autograd does not allow on a view.
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.begun_ns.append(time.thread_time_ns())
        return grads[0], None


class _LastInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, begun_ns: list[int], slowness: Slowness) -> Tensor:
        ctx.begun_ns, ctx.slowness = begun_ns, slowness
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        if ctx.begun_ns:
            _spin(ctx.begun_ns.pop(), ctx.slowness.backward, ctx.slowness.backward_ns)
        return grads[0], None, None


def slowed(module: nn.Module, slowness: Slowness) -> None:
    """Make a module without modules in it take longer, by what `slowness` says at each call; at first by nothing."""
    original: Callable[..., Tensor] = module.forward

    def forward(x: Tensor) -> Tensor:
        begun_ns = time.thread_time_ns()
        backward_begun_ns: list[int] = []
        watched = x.requires_grad
        out = original(_LastInBackward.apply(x, backward_begun_ns, slowness) if watched else x)
        if watched:
            out = _FirstInBackward.apply(out, backward_begun_ns)
        _spin(begun_ns, slowness.forward, slowness.forward_ns)
        return out

    module.forward = forward


@contextmanager
def recomputed(module: nn.Module) -> Iterator[None]:
    """Let a module run again in backward instead of keeping what it needs there."""
    original = module.forward
    module.forward = lambda *args: checkpoint(original, *args, use_reentrant=False)
    try:
        yield
    finally:
        module.forward = original


@contextmanager
def called_twice(module: nn.Module, caller: nn.Module) -> Iterator[None]:
    """Let `caller` call a module once more, before all else, on what it got in the step before."""
    original, originally_called = module.forward, caller.forward
    seen: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        seen[:] = [x.detach()]
        out: Tensor = original(x)
        return out

    def call(*args: Any, **kwargs: Any) -> Any:
        if seen:
            with torch.no_grad():
                module(seen[0])
        return originally_called(*args, **kwargs)

    module.forward, caller.forward = forward, call
    try:
        yield
    finally:
        module.forward, caller.forward = original, originally_called


@contextmanager
def renamed(parent: nn.Module, old: str, new: str) -> Iterator[None]:
    """Register a module of `parent` under another name; the code that calls it stays."""
    module = parent._modules.pop(old)
    parent._modules[new] = module
    parent.__dict__[old] = module
    try:
        yield
    finally:
        del parent.__dict__[old], parent._modules[new]
        parent._modules[old] = module
