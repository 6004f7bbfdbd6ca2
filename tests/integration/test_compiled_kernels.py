"""Kernels of compiled regions go to modules in a merge: judged by shapes that only one layer has, and by their sums."""

from __future__ import annotations

import ast
import json
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import modtrace
from modtrace.compare.run_times import take_samples
from modtrace.profiler.compiled_kernels import FUSED, _Kernel, _match, _plain
from modtrace.timeline.contents import COMPILED, FUSED_TIMES, NOT_IN_PROFILE, WITH_REMEDY
from modtrace.timeline.summary.compiled import CompiledModule
from tests.support.forked_python import run_forked
from tests.support.python_process import run_python
from tests.support.uncompiled_kernels import uncompiled_kernels

pytestmark = [
    pytest.mark.usefixtures("native_engine", "nothing_compiled"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]


class Block(nn.Module):
    """Products with shapes that no other block has: `width` and `inner` identify their owner."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(32, 96), Block(32, 160)])
        self.head = nn.Linear(32, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x = checkpoint(self.blocks[1], x, use_reentrant=False)
        out: Tensor = self.head(x)
        return out


OWNERS = {96: "Net.blocks.0", 160: "Net.blocks.1", 7: "Net.head"}
"""The module of a product, by a size that only this module's products have."""
X = torch.ones(64, 32)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.reshape(1, 2, 64, 16) for part in self.qkv(x).chunk(3, -1))
        out: Tensor = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out


