"""Modules that would share a name: each has its own row, with as many calls as its own hook counts."""

from __future__ import annotations

import copy
import inspect
import logging
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import modtrace
from modtrace.record_options import EngineName
from tests.support.forked_python import run_forked

X = torch.ones(2, 4)


def mlp(out: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, out))


def count_calls(*roots: nn.Module) -> Counter[int]:
    """Count from now on the calls of all modules in `roots`, by id."""
    calls = Counter[int]()

    def count(module: nn.Module, *_: Any) -> None:
        calls[id(module)] += 1

    for module in {inner for root in roots for inner in root.modules()}:
        module.register_forward_hook(count)
    return calls


def rows(timeline: modtrace.Timeline) -> dict[str, int]:
    return {row.fqn: row.calls for row in timeline.summary().rows}


def check_rows(engine: EngineName, run: Callable[[], object], roots: dict[str, nn.Module]) -> None:
    """Assert that the expected modules, and no others, have rows with as many calls as their hooks count.

    Args:
        engine: the engine that records.
        run: the code that is recorded.
        roots: modules by their expected names.
    """
    counted = count_calls(*roots.values())
    with modtrace.record(engine=engine) as recording:
        run()
    expected = {}
    for name, root in roots.items():
        for path, module in root.named_modules():
            expected[f"{name}.{path}" if path else name] = counted[id(module)]
    assert sum(expected.values()) > 0
    assert rows(recording.timeline()) == expected


