"""torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .case import Step, case
from .modules import Net, Scale, leaf

_TRACED = "what is compiled must not be asked while it is traced"


class Two(nn.Module):
    """Two modules in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Scale(), Scale()

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x).sin())


@case(
    """
    forward:
      Two
    backward:
      Two
    """,
    not_live=_TRACED,
)
def a_compiled_model() -> Step:
    """torch.compile of a model, compiled during the recording: one slice, with no modules inside it."""
    torch._dynamo.reset()
    model = torch.compile(Two(), backend="aot_eager", fullgraph=True)
    return lambda: model(leaf()).sum().backward()


@case(
    """
    forward:
      Two
    backward:
      Two
    """,
    not_live=_TRACED,
)
def a_model_compiled_before() -> Step:
    """A model that was compiled before the recording started."""
    torch._dynamo.reset()
    model = torch.compile(Two(), backend="aot_eager", fullgraph=True)
    model(leaf()).sum().backward()
    return lambda: model(leaf()).sum().backward()


@case(
    """
    forward:
      Net
        Net.first
        Net.two
        Net.last
    backward:
      Net
        Net.last
        Net.two
        Net.first
    """,
    not_live=_TRACED,
)
def a_compiled_part() -> Step:
    """One module of a model is compiled in place (module.compile())."""
    torch._dynamo.reset()
    net = Net(lambda self, x: self.last(self.two(self.first(x))), first=Scale(), two=Two(), last=Scale())
    net.two.compile(backend="aot_eager", fullgraph=True)
    return lambda: net(leaf()).sum().backward()


@case(
    """
    forward:
      Net
        Net.broken
    backward:
      Net
        Net.broken
    """,
    not_live=_TRACED,
)
def a_graph_break() -> Step:
    """A module that may not be traced runs by itself between two compiled graphs."""
    torch._dynamo.reset()

    class Broken(nn.Module):
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def forward(self, x: Tensor) -> Tensor:
            return x.exp()

    net = Net(lambda self, x: self.broken(x.sin()).sin(), broken=Broken())
    model = torch.compile(net, backend="aot_eager")
    return lambda: model(leaf()).sum().backward()
