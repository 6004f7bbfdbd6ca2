"""Notes of recordings on a few steps: operators outside modules, hooks, float64, anomaly detection, memory."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import modtrace
from modtrace.record_options import EngineName
from modtrace.timeline.contents import STEP_NOTES
from modtrace.timeline.summary.findings.noted import program_facts
from modtrace.track.sampling import ResidentMemory, RunDelay
from modtrace.track.step_notes import StepNotes

pytestmark = pytest.mark.usefixtures("native_engine", "nothing_compiled")

_STEPS = 9
"""Steps: those after 1, 2, 4 and 8 are looked at, and the last of them ends."""


def notes_of(
    plant: Callable[[nn.Sequential], Callable[[], object]], engine: EngineName = "native", **options: Any
) -> dict[str, Any]:
    """Train a model of four tensors, call the result of `plant` after each step, and return the notes."""
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    after = plant(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with modtrace.record(engine=engine, **options) as recording:
        for _ in range(_STEPS):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            optimizer.step()
            after()
    notes = recording.timeline().metadata[STEP_NOTES]
    assert isinstance(notes, dict)
    return notes


def nothing(_: nn.Sequential) -> Callable[[], object]:
    return lambda: None


def average(model: nn.Sequential) -> Callable[[], object]:
    averages = [parameter.detach().clone() for parameter in model.parameters()]

    @torch.no_grad()
    def update() -> None:
        for own, parameter in zip(averages, model.parameters(), strict=True):
            own.mul_(0.9).add_(parameter, alpha=0.1)

    return update


def calls_of(notes: dict[str, Any], place: str) -> dict[str, int]:
    return {name: calls for name, calls, _ in notes["operators"][place]}


class Subclass(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise AssertionError("modtrace asked for something")


class Lazy(dict[str, torch.Tensor]):
    def values(self) -> Any:
        raise AssertionError("modtrace asked for something")


def test_inputs_of_the_first_outermost_call_of_a_module_are_noted(engine: EngineName) -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 1)

        def forward(self, *given: Any, mask: Any = None) -> torch.Tensor:
            out: torch.Tensor = self.inner(given[0] if type(given[0]) is torch.Tensor else torch.ones(2, 4))
            return out

    model, other, third = Takes(), Takes(), Takes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    odd = torch.ones(7).as_subclass(Subclass)
    lazy = Lazy(a=odd) if engine == "native" else 5  # the Python engine looks for tensors in it
    with modtrace.record(engine=engine) as recording:
        for step in range(_STEPS):
            x = torch.ones(2 + (step == 8), 4)
            y, long = torch.ones(3, dtype=torch.bool), torch.ones(2, 4, dtype=torch.int64)
            with torch.autocast("cpu", torch.bfloat16, enabled=step == 4):
                model(x, [y, (long,)], 5, {"a": long}, odd, lazy, mask=y).sum().backward()
            model(torch.ones(5, 4)).sum().backward()  # such as an evaluation
            other(odd)  # its inputs are of no known kind
            third(odd, torch.ones(3, device="meta"))  # a device without autocast
            optimizer.step()

    inputs = recording.timeline().metadata[STEP_NOTES]["inputs"]
    text = "bool[3], int64[2, 4], bool[3]"
    first, last = f"float32[2, 4], {text}", f"float32[3, 4], {text}"
    assert inputs.pop("Takes#3") == [[step, "float32[3]"] for step in (1, 2, 4, 8)]
    assert inputs == {"Takes": [[1, first], [2, first], [4, f"{first}, autocast to bfloat16"], [8, last]]}


def test_inputs_of_the_first_and_the_last_of_many_calls_in_a_step_are_noted(engine: EngineName) -> None:
    model, same, few = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    with modtrace.record(engine=engine) as recording:
        for _ in range(_STEPS):
            for length in range(8):
                model(torch.ones(2, 1 + length, 4))
                same(torch.ones(2, 4))
                if length:
                    few(torch.ones(2, length, 4))
            recording.step()

    changing = recording.timeline().metadata[STEP_NOTES]["changing_inputs"]
    assert changing == {"Linear": [[8, "float32[2, 1, 4]", "float32[2, 8, 4]"]] * 4}


@pytest.mark.parametrize("hidden", ["_parameters", "_buffers", "_modules", "training", "__dict__"])
@pytest.mark.parametrize("error", [ValueError, KeyError])
def test_a_module_whose_attributes_raise_is_left_out_of_the_notes(
    engine: EngineName, hidden: str, error: type[Exception]
) -> None:
    class Odd(nn.Linear):
        hides = False

        def __getattribute__(self, name: str) -> Any:
            if name == hidden and Odd.hides:
                raise error(name)
            return super().__getattribute__(name)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    model, odd = nn.Linear(4, 4, dtype=torch.float64), Odd(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with modtrace.record(engine=engine) as recording:
        for _ in range(_STEPS):
            model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
            Odd.hides = True
            odd(torch.ones(2, 4))
            optimizer.step()
            Odd.hides = False

    timeline = recording.timeline()
    assert timeline.metadata[STEP_NOTES]["steps"] == 4
    assert timeline.metadata[STEP_NOTES]["doubles"] == ["Linear"]
    assert len(timeline.spans) == 3 * _STEPS


def test_the_class_that_a_module_claims_is_not_read(engine: EngineName) -> None:
    reads = 0

    class Counted(nn.Linear):
        def __getattribute__(self, name: str) -> Any:
            nonlocal reads
            reads += name == "__class__"
            return super().__getattribute__(name)

    model = Counted(4, 4)
    optimizer = torch.optim.SGD([model.weight, model.bias], lr=0.01)
    with modtrace.record(engine=engine) as recording:
        reads = 0
        for _ in range(_STEPS):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        assert reads == 0

    assert recording.timeline().metadata[STEP_NOTES]["steps"] == 4


def test_the_class_that_a_value_claims_is_not_read(engine: EngineName) -> None:
    class Odd:
        @property  # type: ignore[misc]
        def __class__(self) -> Any:
            raise RuntimeError("the class is hidden")

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor, _: Odd) -> tuple[torch.Tensor, Odd]:  # type: ignore[override]
            return super().forward(x), Odd()

    model = Model(4, 4)
    with modtrace.record(engine=engine, shapes=True) as recording:
        for _ in range(_STEPS):
            model(torch.ones(2, 4), Odd())[0].sum().backward()
        assert recording.running

    assert [span.phase for span in recording.timeline().spans] == ["forward", "backward"] * _STEPS


def test_a_function_mode_sees_no_call_of_the_engine(engine: EngineName) -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function.__name__)
            return function(*args, **(kwargs or {}))

    def train() -> list[str]:
        seen.clear()
        with Mode():
            for _ in range(_STEPS):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [*seen]

    seen = list[str]()
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train()
    unrecorded = train()
    with modtrace.record(engine=engine) as recording:
        assert train() == unrecorded

    assert len(recording.timeline().spans) == 2 * 4 * _STEPS


def test_the_time_in_which_notes_are_made_is_noted(engine: EngineName) -> None:
    start_ns = time.monotonic_ns()
    notes = notes_of(nothing, engine)
    elapsed_ns = time.monotonic_ns() - start_ns

    assert [number for number, _ in notes["sampling_ns"]] == [1, 2, 4, 8]
    ns_of_steps = [ns for _, ns in notes["sampling_ns"]]
    assert min(ns_of_steps) > 0
    assert sum(ns_of_steps) < elapsed_ns


def test_the_notes_of_a_step_are_written_in_the_step(engine: EngineName, monkeypatch: pytest.MonkeyPatch) -> None:
    def mark(self: StepNotes, number: int, ended_by: str) -> None:
        if ended_by == "step":
            recording.mark(f"notes {number}")

    monkeypatch.setattr(StepNotes, "after_step", mark)
    model = nn.Linear(4, 4)
    with modtrace.record(engine=engine) as recording:
        for _ in range(2):
            model(torch.ones(2, 4))
            recording.step()

    marks = [mark.text for mark in recording.timeline().marks]
    assert marks == ["notes 0", "step 0", "notes 1", "step 1"]


def test_calls_with_the_inputs_of_an_earlier_one_in_the_step_are_noted(engine: EngineName) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            again = checkpoint(self.other, x + 1, use_reentrant=False)
            out: torch.Tensor = self.inner(x) + self.inner(x) + self.other(self.other(x)) + again
            return out

    model, outer = Twice(), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with modtrace.record(engine=engine) as recording:
        for _ in range(_STEPS):
            x = outer(torch.ones(2, 4))
            (model(x).sum() + outer(x).sum()).backward()
            outer(x)  # belongs to another loss
            optimizer.step()

    assert recording.timeline().metadata[STEP_NOTES]["same_inputs"] == {"Twice.inner": 4}


def test_operators_outside_modules_and_optimizers_are_counted(engine: EngineName) -> None:
    notes = notes_of(average, engine)

    assert notes["steps"] == 4
    loss = {"ones": 4, "square": 4, "mean": 4, "ones_like": 4}
    assert calls_of(notes, "outside") == {"mul_": 16, "add_": 16, **loss}
    assert calls_of(notes_of(nothing, engine), "outside") == loss
    assert calls_of(notes, "in_optimizers") == {"add_": 16}
    assert all(ns > 0 for _, _, ns in notes["operators"]["outside"])


@pytest.mark.parametrize("engine", ["native", "python"])
def test_hooks_of_gradients_are_counted_outside_of_nodes(engine: EngineName) -> None:
    def hook(model: nn.Sequential) -> Callable[[], object]:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.tanh())
        return lambda: None

    notes, plain = notes_of(hook, engine), notes_of(nothing, engine)

    assert notes["gradient_hooks"] == 4
    assert calls_of(notes, "in_passes")["tanh"] == 16
    assert plain["gradient_hooks"] == 0
    assert "tanh" not in calls_of(plain, "in_passes")
    assert calls_of(plain, "in_passes")["nodes"] == calls_of(plain, "in_passes")["nodes and hooks"] > 0
    nodes, with_hooks = (
        {name: ns for name, _, ns in notes["operators"]["in_passes"]}[key] for key in ("nodes", "nodes and hooks")
    )
    assert with_hooks > nodes


@pytest.mark.parametrize("engine", ["native", "python"])
def test_modules_with_forward_hooks_or_of_float64_are_noted(engine: EngineName) -> None:
    def plant(model: nn.Sequential) -> Callable[[], object]:
        model[1].register_forward_hook(lambda *_: None)
        model[1].register_forward_pre_hook(lambda *_: None)
        model[2].double()
        model[1].register_forward_hook(lambda _module, _inputs, output: output.double())
        model[1].scale, model[0].table = torch.tensor(2.0, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        return lambda: None

    notes = notes_of(plant, engine)

    assert notes["hooks"] == {"Sequential.1": 3}
    assert notes["doubles"] == ["Sequential.2"]
    assert (notes["parameters"], notes["float64_parameters"]) == (4 * 8 + 8 + 8 + 1, 8 + 1)
    assert notes["tables"] == ["Sequential.0"]
    assert notes["untrained"] == []
    assert notes_of(nothing, engine)["hooks"] == {}
    assert notes_of(nothing, engine)["doubles"] == notes_of(nothing, engine)["tables"] == []


@pytest.mark.parametrize("engine", ["native", "python"])
@pytest.mark.parametrize(("without", "casts"), [(torch.no_grad, ["Sequential"]), (torch.inference_mode, [])])
def test_autocast_without_gradients_builds_no_graph(
    engine: EngineName, without: Callable[[], contextlib.AbstractContextManager[None]], casts: list[str]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with modtrace.record(engine=engine) as recording:
        for _ in range(_STEPS):
            with without(), torch.autocast("cpu", torch.bfloat16):
                model(torch.ones(2, 4))
    timeline = recording.timeline()

    # torch makes nodes for the weights that it casts, except in old versions.
    assert timeline.metadata[STEP_NOTES]["casts"] == (casts if "unused_nodes" in timeline.slices.args else [])
    assert [one for one in timeline.summary().findings if "graph" in one.what] == []


@pytest.mark.parametrize("engine", ["native", "python"])
def test_modules_whose_gradients_no_optimizer_uses_are_noted(engine: EngineName) -> None:
    def plant(model: nn.Sequential) -> Callable[[], object]:
        # The optimizer has none of these layers. One gets no gradient, and one is updated by hand.
        more = [nn.Linear(1, 1), nn.Linear(1, 1).requires_grad_(False), nn.Linear(1, 1)]

        @torch.no_grad()
        def after() -> None:
            model.extend(more[: 6 - len(model)])
            if more[2].weight.grad is not None:
                more[2].weight.sub_(more[2].weight.grad)

        return after

    assert notes_of(plant, engine)["untrained"] == ["Sequential.3"]


@pytest.mark.parametrize("engine", ["native", "python"])
def test_anomaly_detection_and_memory_are_noted(engine: EngineName) -> None:
    with torch.autograd.set_detect_anomaly(True):
        notes = notes_of(nothing, engine)

    assert notes["settings"] == {"anomaly detection": 4}
    assert [at for at, _ in notes["resident"]] == [1, 2, 4, 8]
    assert all(held > 1 << 20 for _, held in notes["resident"])
    assert notes_of(nothing, engine)["settings"] == {}


class Refusal(Exception):
    """An exception of a module that its caller expects."""


class Refusing(nn.Module):
    def forward(self, _: torch.Tensor) -> None:
        raise Refusal


_BEFORE_LOSS_S, _AFTER_PASS_S, _AFTER_RANGE_S, _AFTER_STEP_S = 0.02, 0.008, 0.004, 0.012


def train_with_pauses(model: nn.Module, clock: list[float]) -> None:
    """Train with a pause in each gap; the tests know the lines by their distance from this function."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    refusing = Refusing()
    for _ in range(_STEPS):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).mean()
        with contextlib.suppress(Refusal):
            refusing(loss)
        time.sleep(_BEFORE_LOSS_S)
        loss.backward()
        time.sleep(_AFTER_PASS_S)
        with modtrace.range("secret"):
            model(torch.ones(2, 4))
        time.sleep(_AFTER_RANGE_S)
        optimizer.step()
        time.sleep(_AFTER_STEP_S)
        clock.append(time.perf_counter() - began)


