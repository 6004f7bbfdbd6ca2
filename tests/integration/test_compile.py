"""torch.compile with a recording: no graph break, no warning, and one slice for a compiled region."""

from __future__ import annotations

import ast
import importlib.util
import logging
import shutil
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.cpp_extension  # a build for CUDA warns here that there is none, and not while a test looks at logs
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.torch_version import TorchVersion

import modtrace
from modtrace import Timeline
from modtrace.record_options import EngineName
from tests.support.forked_python import run_forked

pytestmark = [
    # A warning of torch, when its compiler is imported.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    # A warning of torch, when it compiles a part whose input another part made.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
BACKENDS = ["aot_eager", "inductor"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x) + x
        return out


class Outer(nn.Module):
    """An eager model with a compiled part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.before, self.part, self.after = nn.Linear(4, 4), part, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.part(self.before(x)))
        return out


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs g++")
    name: str = request.param
    return name


def compiled(module: nn.Module, counter: Any) -> nn.Module:
    # fullgraph: a graph break is an error.
    made = torch.compile(module, backend=counter, fullgraph=True)
    assert isinstance(made, nn.Module)
    return made


def step(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


def spans(timeline: Timeline, phase: str) -> list[tuple[str, int]]:
    return [(span.fqn, span.depth) for span in timeline.spans if span.phase == phase]


def test_compiled_fresh_under_a_recording(engine: EngineName, backend: str, caplog: pytest.LogCaptureFixture) -> None:
    counter = CompileCounterWithBackend(backend)
    model = compiled(Net(), counter)
    with caplog.at_level(logging.WARNING), modtrace.record(engine=engine) as recording:
        step(model)
        first = recording.snapshot()
        for _ in range(2):
            step(model)
    timeline = recording.timeline()

    assert caplog.records == []
    assert counter.frame_count == 1
    for n, one in ((1, first), (3, timeline)):
        roots = spans(one, "forward")
        assert [depth for _, depth in roots] == [0] * n
        assert len({fqn for fqn, _ in roots}) == 1
        assert spans(one, "backward") == roots
        assert all(span.complete for span in one.spans)


def test_compiled_before_a_recording(engine: EngineName, backend: str, caplog: pytest.LogCaptureFixture) -> None:
    counter = CompileCounterWithBackend(backend)
    model = compiled(Net(), counter)
    with caplog.at_level(logging.WARNING):
        step(model)
        with modtrace.record(engine=engine) as recording:
            for _ in range(3):
                step(model)

    assert caplog.records == []
    assert counter.frame_count <= 2
    timeline = recording.timeline()
    assert len(spans(timeline, "forward")) == 3
    assert spans(timeline, "backward") == spans(timeline, "forward")


def test_a_change_of_the_recordings_state_compiles_nothing_again(engine: EngineName) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    model = compiled(Net(), counter)
    step(model)
    frames = [counter.frame_count]
    for _ in range(3):
        with modtrace.record(engine=engine):
            step(model)
            step(model)
        frames.append(counter.frame_count)
        step(model)
        frames.append(counter.frame_count)

    assert frames == [1] * 7


def test_other_engines_recordings_compile_nothing_again(native_engine: None) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    model = compiled(Net(), counter)
    engines: list[EngineName] = ["native", "python"]
    for engine in engines * 2:
        with modtrace.record(engine=engine):
            step(model)

    assert counter.frame_count == 1


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_compiled_part_of_an_eager_model(engine: EngineName, backend: str, when: str) -> None:
    counter = CompileCounterWithBackend(backend)
    model = Outer(compiled(Net(), counter))
    if when == "before":
        step(model)
    with modtrace.record(engine=engine) as recording:
        for _ in range(2):
            step(model)
    timeline = recording.timeline()

    assert spans(timeline, "forward") == [("Outer", 0), ("Outer.before", 1), ("Outer.part", 1), ("Outer.after", 1)] * 2
    assert spans(timeline, "backward") == [("Outer", 0), ("Outer.after", 1), ("Outer.part", 1), ("Outer.before", 1)] * 2


def test_a_module_that_compiles_itself(engine: EngineName) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    net = Net()
    net.compile(backend=counter, fullgraph=True)
    model = Outer(net)
    with modtrace.record(engine=engine) as recording:
        for _ in range(2):
            step(model)
    timeline = recording.timeline()

    assert counter.frame_count == 1
    assert spans(timeline, "forward") == [("Outer", 0), ("Outer.before", 1), ("Outer.part", 1), ("Outer.after", 1)] * 2
    assert spans(timeline, "backward") == [("Outer", 0), ("Outer.after", 1), ("Outer.part", 1), ("Outer.before", 1)] * 2


def test_warnings_are_those_without_a_recording(engine: EngineName, backend: str) -> None:
    def warned() -> set[str]:
        torch._dynamo.reset()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for model in (torch.compile(Net(), backend=backend), Outer(compiled(Net(), backend))):
                assert isinstance(model, nn.Module)
                step(model)
        return {str(warning.message) for warning in seen}

    plain = warned()
    with modtrace.record(engine=engine):
        assert warned() <= plain


def test_results_are_those_without_a_recording(engine: EngineName, backend: str) -> None:
    torch.manual_seed(0)
    net = Net()
    step(compiled(net, backend))
    plain = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad(set_to_none=True)
    torch._dynamo.reset()

    with modtrace.record(engine=engine, shapes=True):
        step(compiled(net, backend))

    recorded = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    assert len(recorded) == 4
    assert all(torch.equal(recorded[name], plain[name]) for name in plain)


WRAPPED = """
import sys, torch, modtrace
from torch import nn

IMPORT = "import torch._dynamo.variables.nn_module"

call = nn.Module.__call__

def double(self, *args):
    return 2 * call(self, *args)

def closed(call):
    def double(self, *args, by=2):
        return by * call(self, *args)
    return double

class Doubling:
    def __call__(self, *args):
        return 2 * call(*args)

    def __get__(self, module, owner=None):
        return self if module is None else lambda *args: self(module, *args)

WRAPPERS = [double, closed(call), torch.compiler.disable(closed(call))]
if torch.torch_version.TorchVersion(torch.__version__) >= "2.9":  # 2.8 compiles none that is no function
    WRAPPERS.append(Doubling())
if sys.argv[2] == "before":
    exec(IMPORT)
nn.Module.__call__ = double
exec(IMPORT)
from torch._dynamo.utils import counters

model, x = nn.Sequential(nn.Identity(), nn.Identity()), torch.ones(1)

def run():
    torch._dynamo.reset()
    counters.clear()
    result = torch.compile(lambda: model(x), backend="eager")().item()
    graph_breaks = len(counters.pop("graph_break", ()))
    return result, model(x).item(), graph_breaks, {name: dict(counters[name]) for name in ("stats", "frames")}

for nn.Module.__call__ in WRAPPERS if sys.argv[2] == "before" else WRAPPERS[:1]:
    run()
    before = run()
    with modtrace.record(engine=sys.argv[1]) as recording:
        during = run()
    assert recording.timeline().spans
    print(repr((before, during, run())))
"""


@pytest.mark.parametrize("imported", ["before", "after"])
def test_a_users_wrapper_around_calls_is_compiled_or_not_as_without_a_recording(
    engine: EngineName, imported: str
) -> None:
    # On import, torch's compiler takes the current function for a module's call, and leaves that one out inside.
    lines = run_forked("-W", "ignore", "-c", WRAPPED, engine, imported).stdout.splitlines()

    wrappers = 3 + (TorchVersion(torch.__version__) >= "2.9")
    assert len(lines) == (wrappers if imported == "before" else 1)
    for before, during, after in map(ast.literal_eval, lines):
        assert during == before
        assert after == before


@pytest.mark.parametrize("before", [True, False])
def test_foreign_wrappers_get_only_the_programs_calls(
    engine: EngineName, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    model, called, original = nn.Linear(4, 1), list[str](), nn.Module.__call__

    def note(self: nn.Module, *args: Any) -> Any:
        called.append(type(self).__name__)
        return original(self, *args) * 2.0

    @torch.compile(backend="eager")
    def compiled(x: Tensor) -> Any:
        return model(x).mean()

    if before:
        monkeypatch.setattr(nn.Module, "__call__", note)
    with modtrace.record(engine=engine):
        if not before:
            original = nn.Module.__call__
            monkeypatch.setattr(nn.Module, "__call__", note)
        compiled(torch.ones(2, 4)).backward()
        monkeypatch.undo()

    assert "CompiledRegion" not in called


def test_export(engine: EngineName) -> None:
    with modtrace.record(engine=engine):
        program = torch.export.export(Net(), (torch.ones(2, 4),))

    assert importlib.util.find_spec("torch.export") is not None
    assert [node.op for node in program.graph.nodes].count("placeholder") == 5
