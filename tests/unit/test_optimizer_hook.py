"""The hook behind each optimizer step: it neither raises into the user's step, nor changes what torch iterates over."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import modtrace
from modtrace.track import optimizer_hook, optimizer_steps
from tests.support.forked_python import run_forked


@pytest.fixture(autouse=True, scope="module")
def hooks_of_others() -> Iterator[None]:
    """Remove modtrace's hook, which stays once the user has one, so that other tests start without it."""
    hooks = torch_optimizer._global_optimizer_post_hooks
    yield
    torch_optimizer._global_optimizer_post_hooks = hooks
    optimizer_hook._torch_hooks.clear()


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


IN_HOOKS = """
import sys, threading, torch, modtrace
from torch.optim import SGD
from torch.optim.optimizer import register_optimizer_step_post_hook as register

def step(optimizer):
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

recording, called = modtrace.record(engine="python"), []

def begin(*_):
    called.append("begin")
    if not recording.running:
        if sys.argv[1] == "here":
            recording.start()
        else:
            thread = threading.Thread(target=recording.start)
            thread.start()
            thread.join()

handles = [register(begin), register(lambda *_: called.append("behind"))]
optimizer = SGD([torch.ones(1, requires_grad=True)], lr=0.1)
for _ in range(3):
    step(optimizer)
handles[0].remove()
handles.append(register(lambda *_: called.append("new")))
step(optimizer)
for handle in handles:
    handle.remove()
step(optimizer)
recording.stop()
print(*called, *[mark.text for mark in recording.timeline().marks], sep=", ")
"""


@pytest.mark.parametrize("where", ["here", "in another thread"])
def test_a_first_recording_that_begins_in_a_hook_behind_a_step_is_told_the_next_ones(where: str) -> None:
    told = run_forked("-c", IN_HOOKS, where).stdout

    assert told == "begin, behind, begin, behind, begin, behind, behind, new, step 0, step 1, step 2, step 3\n"


@pytest.mark.parametrize("error", [ValueError, TypeError])
def test_an_error_of_ours_leaves_the_step_alone_and_is_told_once(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise error("ours")

    optimizer = sgd()
    monkeypatch.setattr(optimizer_steps.OptimizerSteps, "_after_step", fail)
    with modtrace.record(engine="python") as recording:
        stepped(optimizer)
        stepped(optimizer)

    assert recording.steps == 0
    assert caplog.messages == ["steps are counted no longer, after an error inside modtrace; the training goes on"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_an_error_of_a_signal_handler_there_reaches_the_user(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def handle(*_: object) -> None:
        raise error

    optimizer = sgd()
    old = signal.signal(signal.SIGUSR1, handle)
    monkeypatch.setattr(optimizer_steps.OptimizerSteps, "_after_step", lambda *_: signal.raise_signal(signal.SIGUSR1))
    try:
        with modtrace.record(engine="python"), pytest.raises(error):
            stepped(optimizer)
    finally:
        signal.signal(signal.SIGUSR1, old)

    assert caplog.messages == []


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
