"""Modules inside compiled regions: the same FLOPs as in eager mode, and torch.compile is unchanged."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import modtrace
from modtrace.timeline.metadata import fit_metadata
from modtrace.timeline.summary.compiled import CompiledModule, compiled_modules
from modtrace.track import compiled_graphs
from tests.support.forked_python import run_forked
from tests.support.uncompiled_kernels import uncompiled_kernels

pytestmark = [
    pytest.mark.usefixtures("nothing_compiled"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(nn.functional.gelu(self.up(x)))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(self.norm(x))
        return out


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return out


X = torch.ones(4, 16, 32)
UP = 2 * 4 * 16 * 32 * 64
"""FLOPs of one product of `MLP`, in closed form."""


def inside(timeline: modtrace.Timeline) -> list[CompiledModule]:
    return list(timeline.summary().compiled)


def step(model: Any) -> Tensor:
    loss: Tensor = model(X).sum()
    loss.backward()
    return loss


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.usefixtures("passed_graphs")
def test_flops_inside_are_those_of_eager(engine: Any, backend: str, tmp_path: Path) -> None:
    model = nn.Sequential(Block(), Block())
    with FlopCounterMode(display=False) as counter:
        step(model)
    eager = {fqn: sum(of_module.values()) for fqn, of_module in counter.get_flop_counts().items() if fqn != "Global"}

    with modtrace.record(engine=engine, ring=tmp_path / "run.modtrace") as recording, uncompiled_kernels():
        step(torch.compile(model, backend=backend))

    rows = inside(recording.timeline())
    assert {row.fqn: row.flops_forward + row.flops_backward for row in rows if row.flops_forward} == eager  # type: ignore[operator]
    assert [(row.fqn, row.module_class) for row in rows] == [
        ("Sequential", ""),
        *[
            (f"Sequential.{block}{path}", name)
            for block in range(2)
            for path, name in (
                *(("", "Block"), (".norm", "LayerNorm"), (".mlp", "MLP")),
                *((".mlp.up", "Linear"), (".mlp.down", "Linear")),
            )
        ],
    ]
    assert {(row.region, row.flops_recompute, row.unknown) for row in rows} == {("Sequential", 0, "")}
    assert all(row.nodes_forward and row.nodes_backward for row in rows)
    for name in ("trace.json", "trace.pftrace"):
        recording.save(tmp_path / name)
        assert inside(modtrace.load(tmp_path / name)) == rows
    assert inside(modtrace.load(tmp_path / "run.modtrace")) == rows
    only = recording.timeline().summary().only("*.up").compiled
    assert [(row.fqn, row.flops_forward, row.flops_backward) for row in only] == [
        ("Sequential.0.mlp.up", UP, 2 * UP),
        ("Sequential.1.mlp.up", UP, 2 * UP),
    ]


class OfNoSelf(nn.Module):
    """Its methods do not name their instance `self`, and go on after a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([MLP(), MLP()])

    def forward(s, x: Tensor) -> Tensor:
        x = s.blocks[0](x)
        torch._dynamo.graph_break()
        out: Tensor = s.blocks[1](x)
        return out


def test_names_inside_are_those_of_eager_whatever_self_is_called(engine: Any) -> None:
    model = OfNoSelf()
    with modtrace.record(engine=engine) as eager:
        model(X)
    with modtrace.record(engine=engine) as recording:
        torch.compile(model, backend="aot_eager")(X)

    spans = [(span.fqn, span.module_class) for span in eager.timeline().spans]
    assert [(row.fqn, row.module_class) for row in inside(recording.timeline()) if row.module_class] == spans[1:]
    assert spans[1:3] == [("OfNoSelf.blocks.0", "MLP"), ("OfNoSelf.blocks.0.up", "Linear")]


def returning_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def wrapper(self: nn.Module, *args: Tensor) -> Any:
        return function(self, *args)

    return wrapper


class Decorated(nn.Module):
    """torch compiles the decorator around its `forward`, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(MLP(), MLP())

    @returning_tensors
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x)
        return out


class Breaking(nn.Module):
    """Its graph breaks inside a part: torch keeps the next part on its stack."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        torch._dynamo.graph_break()
        out: Tensor = self.down(x)
        return out