@pytest.mark.parametrize("engine", ["native", "python"])
def test_time_between_spans_is_noted_with_the_lines_around_it(engine: EngineName) -> None:
    model, clock = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)), list[float]()
    with modtrace.record(engine=engine) as recording:
        train_with_pauses(model, clock)

    first = train_with_pauses.__code__.co_firstlineno
    noted: Any = recording.timeline().metadata[STEP_NOTES]
    gaps = {
        tuple(int(one.partition(":")[2]) - first if ":" in one else one for one in row[:-1]): row[-1]
        for row in noted["gaps"]
    }
    files = {line.partition(":")[0] for row in noted["gaps"] for line in (row[0], row[2])}
    assert files == {"test_step_notes.py"}
    assert gaps.keys() == {
        (6, "optimizer", 7, "forward", "other"),
        (7, "forward", 9, "forward", "loss"),
        (9, "forward", 11, "backward", "loss"),
        (11, "backward", 13, "user", "other"),
        (13, "user", 16, "optimizer", "other"),
        (16, "optimizer", 6, "optimizer", "other"),
    }
    pauses = {9: _BEFORE_LOSS_S, 11: _AFTER_PASS_S, 13: _AFTER_RANGE_S, 16: _AFTER_STEP_S}
    for (line, *_), times in gaps.items():
        assert len(times) == 4
        assert min(times) >= pauses.get(line, 0) * 1e9
    # A stopwatch around all of it: steps that are looked at start in one round and end in the next.
    assert sum(map(sum, gaps.values())) <= sum(clock) * 1e9


