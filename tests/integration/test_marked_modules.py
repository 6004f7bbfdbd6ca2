"""Which modules a kernel belongs to, judged by what modules leave in the code that Inductor writes.

Each module multiplies its inputs and its outputs by numbers that are found nowhere else, and so leaves these in each
kernel, forward and backward, that does some of it. A product is of the module whose weight it reads or whose gradient
it writes. Nothing of this comes from what Inductor notes of nodes. Kernels are not compiled: their code is enough.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor, nn
from torch._inductor.async_compile import AsyncCompile
from torch.torch_version import TorchVersion

import modtrace
from modtrace.timeline.contents import COMPILED

pytestmark = [
    pytest.mark.usefixtures("nothing_compiled"),
    pytest.mark.skipif(TorchVersion(torch.__version__) < "2.9", reason="torch 2.8 does not name kernels"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]

_SOURCE = re.compile(r"^(\w+) = async_compile\.cpp_pybinding\(\[.*?\], r?'''(.*?)'''\)", re.S | re.M)
_CALL = re.compile(r"^\s+(?:(\w+) = )?((?:extern_kernels|torch\.ops|aten)\.[\w.]+|cpp_\w+)\((.*)\)$")
_MARK = re.compile(r"\b1\.\d{4}1\b")
_INPUT = re.compile(r"\b(?:primals_(\d+)|arg(\d+)_1)\b")


def mark(module: nn.Module, number: int) -> tuple[str, str]:
    """Have a module multiply by two numbers of its own; returns how they are written."""
    kind: Any = type(module)
    first, last = float(f"1.{2 * number:04d}1"), float(f"1.{2 * number + 1:04d}1")

    def forward(self: nn.Module, x: Tensor) -> Any:
        return kind.forward(self, x * first) * last

    module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return repr(first), repr(last)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(32), nn.GELU()
        self.up, self.gate = nn.Linear(32, 48, bias=False), nn.Linear(32, 48, bias=False)
        self.down = nn.Linear(48, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        out: Tensor = x + self.down(self.act(self.up(normed)) * self.gate(normed))
        return out


class Net(nn.Module):
    """Its inputs have two dimensions, so that products become part of sums."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(32, 7)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(x))
        return out


@pytest.mark.parametrize("training", [True, False])
def test_kernels_are_of_the_modules_whose_marks_and_weights_they_have(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, codes, inputs = Net(), list[str](), list[Any]()
    module_of = {
        mark_of: name
        for number, (name, module) in enumerate(model.named_modules())
        if name
        for mark_of in mark(module, number)
    }
    weights = {id(weight): name.rpartition(".")[0] for name, weight in model.named_parameters()}

    def compile_and_keep(graph: Any, example_inputs: Any) -> Any:
        inputs[:] = [weights.get(id(value)) for value in example_inputs]
        return importlib.import_module("torch._inductor.compile_fx").compile_fx(graph, example_inputs)

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_, **__: lambda *_: None)
    monkeypatch.setattr("torch._inductor.graph.GraphLowering.save_output_code", staticmethod(codes.append))
    with torch._functorch.config.patch(force_non_lazy_backward_lowering=True), modtrace.record() as recording:
        compiled: Any = torch.compile(model, backend=compile_and_keep)
        if training:
            compiled(torch.ones(16, 32)).sum().backward()
        else:
            with torch.no_grad():
                compiled(torch.ones(16, 32))

    ((graph,),) = recording.timeline().metadata[COMPILED].values()
    paths = [name.rpartition(": ")[0] for name, *_ in graph["work"]]
    said = [
        [(name, {paths[part] for part, *_ in parts}) for name, parts in made["kernels"]] for made in graph["kernels"]
    ]
    assert len(said) == len(codes) == 1 + training
    proven = set[str]()
    for code, kernels in zip(codes, said, strict=True):
        sources = dict(_SOURCE.findall(code))
        calls = [call.groups() for line in code[code.index("def call(") :].splitlines() if (call := _CALL.match(line))]
        assert [name for _, name, _ in calls] == [name for name, _ in kernels]
        for (_, name, args), (_, modules) in zip(calls, kernels, strict=True):
            read = [inputs[int(primal) - 1] if primal else inputs[int(arg)] for primal, arg in _INPUT.findall(args)]
            must = {module for module in read if module is not None}
            must |= {module_of[number] for number in _MARK.findall(sources.get(name, "")) if number in module_of}
            assert must <= modules, name
            assert not must or modules <= must | {"", "blocks.0", "blocks.1"}, name
            proven |= must
    assert proven == set(module_of.values())
