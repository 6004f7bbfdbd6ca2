from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from modtrace.track.call_patch import MODULE_CALL, Patch

ORIGINAL = nn.Module.__call__
Call = Callable[..., Any]


class Echo(nn.Module):
    """Returns the names of the wrappers that a call went through, from the outermost on."""

    def forward(self, path: list[str]) -> list[str]:
        return path


def make_patch(name: str) -> Patch:
    def make(patch: Patch) -> Call:
        def call(module: nn.Module, path: list[str]) -> Any:
            return patch.wrapped(module, [*path, name])

        return call

    return Patch(make)


def foreign(name: str) -> Call:
    """What other code does: it wraps what is there."""
    inner = nn.Module.__call__

    def call(module: nn.Module, path: list[str]) -> Any:
        return inner(module, [*path, name])

    nn.Module.__call__ = call  # type: ignore[method-assign]
    return inner


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    nn.Module.__call__ = ORIGINAL  # type: ignore[method-assign]
    MODULE_CALL.active.clear()


def test_a_patch_is_installed_and_uninstalled() -> None:
    one = make_patch("one")

    one.install()
    assert Echo()([]) == ["one"]
    one.uninstall()

    assert nn.Module.__call__ is ORIGINAL
    assert Echo()([]) == []


def test_installed_twice_is_installed_once() -> None:
    one = make_patch("one")

    one.install()
    one.install()
    assert Echo()([]) == ["one"]
    one.uninstall()
    one.uninstall()

    assert nn.Module.__call__ is ORIGINAL


def test_the_wrapper_is_the_same_function_every_time() -> None:
    one = make_patch("one")
    seen = set()
    for _ in range(3):
        one.install()
        seen.add(nn.Module.__call__)
        one.uninstall()

    assert len(seen) == 1


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_patches_go_off_in_any_order(order: tuple[int, ...]) -> None:
    patches = [make_patch(name) for name in "abc"]
    for each in patches:
        each.install()
    left = ["c", "b", "a"]
    assert Echo()([]) == left

    for number in order:
        patches[number].uninstall()
        left.remove("abc"[number])
        assert Echo()([]) == left

    assert nn.Module.__call__ is ORIGINAL


def test_below_a_foreign_wrapper_a_patch_stays() -> None:
    one = make_patch("one")
    one.install()
    inner = foreign("foreign")
    one.uninstall()

    # Taking it out would take the foreign wrapper with it.
    assert Echo()([]) == ["foreign", "one"]

    nn.Module.__call__ = inner  # type: ignore[method-assign]
    one.uninstall()
    assert nn.Module.__call__ is ORIGINAL


def test_above_a_foreign_wrapper_a_patch_is_uninstalled() -> None:
    foreign("foreign")
    below = nn.Module.__call__
    one = make_patch("one")
    one.install()
    assert Echo()([]) == ["one", "foreign"]
    one.uninstall()

    assert nn.Module.__call__ is below


def test_on_again_below_a_foreign_wrapper_is_on_once() -> None:
    one = make_patch("one")
    one.install()
    foreign("foreign")
    one.uninstall()
    one.install()

    assert Echo()([]) == ["foreign", "one"]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2)), max_size=30))
def test_any_order_of_on_and_off_leaves_what_is_on(actions: list[tuple[bool, int]]) -> None:
    patches = [make_patch(name) for name in "abc"]
    on: list[int] = []
    for puts, number in actions:
        if puts:
            patches[number].install()
            if number not in on:
                on.append(number)
        else:
            patches[number].uninstall()
            if number in on:
                on.remove(number)
        assert Echo()([]) == ["abc"[number] for number in reversed(on)]
    for each in patches:
        each.uninstall()
    assert nn.Module.__call__ is ORIGINAL
