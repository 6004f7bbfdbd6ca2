"""The user's optimizers and callbacks are not called, changed or waited for when their steps become ranges."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import modtrace
from modtrace.track import optimizer_steps


class Refuses:
    """Raises on any attribute access or comparison."""

    def __getattr__(self, name: str) -> Any:
        raise ValueError(name)

    def __eq__(self, other: object) -> bool:
        raise ValueError("==")

    __hash__ = object.__hash__


class Plain:
    """A whole optimizer."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> int:
        self.steps += 1
        return self.steps

    def zero_grad(self) -> None:
        pass


class OfNoClass(Plain):
    """An optimizer that does not show its class."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise ValueError("__class__")


class Closed(type):
    """A class without readable attributes."""

    def __getattribute__(cls, name: str) -> Any:
        raise ValueError(name)


class OfClosed(Plain, metaclass=Closed):
    def step(self) -> int:
        return Plain.step(self)


def of_closed() -> Any:
    own = object.__new__(OfClosed)
    own.steps = 0
    return own


@pytest.mark.parametrize(
    ("make", "names"),
    [(Plain, ["Plain.step"]), (OfNoClass, ["OfNoClass.step"]), (of_closed, ["OfClosed.step"] * 2)],
)
def test_a_step_is_a_range_whatever_its_class_refuses(engine: Any, make: Callable[[], Any], names: list[str]) -> None:
    gc.collect()  # torch's optimizers of other tests
    own = make()
    with modtrace.record(engine=engine) as recording:
        for _ in range(2):
            nn.Linear(1, 1)(torch.ones(1, 1)).sum().backward()
            own.step()

    ranges = [row.name for row in recording.timeline().ranges if row.category == "optimizer"]
    assert (own.steps, recording.steps) == (2, 2)
    assert ranges == names * 2


def test_an_object_that_cannot_be_checked_for_torchs_wrapper_stays(engine: Any) -> None:
    refusing = Refuses()
    later: Any = type("Later", (), {"step": refusing, "zero_grad": refusing, "save_state": refusing})
    with modtrace.record(engine=engine) as recording:
        nn.Linear(1, 1)(torch.ones(1, 1))
    assert vars(later)["step"] is refusing
    assert len(recording.timeline().spans) == 1


async def coroutine(self: Any) -> int:
    return 1


def generator(self: Any) -> Iterator[int]:
    yield 1


async def asynchronous_generator(self: Any) -> Any:
    yield 1


@pytest.mark.parametrize(
    ("function", "asks"),
    [
        (coroutine, inspect.iscoroutinefunction),
        (generator, inspect.isgeneratorfunction),
        (asynchronous_generator, inspect.isasyncgenfunction),
    ],
)
def test_generators_and_coroutines_are_left_unchanged(engine: Any, function: Any, asks: Callable[[Any], bool]) -> None:
    code = function.__code__
    kind: Any = type("Suspends", (), dict.fromkeys(("step", "zero_grad", "save_model"), function))
    with modtrace.record(engine=engine):
        nn.Linear(1, 1)(torch.ones(1, 1))
    assert asks(kind.step)
    assert function.__code__ is code


def test_callbacks_of_the_collector_are_not_compared(engine: Any) -> None:
    refusing: Any = type("Callback", (Refuses,), {"__call__": lambda self, phase, info: None})()
    gc.callbacks.insert(0, refusing)
    try:
        for _ in range(2):
            with modtrace.record(engine=engine) as recording:
                nn.Linear(1, 1)(torch.ones(1, 1))
            count = len(gc.callbacks)
            assert len(recording.timeline().spans) == 1
        with modtrace.record(engine=engine):
            assert len(gc.callbacks) == count
    finally:
        gc.callbacks[:] = [callback for callback in gc.callbacks if callback is not refusing]


@pytest.mark.parametrize("make", [Plain, lambda: SGD([nn.Parameter(torch.ones(1))], 0.1)])
def test_no_step_waits_for_a_walk_through_all_objects(
    engine: Any, make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    optimizer = make()
    walks: list[Any] = []

    def walk(*kinds: Any) -> list[Any]:
        walks.append(kinds)
        return []

    with modtrace.record(engine=engine) as recording:
        monkeypatch.setattr(gc, "get_referrers", walk)
        monkeypatch.setattr(gc, "get_objects", walk)
        nn.Linear(1, 1)(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    assert recording.steps == 1
    assert walks == []


def test_optimizers_are_found_however_they_are_made() -> None:
    before = SGD([nn.Parameter(torch.ones(1))], 0.1)
    with modtrace.record():
        pass
    made = [before, SGD([nn.Parameter(torch.ones(1))], 0.1), copy.deepcopy(before), pickle.loads(pickle.dumps(before))]
    others = optimizer_steps._find_others(before.param_groups[0]["params"][0])
    assert [others.get(optimizer.param_groups[0]["params"][0]) for optimizer in made] == [None, False, False, False]
