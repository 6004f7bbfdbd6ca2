"""Programs behave as before: losses to the bit, pickles, hooks, jit, fx, and others' patches of the call."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import modtrace
from modtrace.record_options import EngineName
from tests.support.models import ARCHITECTURES
from tests.support.python_process import run_python

CALL = nn.Module.__call__
AT_FIRST = ("GPT", "Llama, checkpointed", "ResNet", "mixture of experts")


def gradients(name: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and gradients of two steps of a model, from a seed."""
    torch.manual_seed(0)
    model, loss = ARCHITECTURES[name]()
    losses = []
    for _ in range(2):
        losses.append(loss())
        losses[-1].backward()
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in AT_FIRST else pytest.mark.full) for name in ARCHITECTURES],
)
@pytest.mark.filterwarnings("ignore:.*enable_nested_tensor:UserWarning")
def test_losses_and_gradients_are_the_same_to_the_bit(engine: EngineName, name: str) -> None:
    losses, plain = gradients(name)
    with modtrace.record(engine=engine, shapes=True):
        recorded_losses, recorded = gradients(name)

    assert all(torch.equal(a, b) for a, b in zip(losses, recorded_losses, strict=True))
    assert plain.keys() == recorded.keys()
    assert [key for key in plain if not torch.equal(plain[key], recorded[key])] == []


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.ReLU()))


def everything(module: nn.Module) -> dict[str, set[str]]:
    """The names of all attributes and hooks of each module."""
    return {
        name: {
            *vars(inner),
            *(f"{key}[{entry}]" for key, held in vars(inner).items() if "hooks" in key for entry in held),
        }
        for name, inner in module.named_modules()
    }


def test_modules_hold_nothing_of_the_recording(engine: EngineName) -> None:
    model = small()
    before, state = everything(model), {key: value.clone() for key, value in model.state_dict().items()}
    parameters = [dict(vars(parameter)) for parameter in model.parameters()]
    with modtrace.record(engine=engine):
        model.eval()(torch.ones(4, 2)).sum().backward()
        during = everything(model)
        recorded = model.state_dict()

    assert during == before
    assert list(recorded) == list(state)
    assert all(torch.equal(recorded[key], state[key]) for key in state)
    assert [dict(vars(parameter)) for parameter in model.parameters()] == parameters
    assert all(parameter._backward_hooks is None for parameter in model.parameters())


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_models_can_be_copied_while_they_are_recorded(engine: EngineName, how: str) -> None:
    model, x = small(), torch.ones(4, 2)

    def copied() -> nn.Module:
        if how == "deepcopy":
            return copy.deepcopy(model)
        if how == "pickle":
            made = pickle.loads(pickle.dumps(model))
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            made = torch.load(file, weights_only=False)
        assert isinstance(made, nn.Module)
        return made

    with modtrace.record(engine=engine) as recording:
        model(x).sum().backward()
        twin = copied()
        twin(x).sum().backward()
    forward = [(span.fqn, span.call) for span in recording.timeline().spans if span.phase == "forward"]

    names = ["Sequential", "Sequential.0", "Sequential.1", "Sequential.2", "Sequential.2.0"]
    # The copy is a separate model.
    copies = [name.replace("Sequential", "Sequential#2") for name in names]
    assert forward == [(name, 0) for name in (*names, *copies)]
    # The copy has run one more step.
    model(x)
    assert torch.equal(twin.eval()(x), model.eval()(x))


def test_a_model_pickles_to_the_same_bytes(engine: EngineName) -> None:
    model = small()
    before = pickle.dumps(model)
    with modtrace.record(engine=engine):
        model.eval()(torch.ones(4, 2))
        during = pickle.dumps(model.train())

    assert during == before


def test_the_call_is_restored(engine: EngineName) -> None:
    with modtrace.record(engine=engine):
        assert nn.Module.__call__ is not CALL
    assert nn.Module.__call__ is CALL

    with pytest.raises(ZeroDivisionError), modtrace.record(engine=engine):
        small()(1 / 0)
    assert nn.Module.__call__ is CALL