class Convolutions(nn.Module):
    """A convolution of 3 channels and one of 5, after a checkpoint that keeps the state of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.first = nn.Conv2d(1, 3, 3)
        self.second = nn.Conv2d(3, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.attention, x, use_reentrant=False).reshape(1, 1, 64, 32)
        out: Tensor = self.second(torch.relu(self.first(x)))
        return out


class Sums(nn.Module):
    """Its products are added to other tensors, forward and backward: Inductor makes one node of each such pair."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32, bias=False), nn.Linear(48, 32, bias=False)
        self.left, self.right = nn.Linear(32, 48, bias=False), nn.Linear(32, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.first(x)
        out: Tensor = x + self.last(self.left(inner) * self.right(inner))
        return out


class Merged:
    """A profile of a model's steps with a recording of them, merged."""

    def __init__(self, model: Any, folder: Path, *, before: bool = True) -> None:
        with modtrace.record() as recording:
            if before:
                model(X).sum().backward()
            with torch.profiler.profile(record_shapes=True) as profiler:
                for _ in range(2):
                    model(X).sum().backward()
        profiler.export_chrome_trace(str(folder / "profile.json"))
        self.recorded = recording.timeline()
        self.notes = modtrace.merge(folder / "profile.json", self.recorded, folder / "merged.json").notes
        self.timeline = modtrace.load(folder / "merged.json")
        self.rows = {row.fqn: row for row in self.timeline.summary().compiled}
        events = json.loads((folder / "profile.json").read_text())["traceEvents"]
        self.events = sorted((e for e in events if e.get("ph") == "X"), key=lambda e: (e["ts"], -e["dur"]))
        self.base = json.loads((folder / "profile.json").read_text())["baseTimeNanoseconds"]

    def kernels(self) -> list[dict[str, Any]]:
        """Return the events inside calls of compiled graphs, none inside another, from the trace alone."""
        found = []
        for call in [e for e in self.events if e["name"].startswith("## Call CompiledFxGraph")]:
            until, last = call["ts"], call["ts"] + call["dur"]
            for event in self.events:
                if event["tid"] == call["tid"] and event is not call and until <= event["ts"] < last:
                    found.append(event)
                    until = event["ts"] + event["dur"]
        return found

    def around(self, event: dict[str, Any]) -> modtrace.Span | None:
        """Return the innermost span around the middle of an event."""
        middle = self.base + round((event["ts"] + event["dur"] / 2) * 1000)
        spans = [span for span in self.timeline.spans if span.start_ns <= middle < span.end_ns]
        return max(spans, key=lambda span: span.depth, default=None)


def own_ns(row: CompiledModule) -> int:
    return sum(time or 0 for time in (row.kernel_ns_forward, row.kernel_ns_backward, row.kernel_ns_recompute))


@pytest.mark.usefixtures("passed_graphs")
def test_products_are_in_the_module_whose_shapes_they_have(tmp_path: Path) -> None:
    with torch._inductor.config.patch("cpp.enable_kernel_profile", True), uncompiled_kernels():
        model = Net()
        merged = Merged(torch.compile(model), tmp_path)

    kernels = merged.kernels()
    products = [event for event in kernels if event["name"] in ("aten::mm", "aten::addmm")]
    phases: dict[tuple[str, str], int] = defaultdict(int)
    times: dict[str, float] = defaultdict(float)
    for event in products:
        sizes = {size for shape in event["args"]["Input Dims"] for size in shape}
        (owner,) = (OWNERS[size] for size in sizes & OWNERS.keys())
        span = merged.around(event)
        assert span is not None
        assert span.fqn.rpartition(".")[0] == owner if owner != "Net.head" else span.fqn == owner
        # Only products in forward add a bias.
        assert (span.phase == "backward") == (event["name"] == "aten::mm")
        phases[owner, span.phase] += 1
        times[owner] += event["dur"] * 1000
    # Two steps: two products per block, which the checkpoint reruns, and two of each in backward.
    assert phases == {
        ("Net.blocks.0", "forward"): 4,
        ("Net.blocks.0", "backward"): 8,
        ("Net.blocks.1", "forward"): 4,
        ("Net.blocks.1", "recompute"): 4,
        ("Net.blocks.1", "backward"): 8,
        ("Net.head", "forward"): 2,
        ("Net.head", "backward"): 4,
    }

    region = merged.rows["Net"]
    assert own_ns(region) == pytest.approx(sum(event["dur"] for event in kernels) * 1000, rel=0.001)
    assert region.kernel_ns_divided == 0
    for fqn, took in times.items():
        linears = [merged.rows[name] for name in (f"{fqn}.up", f"{fqn}.down", fqn) if name in merged.rows]
        linears = linears[:2] if len(linears) == 3 else linears
        # Time that is not divided is of the products, and perhaps of sums for a bias.
        assert sum(own_ns(row) - (row.kernel_ns_divided or 0) for row in linears) >= took * 0.999
    assert merged.rows["Net.blocks.1.norm"].divided_share
    fused = {span.fqn for span in merged.timeline.spans if span.module_class == FUSED}
    assert fused
    assert all(" + " in fqn for fqn in fused)
    assert not [note for note in merged.notes if "not in the profile" in note or "not known" in note]
    assert "divided by the bytes" in merged.timeline.summary().tables["compiled"].to("text")

    calls = Counter((span.fqn, span.phase, span.call) for span in merged.timeline.spans)
    assert max(calls.values()) > 1  # kernels of other modules run in between
    samples = take_samples(merged.timeline)
    assert {count for counts in samples.calls.values() for count in counts.tolist()} == {1}
    # A comparison has each module of the eager model, with its part of fused kernels, and nothing else.
    compiled_modules = {fqn for fqn, phase in samples.self_ns if phase != "recompute"}
    assert compiled_modules == {".".join(filter(None, ("Net", name))) for name, _ in model.named_modules()} - {
        "Net.blocks"
    }
    metadata: dict[str, Any] = dict(merged.timeline.metadata)
    metadata[COMPILED] = {"Net": [{**graph, FUSED_TIMES: []} for graph in metadata[COMPILED]["Net"]]}
    undivided = take_samples(replace(merged.timeline, metadata=metadata))
    assert any(" + " in fqn for fqn, _ in undivided.self_ns)
    total, of_all = (sum(int(ns.sum()) for ns in taken.self_ns.values()) for taken in (samples, undivided))
    assert total == pytest.approx(of_all, abs=len(samples.self_ns) * 2)


@pytest.mark.usefixtures("passed_graphs")
def test_products_that_are_part_of_a_sum(tmp_path: Path) -> None:
    with torch._inductor.config.patch("cpp.enable_kernel_profile", True):  # and its kernels are compiled
        merged = Merged(torch.compile(Sums()), tmp_path)

    products = [event for event in merged.kernels() if event["name"] in ("aten::mm", "aten::addmm")]
    # In each of two steps: the product that is added to x, and one of the two gradients that reach `first`.
    assert sum(event["name"] == "aten::addmm" for event in products) == 4
    spans = [merged.around(event) for event in products]
    assert Counter((span.fqn, span.phase) for span in spans if span is not None) == {
        ("Sums.first", "forward"): 2,
        ("Sums.first", "backward"): 2,  # X needs no gradient
        **{(f"Sums.{name}", "forward"): 2 for name in ("left", "right", "last")},
        **{(f"Sums.{name}", "backward"): 4 for name in ("left", "right", "last")},
    }


class Products(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(torch.bmm(x, x.transpose(1, 2).contiguous()).relu(), x)


def owners_as_written(
    model: nn.Module, x: Tensor, *, backward: bool = False, dynamic: bool | None = None, **how: object
) -> list[list[str]]:
    """Return the modules of each kernel that Inductor writes for a call without gradients, or for its backward.

    No kernel is compiled.
    """
    lowered = torch._functorch.config.patch(force_non_lazy_backward_lowering=backward)
    configured, gradients = torch._inductor.config.patch(how), torch.set_grad_enabled(backward)
    with uncompiled_kernels(), configured, lowered, modtrace.record() as recording, gradients:
        torch.compile(model, dynamic=dynamic)(x)
    ((graph,),) = recording.timeline().metadata[COMPILED].values()
    paths = [name.rpartition(": ")[0] for name, *_ in graph["work"]]
    made = graph["kernels"][-1]
    return [[paths[module] for module, *_ in parts] for _, parts in made["kernels"]]


@pytest.mark.usefixtures("passed_graphs")
def test_templates_of_products_belong_only_to_their_module() -> None:
    # Inductor attributes a template to all modules that its inputs come from.
    model = nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32), Products()).eval()
    how: dict[str, Any] = {"freezing": True, "max_autotune": True, "max_autotune_gemm_backends": "CPP"}
    assert owners_as_written(model, torch.ones(4, 32, 32), **how) == [["0", "1"], ["2"], ["3"], ["3"], ["3"]]