class Agent(nn.Module):
    """Like cleanrl's agent: its methods call its parts, and it is never called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = mlp(1)
        self.actor = mlp()
        self.heads = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 2)])

    @torch.no_grad()
    def value(self, x: Tensor) -> Any:
        return self.critic(x)

    def act(self, x: Tensor) -> Any:
        hidden = self.actor(x)
        return [head(hidden) for head in self.heads]

    def act_in_a_function(self, x: Tensor) -> Any:
        def inner() -> Any:
            return self.actor(x)

        return torch.utils.checkpoint.checkpoint(inner, use_reentrant=False)


def test_parts_of_a_module_that_is_never_called(engine: EngineName) -> None:
    agent = Agent()

    def run() -> None:
        for _ in range(3):
            agent.value(X)
            agent.act(X)[0].sum().backward()
        agent.value(X)

    check_rows(
        engine,
        run,
        {
            "Agent.critic": agent.critic,
            "Agent.actor": agent.actor,
            "Agent.heads.0": agent.heads[0],
            "Agent.heads.1": agent.heads[1],
        },
    )


def test_two_modules_that_are_never_called(engine: EngineName) -> None:
    one, two = Agent(), Agent()

    def run() -> None:
        one.act_in_a_function(X)
        two.act_in_a_function(X)
        two.value(X)
        one.act_in_a_function(X)

    check_rows(engine, run, {"Agent.actor": one.actor, "Agent#2.actor": two.actor, "Agent#2.critic": two.critic})


class Plain:
    def __init__(self) -> None:
        self.actor, self.critic, self.more = mlp(), mlp(1), {"target": mlp(1)}

    def step(self) -> None:
        (self.critic(self.actor(X)) + self.more["target"](X)).sum().backward()
        self.critic(X)


def test_attributes_of_an_object_that_is_not_a_module(engine: EngineName) -> None:
    plain = Plain()

    def run() -> None:
        plain.step()
        plain.step()

    check_rows(
        engine,
        run,
        {"Sequential": plain.actor, "Sequential#critic": plain.critic, "Sequential#2": plain.more["target"]},
    )


ACTOR, CRITIC = mlp(), mlp(1)


def test_globals(engine: EngineName) -> None:
    check_rows(engine, lambda: CRITIC(ACTOR(ACTOR(X))), {"Sequential": ACTOR, "Sequential#2": CRITIC})


def test_a_list_and_a_dict(engine: EngineName) -> None:
    listed, named = [mlp(), mlp()], {"a": nn.Tanh(), "b": nn.Tanh()}

    def run() -> None:
        for net in [*listed, listed[1]]:
            net(X)
        for tanh in named.values():
            tanh(X)

    check_rows(
        engine, run, {"Sequential": listed[0], "Sequential#2": listed[1], "Tanh": named["a"], "Tanh#2": named["b"]}
    )


def test_a_generator_and_a_discriminator(engine: EngineName) -> None:
    generator, discriminator = mlp(), mlp(1)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in (discriminator, generator)]

    def run() -> None:
        for _ in range(2):
            (discriminator(X) - discriminator(generator(X).detach())).sum().backward()
            optimizers[0].step()
            discriminator(generator(X)).sum().backward()
            optimizers[1].step()

    check_rows(engine, run, {"Sequential": discriminator, "Sequential#2": generator})


class Net(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared, self.own = shared, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.own(self.shared(x))


def test_two_models_of_one_class_that_share_a_module(engine: EngineName) -> None:
    shared = nn.Linear(4, 4)
    one, two = Net(shared), Net(shared)
    counted = count_calls(one, two)

    with modtrace.record(engine=engine) as recording:
        for net in (one, two, two, one, two):
            net(X).sum().backward()

    assert rows(recording.timeline()) == {
        "Net": counted[id(one)],
        "Net.shared": 2,
        "Net.own": counted[id(one.own)],
        "Net#2": counted[id(two)],
        "Net#2.shared": 3,
        "Net#2.own": counted[id(two.own)],
    }
    assert counted[id(shared)] == 5
    # The backward of each model has its own name too.
    backward = Counter(span.fqn for span in recording.timeline().spans if span.phase == "backward")
    assert (backward["Net"], backward["Net#2"]) == (2, 3)


def test_a_copy_in_each_step_shares_one_name(engine: EngineName) -> None:
    model, copies = mlp(), []

    with modtrace.record(engine=engine) as recording:
        for _ in range(100):
            clone = copy.deepcopy(model)
            copies.append(weakref.ref(clone))
            (model(X) + clone(X)).sum().backward()
        del clone

    assert {copied() for copied in copies} == {None}
    parts = ("", ".0", ".1", ".2")
    assert rows(recording.timeline()) == {
        f"{root}{part}": 100 for root in ("Sequential", "Sequential#2") for part in parts
    }


def test_modules_that_only_the_garbage_collector_frees_have_at_most_64_names(engine: EngineName) -> None:
    def make() -> nn.Module:
        net = mlp()
        net.itself = [net]  # type: ignore[assignment]
        return net

    with modtrace.record(engine=engine) as recording:
        for _ in range(100):
            make()(X)

    roots = ["Sequential", *(f"Sequential#{number}" for number in range(2, 65))]
    expected = dict.fromkeys(roots, 1) | {"Sequential#65+": 36}
    assert {fqn: calls for fqn, calls in rows(recording.timeline()).items() if "." not in fqn} == expected
    assert len(rows(recording.timeline())) == 4 * 65
    assert "65 or more modules were named Sequential; the others are " in str(recording.timeline().summary())


class Perturbed(nn.Module):
    """Like torchdiffeq's, made again around another function in each solve."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Any:
        return self.base(x)


def test_one_path_with_two_classes(engine: EngineName) -> None:
    functions = (nn.Tanh(), nn.ReLU(), nn.Tanh())

    with modtrace.record(engine=engine) as recording:
        for function in (*functions, functions[0]):
            Perturbed(function)(X)

    assert [(row.fqn, row.module_class, row.calls) for row in recording.timeline().summary().rows] == [
        ("Perturbed", "Perturbed", 4),
        ("Perturbed.base", "Tanh", 2),
        ("Perturbed.base#2", "ReLU", 1),
        ("Perturbed.base#3", "Tanh", 1),
    ]


def test_the_summary_says_which_names_several_modules_had(engine: EngineName) -> None:
    nets = [mlp(), mlp(), nn.Tanh(), nn.Tanh(), nn.Tanh(), nn.ReLU()]
    with modtrace.record(engine=engine) as recording:
        for net in nets:
            net(X)
    summary = recording.timeline().summary()

    assert summary.overview is not None
    assert summary.overview.told_apart == {"Sequential": ["Sequential#2"], "Tanh": ["Tanh#2", "Tanh#3"]}
    assert (
        "2 modules were named Sequential; the second is Sequential#2. "
        "3 modules were named Tanh; the others are Tanh#2, Tanh#3"
    ) in str(summary).splitlines()
    with modtrace.record(engine=engine) as recording:
        nets[0](X)
    assert "were named" not in str(recording.timeline().summary())


