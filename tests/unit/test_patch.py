"""The patch of `nn.Module.__call__` beside wrappers of others, put on and taken off in any order."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from torch import nn

from modtrace.track.call_patch import Patch, Wrapper

ORIGINAL = nn.Module.__call__
Call = Callable[..., Any]


class Echo(nn.Module):
    """Returns the names of the wrappers that a call went through, from the outermost on."""

    def forward(self, path: list[str]) -> list[str]:
        return path


def make_patch() -> Patch:
    """A patch whose observer is a name, which a call notes."""

    def make(wrapper: Wrapper) -> Call:
        def call(module: nn.Module, path: list[str]) -> Any:
            return wrapper.wrapped(module, path if wrapper.observer is None else [*path, wrapper.observer])

        return call

    return Patch(make)


def set_call(call: Call) -> None:
    nn.Module.__call__ = call  # type: ignore[method-assign]


class Foreign:
    """Other code that wraps the present function and later restores it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.saved: list[Call] = []

    def on(self) -> Call:
        inner = nn.Module.__call__
        self.saved.append(inner)

        def call(module: nn.Module, path: list[str]) -> Any:
            return inner(module, [*path, self._name])

        set_call(call)
        return call

    def off(self) -> None:
        set_call(self.saved.pop())


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    set_call(ORIGINAL)


def test_a_patch_is_installed_and_uninstalled() -> None:
    one = make_patch()

    one.install("one")
    assert Echo()([]) == ["one"]
    one.uninstall()

    assert nn.Module.__call__ is ORIGINAL
    assert Echo()([]) == []


def test_installed_twice_is_installed_once_with_the_last_observer() -> None:
    one = make_patch()

    one.install("first")
    one.install("second")
    assert Echo()([]) == ["second"]
    one.uninstall()
    one.uninstall()

    assert nn.Module.__call__ is ORIGINAL


def test_the_wrapper_is_the_same_function_every_time() -> None:
    inner, one = make_patch(), make_patch()
    seen = set()
    for _ in range(3):
        inner.install("inner")
        one.install("one")
        seen.add(nn.Module.__call__)
        one.uninstall()
        inner.uninstall()

    assert len(seen) == 1


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_patches_go_off_in_any_order(order: tuple[int, ...]) -> None:
    patches = [make_patch() for _ in "abc"]
    for patch, name in zip(patches, "abc", strict=True):
        patch.install(name)
    left = ["c", "b", "a"]
    assert Echo()([]) == left

    for number in order:
        patches[number].uninstall()
        left.remove("abc"[number])
        assert Echo()([]) == left

    assert nn.Module.__call__ is ORIGINAL


def test_below_a_foreign_wrapper_a_patch_passes_calls_on() -> None:
    one, foreign = make_patch(), Foreign("foreign")
    one.install("one")
    wrapper = foreign.on()
    one.uninstall()

    assert nn.Module.__call__ is wrapper
    assert Echo()([]) == ["foreign"]

    foreign.off()
    one.uninstall()
    assert nn.Module.__call__ is ORIGINAL


def test_above_a_foreign_wrapper_a_patch_is_uninstalled() -> None:
    wrapper = Foreign("foreign").on()
    one = make_patch()
    one.install("one")
    assert Echo()([]) == ["one", "foreign"]
    one.uninstall()

    assert nn.Module.__call__ is wrapper


def test_on_again_below_a_foreign_wrapper_is_on_once() -> None:
    one, foreign = make_patch(), Foreign("foreign")
    one.install("one")
    foreign.on()
    one.uninstall()
    one.install("one")

    assert Echo()([]) == ["one", "foreign"]


def test_under_a_foreign_wrapper_that_is_gone_it_is_on_again() -> None:
    one, foreign = make_patch(), Foreign("foreign")
    foreign.on()
    one.install("one")
    foreign.off()
    one.uninstall()

    one.install("one")
    assert Echo()([]) == ["one"]
    one.uninstall()
    assert nn.Module.__call__ is ORIGINAL


def test_after_torchs_own_was_put_back_by_force_it_is_on_again() -> None:
    one = make_patch()
    one.install("one")
    set_call(ORIGINAL)
    one.install("one")

    assert Echo()([]) == ["one"]


class AnyOrder(RuleBasedStateMachine):
    """Two patches of ours and three of others, on and off in any order, and torch's own put back by force."""

    def __init__(self) -> None:
        super().__init__()
        set_call(ORIGINAL)
        self.patches = {name: make_patch() for name in ("one", "two")}
        self.on: set[str] = set()
        self.foreign = [Foreign(name) for name in "abc"]
        self.wrappers: set[Call] = set()

    @rule(name=st.sampled_from(["one", "two"]))
    def install(self, name: str) -> None:
        self.patches[name].install(name)
        self.on.add(name)
        assert Echo()([]).count(name) == 1

    @rule(name=st.sampled_from(["one", "two"]))
    def uninstall(self, name: str) -> None:
        before = nn.Module.__call__
        path = Echo()([])
        self.patches[name].uninstall()
        self.on.discard(name)
        assert Echo()([]) == [each for each in path if each != name]
        if before in self.wrappers:
            assert nn.Module.__call__ is before

    @rule(number=st.integers(0, 2))
    def foreign_on(self, number: int) -> None:
        if sum(len(foreign.saved) for foreign in self.foreign) < 3:
            path = Echo()([])
            self.wrappers.add(self.foreign[number].on())
            assert Echo()([]) == ["abc"[number], *path]

    @rule(number=st.integers(0, 2))
    def foreign_off(self, number: int) -> None:
        if self.foreign[number].saved:
            self.foreign[number].off()

    @rule()
    def torchs_own(self) -> None:
        set_call(ORIGINAL)

    @invariant()
    def each_is_seen_at_most_once_and_only_while_it_is_on(self) -> None:
        seen = [name for name in Echo()([]) if name in self.patches]
        assert len(seen) == len(set(seen))
        assert set(seen) <= self.on

    def teardown(self) -> None:
        for name, patch in self.patches.items():
            patch.install(name)
        for patch in self.patches.values():
            patch.uninstall()
        assert nn.Module.__call__ is ORIGINAL or nn.Module.__call__ in self.wrappers
        set_call(ORIGINAL)


TestAnyOrder = AnyOrder.TestCase


class Bound:
    """A wrapper that is no function, and is bound to the module as functions are; it notes what it was bound to."""

    def __init__(self, inner: Call, module: nn.Module | None = None) -> None:
        self._inner, self._module = inner, module

    def __get__(self, module: nn.Module | None, owner: type) -> Bound:
        return self if module is None else Bound(self._inner, module)

    def __call__(self, path: list[str]) -> Any:
        return self._inner(self._module, [*path, type(self._module).__name__])


class Unbound:
    """One that a class does not bind: it does not get the module."""

    def __call__(self, path: list[str]) -> list[str]:
        return [*path, "unbound"]


@pytest.mark.parametrize(
    ("foreign", "path"),
    [
        (Bound(ORIGINAL), ["Echo"]),
        (functools.partialmethod(ORIGINAL), []),
        (Unbound(), ["unbound"]),
        (staticmethod(functools.partial(lambda name, path: [*path, name], "partial")), ["partial"]),
    ],
)
def test_a_foreign_wrapper_that_is_no_function_is_called_as_python_calls_it(foreign: Any, path: list[str]) -> None:
    set_call(foreign)
    assert Echo()([]) == path

    patch = make_patch()
    patch.install("ours")
    assert Echo()([]) == ["ours", *path]
    patch.uninstall()

    assert vars(nn.Module)["__call__"] is foreign
    assert Echo()([]) == path