@pytest.mark.usefixtures("passed_graphs")
def test_weights_with_another_layout_belong_to_the_modules_that_use_them() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    owners = owners_as_written(model, torch.ones(2, 3, 16, 16))
    assert owners[0] == ["0"]
    assert {tuple(own) for own in owners} <= {("0",), ("1",), ("2",), ("1", "2"), ("2", "1")}


@pytest.mark.usefixtures("passed_graphs")
def test_dynamic_sizes_are_not_inputs_of_a_kernel() -> None:
    model = nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Sigmoid())
    owners = owners_as_written(model, torch.ones(3, 4, 32), dynamic=True)
    assert [set(own) for own in owners] == [{"0"}, {"1", "2"}]


@pytest.mark.usefixtures("passed_graphs")
def test_a_kernel_belongs_to_pooling_even_if_it_does_not_read_the_inputs() -> None:
    # The operator in backward gets the input of pooling, but reads only its shape.
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AvgPool2d(2), nn.Tanh())
    first, *_ = owners_as_written(model, torch.ones(2, 3, 18, 18), backward=True)
    assert set(first) == {"0", "1", "2"}


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x * 0.5, -1).cumsum(-1)


@pytest.mark.usefixtures("passed_graphs")
def test_kernels_of_a_product_before_a_softmax_belong_to_its_module() -> None:
    owners = owners_as_written(nn.Sequential(nn.Linear(32, 8), Scaled(), nn.Tanh()), torch.ones(4, 32))
    assert [set(own) for own in owners] == [{"0"}, {"1"}, {"1"}, {"2"}]


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.arange(32).expand(4, 32) % 4)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.empty_like(x).bernoulli_(0.5)
        return x.scatter_reduce(0, self.get_buffer("rows"), x * 2, "prod") * mask