class AroundBreaks(nn.Module):
    """The code after a break has parts in variables of this module's call, or on the stack."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.breaking, self.blocks = MLP(), Breaking(), nn.ModuleList([MLP(), MLP()])

    def forward(self, x: Tensor) -> Tensor:
        block = self.blocks[1]
        x = self.blocks[0](self.breaking(self.first(x)))
        torch._dynamo.graph_break()
        out: Tensor = block(x)
        return out


class Wrapped(nn.Module):
    """Parts that are compiled by themselves, in two ways, and one in a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.wrapped, self.again = MLP(), torch.compile(MLP(), backend="aot_eager"), checkpoint_wrapper(MLP())
        self.own.compile(backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.again(self.wrapped(self.own(x)))
        return out


class Tied(nn.Module):
    """Parts that it contains twice: torch reaches them by the second path too."""

    def __init__(self) -> None:
        super().__init__()
        first = MLP()
        self.blocks = nn.ModuleList([first, MLP(), first])
        self.head = self.tail = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.tail(self.head(x))
        return out


@pytest.mark.parametrize("kind", [AroundBreaks, Wrapped, Tied, Decorated])
def test_names_inside_are_those_of_eager_after_breaks_in_wrappers_and_of_tied_parts(
    kind: type[nn.Module], engine: Any
) -> None:
    model = kind()
    with modtrace.record(engine=engine) as eager, torch.compiler.set_stance("force_eager"):
        model(X)
    with modtrace.record(engine=engine) as recording:
        torch.compile(model, backend="aot_eager")(X)

    names = {span.fqn: span.module_class for span in eager.timeline().spans}
    inside_of = {row.fqn: row.module_class for row in inside(recording.timeline()) if row.module_class}
    regions = {row.region for row in inside(recording.timeline())}
    assert len(inside_of) > 6
    assert inside_of == {fqn: module_class for fqn, module_class in names.items() if fqn not in regions}


@pytest.mark.parametrize("trace", [torch.fx.symbolic_trace, lambda model: torch.export.export(model, (X,)).module()])
@pytest.mark.usefixtures("passed_graphs")
def test_a_model_that_was_traced_is_a_region_as_any_other(trace: Callable[[nn.Module], nn.Module], engine: Any) -> None:
    traced = trace(Block())
    with modtrace.record(engine=engine) as recording:
        step(torch.compile(traced, backend="aot_eager"))

    timeline = recording.timeline()
    rows = inside(timeline)
    name = rows[0].fqn
    assert (rows[0].unknown, rows[0].flops_forward, rows[0].flops_backward) == ("", 2 * UP, 4 * UP)
    assert {(span.fqn, span.phase) for span in timeline.spans} == {(name, "forward"), (name, "backward")}
    assert {"norm", "mlp.up", "mlp.down"} <= {row.fqn.removeprefix(f"{name}.") for row in rows}


def test_modules_of_a_compiled_function_are_named_by_its_variables(engine: Any) -> None:
    named, listed, parts = {"up": nn.ReLU()}, [nn.GELU()], nn.ModuleDict({"x": nn.Tanh()})

    def total(x: Tensor) -> Tensor:
        out: Tensor = parts["x"](listed[0](named["up"](x)))
        return out

    with modtrace.record(engine=engine) as recording:
        torch.compile(total, backend="aot_eager")(X)

    assert [row.fqn for row in inside(recording.timeline())] == [
        "total",
        "total.named.up",
        "total.listed.0",
        "total.parts.x",
    ]


@pytest.mark.usefixtures("passed_graphs")
def test_calls_that_a_checkpoint_reruns_are_recompute(engine: Any) -> None:
    with modtrace.record(engine=engine) as recording:
        step(torch.compile(Checkpointed(), backend="aot_eager"))

    rows = {row.fqn: row for row in inside(recording.timeline())}
    up = rows["Checkpointed.block.mlp.up"]
    assert (up.flops_forward, up.flops_backward, up.flops_recompute) == (UP, 2 * UP, UP)
    assert rows["Checkpointed"].flops_forward == 2 * UP


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        heads = x.reshape(4, 2, 16, 16)
        out: Tensor = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return out


class CheckpointedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.attention, x, use_reentrant=False)
        return out


@pytest.mark.usefixtures("passed_graphs")
def test_flops_of_an_operator_with_the_state_of_random_numbers(engine: Any) -> None:
    with modtrace.record(engine=engine) as recording:
        torch.compile(CheckpointedAttention(), backend="aot_eager")(X.clone().requires_grad_()).sum().backward()

    rows = {row.fqn: row for row in inside(recording.timeline())}
    attention = rows["CheckpointedAttention.attention"]
    # Two products of 4 batches and 2 heads; backward has five, as torch's formula counts.
    flops = 2 * 4 * 2 * 2 * 16 * 16 * 16
    assert (attention.flops_forward, attention.flops_backward, attention.flops_recompute) == (
        flops, 5 * flops // 2, flops,
    )  # fmt: skip


