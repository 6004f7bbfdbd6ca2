"""Compiled functions: spans with their backward, and nothing changed of what torch.compile captures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import modtrace
from tests.support.python_process import run_python


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layer(x).relu()
        return hidden


net = Net()
X = torch.ones(2, 4)


def compute_loss(x: Tensor) -> Tensor:
    loss: Tensor = net(x).sum()
    return loss


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def told(recording: modtrace.Recording) -> list[tuple[str, str, int]]:
    return [(span.phase, span.fqn, span.depth) for span in recording.timeline().spans]


# Of what inductor imports.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("compiled_first", [True, False])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_compiled_function_is_a_span_with_its_backward(engine: Any, backend: str, compiled_first: bool) -> None:
    compiled = torch.compile(compute_loss, backend=backend)
    if compiled_first:
        compiled(X).backward()

    with modtrace.record(engine=engine) as recording:
        for _ in range(2):
            compiled(X).backward()

    assert told(recording) == [("forward", "compute_loss", 0), ("backward", "compute_loss", 0)] * 2
    assert recording.timeline().stats.unattributed == 0
    assert [span.module_class for span in recording.timeline().spans] == ["CompiledFunction"] * 4


def test_what_was_compiled_is_called_without_us_afterwards(engine: Any) -> None:
    compiled = torch.compile(compute_loss, backend="aot_eager")
    compiled(X)
    before = {name: value for name, value in globals().items() if name.startswith("__compiled_fn")}

    with modtrace.record(engine=engine):
        compiled(X)
        inside = {name: globals()[name] for name in before}
    after = {name: globals()[name] for name in before}

    assert before
    assert after == before
    assert all(inside[name] is not before[name] for name in before)


def test_hooks_of_modules_do_not_see_a_compiled_function(engine: Any) -> None:
    seen: list[nn.Module] = []
    compiled = torch.compile(compute_loss, backend="aot_eager")
    compiled(X)
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    torch._dynamo.reset()
    try:
        with modtrace.record(engine=engine):
            compiled(X)
    finally:
        handle.remove()

    assert "CompiledRegion" not in {type(module).__name__ for module in seen}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_compiled_part_of_a_module_without_a_name_of_its_own_is_that_modules(engine: Any) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.activate = torch.compile(self._activate, backend="aot_eager")

        def _activate(self, x: Tensor) -> Tensor:
            return x.sin()

        def forward(self, x: Tensor) -> Tensor:
            activated: Tensor = self.activate(self.net(x))
            return activated

    around = Around()
    around(X).sum().backward()

    with modtrace.record(engine=engine) as recording:
        around(X).sum().backward()

    name = "Around.Around._activate" if hasattr(compute_loss.__code__, "co_qualname") else "Around._activate"
    assert ("forward", name, 1) in told(recording)
    assert ("backward", name, 1) in told(recording)


GRAPHS = """
import contextlib, json, sys
import torch
from torch import nn
import modtrace

what, engine = sys.argv[1:]
graphs = []

def backend(graph, inputs):
    graphs.append(len(graph.graph.nodes))
    return graph

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        hidden: Tensor = self.layer(x).relu()
        return hidden

class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = Block(), torch._dynamo.disable(Block()), Block()

    def forward(self, x):
        x = self.a(x)
        torch._dynamo.graph_break()
        return self.c(self.b(x))

model = torch.compile(Broken(), backend=backend) if what != "step" else Broken()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step():
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

if what == "step":
    step = torch.compile(step, backend=backend)
with contextlib.nullcontext() if engine == "none" else modtrace.record(engine=engine) as recording:
    with (
        torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend))
        if what == "compiled_autograd"
        else contextlib.nullcontext()
    ):
        for _ in range(3):
            step()
breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
names = [] if engine == "none" else sorted({f"{span.phase} {span.fqn}" for span in recording.timeline().spans})
print(json.dumps([graphs, breaks, names]))
"""


@pytest.mark.usefixtures("native_engine")
@pytest.mark.parametrize("what", ["model", "step", "compiled_autograd"])
def test_what_is_captured_is_the_same_with_and_without_a_recording(what: str) -> None:
    graphs = {
        engine: json.loads(run_python("-c", GRAPHS, what, engine).stdout.splitlines()[-1])
        for engine in ("none", "native", "python")
    }

    assert graphs["native"][:2] == graphs["none"][:2]
    assert graphs["python"][:2] == graphs["none"][:2]
    assert len(graphs["none"][0]) > 1
    for engine in ("native", "python"):
        # No graph of torch.compile's own, and none run again.
        assert not [name for name in graphs[engine][2] if "Graph" in name or "Autograd" in name or "recompute" in name]
        assert f"backward {'step' if what == 'step' else 'Broken'}" in graphs[engine][2]
