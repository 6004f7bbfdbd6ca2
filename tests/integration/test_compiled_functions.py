"""Compiled functions: spans with their backward, and the same graphs captured by torch.compile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.package import package
from torch.utils import _pytree as pytree

import modtrace


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


# Warnings from imports of inductor.
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


def test_compiled_functions_are_seen_only_by_recordings_and_once_by_each(engine: Any) -> None:
    compiled = torch.compile(compute_loss, backend="aot_eager")
    loss = compiled(X)
    recordings, called = [], []
    for _ in range(2):
        with modtrace.record(engine=engine) as recording:
            compiled(X)
        recordings.append(recording)
        assert torch.equal(compiled(X), loss)
        called.append({name: value for name, value in globals().items() if name.startswith("__compiled_fn")})

    assert [told(recording) for recording in recordings] == [[("forward", "compute_loss", 0)]] * 2
    assert called[0]
    assert called[0] == called[1]


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
def test_a_compiled_part_without_a_name_of_its_own_belongs_to_its_module(engine: Any) -> None:
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

    name = f"Around.{label_of('Around._activate')}"
    assert ("forward", name, 1) in told(recording)
    assert ("backward", name, 1) in told(recording)


def label_of(method: str) -> str:
    """Return the label of a compiled method's region: before Python 3.11, code does not name its class."""
    return method if hasattr(compute_loss.__code__, "co_qualname") else method.rpartition(".")[2]


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def body(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.net(x)
        return hidden


class Heir(Base):
    """Its calls are compiled: a method that it inherits, and a function with one of its parts in a variable."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Sequential(nn.GELU(), nn.ReLU())
        self.compiled: Any = torch.compile(self.body, backend="eager")
        last = self.act[1]

        def tail(x: Tensor) -> Tensor:
            hidden: Tensor = last(x)
            return hidden

        self.tail = torch.compile(tail, backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.tail(self.act[0](self.compiled(x)))
        return hidden


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_modules_of_a_compiled_method_are_named_as_parts_of_its_module_and_it_by_the_objects_class(engine: Any) -> None:
    heirs = nn.Sequential(Heir(), Heir())
    with modtrace.record(engine=engine) as recording:
        heirs(X)

    body = label_of("Heir.body")
    found = [(fqn, inside) for _, fqn, inside in compiled_modules(recording.timeline()) if inside is not None]
    in_body, in_tail = "net: Net, net.layer: Linear", "act.1: ReLU"
    assert found == [
        (f"Sequential.{index}.{label}", inside)
        for index in range(2)
        for label, inside in ((body, in_body), ("tail", in_tail))
    ]


# Warnings from imports of inductor.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_a_compiled_step_of_an_optimizer_is_named_by_its_class(engine: Any) -> None:
    optimizer = torch.optim.AdamW(net.parameters())  # inherits its step from Adam
    net(X).sum().backward()
    with modtrace.record(engine=engine) as recording:
        torch.compile(optimizer.step, backend="eager")()

    assert told(recording) == [("forward", label_of("AdamW.step"), 0)]


def test_modules_inside_are_in_the_order_of_their_calls(engine: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.ReLU())
    with modtrace.record(engine=engine) as recording:
        torch.compile(model, backend="eager")(X)

    assert compiled_modules(recording.timeline()) == [
        ("forward", "Sequential", "0: Linear, 1: GELU, 2: Linear, 3: ReLU")
    ]


class Parts(nn.Module):
    """Compiled in two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList([Net(), Net()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.nets[0](x)
        torch._dynamo.graph_break()
        hidden: Tensor = self.nets[1](x)
        return hidden


def compiled_modules(timeline: modtrace.Timeline) -> list[tuple[str, str, int | str | None]]:
    return [
        (span.phase, span.fqn, timeline.span_args.get(index, {}).get("compiled_modules"))
        for index, span in enumerate(timeline.spans)
    ]


# A warning of torch at a graph break, which torch means to hide.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_span_lists_the_modules_inside(engine: Any, tmp_path: Path) -> None:
    parts = torch.compile(Parts(), backend="aot_eager")
    sequential = torch.compile(nn.Sequential(nn.Linear(4, 4), Net()), backend="eager")
    function = torch.compile(compute_loss, backend="aot_eager")
    eager = Net()

    def step() -> None:
        parts(X).sum().backward()
        sequential(X)
        function(X).backward()
        eager(X)

    # Regions compiled in one recording are known to the next one.
    with modtrace.record(engine=engine):
        step()
    with modtrace.record(engine=engine) as recording:
        step()

    timeline = recording.timeline()
    in_parts = "nets.0: Net, nets.0.layer: Linear, nets.1: Net, nets.1.layer: Linear"
    expected = [
        ("forward", "Parts", in_parts),
        ("backward", "Parts", in_parts),
        ("forward", "Sequential", "0: Linear, 1: Net, 1.layer: Linear"),
        ("forward", "compute_loss", "net: Net, net.layer: Linear"),
        ("backward", "compute_loss", "net: Net, net.layer: Linear"),
        ("forward", "Net", None),
        ("forward", "Net.layer", None),
    ]
    assert compiled_modules(timeline) == expected
    for name in ("trace.json", "trace.pftrace"):
        timeline.save(tmp_path / name)
        assert compiled_modules(modtrace.load(tmp_path / name)) == expected


def test_regions_compiled_between_recordings_are_known_to_the_next(engine: Any) -> None:
    with modtrace.record(engine=engine):
        pass
    compiled = torch.compile(compute_loss, backend="aot_eager")
    compiled(X)

    with modtrace.record(engine=engine) as recording:
        compiled(X)

    assert compiled_modules(recording.timeline()) == [("forward", "compute_loss", "net: Net, net.layer: Linear")]


class Loader:
    """Stand-in for AOTInductor's loaded package of a function of one tensor."""

    def get_call_spec(self) -> list[str]:
        inside = pytree.tree_structure(((X,), {}))
        return [pytree.treespec_dumps(inside), pytree.treespec_dumps(pytree.tree_structure(X))]

    def boxed_run(self, inputs: list[Tensor]) -> list[Tensor]:
        return [inputs.pop() + 1]


# A warning from torch's own code for the structure of arguments.
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning")
def test_a_packaged_model_is_a_span_whenever_it_is_called(engine: Any) -> None:
    make: Any = vars(package)["AOTICompiledModel"]
    first, second = make(Loader()), make(Loader())
    with modtrace.record(engine=engine) as recording:
        assert torch.equal(first(X), X + 1)
        net(second(X))
    assert torch.equal(first(X), X + 1)

    assert told(recording)[:2] == [("forward", "AOTICompiledModel", 0)] * 2
    assert [span.fqn for span in recording.timeline().spans[2:]] == ["Net", "Net.layer"]
    assert recording.timeline().spans[0].module_class == "CompiledFunction"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_comparison_with_eager_has_the_modules_inside_of_compiled_functions(engine: Any) -> None:
    heir, loss = Heir(), torch.compile(compute_loss, backend="eager")
    steps = {"heir": lambda: heir(X), "loss": lambda: loss(X)}
    timelines = {}
    for stance in ("force_eager", "default"):
        for name, step in steps.items():
            with torch.compiler.set_stance(stance), modtrace.record(engine=engine) as recording:
                for _ in range(4):
                    step()
                    recording.step()
            timelines[name, stance] = recording.timeline()

    body = f"Heir.{label_of('Heir.body')}"
    for name, inside in {
        "heir": ["Heir.tail.act.1", f"{body}.net", f"{body}.net.layer"],
        "loss": ["compute_loss.net", "compute_loss.net.layer"],
    }.items():
        comparison = modtrace.diff(timelines[name, "force_eager"], timelines[name, "default"])
        assert (sorted(comparison.inside), comparison.unrelated) == (sorted(inside), False)
        assert {change.verdict for change in comparison.changes}.isdisjoint({"added", "removed"})