class AttentionByHand(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.reshape(4, 16, 2, 16).transpose(1, 2) for part in x.chunk(3, -1))
        out: Tensor = torch.softmax(q @ k.transpose(-1, -2) / 4.0, -1) @ v
        return out


@pytest.mark.usefixtures("passed_graphs")
def test_attention_that_inductor_fuses_is_its_modules_and_counts_once() -> None:
    with modtrace.record() as recording, uncompiled_kernels():
        step(torch.compile(nn.Sequential(nn.Linear(32, 96), AttentionByHand())))

    rows = {row.fqn: row for row in inside(recording.timeline())}
    # Inductor compiles pieces of that kind itself, to find it. The compiled attention computes q k again in backward:
    flops = 2 * 4 * 2 * 2 * 16 * 16 * 16
    attention, linear = rows["Sequential.1"], 2 * 4 * 16 * 32 * 96
    assert (attention.flops_forward, attention.flops_backward, attention.flops_recompute) == (flops, 5 * flops // 2, 0)
    region = rows["Sequential"]
    assert (region.flops_forward, region.flops_backward, region.flops_recompute) == (
        flops + linear, 5 * flops // 2 + linear, 0,
    )  # fmt: skip


@pytest.mark.usefixtures("passed_graphs")
def test_each_graph_is_listed_and_dynamic_shapes_have_no_flops(engine: Any) -> None:
    model = torch.compile(MLP(), backend="aot_eager")
    with modtrace.record(engine=engine) as recording:
        for size in (2, 3, 5):
            model(torch.ones(size, 32))

    rows = [row for row in inside(recording.timeline()) if row.fqn == "MLP.up"]
    assert [(row.graph.partition("/")[2], row.flops_forward) for row in rows] == [("0", 2 * 2 * 32 * 64), ("1", None)]
    assert all(row.nodes_forward for row in rows)


@pytest.mark.usefixtures("passed_graphs")
def test_a_graph_from_a_cache_is_reported_as_unknown(engine: Any) -> None:
    if not torch._functorch.config.enable_autograd_cache:
        pytest.skip("AOTAutograd has no cache")
    model = MLP()
    with modtrace.record(engine=engine) as recording, uncompiled_kernels():
        step(torch.compile(model))
        first = inside(recording.snapshot())
        torch._dynamo.reset()
        step(torch.compile(model))

    cached = inside(recording.timeline())[len(first) :]
    assert [(row.fqn, row.unknown) for row in first] == [("MLP", ""), ("MLP.up", ""), ("MLP.down", "")]
    reason = "from the cache of AOTAutograd"
    assert [(row.fqn, row.unknown, row.flops_forward, row.nodes_forward) for row in cached] == [
        (fqn, reason, None, None) for fqn in ("MLP", "MLP.up", "MLP.down")
    ]
    assert f"not known of MLP, graph {cached[0].graph}: {reason}" in recording.timeline().summary().tables[
        "compiled"
    ].to("text")


@pytest.mark.usefixtures("passed_graphs")
def test_a_backend_without_aot_autograd_is_reported_as_unknown(engine: Any) -> None:
    with modtrace.record(engine=engine) as recording:
        torch.compile(MLP(), backend="eager")(X)

    (reason,) = {row.unknown for row in inside(recording.timeline())}
    assert reason == "its backend does not use AOTAutograd"


@pytest.mark.usefixtures("passed_graphs")
def test_features_that_a_version_of_torch_lacks_are_named(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = sys.modules[compiled_graphs.GRAPHS_MODULE]
    with modtrace.record(engine=engine) as recording:
        monkeypatch.setattr(compiled_graphs, "_COMPILE_FUNCTIONS", ("_of_another_version",))
        monkeypatch.setattr(compiled_graphs, "_add_nodes", lambda *_, **__: None)
        step(torch.compile(MLP(), backend="aot_eager"))

    assert not hasattr(graphs, "_of_another_version")
    (reason,) = {row.unknown for row in inside(recording.timeline())}
    assert reason == f"torch {torch.__version__} does not pass graphs by _of_another_version"


def test_an_error_inside_modtrace_does_not_reach_the_user(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_graphs, "formula_by_operator", lambda: 1 / 0)
    with modtrace.record(engine=engine) as recording:
        step(torch.compile(MLP(), backend="aot_eager"))

    assert {row.flops_forward for row in inside(recording.timeline())} == {None}


_PROGRAM = """
import json, shutil, sys
import torch
from torch import nn
from torch._dynamo.utils import counters

def run(record, backend):
    torch._dynamo.reset()
    counters.clear()
    for graphs in ("aotautograd", "fxgraph"):  # the C++ of both is the same, and compiled once
        shutil.rmtree(f"{sys.argv[1]}/{graphs}", ignore_errors=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64))
    compiled = torch.compile(model, backend=backend)
    before = torch.compile(model[0], backend=backend)
    before(torch.ones(2, 32))
    losses, unknown = [], None

    def train():
        before(torch.ones(2, 32))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for size in (2, 2, 3, 4, 4):
            loss = compiled(torch.ones(size, 32)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item().hex())

    if record:
        import modtrace
        with modtrace.record() as recording:
            train()
        unknown = [row.unknown for row in recording.timeline().summary().compiled]
    else:
        train()
    names = ("stats", "frames", "aot_autograd", "inductor", "graph_break", "recompiles")
    return losses, {name: dict(counters[name]) for name in names}, unknown

backends = sys.argv[2:]
plain = [run(False, backend) for backend in backends]
assert "modtrace" not in sys.modules
print(json.dumps([plain, [run(True, backend) for backend in backends]]))
"""


def test_losses_and_counters_are_those_without_modtrace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    plain, recorded = json.loads(run_forked("-c", _PROGRAM, tmp_path, "aot_eager", "inductor").stdout.splitlines()[-1])

    assert [run[:2] for run in plain] == [run[:2] for run in recorded]
    assert [len(losses) for losses, *_ in plain] == [5, 5]
    # Before the recording (the first of its process or not), then in it.
    lacks = compiled_graphs._missing()  # on torch 2.8
    assert [unknown[0] for *_, unknown in recorded] == ["compiled before the first recording", lacks]
    assert {unknown for *_, run in recorded for unknown in run[1:]} == {lacks}


@pytest.mark.usefixtures("passed_graphs")
def test_reading_takes_at_most_two_percent_of_compiling(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read_ns, original = [0], compiled_graphs._add_nodes

    def add_nodes(*args: Any, **kwargs: Any) -> None:
        before = time.process_time_ns()
        original(*args, **kwargs)
        read_ns[0] += time.process_time_ns() - before

    monkeypatch.setattr(compiled_graphs, "_add_nodes", add_nodes)
    model = torch.compile(nn.Sequential(*(Block() for _ in range(8))), backend="aot_eager")
    with modtrace.record(engine=engine):
        before = time.process_time_ns()
        step(model)
        took_ns = time.process_time_ns() - before

    assert 0 < read_ns[0] < 0.02 * took_ns


def test_a_call_of_a_region_runs_no_further_code_of_modtrace(engine: Any) -> None:
    model = torch.compile(MLP(), backend="aot_eager")
    called: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and Path(frame.f_code.co_filename).stem in ("compiled_graphs", "compiled_regions"):
            called.append(frame.f_code.co_name)

    with modtrace.record(engine=engine):
        for _ in range(2):
            step(model)
        sys.setprofile(note)
        try:
            model(X)
        finally:
            sys.setprofile(None)

    assert called == ["call"]


def test_malformed_metadata_is_left_out() -> None:
    work = [["a: A", 1, 0, 0, -1, 0, 0], ["a.b: B", 1, 0, 0, 5, 0, 0], ["x" * 2000, 1, 0, 0, 0, 0, 0]]
    for value in (None, 3, [1], {"Net": 3}, {"Net": [None, 4]}):
        assert compiled_modules(fit_metadata({"compiled": value})) == []
    assert compiled_modules({}) == []
    (row,) = compiled_modules(fit_metadata({"compiled": {"Net": [{"graph": 1, "work": work}]}}))
    assert (row.fqn, row.graph, row.nodes_forward) == ("Net", "1", 0)
    rows = compiled_modules({"compiled": {"Net": [{"graph": "0/0", "work": work[:2], "unknown": ""}]}})
    assert [(row.fqn, row.nodes_forward, row.flops_forward) for row in rows] == [
        ("Net", 2, None),
        ("Net.a", 2, None),
        ("Net.a.b", 1, 5),
    ]
