"""Inputs of modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .case import Step, case
from .modules import Exp, Net, Scale, leaf

_CHAIN = """
    forward:
      Net
        Net.a
        Net.b
    backward:
      Net
        Net.b
        Net.a
"""


@case(
    """
    forward:
      Net
        Net.tokens
        Net.positions
        Net.a
    backward:
      Net
        Net.a
        Net.positions
        Net.tokens
    """
)
def token_ids() -> Step:
    """The first modules' inputs cannot require grad (two embeddings)."""

    def body(self: Any, x: Tensor) -> Any:
        return self.a(self.tokens(x) + self.positions(torch.arange(2)))

    net = Net(body, tokens=nn.Embedding(3, 2), positions=nn.Embedding(2, 2), a=Exp())
    return lambda: net(torch.tensor([0, 2])).sum().backward()


@case(_CHAIN)
def no_input_requires_grad() -> Step:
    """No input of either sibling requires grad, only parameters do."""
    net = Net(lambda self, x: self.a(x) + self.b(x), a=Scale(), b=Scale())
    return lambda: net(torch.ones(2, 2)).sum().backward()


@case(_CHAIN)
def keyword_inputs() -> Step:
    """Inputs by keyword only."""

    def inner(self: Any, *, x: Tensor) -> Tensor:
        return x.exp()

    # Net.a and Net.b are of class Net too; they are named by their place.
    net = Net(lambda self, *, x: self.b(x=self.a(x=x)), a=Net(inner), b=Net(inner))
    return lambda: net(x=leaf()).sum().backward()


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
def detached_between() -> Step:
    """The gradient stops between two modules: the first has no backward."""
    net = Net(lambda self, x: self.b(self.a(x).detach()), a=Scale(), b=Scale())
    return lambda: net(leaf()).sum().backward()


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
        Net.a
    """
)
def a_module_that_hands_through() -> Step:
    """A module returns its input: it makes no node, so it has no backward."""
    net = Net(lambda self, x: self.c(self.b(self.a(x))), a=Scale(), b=nn.Identity(), c=Scale())
    return lambda: net(leaf()).sum().backward()


@case(_CHAIN)
def nested_inputs() -> Step:
    """Tensors inside dicts inside lists inside tuples."""

    def inner(self: Any, x: Any) -> Any:
        return {"out": [(x["in"][0][1].exp(),)]}

    def body(self: Any, x: Tensor) -> Tensor:
        first = self.a({"in": [(None, x)]})["out"][0][0]
        result: Tensor = self.b({"in": [("text", first)]})["out"][0][0]
        return result

    net = Net(body, a=Net(inner), b=Net(inner))
    return lambda: net(leaf()).sum().backward()


@case(
    """
    forward:
      Net
        Net.a
      Net #1
        Net.a #1
      Net #2
        Net.a #2
    backward:
      Net
        Net.a
      Net #1
        Net.a #1
      Net #2
        Net.a #2
    """
)
def a_persistent_input() -> Step:
    """The same leaf, which requires grad, is the input of every step."""
    net = Net(lambda self, x: self.a(x), a=Exp())
    x = leaf()

    def step() -> None:
        for _ in range(3):
            net(x).sum().backward()

    return step


@case(
    """
    forward:
      Net
        Net.q
        Net.k
        Net.v
    backward:
      Net
        Net.v
        Net.k
        Net.q
    """
)
def fan_out() -> Step:
    """q, k and v share an input, whose gradient is a sum that is known only after all three."""
    net = Net(lambda self, x: self.q(x) + self.k(x) + self.v(x), q=Scale(), k=Scale(), v=Scale())
    return lambda: net(leaf()).sum().backward()


@case(
    """
    forward:
      Net
        Net.first
        Net.q
        Net.k
        Net.v
    backward:
      Net
        Net.v
        Net.k
        Net.q
        Net.first
    """
)
def fan_out_of_a_module() -> Step:
    """A module makes the shared input, so its backward starts only after the siblings' backward."""

    def body(self: Any, x: Tensor) -> Any:
        x = self.first(x)
        return torch.stack([self.q(x), self.k(x), self.v(x)])

    net = Net(body, first=Scale(), q=Scale(), k=Scale(), v=Scale())
    return lambda: net(leaf()).sum().backward()


@case(
    """
    forward:
      Net
        Net.0
          Net.0.f
        Net.1
          Net.1.f
    backward:
      Net
        Net.1
          Net.1.f
        Net.0
          Net.0.f
    """
)
def residual() -> Step:
    """x + f(x), twice: each block's input gradient is complete only after its f."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = Scale()

        def forward(self, x: Tensor) -> Any:
            return x + self.f(x)

    net = Net(lambda self, x: self.get_submodule("1")(self.get_submodule("0")(x)), **{"0": Block(), "1": Block()})
    return lambda: net(leaf()).sum().backward()


@case(_CHAIN)
def parameter_gradients_come_last() -> Step:
    """The gradient of a transposed weight is made after the gradient of the input: the module is still open."""

    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 2))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.t().contiguous().t()

    net = Net(lambda self, x: self.b(self.a(x)), a=Transposed(), b=Transposed())
    return lambda: net(leaf()).sum().backward()


@case(
    """
    forward:
      Net
        Net.a
        Net.b
        Net.gate
    backward:
      Net
        Net.gate
        Net.b
        Net.a
    """
)
def some_inputs_without_gradients() -> Step:
    """A module with one input that requires grad and another that does not."""

    def body(self: Any, x: Tensor, mask: Tensor) -> Any:
        return self.gate(self.b(self.a(x)), mask)

    net = Net(body, a=Scale(), b=Exp(), gate=Net(lambda self, x, mask: x.masked_fill(mask, 0.0)))
    return lambda: net(leaf(), torch.eye(2, dtype=torch.bool)).sum().backward()


@case(
    """
    forward:
      Net
        Net.make
        Net.a
    backward:
      Net
        Net.a
    """
)
def an_input_that_is_a_parameter() -> Step:
    """A module returns its parameter, another uses it: the first makes no node."""

    class Make(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 2))

        def forward(self) -> Tensor:
            return self.weight

    net = Net(lambda self: self.a(self.make()), make=Make(), a=Exp())
    return lambda: net().sum().backward()
