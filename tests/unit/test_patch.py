from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from modtrace.track import call_patch as patch
from modtrace.track.call_patch import Layer

ORIGINAL = nn.Module.__call__
Call = Callable[..., Any]


class Echo(nn.Module):
    """Returns the names of the wrappers that a call went through, from the outermost on."""

    def forward(self, path: list[str]) -> list[str]:
        return path


def layer(name: str) -> Layer:
    def make(layer: Layer) -> Call:
        def call(module: nn.Module, path: list[str]) -> Any:
            return layer.inner(module, [*path, name])

        return call

    return Layer(make)


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
    patch.CALL.worn.clear()


def test_a_layer_goes_on_and_off() -> None:
    one = layer("one")

    one.put_on()
    assert Echo()([]) == ["one"]
    one.take_off()

    assert nn.Module.__call__ is ORIGINAL
    assert Echo()([]) == []


def test_on_twice_is_on_once() -> None:
    one = layer("one")

    one.put_on()
    one.put_on()
    assert Echo()([]) == ["one"]
    one.take_off()
    one.take_off()

    assert nn.Module.__call__ is ORIGINAL


def test_the_wrapper_is_the_same_function_every_time() -> None:
    one = layer("one")
    seen = set()
    for _ in range(3):
        one.put_on()
        seen.add(nn.Module.__call__)
        one.take_off()

    assert len(seen) == 1


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_layers_go_off_in_any_order(order: tuple[int, ...]) -> None:
    layers = [layer(name) for name in "abc"]
    for each in layers:
        each.put_on()
    left = ["c", "b", "a"]
    assert Echo()([]) == left

    for number in order:
        layers[number].take_off()
        left.remove("abc"[number])
        assert Echo()([]) == left

    assert nn.Module.__call__ is ORIGINAL


def test_below_a_foreign_wrapper_a_layer_stays() -> None:
    one = layer("one")
    one.put_on()
    inner = foreign("foreign")
    one.take_off()

    # Taking it out would take the foreign wrapper with it.
    assert Echo()([]) == ["foreign", "one"]

    nn.Module.__call__ = inner  # type: ignore[method-assign]
    one.take_off()
    assert nn.Module.__call__ is ORIGINAL


def test_above_a_foreign_wrapper_a_layer_goes() -> None:
    foreign("foreign")
    below = nn.Module.__call__
    one = layer("one")
    one.put_on()
    assert Echo()([]) == ["one", "foreign"]
    one.take_off()

    assert nn.Module.__call__ is below


def test_on_again_below_a_foreign_wrapper_is_on_once() -> None:
    one = layer("one")
    one.put_on()
    foreign("foreign")
    one.take_off()
    one.put_on()

    assert Echo()([]) == ["foreign", "one"]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2)), max_size=30))
def test_any_order_of_on_and_off_leaves_what_is_on(actions: list[tuple[bool, int]]) -> None:
    layers = [layer(name) for name in "abc"]
    on: list[int] = []
    for puts, number in actions:
        if puts:
            layers[number].put_on()
            if number not in on:
                on.append(number)
        else:
            layers[number].take_off()
            if number in on:
                on.remove(number)
        assert Echo()([]) == ["abc"[number] for number in reversed(on)]
    for each in layers:
        each.take_off()
    assert nn.Module.__call__ is ORIGINAL
