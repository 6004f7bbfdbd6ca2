"""Outputs of modules, and places of the loss."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .case import Step, by_hooks, case
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
"""Net's own forward makes no node: its backward is the backward of its inner modules."""


def _wrapped(wrap: Callable[[Tensor], Any], unwrap: Callable[[Any], Tensor]) -> Step:
    def inner(self: Any, x: Any) -> Any:
        return wrap(unwrap(x).exp())

    net = Net(lambda self, x: self.b(self.a(wrap(x))), a=Net(inner), b=Net(inner))
    return lambda: unwrap(net(leaf())).sum().backward()


@case(_CHAIN)
def dict_outputs() -> Step:
    """A dict goes in and comes out."""
    return _wrapped(lambda t: {"x": t}, lambda d: d["x"])


@case(_CHAIN)
def list_outputs() -> Step:
    """A list in a tuple goes in and comes out."""
    return _wrapped(lambda t: ([t],), lambda d: d[0][0])


@dataclass
class _Output:
    hidden: Tensor
    past: None = None


@case(_CHAIN)
def dataclass_outputs() -> Step:
    """A dataclass goes in and comes out."""
    return _wrapped(_Output, lambda d: d.hidden)


class _ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """A dict whose items are attributes too, as Hugging Face's models return."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@case(_CHAIN)
def model_outputs() -> Step:
    """A dict with attributes goes in and comes out (Hugging Face's ModelOutput)."""
    return _wrapped(lambda t: _ModelOutput(logits=t), lambda d: d.logits)


class _Pair(NamedTuple):
    x: Tensor
    more: dict[str, int]


@case(_CHAIN)
def named_tuple_outputs() -> Step:
    """A named tuple goes in and comes out."""
    return _wrapped(lambda t: _Pair(t, {"n": 1}), lambda d: d.x)


class _Opaque:
    """An object of an unknown class (such as torch_geometric's Data)."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


@case(_CHAIN)
def opaque_outputs() -> Step:
    """An object of an unknown class goes in and comes out."""
    return _wrapped(_Opaque, lambda d: d.value)


@case(_CHAIN)
def mapping_outputs() -> Step:
    """A mapping that is not a dict (a tokenizer's BatchEncoding) goes in and comes out."""
    return _wrapped(lambda t: UserDict(x=t), lambda d: d["x"])


def _split(self: Any, x: Tensor) -> Any:
    return x.exp(), x.sin()


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
def an_output_unused() -> Step:
    """The newer of two outputs is not used: the module's backward starts at the older output."""
    net = Net(lambda self, x: self.b(self.a(x)[0]), a=Net(_split), b=Scale())
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
def a_branch_unused() -> Step:
    """A module's output is not used at all: it has no backward."""

    def body(self: Any, x: Tensor) -> Any:
        x = self.a(x)
        self.b(x)
        return self.c(x)

    net = Net(body, a=Scale(), b=Scale(), c=Scale())
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
        Net.b
        Net.a
    """
)
def outputs_of_one_node() -> Step:
    """Chunks of one tensor are outputs of one node; each goes to another module."""

    def body(self: Any, x: Tensor) -> Any:
        left, right = self.a(x)
        return self.b(left) + self.c(right)

    net = Net(body, a=Net(lambda self, x: x.exp().chunk(2)), b=Exp(), c=Exp())
    return lambda: net(leaf()).sum().backward()


@case(
    """
    forward:
      Net
        Net.a
        Net.b
    backward:
      Net
        Net.a
    """,
    wrong=by_hooks("hooks are put on what a call returned, and on what that was made of"),
)
def a_loss_beside_the_output() -> Step:
    """The loss is a tensor that a module stored; the module's output is not used."""
    aside: list[Tensor] = []

    def inner(self: Any, x: Tensor) -> Tensor:
        aside.append(x.sin())
        return x.exp()

    net = Net(lambda self, x: self.b(self.a(x)), a=Net(inner), b=Scale())

    def step() -> None:
        net(leaf())
        aside.pop().sum().backward()

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
def a_loss_on_both() -> Step:
    """The loss is the output and a tensor that an inner module stored (a mixture of experts' balance loss)."""
    aside: list[Tensor] = []

    def inner(self: Any, x: Tensor) -> Tensor:
        aside.append(x.sin().mean())
        return x.exp()

    net = Net(lambda self, x: self.b(self.a(x)), a=Net(inner), b=Scale())
    return lambda: (net(leaf()).sum() + aside.pop()).backward()


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
def no_output() -> Step:
    """The modules return None and store their results in a list."""
    made: list[Tensor] = []

    def inner(self: Any, x: Tensor) -> None:
        made.append(x.exp())

    net = Net(lambda self, x: self.a(x), a=Net(inner))

    def step() -> None:
        net(leaf())
        made.pop().sum().backward()

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
def an_output_without_gradient() -> Step:
    """One of a module's outputs does not require grad (token counts, masks)."""

    def inner(self: Any, x: Tensor) -> Any:
        return x.argmax(), x.exp()

    net = Net(lambda self, x: self.b(self.a(x)[1]), a=Net(inner), b=Scale())
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
def complex_and_views() -> Step:
    """Outputs are views of complex numbers (rotary embeddings)."""

    def inner(self: Any, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(x) * torch.polar(torch.ones(2), torch.ones(2))
        return torch.view_as_real(turned)

    net = Net(lambda self, x: self.b(self.a(x)), a=Net(inner), b=Net(inner))
    return lambda: net(leaf()).sum().backward()
