"""The modules of each kernel, judged by marks that modules leave in the code that Inductor writes.

Each module multiplies its inputs and its outputs by numbers that are found nowhere else, and so leaves these in each
kernel, forward and backward, that does some of its work. A product belongs to the module whose weight it reads or
whose gradient it writes. Inductor's notes on nodes are not used. Kernels are not compiled: their code is enough.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch
import torch._dynamo.config
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
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

_SOURCE = re.compile(r"^(\w+) = async_compile\.cpp_pybinding\(\[.*?\], r?'''(.*?)'''\)", re.S | re.M)
_CALL = re.compile(r"^\s+(?:(\w+) = )?((?:extern_kernels|torch\.ops|aten)\.[\w.]+|cpp_\w+)\((.*)\)$")
_MARK = re.compile(r"\b1\.\d{4}1\b")
_INPUT = re.compile(r"\b(?:primals_(\d+)|arg(\d+)_1)\b")


def mark(module: nn.Module, number: int) -> tuple[str, str]:
    """Make a module multiply by two numbers of its own; return how they are written."""
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


class Judge:
    """Inductor's code for a model, and the modules that its code shows.

    Attributes:
        codes: code of each compiled graph, with the module of each input of its captured graph.
        module_of: the module that multiplies by a number, by number.
    """

    def __init__(self, model: nn.Module, parts: dict[str, nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
        """Mark the modules of each separately compiled part: those at the same place get the same marks."""
        self.codes, self.inputs, self.module_of = list[tuple[str, list[Any]]](), list[Any](), dict[str, str]()
        self.weights = dict[int, str]()
        classes = dict[tuple[type, str], type]()
        for part in parts.values():
            for number, (name, module) in enumerate(part.named_modules()):
                if name or len(parts) > 1:
                    kind = type(module)
                    self.module_of |= dict.fromkeys(mark(module, number), name)
                    module.__class__ = classes.setdefault((kind, name), module.__class__)
            self.weights |= {id(weight): name.rpartition(".")[0] for name, weight in part.named_parameters()}
        monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_, **__: lambda *_: None)
        monkeypatch.setattr("torch._inductor.graph.GraphLowering.save_output_code", staticmethod(self._keep))

    def compile(self, graph: Any, example_inputs: Any) -> Any:
        """Compile a captured graph as Inductor does."""
        self.inputs = [self.weights.get(id(value)) for value in example_inputs]
        return importlib.import_module("torch._inductor.compile_fx").compile_fx(graph, example_inputs)

    def _keep(self, code: str) -> None:
        self.codes.append((code, self.inputs))

    def check(self, graph: dict[str, Any], around: set[str]) -> set[str]:
        """Check the notes on a graph's kernels; return the modules that are proven.

        Args:
            graph: the graph's entry in the metadata.
            around: modules that contain others.
        """
        paths = [name.rpartition(": ")[0] for name, *_ in graph["work"]]
        said = [
            [(name, {paths[part] for part, *_ in parts}) for name, parts in made["kernels"]]
            for made in graph["kernels"]
        ]
        assert len(said) == len(self.codes)
        proven = set[str]()
        for (code, inputs), kernels in zip(self.codes, said, strict=True):
            sources = dict(_SOURCE.findall(code))
            lines = code[code.index("def call(") :].splitlines()
            calls = [call.groups() for line in lines if (call := _CALL.match(line))]
            assert [name for _, name, _ in calls] == [name for name, _ in kernels]
            for (_, name, args), (_, modules) in zip(calls, kernels, strict=True):
                read = [inputs[int(primal) - 1] if primal else inputs[int(arg)] for primal, arg in _INPUT.findall(args)]
                must = {module for module in read if module is not None}
                numbers = _MARK.findall(sources.get(name, ""))
                must |= {self.module_of[number] for number in numbers if number in self.module_of}
                assert must <= modules, name
                assert not must or modules <= must | around, name
                proven |= must
        return proven


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("training", [True, False])
def test_kernels_belong_to_the_modules_whose_marks_and_weights_they_have(
    training: bool, dynamic: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Net(), torch.ones(3, 4, 32) if dynamic else torch.ones(16, 32)
    judge = Judge(model, {"": model}, monkeypatch)
    with torch._functorch.config.patch(force_non_lazy_backward_lowering=training), modtrace.record() as recording:
        compiled: Any = torch.compile(model, backend=judge.compile, dynamic=dynamic)
        with torch._dynamo.config.patch(specialize_float=True), torch.set_grad_enabled(training):
            compiled(x)

    ((graph,),) = recording.timeline().metadata[COMPILED].values()
    assert len(judge.codes) == 1 + training
    assert judge.check(graph, {"", "blocks.0", "blocks.1"}) == set(judge.module_of.values())


def test_a_graph_that_several_modules_share_has_kernels_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    parts = dict(model.blocks.named_children())
    judge = Judge(model, parts, monkeypatch)
    with torch._functorch.config.patch(force_non_lazy_backward_lowering=True), modtrace.record() as recording:
        for block in parts.values():
            block.compile(backend=judge.compile)
        model(torch.ones(16, 32, requires_grad=True))

    graphs = recording.timeline().metadata[COMPILED]
    assert list(graphs) == ["Net.blocks.0", "Net.blocks.1"]
    assert len(judge.codes) == 2
    for (graph,) in graphs.values():
        assert judge.check(graph, {""}) == set(judge.module_of.values())
