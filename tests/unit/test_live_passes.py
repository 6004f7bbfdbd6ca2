"""Backward passes counted by the trackers: on threads, failed, and nested."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modtrace import ModTracker, ModuleTracker
from modtrace.track.python.passes import backward_nesting_depth


class RunsAnother(torch.autograd.Function):
    """Its backward runs another backward pass, from the tensor that `inner` returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inner: Any) -> Tensor:
        ctx.inner = inner
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            inner = ctx.inner().sum()
        inner.backward()
        return gradient, None


def test_passes_are_counted_on_the_thread_that_calls_them() -> None:
    counts: list[int] = []

    def noted(name: int) -> Tensor:
        y = torch.ones(2, requires_grad=True).exp()
        y.register_hook(lambda _: counts.append(backward_nesting_depth()))
        return y

    y = RunsAnother.apply(noted(1), lambda: RunsAnother.apply(noted(2), lambda: noted(3)))
    assert backward_nesting_depth() == 0
    y.sum().backward()
    assert backward_nesting_depth() == 0
    # A pass runs its inner pass before it reaches the node that notes.
    assert counts == [3, 2, 1]


@pytest.mark.parametrize("kind", [ModuleTracker, ModTracker])
def test_many_failed_passes_leave_nothing(kind: Any) -> None:
    def fail(_: Tensor) -> None:
        raise ValueError("on purpose")

    tracker = kind()
    bad, good = nn.Linear(2, 2), nn.ReLU()
    seen: list[set[str]] = []
    with tracker:
        losses = []
        for _ in range(5):
            y = bad(torch.ones(2))
            y.register_hook(fail)
            losses.append(y.sum())
        x = good(torch.ones(2, requires_grad=True))
        x.register_hook(lambda _: seen.append(tracker.parents))
        for loss in losses:
            with pytest.raises(ValueError, match="on purpose"):
                loss.backward()
        x.sum().backward()
        assert len(tracker._follower._thread().graph_tasks) <= 1
    assert seen == [{"Global", "ReLU"}]


def test_a_pass_inside_a_pass_of_another_thread_is_its_own() -> None:
    tracker = ModuleTracker()
    seen: list[tuple[str, set[str]]] = []
    outer, inner = nn.Linear(2, 2), nn.ReLU()

    def run() -> None:
        y = inner(torch.ones(2, requires_grad=True))
        y.register_hook(lambda _: seen.append((threading.current_thread().name, tracker.parents)))
        y.sum().backward()

    def elsewhere(_: Tensor) -> None:
        with torch.enable_grad():
            thread = threading.Thread(target=run, name="other")
            thread.start()
            thread.join()
        seen.append((threading.current_thread().name, tracker.parents))

    with tracker:
        y = outer(torch.ones(2))
        y.register_hook(elsewhere)
        y.sum().backward()
    assert seen == [("other", {"Global", "ReLU"}), (threading.current_thread().name, {"Global", "Linear"})]


def test_a_pass_to_features_calls_no_hook_of_the_module_that_made_them() -> None:
    names: list[str] = []
    trunk, head = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 1)
    tracker = ModTracker()
    tracker.register_user_hooks(pre_bw_hook=lambda module, _: names.append(tracker.get_known_fqn(module) or ""))
    with tracker:
        features = trunk(torch.ones(2))
        loss = head(features).sum()
        torch.autograd.grad(loss, features, retain_graph=True)
        to_features = names.copy()
        loss.backward()

    assert to_features == ["Linear"]
    assert names[1:] == ["Linear", "Sequential", "Sequential.1", "Sequential.0"]
