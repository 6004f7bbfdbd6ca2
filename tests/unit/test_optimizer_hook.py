"""The hook behind each optimizer step: it neither raises into the user's step, nor changes what torch iterates over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import modtrace


def stepped(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group.get("params", ()):
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def sgd() -> SGD:
    return SGD([torch.ones(1, requires_grad=True)], lr=0.1)


def test_a_recording_that_ends_in_a_step_leaves_the_hooks_behind_its_own_alone() -> None:
    optimizer, called = sgd(), []
    with modtrace.record(engine="python", max_steps=2) as recording:
        handle = register_optimizer_step_post_hook(lambda *_: called.append(len(called)))
        for _ in range(4):
            stepped(optimizer)
    handle.remove()

    assert called == [0, 1, 2, 3]
    assert [mark.text for mark in recording.timeline().marks] == ["step 0", "step 1"]
    # What was left in torch's dictionary goes with the next recording that ends outside of a step.
    with modtrace.record(engine="python") as recording:
        stepped(optimizer)
    assert [mark.text for mark in recording.timeline().marks] == ["step 0"]
    assert "modtrace" not in [*map(str, torch_optimizer._global_optimizer_post_hooks)]


def test_a_recording_that_begins_in_a_step_changes_no_hooks_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    optimizer, recordings, called = sgd(), [modtrace.record(engine="python")], []

    def begin(*_: object) -> None:
        recordings.pop().start()

    handles = [
        register_optimizer_step_post_hook(begin),
        register_optimizer_step_post_hook(lambda *_: called.append(0)),
    ]
    recording = recordings[0]
    stepped(optimizer)
    recording.stop()
    for handle in handles:
        handle.remove()

    assert called == [0]
    assert caplog.messages == ["steps of optimizers are not told: the recording began within one"]


class _Odd(Optimizer):
    """One whose groups are not as torch's."""

    def __init__(self, groups: Any) -> None:
        super().__init__([torch.ones(1, requires_grad=True)], {})
        self.param_groups = groups

    def step(self, closure: Any = None) -> Any:
        """Do nothing."""


@pytest.mark.parametrize("groups", [[{}], [{"params": None}], [{"params": [3]}], [[1]], None, 7])
def test_optimizers_with_groups_of_their_own_step_beside_others(groups: Any) -> None:
    odd, optimizer = _Odd(groups), sgd()
    with modtrace.record(engine="python") as recording:
        odd.step()
        stepped(optimizer)
        odd.step()
        stepped(optimizer)

    assert len([mark for mark in recording.timeline().marks if mark.kind == "step"]) == 2


def test_a_recording_that_begins_in_a_closure_is_told_the_step_around_it() -> None:
    optimizer, recording = sgd(), modtrace.record(engine="python", max_steps=2)

    def closure() -> float:
        if not recording.running:
            recording.start()
        return 0.0

    optimizer.step(closure)
    stepped(optimizer)

    assert not recording.running
    assert [mark.text for mark in recording.timeline().marks] == ["step 0", "step 1"]