@pytest.mark.parametrize("engine", ["native", "python"])
@pytest.mark.parametrize(("slow", "noted"), [([4, 9, 14, 19, 24, 29], [9, 14, 19, 24]), ([6], [])])
def test_lines_are_noted_in_slow_steps_that_come_with_a_period(
    engine: EngineName, slow: list[int], noted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = 0

    def monotonic_ns() -> int:
        nonlocal now_ns
        now_ns += 1
        return now_ns

    monkeypatch.setattr(time, "monotonic_ns", monotonic_ns)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with modtrace.record(engine=engine) as recording:
        for step in range(30):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).mean().backward()
            optimizer.step()
            now_ns += 1_000_000 + (10_000_000 + 1_000 * step) * (step in slow)

    notes: Any = recording.timeline().metadata[STEP_NOTES]
    times = [row[-1] for row in notes["slow_gaps"] if row[1:5:2] == ["optimizer", "optimizer"]]
    assert [[ns // 1_000 - 11_000 for ns in each] for each in times] == [noted] * bool(noted)
    lines = [int(row[line].partition(":")[2]) for row in notes["slow_gaps"][:1] for line in (0, 2)]
    assert lines == ([lines[0], lines[0] - 2] if noted else [])


@pytest.mark.parametrize("engine", ["native", "python"])
def test_lines_are_those_of_libraries_generators_and_coroutines(engine: EngineName) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def outputs() -> Iterator[torch.Tensor]:
        for _ in range(_STEPS):
            yield model(torch.ones(2, 4))

    async def train() -> None:
        for output in outputs():
            await asyncio.sleep(0.01)
            output.sum().backward()
            with contextlib.ExitStack() as stack:
                stack.enter_context(modtrace.range("step"))
                optimizer.step()

    with modtrace.record(engine=engine) as recording:
        asyncio.run(train())

    noted: Any = recording.timeline().metadata[STEP_NOTES]
    made, trained = outputs.__code__.co_firstlineno, train.__code__.co_firstlineno
    file = Path(__file__).name
    assert min(noted["gaps"][0][-1]) >= 0.01e9
    assert noted["gaps"][0][:-1] == [f"{file}:{made + 2}", "forward", f"{file}:{trained + 3}", "backward", "loss"]
    # The optimizer's step range and the range around it end: they started before this step did.
    assert sorted(row[:-1] for row in noted["gaps"][1:]) == [
        [f"{file}:{trained + 3}", "backward", f"{file}:{trained + 5}", "user", "other"],
        [f"{file}:{trained + 4}", "optimizer", f"{file}:{made + 2}", "forward", "other"],
    ]


def test_the_program_is_noted_for_comparisons(engine: EngineName) -> None:
    def run(width: int, optimizer: type[torch.optim.Optimizer], hooks: int, *, anomaly: bool) -> Any:
        model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))
        for parameter in [*model.parameters()][:hooks]:
            parameter.register_hook(lambda gradient: gradient)
        steps = optimizer(model.parameters(), lr=0.01)  # type: ignore[call-arg]
        with torch.autograd.set_detect_anomaly(anomaly), modtrace.record(engine=engine) as recording:
            for _ in range(_STEPS):
                model(torch.ones(2, 4)).sum().backward()
                steps.step()
        return program_facts(recording.timeline().metadata)

    assert run(2, torch.optim.SGD, 0, anomaly=False) == {
        "optimizer": "SGD (one by one)",
        "parameters": "13 values",
        "hooks of gradients": "0",
        "anomaly detection": "off",
    }
    assert run(3, torch.optim.Adam, 2, anomaly=True) == {
        "optimizer": "Adam (one by one)",
        "parameters": "19 values",
        "hooks of gradients": "2",
        "anomaly detection": "on",
    }
    assert program_facts({}) == {}


