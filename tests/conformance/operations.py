"""A module's own operations, between the modules that it calls."""

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
    backward:
      Net
        Net.b
        Net.a
    """
)
def own_operations_everywhere() -> Step:
    """Operations before, between and after the inner modules: one slice of Net contains all."""
    net = Net(lambda self, x: self.b(self.a(x.sin()).sin()).sin(), a=Scale(), b=Scale())
    return lambda: net(leaf()).sum().backward()


@case(
    """
    forward:
      Net
        Net.block
          Net.block.a
        Net.b
    backward:
      Net
        Net.b
        Net.block
          Net.block.a
    """
)
def own_operations_that_go_nowhere_near() -> Step:
    """An operation whose result is neither the next module's input nor the output, but is used later."""

    def inner(self: Any, x: Tensor) -> Any:
        aside = x.sin()
        return self.a(x) + aside

    net = Net(lambda self, x: self.b(self.block(x)), block=Net(inner, a=Scale()), b=Scale())
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
        Net.a
    """
)
def own_operations_of_parameters_only() -> Step:
    """A module's operation on its own parameter (a mask, a normed weight), used last."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 2))
            self.a, self.b = Scale(), Scale()

        def forward(self, x: Tensor) -> Any:
            x = self.a(x)
            weight = self.weight.softmax(0)
            return self.b(x) * weight

    Normed.__name__ = "Net"
    net = Normed()
    return lambda: net(leaf()).sum().backward()


@case(
    """
    forward:
      Outer
        Outer.net
          Outer.net.a
      Outer #1
        Outer.net #1
          Outer.net.a #1
    backward:
      Outer
        Outer.net
          Outer.net.a
      Outer #1
        Outer.net #1
          Outer.net.a #1
    """
)
def two_steps() -> Step:
    """Two steps of a model without operations of its own."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(lambda self, x: self.a(x), a=Scale())

        def forward(self, x: Tensor) -> Any:
            return self.net(x)

    model = Outer()

    def step() -> None:
        for _ in range(2):
            model(leaf()).sum().backward()

    return step


@case(
    """
    forward:
      Exp
      Scale
    backward:
      Scale
      Exp
    """
)
def operations_outside_of_all() -> Step:
    """Two models with operations between them that belong to no module."""
    first, second = Exp(), Scale()
    return lambda: second(first(leaf()).sin()).sum().backward()


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
def a_custom_function() -> Step:
    """A custom autograd function inside a module."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    net = Net(lambda self, x: self.a(x), a=Net(lambda self, x: Double.apply(x)))
    return lambda: net(leaf()).sum().backward()


@case(
    """
    forward:
      Sequential
        Sequential.0
        Sequential.1
    backward:
      Sequential
        Sequential.1
        Sequential.0
    """
)
def recurrent_layers() -> Step:
    """An embedding and nn.LSTM, which makes many nodes in one call."""
    model = nn.Sequential(nn.Embedding(3, 2), nn.LSTM(2, 2, num_layers=2))
    return lambda: model(torch.tensor([0, 1, 2]))[0].sum().backward()


@case(
    """
    forward:
      TransformerEncoderLayer
        TransformerEncoderLayer.self_attn
        TransformerEncoderLayer.dropout1
        TransformerEncoderLayer.norm1
        TransformerEncoderLayer.linear1
        TransformerEncoderLayer.dropout
        TransformerEncoderLayer.linear2
        TransformerEncoderLayer.dropout2
        TransformerEncoderLayer.norm2
    backward:
      TransformerEncoderLayer
        TransformerEncoderLayer.norm2
        TransformerEncoderLayer.linear2
        TransformerEncoderLayer.linear1
        TransformerEncoderLayer.norm1
        TransformerEncoderLayer.self_attn
    """
)
def a_transformer_layer() -> Step:
    """torch's own layer: residuals, attention whose projections are called as functions, dropouts that do nothing."""
    model = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    return lambda: model(torch.ones(1, 3, 4)).sum().backward()


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
def forward_hooks_of_the_user() -> Step:
    """A user's forward hook replaces an output: the hook's nodes belong to the module."""
    net = Net(lambda self, x: self.b(self.a(x)), a=Scale(), b=Scale())
    net.a.register_forward_hook(lambda module, args, output: output.sin())
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
        Net.a
    """
)
def backward_hooks_of_the_user() -> Step:
    """A user's full backward hooks, whose nodes are made at the start and end of the call."""
    net = Net(lambda self, x: self.b(self.a(x)), a=Scale(), b=Scale())
    net.a.register_full_backward_hook(lambda module, inputs, outputs: None)
    net.b.register_full_backward_pre_hook(lambda module, outputs: None)
    return lambda: net(leaf()).sum().backward()


@case(
    """
    forward:
      Net.a
    backward:
      Net.a
    """,
    renamed=("Net.a", "Scale"),
)
def forward_called_directly() -> Step:
    """net.forward(x) is not a call of net: the inner modules are outermost, with their names below net."""
    net = Net(lambda self, x: self.a(x), a=Scale())
    return lambda: net.forward(leaf()).sum().backward()


@case(
    """
    forward:
      Exp
    """
)
def no_backward_at_all() -> Step:
    """A forward whose graph is dropped."""
    model = Exp()

    def step() -> None:
        model(leaf())

    return step