def test_the_call_is_restored_below_wrappers_of_others(engine: EngineName) -> None:
    seen: list[str] = []
    recording = modtrace.record(engine=engine)
    recording.start()
    inner = nn.Module.__call__

    def foreign(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(type(module).__name__)
        return inner(module, *args, **kwargs)

    nn.Module.__call__ = foreign  # type: ignore[method-assign]
    model, x = nn.ReLU(), torch.ones(1)
    try:
        model(x)
        recording.stop()
        # The other wrapper works on, and nothing is recorded.
        model(x)
        assert nn.Module.__call__ is foreign
        assert seen == ["ReLU", "ReLU"]
        assert len(recording.timeline().spans) == 1
        with modtrace.record(engine=engine) as again:
            model(x)
        assert len(again.timeline().spans) == 1
    finally:
        nn.Module.__call__ = inner  # type: ignore[method-assign]
        with modtrace.record(engine=engine):
            pass
    assert nn.Module.__call__ is CALL


def test_no_finders_of_modules_are_put_in_beside_those_of_the_first_recording(engine: EngineName) -> None:
    code = """
import sys, torch, modtrace
with modtrace.record(engine=sys.argv[1], capacity=64):
    torch.nn.Identity()(torch.ones(1))
assert "torch._dynamo.utils" not in sys.modules
first = list(sys.meta_path)
for _ in range(3):
    with modtrace.record(engine=sys.argv[1], capacity=64):
        assert sys.meta_path == first
print(sys.meta_path == first)
"""

    assert run_python("-c", code, engine).stdout == "True\n"


def test_hooks_of_the_user_run_as_ever(engine: EngineName) -> None:
    def run() -> list[str]:
        seen: list[str] = []
        model = nn.Sequential(inner := nn.Linear(2, 2))
        model.register_forward_pre_hook(lambda *_: seen.append("before"))
        model.register_forward_hook(lambda *_: seen.append("after"))
        inner.register_full_backward_hook(lambda *_: seen.append("backward"))
        inner.weight.register_hook(lambda _: seen.append("gradient"))
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
        return seen

    plain = run()
    with modtrace.record(engine=engine) as recording:
        assert run() == plain
    assert {span.phase for span in recording.timeline().spans if span.fqn == "Sequential.0"} == {"forward", "backward"}


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.relu(self.first(x)))
        return out


@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize("kind", ["script", "trace"])
def test_scripted_and_traced_modules(engine: EngineName, kind: str, when: str) -> None:
    def make(model: nn.Module) -> Any:
        # They are deprecated, but in use.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.jit.script(model) if kind == "script" else torch.jit.trace(model, torch.ones(2))

    model, x = Plain(), torch.ones(2)
    expected = model(x)
    made = make(model) if when == "before" else None
    with modtrace.record(engine=engine) as recording:
        made = make(model) if made is None else made
        out = made(x)
        out.sum().backward()

    assert torch.equal(out, expected)
    assert model.first.weight.grad is not None
    assert "forward" in {span.phase for span in recording.timeline().spans}


@pytest.mark.parametrize("when", ["before", "during"])
def test_fx_traced_modules(engine: EngineName, when: str) -> None:
    model, x = Plain(), torch.ones(2)
    traced = torch.fx.symbolic_trace(model)
    with modtrace.record(engine=engine) as recording:
        if when == "during":
            traced = torch.fx.symbolic_trace(model)
        out = traced(x)
        out.sum().backward()

    assert torch.equal(out, model(x))
    assert [str(node) for node in traced.graph.nodes] == ["x", "first", "relu", "second", "output"]
    names = [span.fqn.rpartition(".")[2] for span in recording.timeline().spans if span.phase == "backward"]
    assert names[1:] == ["second", "first"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_transforms_of_functions(engine: EngineName) -> None:
    model, x = Plain(), torch.randn(5, 2)
    parameters: dict[str, Tensor] = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(model, parameters, (x,)).square().sum()
        return out

    def run() -> list[Tensor]:
        each = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
        hessian = torch.func.hessian(loss)(parameters, x[0])
        tangent = torch.func.jvp(lambda x: model(x), (x,), (torch.ones_like(x),))[1]
        return [*each.values(), hessian["first.weight"]["second.weight"], tangent]

    plain = run()
    with modtrace.record(engine=engine) as recording:
        recorded = run()

    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    assert {"Plain", "Plain.first", "Plain.second"} <= {span.fqn for span in recording.timeline().spans}


def test_tensors_that_are_no_plain_tensors(engine: EngineName) -> None:
    class Logged(Tensor):
        pass

    model = Plain()
    with modtrace.record(engine=engine, shapes=True) as recording:
        out = model(torch.ones(3, 2).as_subclass(Logged))
        out.sum().backward()
        with torch.device("meta"):
            Plain()(torch.ones(2))
        model.to(torch.float64)(torch.ones(2, dtype=torch.float64)).sum().backward()

    assert isinstance(out, Logged)
    assert len([span for span in recording.timeline().spans if span.phase == "forward"]) == 9


def test_a_trace_of_jit_does_not_note_that_shapes_are_recorded(engine: EngineName) -> None:
    model, x = nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.ones(2, 4)

    def trace() -> tuple[list[str], list[str]]:
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            warnings.simplefilter("always")
            graph = torch.jit.trace(model, x, check_trace=False).inlined_graph
        return [node.kind() for node in graph.nodes()], [str(warning.message) for warning in caught]

    plain = trace()
    with modtrace.record(engine=engine, shapes=True) as recording:
        recorded = trace()

    assert recorded == plain
    assert [args["shapes"] for args in recording.timeline().span_args.values()] == ["float32[2, 4]"] * 2 + [
        "float32[2, 3]"
    ]


def test_a_class_of_tensors_does_not_see_that_shapes_are_recorded(engine: EngineName) -> None:
    seen: list[str] = []

    class Seeing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return super().__torch_function__(function, types, args, kwargs or {})

    model, x = nn.Linear(2, 2), torch.ones(1, 2).as_subclass(Seeing)
    with torch.no_grad():
        model(x)
        plain = seen[:]
        seen.clear()
        with modtrace.record(engine=engine, shapes=True) as recording:
            model(x)

    assert seen == plain
    assert recording.timeline().span_args == {0: {"shapes": "float32[1, 2]"}}