def test_a_thread_beside_the_one_that_is_looked_at_has_no_lines() -> None:
    model, stop = nn.Linear(4, 1), threading.Event()

    def call() -> None:
        while not stop.is_set():
            model(torch.ones(2, 4))

    beside = threading.Thread(target=call)
    beside.start()
    try:
        notes = notes_of(lambda _: lambda: time.sleep(0.002))
    finally:
        stop.set()
        beside.join()

    first, last = notes_of.__code__.co_firstlineno, notes_of.__code__.co_firstlineno + 20
    lines = [int(line.partition(":")[2]) for row in notes["gaps"] for line in (row[0], row[2])]
    assert lines
    assert all(first < line < last for line in lines)


def test_a_call_of_another_thread_that_ends_late_does_not_end_the_look_at_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ends, goes_on = nn.Linear(4, 1), threading.Event(), threading.Event()
    beside = threading.Thread(target=lambda: model(torch.ones(2, 4)))
    of_thread = RunDelay.__call__

    def delay(self: RunDelay) -> int:
        if threading.current_thread() is beside:
            ends.set()
            goes_on.wait(60)
        return of_thread(self)

    monkeypatch.setattr(RunDelay, "__call__", delay)

    def begin_beside(model: nn.Sequential) -> Callable[[], object]:
        def begin(*_: object) -> None:
            if beside.ident is None:
                beside.start()
                ends.wait(60)

        def end_beside() -> None:
            goes_on.set()
            beside.join()

        model.register_forward_pre_hook(begin)
        return end_beside

    notes = notes_of(begin_beside)
    assert {gap[1] for gap in notes["gaps"]} == {"optimizer", "forward", "backward"}


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("/home/me/train.py", "train.py"),
        (r"C:\Users\me\train.py", "train.py"),
        ("/home/me/größe 2.py", "größe 2.py"),
        ("<ipython-input-3>", "<ipython-input-3>"),
        ("/home/me/caf\udce9.py", "<code>"),
        ("def secret(): pass", "<code>"),
        ("train.py\n", "<code>"),
        ("/home/me/", "<code>"),
        ("x" * 300_000, "<code>"),
    ],
)
def test_lines_name_a_file_without_folders_or_no_file(file: str, said: str) -> None:
    def plant(model: nn.Module) -> Callable[[], object]:
        scope: dict[str, Any] = {"model": model, "x": torch.ones(2, 4)}
        exec(compile("def call():\n    model(x)\n", file, "exec"), scope)
        return scope["call"]  # type: ignore[no-any-return]

    begun = {begins for _, _, begins, *_ in notes_of(plant)["gaps"]}

    assert f"{said}:2" in begun
    assert {line.rpartition(":")[0] for line in begun} == {said, Path(__file__).name}


