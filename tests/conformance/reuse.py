"""One module in several places, at several times; modules that come and go."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .case import Step, case
from .modules import Exp, Net, Scale, leaf


@case(
    """
    forward:
      Net
        Net.a
        Net.b
        Net.a #1
        Net.b #1
    backward:
      Net
        Net.b #1
        Net.a #1
        Net.b
        Net.a
    """
)
def called_many_times() -> Step:
    """Two modules in turn, twice (layers that share their weights)."""
    net = Net(lambda self, x: self.b(self.a(self.b(self.a(x)))), a=Scale(), b=Scale())
    return lambda: net(leaf()).sum().backward()


@case(
    """
    forward:
      Net
        Net.a
        Net.a #1
        Net.a #2
    backward:
      Net
        Net.a #2
        Net.a #1
        Net.a
    """
)
def called_again_at_once() -> Step:
    """One module, three times in a row (a recurrent cell)."""
    net = Net(lambda self, x: self.a(self.a(self.a(x))), a=Scale())
    return lambda: net(leaf()).sum().backward()


@case(
    """
    forward:
      Net
        Net.left
          Net.left.inner
        Net.right
          Net.right.inner
    backward:
      Net
        Net.right
          Net.right.inner
        Net.left
          Net.left.inner
    """
)
def shared_under_two_parents() -> Step:
    """One module under two parents: each call is named after its caller."""
    shared = Scale()
    left, right = (Net(lambda self, x: self.inner(x), inner=shared) for _ in range(2))
    net = Net(lambda self, x: self.right(self.left(x)), left=left, right=right)
    return lambda: net(leaf()).sum().backward()


@case(
    """
    forward:
      Itself
        Itself #1
          Itself.inner
    backward:
      Itself
        Itself #1
          Itself.inner
    """
)
def a_module_that_calls_itself() -> Step:
    """A module calls itself, once."""

    class Itself(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Scale()

        def forward(self, x: Tensor, again: bool = True) -> Any:
            return self(x, False) if again else self.inner(x)

    model = Itself()
    return lambda: model(leaf()).sum().backward()


@case(
    """
    forward:
      Net
        Net.a
    backward:
      Net
        Net.a
    """
)
def deleted_before_backward() -> Step:
    """The model is deleted between forward and backward."""
    models = [Net(lambda self, x: self.a(x), a=Scale())]

    def step() -> None:
        loss = models[0](leaf()).sum()
        models.clear()
        loss.backward()

    return step


@case(
    """
    forward:
      Net
        Scale
        Scale #1
    backward:
      Net
        Scale #1
        Scale
    """
)
def made_in_forward() -> Step:
    """Modules that are made for one call and belong to no module."""
    net = Net(lambda self, x: Scale()(Scale()(x)))
    return lambda: net(leaf()).sum().backward()


@case(
    """
    forward:
      Net
        Net.a
      Net #1
        Net.a #1
        Net.late
    backward:
      Net
        Net.a
      Net #1
        Net.late
        Net.a #1
    """
)
def added_between_steps() -> Step:
    """A module that is added to the model after the first step."""

    def body(self: Any, x: Tensor) -> Any:
        x = self.a(x)
        return self.late(x) if hasattr(self, "late") else x

    net = Net(body, a=Scale())

    def step() -> None:
        net(leaf()).sum().backward()
        net.add_module("late", Scale())
        net(leaf()).sum().backward()

    return step


@case(
    """
    forward:
      Net
        Net.encoder
        Net.decoder
    backward:
      Net
        Net.decoder
        Net.encoder
    """
)
def tied_weights() -> Step:
    """Two modules share a parameter: its gradient is the sum of both, and each has its own slice."""
    encoder, decoder = Scale(), Scale()
    decoder.weight = encoder.weight
    net = Net(lambda self, x: self.decoder(self.encoder(x)), encoder=encoder, decoder=decoder)
    return lambda: net(leaf()).sum().backward()


@case(
    """
    forward:
      Net
        Net.a
        Net.b
        Net.a #1
    backward:
      Net
        Net.a #1
        Net.b
        Net.a
    """
)
def an_output_that_goes_back_in() -> Step:
    """A module's output goes into the same module again, also added to another module's output."""

    def body(self: Any, x: Tensor) -> Any:
        x = self.a(x)
        return self.a(x + self.b(x))

    net = Net(body, a=Scale(), b=Exp())
    return lambda: net(leaf()).sum().backward()


@case(
    """
    forward:
      Net
        Net.items.0
        Net.items.1
        Net.named.x
    backward:
      Net
        Net.named.x
        Net.items.1
        Net.items.0
    """
)
def containers_that_are_not_called() -> Step:
    """Modules in lists and dicts of modules, which are never called themselves."""

    def body(self: Any, x: Tensor) -> Any:
        for item in self.items:
            x = item(x)
        return self.named["x"](x)

    net = Net(body, items=nn.ModuleList([Scale(), Scale()]), named=nn.ModuleDict({"x": Scale()}))
    return lambda: net(leaf()).sum().backward()


@case(
    """
    forward:
      Net
        Net.experts.1
        Net.experts.0
    backward:
      Net
        Net.experts.0
        Net.experts.1
    """
)
def routed_modules() -> Step:
    """Experts: each gets some of the rows, in an order that depends on the data; one expert is not called."""

    def body(self: Any, x: Tensor) -> Any:
        out = torch.zeros_like(x)
        for expert, rows in ((1, torch.tensor([0])), (0, torch.tensor([1]))):
            out = out.index_add(0, rows, self.experts[expert](x[rows]))
        return out

    class Row(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    net = Net(body, experts=nn.ModuleList([Row(), Row(), Row()]))
    return lambda: net(leaf()).sum().backward()