@pytest.mark.usefixtures("passed_graphs")
def test_operators_that_write_to_their_inputs() -> None:
    # Inductor names the nodes of a kernel, except if it calls such an operator.
    model = nn.Sequential(nn.Linear(32, 32), Written(), nn.Linear(32, 8))
    owners = owners_as_written(model, torch.ones(4, 32), fallback_random=True)
    assert owners == [["1"], ["1"], ["0"], ["1"], ["1"], ["1"], ["2"]]


def test_operators_have_one_name_in_code_and_in_a_profile() -> None:
    written = ["extern_kernels.bias_addmm", "torch.ops.aten.mm.out", "aten.randint.low_out", "aten.index_put_", "cpp_1"]
    profiled = ["aten::addmm", "aten::mm", "aten::randint", "aten::index_put_", "graph_0_cpp_1"]
    assert [*map(_plain, written)] == [*map(_plain, profiled)] == ["addmm", "mm", "randint", "index_put_", "cpp_1"]


def test_templates_are_named_by_their_sizes_in_a_profile() -> None:
    kernels = [_Kernel(name, {}, 0) for name in ("cpp_fused_0", "mm", "cpp_fused_1")]
    assert _match(kernels, ["gemm_m64n96k64_kernel", "mm", "gemm_m64n64k96_kernel"]) == [0, 1, 2]
    assert _match(kernels, ["gemm_m64n96k64_kernel", "mm"]) == [-1, 1]


class Product(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last, self.mix = nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), Product()

    def forward(self, x: Tensor) -> Tensor:
        flat = self.act(self.first(x)).flatten(0, 1)
        out: Tensor = self.mix(self.last(flat), flat)
        return out


@pytest.mark.usefixtures("passed_graphs")
def test_inputs_of_a_kernel_are_not_computed_in_it() -> None:
    # Inductor attributes a view's reader also to all nodes that made the view, if the view came before its memory.
    assert owners_as_written(Gated(), torch.ones(4, 8, 32)) == [["first"], ["act"], ["last"], ["mix"]]


class Relative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias, self.act = nn.Embedding(16, 32), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[0])
        out: Tensor = self.act(x + self.bias((at[:, None] - at[None]).clamp(-7, 8) + 7).sum(0))
        return out


@pytest.mark.usefixtures("passed_graphs")
def test_a_kernel_that_computes_its_own_indexes() -> None:
    owners = owners_as_written(Relative(), torch.ones(4, 32))
    assert {module for own in owners for module in own} == {"", "bias", "act"}


@pytest.mark.usefixtures("passed_graphs")
def test_operators_with_several_results_and_with_random_numbers(tmp_path: Path) -> None:
    with uncompiled_kernels():
        merged = Merged(torch.compile(Convolutions()), tmp_path)

    found: dict[tuple[str, str, str], int] = defaultdict(int)
    for event in merged.kernels():
        if event["name"].startswith(("aten::convolution", "aten::_scaled_dot")):
            span = merged.around(event)
            assert span is not None
            found[event["name"].removeprefix("aten::"), span.fqn, span.phase] += 1
            if "convolution" in event["name"]:
                name = "second" if [5, 3, 3, 3] in event["args"]["Input Dims"] else "first"
                assert span.fqn == f"Convolutions.{name}"
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert found == {
        ("convolution", "Convolutions.first", "forward"): 2,
        ("convolution", "Convolutions.second", "forward"): 2,
        ("convolution_backward", "Convolutions.first", "backward"): 2,
        ("convolution_backward", "Convolutions.second", "backward"): 2,
        (attention, "Convolutions.attention", "forward"): 2,
        (attention, "Convolutions.attention", "recompute"): 2,
        (f"{attention}_backward", "Convolutions.attention", "backward"): 2,
    }