def test_the_header_lists_only_modules_with_a_row(engine: EngineName) -> None:
    agent, net = Agent(), Net(nn.Tanh())
    with modtrace.record(engine=engine) as recording:
        agent.value(X)
        net(X)
        torch.utils.checkpoint.checkpoint(net, X.requires_grad_(), use_reentrant=True).sum().backward()
    summary = recording.timeline().summary()

    assert summary.overview is not None
    assert summary.overview.roots == ["Net", "Agent.critic"]
    assert {*summary.overview.roots} <= {row.fqn for row in summary.rows}


def test_the_variables_of_the_caller_are_not_kept(engine: EngineName) -> None:
    class Held(nn.Module):
        pass

    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Tanh()

        def call(self) -> tuple[bool, nn.Module]:
            held = Held()
            alive = weakref.ref(held)
            self.part(X)
            del held
            return alive() is None, self

        def call_beside_a_look_at_variables(self) -> dict[str, Any]:
            before = locals()
            later = self.part(X)
            assert later is not None
            return before

    owner, other = Owner(), Owner()
    with modtrace.record(engine=engine) as recording:
        assert owner.call() == (True, owner)
        assert other.call_beside_a_look_at_variables() == {"self": other}

    assert list(rows(recording.timeline())) == ["Owner.part", "Tanh"]


def test_the_wrapper_describes_itself_as_torchs_function_does(engine: EngineName) -> None:
    def said() -> list[object]:
        call = nn.Module.__call__
        names = [getattr(call, name) for name in ("__name__", "__qualname__", "__module__", "__doc__")]
        return [*names, inspect.signature(call), inspect.unwrap(call) is call]

    before = said()
    with modtrace.record(engine=engine):
        assert nn.Module.__call__ is not nn.Module._wrapped_call_impl
        assert said() == before
    assert before[0] == "_wrapped_call_impl"


def test_functions_compiled_before_are_not_compiled_again(engine: EngineName) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    nets = [mlp(), mlp()]
    with modtrace.record(engine=engine):
        pass
    compiled = [torch.compile(net, backend=backend) for net in nets]
    for net in compiled:
        net(X)
    count = len(graphs)
    with modtrace.record(engine=engine) as recording:
        for net in compiled:
            net(X)
        for plain in nets:
            plain(X)

    assert len(graphs) == count
    assert rows(recording.timeline())["Sequential"] == rows(recording.timeline())["Sequential#2"] == 2


def test_a_model_that_is_never_called_is_reported(engine: EngineName, caplog: pytest.LogCaptureFixture) -> None:
    net, other = mlp(), nn.Tanh()
    said = "model: no {}, nor a part of one, was called; names start at the outermost modules"
    with caplog.at_level(logging.WARNING, "modtrace"):
        for model in ("Sequential", "Linear", net, net[0], None):
            with modtrace.record(engine=engine, model=model):
                nn.Sequential(net)(X)
        assert caplog.messages == []
        for model in ("Absent", other):
            with modtrace.record(engine=engine, model=model):
                net(X)

    assert caplog.messages == [said.format("Absent"), said.format("Tanh")]


def test_run_says_on_stderr_that_a_model_is_never_called(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nlinear = torch.nn.Linear(1, 1)\nfor _ in range(3): linear(torch.ones(1))\n")
    arguments = ["-m", "modtrace", "run", "--engine", "python", "-o", str(tmp_path / "out.pftrace")]

    absent, there = (run_forked(*arguments, "--model", name, str(script)) for name in ("Absent", "Linear"))

    said = "modtrace: model: no Absent, nor a part of one, was called; names start at the outermost modules"
    assert absent.stderr.splitlines().count(said) == 1
    assert "nor a part" not in there.stderr
