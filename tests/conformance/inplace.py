"""Operations in place, and views."""

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


def _add(self: Any, total: Tensor, x: Tensor) -> None:
    total.add_(x)


@case(_CHAIN)
def in_place_on_an_output() -> Step:
    """The caller changes a module's output in place, then uses it."""
    net = Net(lambda self, x: self.b(self.a(x).relu_()), a=Scale(), b=Scale())
    return lambda: net(leaf()).sum().backward()


@case(
    """
    forward:
      Net
        Net.a
        Net.relu
        Net.b
    backward:
      Net
        Net.b
        Net.relu
        Net.a
    """
)
def in_place_modules() -> Step:
    """A module changes its input in place and returns it (nn.ReLU(inplace=True))."""
    net = Net(lambda self, x: self.b(self.relu(self.a(x))), a=Scale(), relu=nn.ReLU(inplace=True), b=Scale())
    return lambda: net(leaf()).sum().backward()


@case(_CHAIN)
def in_place_on_a_view_of_an_output() -> Step:
    """The caller changes a view of a module's output in place."""

    def body(self: Any, x: Tensor) -> Any:
        x = self.a(x)
        x[0].mul_(2)
        return self.b(x)

    net = Net(body, a=Scale(), b=Scale())
    return lambda: net(leaf()).sum().backward()


@case(_CHAIN)
def in_place_through_a_view_that_comes_out() -> Step:
    """A module returns a view; the caller changes its base in place afterwards."""

    def inner(self: Any, x: Tensor) -> Any:
        base = x.sin()
        return base, base[0]

    def body(self: Any, x: Tensor) -> Any:
        base, view = self.a(x)
        base.mul_(2)
        return self.b(view)

    net = Net(body, a=Net(inner), b=Exp())
    return lambda: net(leaf()).sum().backward()


@case(_CHAIN)
def writing_into_a_buffer() -> Step:
    """Outputs are written into parts of a buffer of the caller's."""

    def body(self: Any, x: Tensor) -> Any:
        out = torch.zeros(4, 2)
        out[:2] = self.a(x)
        out[2:] = self.b(x)
        return out

    net = Net(body, a=Scale(), b=Scale())
    return lambda: net(leaf()).sum().backward()


@case(
    """
    forward:
      Net
        Net.a
        Net.add
        Net.b
    backward:
      Net
        Net.b
        Net.add
        Net.a
    """
)
def in_place_into_another_input() -> Step:
    """A module adds one input to another in place, and returns nothing."""

    def body(self: Any, x: Tensor) -> Any:
        total = self.a(x)
        self.add(total, x)
        return self.b(total)

    net = Net(body, a=Scale(), add=Net(_add), b=Scale())
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
    """
)
def detached_in_place() -> Step:
    """A module's output is detached in place by the caller: the module has no backward."""
    net = Net(lambda self, x: self.b(self.a(x).detach_()), a=Scale(), b=Scale())
    return lambda: net(leaf()).sum().backward()