@pytest.mark.parametrize("engine", ["native", "python"])
def test_a_program_near_the_end_of_its_stack_goes_on_while_it_is_looked_at(engine: EngineName) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def call_below(frames: int) -> None:
        if frames:
            call_below(frames - 1)
        else:
            model(torch.ones(1, 2))

    def fits_below(frames: int) -> bool:
        try:
            call_below(frames)
        except RecursionError:
            return False
        return True

    with modtrace.record(engine=engine) as recording:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        fits = [fits_below(frames) for frames in range(sys.getrecursionlimit())]
        last = model(torch.ones(1, 2)).sum()
        last.backward()

    assert fits == sorted(fits, reverse=True)
    assert set(fits) == {True, False}
    assert [span.phase for span in recording.timeline().spans[-2:]] == ["forward", "backward"]


@pytest.mark.parametrize("trains", [True, False])
def test_the_python_engine_notes_no_operators_outside_of_passes_or_calls_that_are_steps(trains: bool) -> None:
    model = nn.Linear(2, 2)
    with modtrace.record(engine="python") as recording:
        for _ in range(5):
            output = model(torch.ones(1, 2)).sum()
            if trains:
                output.backward()
            torch.ones(1).cos()

    # It counts none there, so no list says that there were none.
    assert recording.timeline().metadata[STEP_NOTES]["operators"].keys() == {"in_passes", "in_optimizers"}


def test_the_python_engine_counts_nothing_if_another_profiler_runs() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        notes = notes_of(average, "python")

    assert notes["operators"] == {"outside": [], "in_passes": [], "in_optimizers": []}
    assert notes["inside"] == {}
    assert notes["settings"] == {"torch.profiler": 4}


def test_the_python_engine_ends_its_profiler_if_another_one_starts() -> None:
    profiled = []

    def profile(_: nn.Sequential) -> Callable[[], object]:
        def after() -> None:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
                torch.ones(3).cos()
            profiled.append([event.name for event in profiler.events()])

        return after

    notes = notes_of(profile, "python")

    assert profiled == [["aten::ones", "aten::empty", "aten::fill_", "aten::cos"]] * _STEPS
    # It starts again at the next span.
    assert calls_of(notes, "outside") == {"ones": 4, "square": 4, "mean": 4, "ones_like": 4}
    assert calls_of(notes, "in_optimizers") == {"add_": 16}
    assert not torch._C._autograd._profiler_enabled()


