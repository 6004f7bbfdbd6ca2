"""Calls with inputs that the module has already had in the same step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from modtrace.track.sampling import RepeatedCalls


def again(module: nn.Module, *calls: tuple[Any, ...]) -> int:
    repeated = RepeatedCalls()
    repeated.begin()
    for inputs in calls:
        repeated.note(module, inputs)
    return sum(repeated.end().values())


def test_calls_with_the_same_tensors_and_plain_values_are_counted() -> None:
    x, y, linear = torch.ones(2), torch.ones(2), nn.Linear(2, 2)

    assert again(linear, (x,), (x,), (x,)) == 2
    assert again(linear, (x, (y, None), 3), (x, (y, None), 3)) == 1
    assert again(nn.ReLU(), (x,), (x,)) == 1


@pytest.mark.parametrize(
    "inputs",
    [
        lambda x, y: [(x,), (y,)],
        lambda x, y: [(x, 1), (x, 2)],
        lambda x, y: [(x, 1), (x, True)],
        lambda x, y: [(x,), (x, y)],
        lambda x, y: [(x, [1]), (x, [1])],  # the items of a list may have changed by then
        lambda x, y: [(3,), (3,)],
        lambda x, y: [(weight := nn.Parameter(x),), (weight,)],  # no references to parameters: they may be swapped
    ],
)
def test_calls_with_other_inputs_are_not_counted(inputs: Callable[..., list[tuple[Any, ...]]]) -> None:
    assert again(nn.Linear(2, 2), *inputs(torch.ones(2), torch.ones(2))) == 0


def test_a_tensor_written_in_between_is_another_input() -> None:
    x, linear = torch.ones(2), nn.Linear(2, 2)
    repeated = RepeatedCalls()
    repeated.note(linear, (x,))
    x.add_(1)
    repeated.note(linear, (x,))
    with torch.no_grad():
        linear.weight.add_(1)
    repeated.note(linear, (x,))
    with torch.no_grad():
        repeated.note(linear, (x,))

    assert repeated.end() == {}


def test_a_tensor_at_the_address_of_one_that_died_is_another_input() -> None:
    linear, repeated = nn.Linear(2, 2), RepeatedCalls()
    for _ in range(50):
        repeated.note(linear, (torch.ones(2),))

    assert repeated.end() == {}


def test_dropout_and_tensors_without_a_version_compute_other_results() -> None:
    x, drops = torch.ones(2), nn.Sequential(nn.Linear(2, 2), nn.Dropout())

    assert again(drops, (x,), (x,)) == 0
    assert again(drops.eval(), (x,), (x,)) == 1
    with torch.inference_mode():
        assert again(drops, (torch.ones(2),), (torch.ones(2),)) == 0
        own = torch.ones(2)
        assert again(drops, (own,), (own,)) == 0


def test_calls_of_weights_without_a_version_are_not_compared() -> None:
    x = torch.ones(2)
    with torch.inference_mode():
        linear = nn.Linear(2, 2)

    assert again(linear, (x,), (x,)) == 0


def test_a_step_starts_without_the_calls_of_the_last_one() -> None:
    x, linear, repeated = torch.ones(2), nn.Linear(2, 2), RepeatedCalls()
    repeated.note(linear, (x,))
    repeated.begin()
    repeated.note(linear, (x,))

    assert repeated.end() == {}


def test_a_call_after_a_backward_pass_is_not_compared_with_those_before() -> None:
    x, linear, repeated = torch.ones(2), nn.Linear(2, 2), RepeatedCalls()
    for _ in range(2):
        repeated.note(linear, (x,))
        repeated.note(linear, (x,))
        repeated.forget_inputs()

    assert repeated.end() == {id(linear): 2}


def test_a_module_that_holds_itself_is_noted() -> None:
    x, holder = torch.ones(2), nn.Module()
    holder._modules["self"] = holder

    assert again(holder, (x,), (x,)) == 1