@pytest.mark.usefixtures("passed_graphs")
def test_graphs_of_torchs_caches_and_what_was_compiled_before(tmp_path: Path) -> None:
    model = Net()
    with uncompiled_kernels():
        first = Merged(torch.compile(model), tmp_path)
        torch._dynamo.reset()
        cached = Merged(torch.compile(model), tmp_path)
        torch._dynamo.reset()
        compiled = torch.compile(model)
        compiled(X).sum().backward()
        late = Merged(compiled, tmp_path, before=False)

    def spans(merged: Merged) -> set[tuple[str, str, str]]:
        return {(span.fqn, span.module_class, span.phase) for span in merged.timeline.spans}

    assert ("Net.blocks.1.up", "Linear", "recompute") in spans(first)
    assert spans(cached) == spans(first)
    assert any("kernels of compiled regions are not in the profile (in Net), so" in note for note in first.notes)
    reasons = {own.get("compiled_unknown") for own in first.timeline.span_args.values()}
    assert reasons == {WITH_REMEDY[NOT_IN_PROFILE]}
    assert spans(late) == spans(first)

    metadata = {**first.recorded.metadata, COMPILED: {"Net": [{"graph": "0/0", "unknown": "", "work": []}]}}
    unknown = modtrace.merge(tmp_path / "profile.json", replace(late.recorded, metadata=metadata), tmp_path / "u.json")
    assert "4 of 4 calls of compiled graphs have no modules: their kernels are not known" in unknown.notes
    assert {span.fqn for span in modtrace.load(tmp_path / "u.json").spans} == {"Net"}


@pytest.mark.usefixtures("passed_graphs")
def test_a_torch_that_names_no_kernels_is_named(tmp_path: Path) -> None:
    merged = Merged(torch.compile(Net(), backend="aot_eager"), tmp_path)
    assert not [note for note in merged.notes if "no modules" in note]
    lacks = "torch 2.8.0 does not name kernels by set_kernel_post_grad_provenance_tracing"
    graph = {"graph": "0/0", "unknown": "", "work": [], "kernels": [{"key": "k", "kernels": [], "unknown": lacks}]}
    older = replace(merged.recorded, metadata={**merged.recorded.metadata, COMPILED: {"Net": [graph]}})
    notes = modtrace.merge(tmp_path / "profile.json", older, tmp_path / "older.json").notes
    assert [note for note in notes if "no modules" in note] == [f"kernels in Net have no modules: {lacks}"]


_WARM = """
import sys
import torch
from torch import nn
from tests.support.uncompiled_kernels import uncompiled_kernels
uncompiled = uncompiled_kernels()
uncompiled.__enter__()
model = nn.Sequential(nn.Linear(8, 16), nn.GELU())
compiled, x = torch.compile(model), torch.ones(4, 8)
if sys.argv[1] == "before":
    compiled(x).sum().backward()
import modtrace
with modtrace.record() as recording, torch.profiler.profile() as profiler:
    compiled(x).sum().backward()
profiler.export_chrome_trace(sys.argv[2] + "profile.json")
timeline = recording.timeline()
merged = modtrace.merge(sys.argv[2] + "profile.json", timeline, sys.argv[2] + "merged.json")
spans = modtrace.load(sys.argv[2] + "merged.json").spans
args = {own["compiled_unknown"] for own in timeline.span_args.values() if "compiled_unknown" in own}
notes = [note for note in merged.notes if "no modules" in note]
print(repr((args, notes, sorted({span.phase for span in spans if span.fqn == "Sequential.0"}))))
"""


@pytest.mark.usefixtures("passed_graphs")
def test_reasons_for_kernels_without_modules_name_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))

    def told(how: str, run: Callable[..., CompletedProcess[str]] = run_forked) -> tuple[set[str], list[str], list[str]]:
        said: tuple[set[str], list[str], list[str]] = ast.literal_eval(
            run("-c", _WARM, how, f"{tmp_path}/").stdout.splitlines()[-1]
        )
        return said

    before = "compiled before the first recording (record from before its first call)"
    cached = "from a cache that was filled without modtrace (TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 compiles it again)"
    start = "2 of 2 calls of compiled graphs have no modules: Sequential is "
    # The first process fills the caches of the second.
    assert told("before") == ({before}, [start + before], [])
    assert told("recorded") == ({cached}, [start + cached], [])
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    # torch reads the variable when it is imported.
    assert told("recorded", run_python) == (set(), [], ["backward", "forward"])
