"""Exceptions."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from .case import Step, case
from .modules import Exp, Net, Scale, leaf


class Fails(nn.Module):
    """Raises in forward, after it has called its inner module."""

    def __init__(self, error: type[BaseException] = ValueError) -> None:
        super().__init__()
        self.inner = Scale()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        raise self.error("on purpose")


@case(
    """
    forward:
      Net
        Net.fails
          Net.fails.inner
        Net.a
    backward:
      Net
        Net.a
    """
)
def an_exception_caught_by_the_caller() -> Step:
    """A module raises, its caller catches it and goes on."""

    def body(self: Any, x: Tensor) -> Any:
        with suppress(ValueError):
            self.fails(x)
        return self.a(x)

    net = Net(body, fails=Fails(), a=Scale())
    return lambda: net(leaf()).sum().backward()


@case(
    """
    forward:
      Net
        Net.fails
          Net.fails.inner
      Scale
    backward:
      Scale
    """
)
def an_exception_caught_outside() -> Step:
    """A model raises; another model runs afterwards."""
    net, other = Net(lambda self, x: self.fails(x), fails=Fails()), Scale()

    def step() -> None:
        with suppress(ValueError):
            net(leaf())
        other(leaf()).sum().backward()

    return step


@case(
    """
    forward:
      Net
        Net.fails
          Net.fails.inner
      Scale
    backward:
      Scale
    """
)
def an_interrupt() -> Step:
    """A KeyboardInterrupt (Ctrl-C), which is not a subclass of Exception."""
    net, other = Net(lambda self, x: self.fails(x), fails=Fails(KeyboardInterrupt)), Scale()

    def step() -> None:
        with suppress(KeyboardInterrupt):
            net(leaf())
        other(leaf()).sum().backward()

    return step


class _Stopped(Exception):
    """Raised to end a forward early."""


def _take(taken: list[Tensor]) -> Any:
    def hook(*call: Any) -> None:
        taken.append(call[-1])
        raise _Stopped

    return hook


_STOPPED = """
    forward:
      Net
        Net.a
        Net.b
    backward:
      Net
        Net.b
        Net.a
"""


@case(_STOPPED)
def a_forward_that_a_hook_stopped() -> Step:
    """A forward hook keeps the output of the second of three modules and ends the forward by raising."""
    net = Net(lambda self, x: self.c(self.b(self.a(x))), a=Exp(), b=Exp(), c=Exp())
    taken: list[Tensor] = []
    net.b.register_forward_hook(_take(taken))

    def step() -> None:
        with suppress(_Stopped):
            net(leaf())
        taken.pop().sum().backward()

    return step


@case(
    """
    forward:
      Net
        Net.a
        Net.b
          Net.b.inner
        Net.c
    backward:
      Net
        Net.c
        Net.b
          Net.b.inner
        Net.a
    """
)
def a_forward_stopped_inside_another() -> Step:
    """A module stores its result and raises; the outer module catches that and continues with the result."""
    taken: list[Tensor] = []

    def inner(self: Any, x: Tensor) -> Any:
        taken.append(self.inner(x).exp())
        raise _Stopped

    def body(self: Any, x: Tensor) -> Any:
        with suppress(_Stopped):
            self.b(self.a(x))
        return self.c(taken.pop())

    net = Net(body, a=Exp(), b=Net(inner, inner=Exp()), c=Exp())
    return lambda: net(leaf()).sum().backward()


@case(
    """
    forward:
      Net
        Net.a
        Net.b
      Scale
    backward:
      Scale
      Net
        Net.b
        Net.a
    """
)
def two_forwards_one_of_which_was_stopped() -> Step:
    """A KeyboardInterrupt stops a forward before its last module; another model runs on its stored result."""
    taken: list[Tensor] = []

    def body(self: Any, x: Tensor) -> Any:
        taken.append(self.b(self.a(x)))
        raise KeyboardInterrupt

    net, other = Net(body, a=Exp(), b=Exp()), Scale()

    def step() -> None:
        with suppress(KeyboardInterrupt):
            net(leaf())
        other(taken.pop()).sum().backward()

    return step


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("on purpose")


@case(
    """
    forward:
      Net
        Net.a
        Net.broken
        Net.b
      Scale
    backward:
      Net
        Net.b
        Net.broken
      Scale
    """
)
def an_exception_in_backward() -> Step:
    """Backward fails in a module, so the backward of the module before never starts; another model's step follows."""
    broken = Net(lambda self, x: _Broken.apply(x))
    net = Net(lambda self, x: self.b(self.broken(self.a(x))), a=Scale(), broken=broken, b=Scale())
    other = Scale()

    def step() -> None:
        with suppress(ValueError):
            net(leaf()).sum().backward()
        other(leaf()).sum().backward()

    return step


@case(
    """
    forward:
      Scale
      Net
        Net.broken
    backward:
      Net
        Net.broken
      Scale
    """
)
def a_backward_after_one_that_failed() -> Step:
    """A backward pass fails; the next pass follows without a forward between them."""
    net, other = Net(lambda self, x: self.broken(x), broken=Net(lambda self, x: _Broken.apply(x))), Scale()

    def step() -> None:
        good, bad = other(leaf()).sum(), net(leaf()).sum()
        with suppress(ValueError):
            bad.backward()
        good.backward()

    return step


@case(
    """
    forward:
      Net
        Net.a
        Net.b
      Net #1
        Net.a #1
        Net.b #1
    backward:
      Net
        Net.b
      Net #1
        Net.b #1
        Net.a #1
    """,
    wrong={"Python engine": "its own hook on the node runs before the one that fails"},
)
def a_hook_that_raises() -> Step:
    """A hook on the first module's output fails, so its backward never starts; the next step is complete."""

    def fail(_: Tensor) -> None:
        raise ValueError("on purpose")

    first = [True]

    def body(self: Any, x: Tensor) -> Any:
        x = self.a(x)
        if first:
            first.clear()
            x.register_hook(fail)
        return self.b(x)

    net = Net(body, a=Scale(), b=Scale())

    def step() -> None:
        with suppress(ValueError):
            net(leaf()).sum().backward()
        net(leaf()).sum().backward()

    return step


@case(
    """
    forward:
      Net
        Net.broken
        Net.b
    backward:
      Net
        Net.b
          Net
            Net.broken
    """
)
def a_pass_that_fails_inside_another() -> Step:
    """A custom function's backward runs a pass that fails, catches the exception and goes on."""
    inner_outputs: list[Tensor] = []

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            with suppress(ValueError):
                inner_outputs.pop().backward()
            return gradient

    def body(self: Any, x: Tensor) -> Any:
        inner_outputs.append(self.broken(x).sum())
        return self.b(x)

    net = Net(body, broken=Net(lambda self, x: _Broken.apply(x)), b=Net(lambda self, x: Nested.apply(x)))
    return lambda: net(leaf()).sum().backward()