def test_the_python_engine_ends_its_profiler_after_a_step_that_ended_in_a_pass() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def is_profiled_after(hooked: Callable[[torch.Tensor], object]) -> bool:
        handle = model.bias.register_post_accumulate_grad_hook(hooked)
        model(torch.ones(1, 2)).sum().backward()
        handle.remove()
        is_profiled: bool = torch._C._autograd._profiler_enabled()
        return is_profiled

    with modtrace.record(engine="python"):
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        assert torch._C._autograd._profiler_enabled()
        for _ in range(2):  # the steps after steps two and three: the second of them is not looked at
            is_profiled = is_profiled_after(lambda _: optimizer.step())
        assert not is_profiled


def test_the_python_engine_ends_its_profiler_if_another_thread_stops_the_recording() -> None:
    model = nn.Linear(2, 2)
    recording = modtrace.record(engine="python")
    recording.start()
    for _ in range(2):
        model(torch.ones(1, 2))
        recording.step()
    assert torch._C._autograd._profiler_enabled()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(recording.stop).result()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        pass
    assert not torch._C._autograd._profiler_enabled()


def test_steps_that_the_user_ends_are_looked_at() -> None:
    model = nn.Linear(2, 2)
    with modtrace.record() as recording:
        for _ in range(3):
            model(torch.ones(1, 2))
            torch.ones(3).cos()
            recording.step()

    notes = recording.timeline().metadata[STEP_NOTES]
    assert isinstance(notes, dict)
    assert calls_of(notes, "outside")["cos"] == notes["steps"] == 2


def test_the_wait_of_a_thread_for_a_processor_is_read_from_linux() -> None:
    def waited_ns() -> int:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1])

    delay = RunDelay()
    assert delay() == 0  # no reading before
    begin = waited_ns()
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(RunDelay()).result() == 0
    ended = waited_ns()
    assert delay() >= ended - begin >= 0
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(delay).result() == 0  # on another thread
    delay.close()


def test_the_total_wait_of_calls_for_a_processor_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunDelay, "__call__", lambda self: 1_000)
    model = nn.Linear(4, 1)
    with torch.no_grad(), modtrace.record() as recording:
        for _ in range(6):
            model(torch.ones(2, 4))

    # The delay is read after calls 1 to 5 and at the end.
    assert recording.timeline().metadata[STEP_NOTES]["waited_ns"] == 6_000


def test_the_longest_waits_for_a_processor_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    waits_ns = itertools.count(100_000, 40_000)  # longer at each end of a step; also read as step 0 starts
    monkeypatch.setattr(RunDelay, "__call__", lambda self: next(waits_ns))
    model = nn.Linear(4, 1)
    with modtrace.record() as recording:
        for _ in range(100):
            model(torch.ones(2, 4))
            recording.step()

    delays = recording.timeline().metadata[STEP_NOTES]["delays"]
    assert delays == [[step, 140_000 + 40_000 * step] for step in range(99, 35, -1)]


def test_an_exception_of_a_handler_during_a_read_from_linux_reaches_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_slow(*_: object) -> None:
        raise TimeoutError("of the program")

    def interrupted(*of: Any) -> bytes:
        signal.raise_signal(signal.SIGALRM)
        return ask(*of)

    before, ask = signal.signal(signal.SIGALRM, too_slow), os.pread
    delay, held = RunDelay(), ResidentMemory()
    try:
        monkeypatch.setattr(os, "pread", interrupted)
        for read in delay, held:
            with pytest.raises(TimeoutError, match="of the program"):
                read()
    finally:
        signal.signal(signal.SIGALRM, before)
        delay.close()
        held.close()


