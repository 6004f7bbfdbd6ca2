"""Modules with odd names, classes, shapes and inputs train as without a recording; wrong arguments are reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import modtrace
from modtrace import RecordingError
from modtrace._ranks import expand_path
from modtrace.record_options import EngineName


class Unhashable(nn.Module):
    __hash__ = None  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class RaisesInHash(Unhashable):
    def __hash__(self) -> int:  # type: ignore[override]
        raise ValueError("no hash")


class RaisesInEq(Unhashable):
    def __eq__(self, other: object) -> bool:
        raise ValueError("no eq")

    def __hash__(self) -> int:  # type: ignore[override]
        return 1


class TensorInEq(RaisesInEq):
    def __eq__(self, other: object) -> Any:
        return torch.ones(3)

    __hash__ = RaisesInEq.__hash__


class RaisesInGetattribute(Unhashable):
    made = False

    def __getattribute__(self, name: str) -> Any:
        if RaisesInGetattribute.made and name in ("__class__", "_modules", "named_modules", "_orig_mod"):
            raise ValueError(f"no {name}")
        return super().__getattribute__(name)


class RaisesInNamedModules(Unhashable):
    def named_modules(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Module]]:
        raise ValueError("no names")


class _OddName(type):
    @property
    def __name__(cls) -> Any:  # type: ignore[override]
        return 3


class OddName(Unhashable, metaclass=_OddName):
    pass


ODD = [
    Unhashable,
    RaisesInHash,
    RaisesInEq,
    TensorInEq,
    RaisesInGetattribute,
    RaisesInNamedModules,
]


@pytest.mark.parametrize("kind", ODD, ids=lambda kind: kind.__name__)
def test_an_odd_module_has_its_name_and_the_recording_goes_on(engine: EngineName, kind: type[nn.Module]) -> None:
    class Holds(kind):  # type: ignore[valid-type, misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner: Any = kind()
            self.inner.leaf = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.leaf_of(self.inner(x))

        def leaf_of(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner.leaf(x)
            return out

    RaisesInGetattribute.made = False
    model = Holds()
    RaisesInGetattribute.made = True
    with modtrace.record(engine=engine, shapes=True) as recording:
        model(torch.ones(1, requires_grad=True)).sum().backward()
        nn.ReLU()(torch.ones(1))

    spans = recording.timeline().spans
    assert [(span.fqn, span.module_class) for span in spans if span.phase == "forward"] == [
        ("Holds", "Holds"),
        ("Holds.inner", kind.__name__),
        ("Holds.inner.leaf", "Identity"),
        ("ReLU", "ReLU"),
    ]
    with modtrace.ModuleTracker() as tracker:
        handle = nn.modules.module.register_module_forward_hook(lambda *_: seen.append(tracker.parents))
        seen: list[set[str]] = []
        model(torch.ones(1))
        handle.remove()
    assert {"Holds", "Holds.inner", "Global"} in seen


def test_a_class_whose_name_is_no_text_ends_the_recording_and_not_the_training(
    engine: EngineName, caplog: pytest.LogCaptureFixture
) -> None:
    with modtrace.record(engine=engine):
        assert OddName()(torch.ones(1)).item() == 2

    (record,) = [record for record in caplog.records if record.name == "modtrace"]
    assert "the recording stopped after an error inside modtrace; the training goes on" in record.message


def test_a_child_whose_name_is_no_text(engine: EngineName) -> None:
    model = nn.Sequential(nn.ReLU())
    model._modules[7] = nn.Identity()  # type: ignore[index]
    with modtrace.record(engine=engine) as recording:
        model(torch.ones(1))

    assert [span.fqn for span in recording.timeline().spans] == ["Sequential", "Sequential.0", "Sequential.7"]


def holding_itself() -> tuple[nn.Module, list[str]]:
    """Return a module, and the names that its call has to have."""
    net = nn.Sequential(nn.Linear(2, 2))
    object.__setattr__(net, "forward", lambda x: net[0](x))
    net.add_module("model", net)
    return net, ["Sequential", "Sequential.0"]


def holding_its_parent() -> tuple[nn.Module, list[str]]:
    net, part = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    object.__setattr__(net, "forward", lambda x: part(net[0](x)))
    object.__setattr__(part, "forward", lambda x: part[0](x))
    net.add_module("part", part)
    part.add_module("parent", net)
    return net, ["Sequential", "Sequential.0", "Sequential.part", "Sequential.part.0"]


def holding_a_part_twice_in_a_circle() -> tuple[nn.Module, list[str]]:
    net, shared = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    for name in ("first", "second"):
        net.add_module(name, nn.ModuleDict({"shared": shared, "net": net}))
    object.__setattr__(net, "forward", lambda x: shared(shared(net[0](x))))
    return net, ["Sequential", "Sequential.0", "Sequential.first.shared", "Sequential.first.shared"]


def wrappers_of_each_other() -> tuple[nn.Module, list[str]]:
    one, other = AveragedModel(nn.Linear(2, 2)), AveragedModel(nn.Linear(2, 2))
    linear = one.module
    one.module, other.module = other, one
    object.__setattr__(one, "forward", linear)
    return one, ["AveragedModel", "Linear"]


def a_deep_chain() -> tuple[nn.Module, list[str]]:
    outermost = net = nn.Sequential(nn.Linear(2, 2))
    for _ in range(3000):
        net.add_module("n", inner := nn.Sequential())
        net = inner
    net.add_module("last", last := nn.Linear(2, 2))
    object.__setattr__(outermost, "forward", lambda x: last(outermost[0](x)))
    return outermost, ["Sequential", "Sequential.0", "Sequential." + "n." * 3000 + "last"]


SHAPES_OF_MODELS = [
    holding_itself,
    holding_its_parent,
    holding_a_part_twice_in_a_circle,
    wrappers_of_each_other,
    a_deep_chain,
]


@pytest.mark.parametrize("make", SHAPES_OF_MODELS, ids=lambda make: make.__name__)
def test_a_model_of_any_shape_trains_as_without_a_recording(
    engine: EngineName, make: Callable[[], tuple[nn.Module, list[str]]]
) -> None:
    def gradient(model: nn.Module) -> list[float]:
        x = torch.ones(2, requires_grad=True)
        model(x).sum().backward()
        assert x.grad is not None
        return x.grad.tolist()

    torch.manual_seed(0)
    plain = gradient(make()[0])
    torch.manual_seed(0)
    model, names = make()
    with modtrace.record(engine=engine, memory=engine == "native") as recording:
        recorded = gradient(model)
    with modtrace.ModuleTracker() as tracker:
        handle = nn.modules.module.register_module_forward_hook(lambda *_: seen.append(tracker.parents))
        seen: list[set[str]] = []
        model(torch.ones(2))
        handle.remove()

    assert recorded == plain
    assert [span.fqn for span in recording.timeline().spans if span.phase == "forward"] == names
    assert "Global" in seen[0]


@dataclass
class Link:
    to: list[Any]


def holds_itself(x: Tensor) -> Any:
    values: list[Any] = [x]
    values += [values] * 100
    return values


def hold_each_other(x: Tensor) -> Any:
    links = [Link([]) for _ in range(100)]
    for link in links:
        link.to = [*links, x]
    return links


def is_shared_by_all(x: Tensor) -> Any:
    values: dict[str, Any] = {"x": x}
    for _ in range(6):
        values = {str(number): values for number in range(100)}
    return values


def is_nested_tensor(x: Tensor) -> Any:
    return torch.nested.nested_tensor([x.detach(), torch.ones(3)])  # it raises for its shape


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make", [holds_itself, hold_each_other, is_shared_by_all, is_nested_tensor], ids=lambda make: make.__name__
)
def test_inputs_of_any_shape(engine: EngineName, make: Callable[[Tensor], Any]) -> None:
    class Double(nn.Module):
        def forward(self, x: Tensor, values: Any) -> Tensor:
            return x * 2

    x = torch.ones(2, requires_grad=True)
    with modtrace.record(engine=engine, shapes=True) as recording:
        Double()(x, make(x)).sum().backward()
        Double()(x, make(x)).sum().backward()

    assert [(span.fqn, span.phase) for span in recording.timeline().spans] == [
        ("Double", "forward"),
        ("Double", "backward"),
    ] * 2


def test_a_mark_that_is_no_text_is_an_error_at_the_call(engine: EngineName) -> None:
    with modtrace.record(engine=engine) as recording:
        with pytest.raises(TypeError, match="the text of a mark is a str, not int"):
            recording.mark(3)  # type: ignore[arg-type]
        recording.mark("3")

    assert [mark.text for mark in recording.timeline().marks] == ["3"]


@pytest.mark.parametrize("option", ["path", "ring"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"a.json", "bytes; pass a str or a pathlib.Path"),
        (3, "int; pass a str"),
        (nn.Linear(1, 1), "Linear; pass a str"),
        ("a\0.json", "remove the NUL character"),
    ],
)
def test_paths_that_are_no_paths_are_refused(option: str, value: Any, message: str) -> None:
    options: Any = {option: value}

    with pytest.raises(RecordingError, match=f"{option} is .*{message}"):
        modtrace.record(**options)


def test_a_rank_that_is_no_number_names_no_file() -> None:
    environment = {"RANK": "../../evil", "WORLD_SIZE": "2"}

    with pytest.raises(RecordingError, match=r"RANK is '../../evil'; it must be a number"):
        expand_path("run-%r.json", environment)
    assert expand_path("run-%%r-%p.json", {**environment, "WORLD_SIZE": "1"}).startswith("run-%r-")
