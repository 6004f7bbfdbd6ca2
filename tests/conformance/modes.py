"""Modes without a graph, functorch's transforms, scripted and traced modules, and wrapped parameters."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from .case import Step, case
from .modules import Exp, Net, Scale, leaf

_FORWARD = """
    forward:
      Net
        Net.a
        Net.b
"""


def _two() -> Net:
    return Net(lambda self, x: self.b(self.a(x)), a=Scale(), b=Scale())


@case(_FORWARD)
def no_grad() -> Step:
    """torch.no_grad: calls without a backward."""
    net = _two()

    def step() -> None:
        with torch.no_grad():
            net(leaf())

    return step


@case(_FORWARD)
def inference_mode() -> Step:
    """torch.inference_mode: calls without a backward."""
    net = _two()

    def step() -> None:
        with torch.inference_mode():
            net(torch.ones(2, 2))

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
    """
)
def evaluation_between() -> Step:
    """An evaluation without gradients between a forward and its backward."""
    net = _two()

    def step() -> None:
        loss = net(leaf()).sum()
        net.eval()
        with torch.no_grad():
            net(leaf())
        net.train()
        loss.backward()

    return step


@case(
    """
    forward:
      Net
        Net.frozen
        Net.b
    backward:
      Net
        Net.b
    """
)
def a_frozen_module() -> Step:
    """The first module's parameters do not require grad: it has no backward."""
    net = Net(lambda self, x: self.b(self.frozen(x)), frozen=Scale(), b=Scale())
    net.frozen.requires_grad_(False)
    return lambda: net(torch.ones(2, 2)).sum().backward()


@case(
    """
    forward:
      Net
        Net.a
        Net.b
    """
)
def vmap() -> Step:
    """torch.func.vmap over a model: it is called once, with a tensor for the whole batch."""
    net = _two()

    def step() -> None:
        with torch.no_grad():
            torch.func.vmap(net)(torch.ones(3, 2, 2))

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
def vmap_and_backward() -> Step:
    """torch.func.vmap over a model, and a backward pass: the calls' outputs have no graph node."""
    net = _two()
    return lambda: torch.func.vmap(net)(torch.ones(3, 2, 2)).sum().backward()


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
def vmap_of_vmap_inside_a_forward() -> Step:
    """A module maps an inner module over two dimensions, between two normal calls."""
    net = Net(lambda self, x: self.c(torch.func.vmap(torch.func.vmap(self.b))(self.a(x))), a=Exp(), b=Exp(), c=Exp())
    return lambda: net(leaf()).sum().backward()


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
def vmap_over_parameters() -> Step:
    """An ensemble (functional_call, mapped over stacked parameters), called twice; a pass per call, the last first."""
    net = _two()
    stacked = {name: torch.ones(3, 2, 2, requires_grad=True) for name, _ in net.named_parameters()}

    def run(parameters: dict[str, Tensor], x: Tensor) -> Any:
        return torch.func.functional_call(net, parameters, (x,))

    def step() -> None:
        losses = [torch.func.vmap(run, in_dims=(0, None))(stacked, torch.ones(2, 2)).sum() for _ in range(2)]
        for loss in reversed(losses):
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
        Net.a
      Net
        Net.b
    """
)
def vmap_and_a_pass_inside_forward() -> Step:
    """A forward maps one module and runs its backward, then calls another module."""

    def body(self: Any, x: Tensor) -> Any:
        torch.func.vmap(self.a)(x).sum().backward()
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
        Net.a
    """
)
def func_grad() -> Step:
    """torch.func.grad of a model, whose backward is a pass of functorch's own."""
    net = _two()
    return lambda: torch.func.grad(lambda x: net(x).sum())(torch.ones(2, 2))


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
def functional_call() -> Step:
    """torch.func.functional_call with other parameters."""
    net = _two()

    def step() -> None:
        parameters = {name: value.detach().clone().requires_grad_() for name, value in net.named_parameters()}
        torch.func.functional_call(net, parameters, (leaf(),)).sum().backward()

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
    """,
    not_live="nothing can ask inside a scripted forward",
)
def a_scripted_module() -> Step:
    """A scripted module inside a model: one call, without its inner modules."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    net = Net(lambda self, x: self.b(self.a(x)), a=scripted, b=Scale())
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
    """,
    not_live="nothing can ask inside a scripted forward",
)
def a_traced_module() -> Step:
    """A traced module inside a model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(nn.Linear(2, 2), torch.ones(2, 2))
    net = Net(lambda self, x: self.b(self.a(x)), a=traced, b=Scale())
    return lambda: net(leaf()).sum().backward()


@case(
    """
    forward:
      Net
        Net.a
          Net.a.parametrizations.weight
            Net.a.parametrizations.weight.0
        Net.b
    backward:
      Net
        Net.b
        Net.a
          Net.a.parametrizations.weight
            Net.a.parametrizations.weight.0
    """
)
def a_parametrized_module() -> Step:
    """A weight that is computed by modules (weight norm)."""
    linear = parametrizations.weight_norm(nn.Linear(2, 2, bias=False))
    net = Net(lambda self, x: self.b(self.a(x)), a=linear, b=Scale())
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
def autocast() -> Step:
    """Mixed precision: casts of inputs and weights are nodes of the module that uses them."""
    net = Net(lambda self, x: self.b(self.a(x)), a=nn.Linear(2, 2), b=nn.Linear(2, 2))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(torch.ones(2, 2)).sum()
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
def a_tensor_subclass() -> Step:
    """Inputs of a subclass of Tensor."""

    class Tagged(torch.Tensor):
        pass

    net = Net(lambda self, x: self.b(self.a(x)), a=Scale(), b=Exp())

    def step() -> None:
        x = torch.ones(2, 2).as_subclass(Tagged).requires_grad_()
        net(x).sum().backward()

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
def saved_tensor_hooks() -> Step:
    """Activations are packed away and unpacked again (offloading)."""
    net = Net(lambda self, x: self.b(self.a(x)), a=Exp(), b=Exp())

    def step() -> None:
        def pack(x: Tensor) -> Any:
            return x.detach().clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = net(leaf()).sum()
        loss.backward()

    return step
