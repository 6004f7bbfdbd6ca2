"""Recomputation in backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from .case import Step, case
from .modules import Exp, Net, Scale, leaf


def _again(self: Any, x: Tensor, reentrant: bool) -> Any:
    return self.b(checkpoint(self.a, x, use_reentrant=reentrant))


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
          recompute Net.a
    """
)
def checkpoint_without_reentry() -> Step:
    """The recomputation runs inside the first node of the module that it repeats."""
    net = Net(lambda self, x: _again(self, x, False), a=Exp(), b=Scale())
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
        recompute Net.a
        Net.a
    """
)
def checkpoint_with_reentry() -> Step:
    """The recomputation runs first, inside one of Net's own nodes; then follows a backward inside the backward."""
    net = Net(lambda self, x: _again(self, x, True), a=Exp(), b=Scale())
    return lambda: net(leaf()).sum().backward()


@case(
    """
    forward:
      Net
        Net.block
          Net.block.x
          Net.block.y
          Net.block.z
    backward:
      Net
        Net.block
          Net.block.z
            recompute Net.block
              recompute Net.block.x
              recompute Net.block.y
              recompute Net.block.z
          Net.block.y
          Net.block.x
    """
)
def checkpoint_of_a_block() -> Step:
    """Three modules inside one checkpoint, without reentry."""
    block = Net(lambda self, x: self.z(self.y(self.x(x))), x=Exp(), y=Exp(), z=Exp())
    net = Net(lambda self, x: checkpoint(self.block, x, use_reentrant=False), block=block)
    return lambda: net(leaf()).sum().backward()


@case(
    """
    forward:
      Net
        Net.block
          Net.block.x
          Net.block.y
    backward:
      Net
        recompute Net.block
          recompute Net.block.x
          recompute Net.block.y
        Net.block
          Net.block.y
          Net.block.x
    """
)
def checkpoint_of_a_block_with_reentry() -> Step:
    """Two modules inside one checkpoint, with reentry."""
    block = Net(lambda self, x: self.y(self.x(x)), x=Exp(), y=Exp())
    net = Net(lambda self, x: checkpoint(self.block, x, use_reentrant=True), block=block)
    return lambda: net(leaf()).sum().backward()


@case(
    """
    forward:
      Net
        Net.block
          Net.block.x
          Net.block.y
          Net.block.z
    backward:
      Net
        Net.block
          Net.block.y
            recompute Net.block
              recompute Net.block.x
              recompute Net.block.y
          Net.block.x
    """
)
def checkpoint_that_stops_early() -> Step:
    """The last module saves nothing, so the recomputation stops, by an exception, before it is called."""
    block = Net(lambda self, x: self.z(self.y(self.x(x))), x=Exp(), y=Exp(), z=nn.Identity())
    net = Net(lambda self, x: checkpoint(self.block, x, use_reentrant=False), block=block)
    return lambda: net(leaf()).sum().backward()


@case(
    """
    forward:
      Net
        Net.outer
          Net.outer.inner
    backward:
      Net
        Net.outer
          Net.outer.inner
            recompute Net.outer
            recompute Net.outer.inner
    """
)
def checkpoint_in_a_checkpoint() -> Step:
    """A checkpoint inside a checkpoint: recomputing the outer one stops at the input that the inner one saved."""
    inner = Net(lambda self, x: x.exp())
    outer = Net(lambda self, x: checkpoint(self.inner, x, use_reentrant=False), inner=inner)
    net = Net(lambda self, x: checkpoint(self.outer, x, use_reentrant=False), outer=outer)
    return lambda: net(leaf()).sum().backward()


@case(
    """
    forward:
      Net
        Net.a
        Net.a #1
    backward:
      Net
        Net.a #1
          recompute Net.a #1
        Net.a
          recompute Net.a
    """
)
def checkpoint_of_one_module_twice() -> Step:
    """One module in two checkpoints: each recomputation repeats its own call."""

    def body(self: Any, x: Tensor) -> Any:
        return checkpoint(self.a, checkpoint(self.a, x, use_reentrant=False), use_reentrant=False)

    net = Net(body, a=Exp())
    return lambda: net(leaf()).sum().backward()


@case(
    """
    forward:
      Net
        Net.layers.0
        Net.layers.1
        Net.layers.2
        Net.layers.3
    backward:
      Net
        Net.layers.3
        Net.layers.2
        Net.layers.1
          recompute Net.layers.0
          recompute Net.layers.1
        Net.layers.0
    """
)
def checkpoint_sequential_segments() -> Step:
    """checkpoint_sequential: all segments except the last are recomputed."""

    def body(self: Any, x: Tensor) -> Any:
        return checkpoint_sequential(self.layers, 2, x, use_reentrant=False)

    net = Net(body, layers=nn.Sequential(Exp(), Exp(), Exp(), Exp()))
    return lambda: net(leaf()).sum().backward()


@case(
    """
    forward:
      Net
        Net.block
          Net.block.a
          Net.block.b
    backward:
      Net
        Net.block
          Net.block.b
            recompute Net.block
              recompute Net.block.a
              recompute Net.block.b
          Net.block.a
    """
)
def selective_checkpoint() -> Step:
    """A checkpoint that keeps the results of matrix products."""

    def contexts() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    block = Net(lambda self, x: self.b(self.a(x)), a=nn.Linear(2, 2, bias=False), b=Exp())
    net = Net(lambda self, x: checkpoint(self.block, x, use_reentrant=False, context_fn=contexts), block=block)
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
def checkpoint_without_gradients() -> Step:
    """A checkpoint with reentry whose inputs do not require grad gives its parameters no gradients."""
    net = Net(lambda self, x: _again(self, x, True), a=Scale(), b=Scale())
    return lambda: net(torch.ones(2, 2)).sum().backward()