def test_an_interrupt_as_a_step_is_noted_ends_no_later_look(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        """A lock, with an interrupt after its second acquisition."""

        def __init__(self) -> None:
            self.lock, self.count = threading.Lock(), 0
            self.release, self._is_owned = self.lock.release, self.lock.locked

        def acquire(self, **options: Any) -> bool:
            taken, self.count = self.lock.acquire(**options), self.count + 1
            if self.count == 2:
                raise KeyboardInterrupt
            return taken

    make = StepNotes.__init__

    def make_interrupted(self: StepNotes, *arguments: Any) -> None:
        make(self, *arguments)
        self._in_use = Interrupted()  # type: ignore[assignment]

    monkeypatch.setattr(StepNotes, "__init__", make_interrupted)
    model, interrupts = nn.Linear(2, 2), 0
    with modtrace.record() as recording:
        for _ in range(5):
            model(torch.ones(1, 2))
            try:
                recording.step()
            except KeyboardInterrupt:
                interrupts += 1

    assert interrupts == 1
    assert recording.timeline().metadata[STEP_NOTES]["steps"] == 2  # of steps 2 to 5, those after the first and second


def test_a_file_of_the_programs_that_took_the_number_stays_open(tmp_path: Path) -> None:
    delay = RunDelay()
    delay()
    number = delay._file._file
    with open(tmp_path / "log", "w") as log:
        os.dup2(log.fileno(), number)  # as if the program had closed all open files
        delay()
        assert delay._file._file != number
        delay.close()
        assert os.path.sameopenfile(log.fileno(), number)
    os.close(number)


class Loop(nn.Module):
    """Multiplies 70 times, adds once in float64, and stores a number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.numbers, self.fixed = nn.Linear(2, 2), list[int](), [1]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(inputs)
        for _ in range(70):
            output = output * 1.5
        self.numbers.append(len(self.numbers))
        return output.double().add(1).float()


def test_tensors_that_grow_in_each_step_are_noted(engine: EngineName) -> None:
    class Caches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen, self.last, self.shrinks = torch.zeros(0, 2), torch.zeros(1, 2), torch.zeros(_STEPS)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.seen, self.last, self.shrinks = torch.cat([self.seen, inputs]), inputs, self.shrinks[1:]
            return inputs

    model = Caches()
    with modtrace.record(engine=engine) as recording:
        for _ in range(_STEPS):
            model(torch.ones(1, 2))
            recording.step()

    notes = recording.timeline().metadata[STEP_NOTES]
    assert notes["tensors_lengthen"] == {"Caches.seen": [[2, 4], [3, 6], [5, 10], [9, 18]]}


@pytest.mark.parametrize("ended_by", ["step", "passes", "calls"])
@pytest.mark.parametrize("engine", ["native", "python"])
def test_operators_of_modules_themselves_are_noted_whatever_ends_steps(engine: EngineName, ended_by: str) -> None:
    model = Loop()
    with modtrace.record(engine=engine) as recording, torch.set_grad_enabled(ended_by != "calls"):
        for _ in range(_STEPS):
            output = model(torch.ones(1, 2))
            if ended_by != "calls":
                output.sum().backward()
            if ended_by == "step":
                recording.step()

    timeline = recording.timeline()
    notes = timeline.metadata[STEP_NOTES]
    assert isinstance(notes, dict)
    assert notes["steps"] == 4
    assert notes["lengthen"] == {"Loop.numbers": [[2, 2], [3, 3], [5, 5], [9, 9]]}
    assert notes["tensors_lengthen"] == {}
    noted = {fqn: [row[:2] for row in rows] for fqn, rows in notes["inside"].items()}
    # The first 3 operators with float64 tensors are noted by time; the Python engine does not know them.
    assert noted["Loop"][0] == ["", 4 * 73]
    assert ["mul", 4 * 70] in noted["Loop"]
    assert noted["Loop.inner"] == [["", 4], ["linear", 4]]
    assert ([" (float64)", 8] in noted["Loop"]) == (engine == "native")
    double = " (float64)" if engine == "native" else ""
    assert all(name in ("mul", "to", f"add{double}", f"to{double}", " (float64)") for name, _ in noted["Loop"][1:])
    made = [args["own_nodes"] for args in timeline.span_args.values() if "own_nodes" in args]
    # Nodes: 70 products, two conversions and a sum.
    assert made == ([73] * _STEPS if ended_by != "calls" else [])


@pytest.mark.parametrize("engine", ["native", "python"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_operators_in_a_checkpoint_are_those_of_the_modules_in_it(engine: EngineName, use_reentrant: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.last(checkpoint(self.first, x, use_reentrant=use_reentrant))
            return out

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with modtrace.record(engine=engine) as recording:
        for _ in range(_STEPS):
            model(torch.ones(2, 4, requires_grad=True)).sum().backward()
            optimizer.step()

    inside = recording.timeline().metadata[STEP_NOTES]["inside"]
    # Older versions of torch keep the checkpoint's inputs by a function and a tensor for it, in each step.
    keeps = not use_reentrant and hasattr(torch.utils.checkpoint, "_NoopSaveInputs")
    assert {fqn: [row[:2] for row in own] for fqn, own in inside.items()} == {
        **({"Net": [["", 8], ["_NoopSaveInputs", 4], ["empty", 4]]} if keeps else {}),
        **{fqn: [["", 4], ["linear", 4]] for fqn in ("Net.first", "Net.last")},
    }


def test_a_module_that_no_loss_needs_builds_a_graph_that_no_pass_uses(engine: EngineName) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare, self.quiet = (
                nn.Linear(2, 2),
                nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
                nn.Linear(2, 2),
            )

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.last = self.spare(inputs)
            with torch.no_grad():
                self.quiet(inputs)
            output: torch.Tensor = self.used(inputs)
            return output

    model = Net()
    with modtrace.record(engine=engine) as recording:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()

    timeline = recording.timeline()
    names = [timeline.names[name].fqn for name in timeline.columns.name.tolist()]
    unused = {names[row]: args["unused_nodes"] for row, args in timeline.span_args.items() if "unused_nodes" in args}
    assert unused == {"Net.spare": 3}  # a transposed weight, a product, and an activation


@pytest.mark.parametrize("engine", ["native", "python"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("layer", "other", "does"),
    [
        (nn.Dropout(0.1), nn.Dropout(0), "drop values"),
        (nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False), "normalize by each batch"),
    ],
)
def test_training_mode_without_training_is_a_finding(
    engine: EngineName, training: bool, layer: nn.Module, other: nn.Module, does: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4), other).train(training)
    with modtrace.record(engine=engine) as recording, torch.no_grad():
        for _ in range(5):
            model(torch.ones(2, 4))

    timeline = recording.timeline()
    notes = timeline.metadata[STEP_NOTES]
    assert isinstance(notes, dict)
    assert notes["steps"] == 3  # the calls after 1, 2 and 4
    assert notes["drop"] == (["Sequential.1"] if training else [])
    found = [one for one in timeline.summary().findings if one.what == "runs in training mode"]
    assert [one.where for one in found] == (["Sequential"] if training else [])
    assert all(f"1 module, such as Sequential.1, {does} though nothing is trained: " in one.evidence for one in found)


@pytest.mark.parametrize("engine", ["native", "python"])
@pytest.mark.parametrize(("sizes", "differ"), [([2, 3, 4], True), ([2, 3, 3], False), ([2, 2, 3, 3], True)])
def test_places_whose_modules_differ_in_size_are_noted(engine: EngineName, sizes: list[int], differ: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList(nn.Sequential(nn.Linear(2, size), nn.ReLU()) for size in sizes)

        def forward(self, inputs: torch.Tensor) -> list[torch.Tensor]:
            return [stage(inputs) for stage in self.stages]

    model = Net()
    with modtrace.record(engine=engine) as recording, torch.no_grad():
        model(torch.ones(1, 2))

    notes = recording.timeline().metadata[STEP_NOTES]
    assert isinstance(notes, dict)
    # A ReLU has the size of the module around it.
    assert notes["unlike"] == ["Net.stages.*", "Net.stages.*.0", "Net.stages.*.1"] * differ
    # 6 values instead of 9; a ReLU has no values itself.
    assert notes["size_percent"] == ({} if differ else {"Net.stages.0": 66, "Net.stages.0.0": 66})


@pytest.mark.parametrize(("width", "noted"), [(80, {"Sequential.0": 80}), (79, {})])
def test_the_module_with_most_of_the_values_is_noted(width: int, noted: dict[str, int]) -> None:
    rest = 100 - width
    model = nn.Sequential(nn.Linear(width, 1, bias=False), nn.Linear(1, rest, bias=False))
    with modtrace.record() as recording:
        for _ in range(2):
            model(torch.ones(1, width))

    assert recording.timeline().metadata[STEP_NOTES]["largest"] == noted


def test_sizes_are_found_without_running_code_of_the_user() -> None:
    class Own(nn.Linear):
        asked = 0

        def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
            Own.asked += 1
            raise ValueError

        named_parameters = named_modules = parameters  # type: ignore[assignment]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList(Own(2, size) for size in (2, 3, 4))
            self.stages[0].unused = nn.LazyLinear(2)

        def forward(self, inputs: torch.Tensor) -> list[torch.Tensor]:
            return [stage(inputs) for stage in self.stages]

    model = Net()
    with modtrace.record() as recording, torch.no_grad():
        model(torch.ones(1, 2))

    notes = recording.timeline().metadata[STEP_NOTES]
    assert isinstance(notes, dict)
    assert notes["unlike"] == ["Net.stages.*"]
    assert Own.asked == 0


def test_an_attribute_whose_name_raises_as_it_is_formatted_is_left_out_of_the_notes(engine: EngineName) -> None:
    class Odd(str):
        def __format__(self, _: str) -> str:
            raise ValueError("modtrace formatted a name of the user")

    def grow(model: nn.Sequential) -> Callable[[], object]:
        vars(model[1])[Odd("odd")] = []
        vars(model[1])["seen"] = seen = list[int]()
        return lambda: seen.append(1)

    notes = notes_of(grow, engine)
    assert notes["steps"] == 4
    assert [*notes["lengthen"]] == ["Sequential.1.seen"]


def test_notes_survive_in_a_ring_and_in_traces(tmp_path: Path) -> None:
    notes = notes_of(average, ring=tmp_path / "run.modtrace", path=str(tmp_path / "run.pftrace"))

    assert modtrace.load(tmp_path / "run.modtrace").metadata[STEP_NOTES] == notes
    assert modtrace.load(tmp_path / "run.pftrace").metadata[STEP_NOTES] == notes


def test_operators_of_a_step_that_does_not_end_are_counted_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def many(_: nn.Sequential) -> Callable[[], object]:
        return lambda: [torch.ones(1).cos() for _ in range(200)]

    assert calls_of(notes_of(many), "outside")["cos"] >= 200
    monkeypatch.setattr("modtrace.track.step_notes._MAX_NS", 0)
    notes = notes_of(many)

    assert "operators" not in notes
    assert notes["steps"] == 0


def test_nothing_is_counted_after_a_recording() -> None:
    notes_of(average)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        torch.ones(3).cos()
    assert calls_of(notes_of(nothing), "outside").get("cos") is None
