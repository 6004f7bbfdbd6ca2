"""Backward passes: several, partial, of higher order, nested."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .case import Step, case
from .modules import Exp, Net, Scale, leaf


def _two() -> Net:
    return Net(lambda self, x: self.b(self.a(x)), a=Scale(), b=Scale())


@case(
    """
    forward:
      Net
        Net.a
        Net.b
    backward:
      Net
        Net.b
        Net.a
      Net
        Net.b
        Net.a
    """
)
def retained_graph() -> Step:
    """Two backward passes through one graph."""
    net = _two()

    def step() -> None:
        loss = net(leaf()).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    return step


@case(
    """
    forward:
      Net
        Net.a
        Net.b
    backward:
      Net
        Net.b
        Net.a
    """
)
def gradients_asked_for() -> Step:
    """torch.autograd.grad for the input."""
    net = _two()

    def step() -> None:
        x = leaf()
        torch.autograd.grad(net(x).sum(), x)

    return step


@case(
    """
    forward:
      Net
        Net.a
        Net.b
        Net.c
    backward:
      Net
        Net.c
        Net.b
        Net.a
    """
)
def accumulated_up_to_features() -> Step:
    """backward(inputs=[the output of the first of three modules]): torch runs the node that made it."""
    features: list[Tensor] = []

    def forward(net: Any, x: Tensor) -> Tensor:
        features.append(net.a(x))
        features[-1].retain_grad()
        out: Tensor = net.c(net.b(features[-1]))
        return out

    net = Net(forward, a=Scale(), b=Scale(), c=Scale())

    def step() -> None:
        loss = net(leaf()).sum()
        loss.backward(inputs=[features.pop()])

    return step


@case(
    """
    forward:
      Net
        Net.a
        Net.b
    backward:
      Net
        Net.b
        Net.a
    """
)
def gradients_of_features_and_of_the_input() -> Step:
    """torch.autograd.grad for the first module's output and input."""
    features: list[Tensor] = []

    def forward(net: Any, x: Tensor) -> Tensor:
        features.append(net.a(x))
        out: Tensor = net.b(features[-1])
        return out

    net = Net(forward, a=Scale(), b=Scale())

    def step() -> None:
        x = leaf()
        torch.autograd.grad(net(x).sum(), [features.pop(), x])

    return step


@case(
    """
    forward:
      Net
        Net.a
        Net.b
    backward:
      Net
        Net.b
    """
)
def gradients_of_something_between() -> Step:
    """torch.autograd.grad for the first module's output: that module's own backward does not run."""
    between: list[Tensor] = []

    def body(self: Any, x: Tensor) -> Any:
        between.append(self.a(x))
        return self.b(between[0])

    net = Net(body, a=Scale(), b=Scale())
    return lambda: torch.autograd.grad(net(leaf()).sum(), between.pop())


@case(
    """
    forward:
      Net
        Net.a
        Net.b
    backward:
      Net
        Net.b
    """
)
def backward_to_some_inputs() -> Step:
    """backward(inputs=...) for the last module's parameter: the first module's backward does not run."""
    net = _two()
    return lambda: net(torch.ones(2, 2)).sum().backward(inputs=[net.b.weight])


@case(
    """
    forward:
      Net
        Net.a
        Net.b
    backward:
      Net
        Net.b
        Net.a
      Net
        Net.a
        Net.b
        Net.a
    """,
    wrong={"Python engine": "nodes that a backward makes are not hooked"},
)
def double_backward() -> Step:
    """A gradient penalty: the nodes that the first pass made run first, newest first; then the forward's nodes."""
    net = Net(lambda self, x: self.b(self.a(x)), a=Exp(), b=Exp())

    def step() -> None:
        x = leaf()
        (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        # Both Exp save their results, so the second pass runs the nodes that the backward of a made, then the nodes
        # that the backward of b made, then the nodes of the forwards of b and a.
        gradient.sum().backward()

    return step


@case(
    """
    forward:
      Net
        Net.a
        Net.b
    backward:
      Net
        Net.b
      Net
        Net.a
    """
)
def two_losses() -> Step:
    """Two losses, one on each module's output, each with its own pass; the modules share no node."""
    net = Net(lambda self, x: (self.a(x), self.b(x)), a=Scale(), b=Scale())

    def step() -> None:
        a, b = net(leaf())
        b.sum().backward()
        a.sum().backward()

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
        Net.a
      Net #1
        Net.b #1
        Net.a #1
    """
)
def micro_batches() -> Step:
    """Two forwards, then two backwards in the same order (a pipeline's schedule)."""
    net = _two()

    def step() -> None:
        first, second = net(leaf()).sum(), net(leaf()).sum()
        first.backward()
        second.backward()

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
      Net #1
        Net.b #1
        Net.a #1
      Net
        Net.b
        Net.a
    """
)
def one_loss_of_two_calls() -> Step:
    """One loss of two calls of a model (contrastive learning): the newer call's nodes run first."""
    net = _two()
    return lambda: (net(leaf()) + net(leaf())).sum().backward()


@case(
    """
    forward:
      Net
        Net.a
        Net.b
    backward:
      Net
        Net.a
      Net
        Net.b
    """
)
def backward_inside_forward() -> Step:
    """A backward pass of an inner module inside the outer module's forward; the outer module's pass follows."""

    def body(self: Any, x: Tensor) -> Any:
        self.a(x).sum().backward()
        return self.b(x)

    net = Net(body, a=Scale(), b=Scale())
    return lambda: net(leaf()).sum().backward()


@case(
    """
    forward:
      Net
        Net.a
        Net.b
    backward:
      Net
        Net.b
          Net
            Net.a
    """
)
def backward_inside_backward() -> Step:
    """A custom function of b runs a pass of a in its backward: the inner pass has its own slices."""
    inner_outputs: list[Tensor] = []

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            inner_outputs.pop().backward()
            return gradient

    def body(self: Any, x: Tensor) -> Any:
        inner_outputs.append(self.a(x).sum())
        return self.b(x)

    net = Net(body, a=Scale(), b=Net(lambda self, x: Nested.apply(x)))
    return lambda: net(leaf()).sum().backward()


@case(
    """
    forward:
      Net
        Net.a
    backward:
      Net
        Net.a
          Net
            Net.a
    """,
    wrong={"Python engine": "the inner graph is not behind what the call returned"},
)
def a_graph_of_its_own_backward() -> Step:
    """A custom function of a makes a graph in forward and runs a pass through it in backward: all belongs to a."""

    class Implicit(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:
            with torch.enable_grad():
                ctx.x = x.detach().requires_grad_()
                ctx.y = ctx.x.exp()
            return ctx.y.detach()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return torch.autograd.grad(ctx.y, ctx.x, gradient)[0]

    net = Net(lambda self, x: self.a(x), a=Net(lambda self, x: Implicit.apply(x)))
    return lambda: net(leaf()).sum().backward()
