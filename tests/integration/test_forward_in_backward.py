"""Forward calls inside a backward pass: a checkpoint reruns some of them, and the others are counted.

The expected calls are written by hand per step, in the order of the calls of the watched module: `f` is a
forward and `r` a recompute of the call of that number. The module's own `forward` counts how often it ran.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import modtrace
from modtrace.record_options import EngineName

STEPS = 2


class Field(nn.Module):
    """The watched module; it counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.ran = 0

    def forward(self, y: Tensor) -> Tensor:
        self.ran += 1
        return self.inner(y).tanh()  # type: ignore[no-any-return]


class Adjoint(torch.autograd.Function):
    """Integrates `forward_steps` without a graph, and its adjoint in `backward_steps`, as an ODE solver does."""

    @staticmethod
    def forward(
        ctx: Any, field: nn.Module, forward_steps: int, backward_steps: int, y: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.field, ctx.steps = field, backward_steps
        for _ in range(forward_steps):
            y = y + 0.1 * field(y)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (y,) = gradients, ctx.saved_tensors
        parameters = list(ctx.field.parameters())
        of_parameters = [torch.zeros_like(parameter) for parameter in parameters]
        for _ in range(ctx.steps):
            with torch.enable_grad():
                y = y.detach().requires_grad_()
                slope = ctx.field(y)
                inner = torch.autograd.grad(slope, [y, *parameters], gradient)
            y, gradient = y - 0.1 * slope.detach(), gradient + 0.1 * inner[0]
            of_parameters = [total + 0.1 * one for total, one in zip(of_parameters, inner[1:], strict=True)]
        return (None, None, None, gradient, *of_parameters)


class OwnCheckpoint(torch.autograd.Function):
    """A checkpoint that a user wrote."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        torch.autograd.backward(y, gradients)
        return None, x.grad


class Net(nn.Module):
    def __init__(self, body: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.into = nn.Linear(3, 3)
        self.field = Field()
        self.out = nn.Linear(3, 3)
        self.identity = nn.Identity()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(self, self.into(x)))  # type: ignore[no-any-return]


def _adjoint(forward_steps: int, backward_steps: int) -> Callable[[Net, Tensor], Tensor]:
    def body(net: Net, x: Tensor) -> Tensor:
        return Adjoint.apply(net.field, forward_steps, backward_steps, x, *net.field.parameters())  # type: ignore[no-any-return]

    return body


def _checkpointed(reentrant: bool, function: Callable[[Net, Tensor], Tensor]) -> Callable[[Net, Tensor], Tensor]:
    return lambda net, x: checkpoint(lambda z: function(net, z), x, use_reentrant=reentrant)


def _calls_in_hook(net: Net, y: Tensor) -> Tensor:
    y.register_hook(lambda gradient: (net.field(gradient.detach()), None)[1])
    return y


def _twice(net: Net, x: Tensor) -> Tensor:
    return net.field(net.field(x))  # type: ignore[no-any-return]


def _penalty(net: Net, x: Tensor) -> Tensor:
    y = net.field(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y + slope  # type: ignore[no-any-return]


def _in_blocks(net: Net, x: Tensor) -> Tensor:
    return checkpoint_sequential([net.field, net.identity, net.field, net.into], 2, x, use_reentrant=False)  # type: ignore[no-any-return]


CASES: dict[str, tuple[Callable[[Net, Tensor], Tensor], str, str]] = {
    "adjoint": (_adjoint(3, 4), "f0 f1 f2 f3 f4 f5 f6", "f7 f8 f9 f10 f11 f12 f13"),
    "adjoint of as many steps": (_adjoint(2, 2), "f0 f1 f2 f3", "f4 f5 f6 f7"),
    "adjoint of one step": (_adjoint(1, 1), "f0 f1", "f2 f3"),
    "adjoint in a reentrant checkpoint": (
        _checkpointed(True, _adjoint(2, 1)),
        "f0 f1 r0 r1 f2",
        "f3 f4 r3 r4 f5",
    ),
    "adjoint in a checkpoint": (_checkpointed(False, _adjoint(2, 1)), "f0 f1 r0 r1 f2", "f3 f4 r3 r4 f5"),
    "reentrant": (_checkpointed(True, lambda net, x: net.field(x)), "f0 r0", "f1 r1"),
    "not reentrant": (_checkpointed(False, lambda net, x: net.field(x)), "f0 r0", "f1 r1"),
    "reentrant, twice inside": (_checkpointed(True, _twice), "f0 f1 r0 r1", "f2 f3 r2 r3"),
    "not reentrant, twice inside": (_checkpointed(False, _twice), "f0 f1 r0 r1", "f2 f3 r2 r3"),
    "after an operation": (_checkpointed(False, lambda net, x: net.field(x * 2)), "f0 r0", "f1 r1"),
    # The module after the first checkpointed part is called before that part is rerun.
    "sequential": (_in_blocks, "f0 f1 r0", "f2 f3 r2"),
    # The last call saves its output, which ends the recomputation.
    "stopped early": (
        _checkpointed(False, lambda net, x: net.identity(net.field(x))),
        "f0 r0",
        "f1 r1",
    ),
    # The outer checkpoint's recompute stops at the tensor that the inner one saved, its input.
    "nested": (
        _checkpointed(False, _checkpointed(False, lambda net, x: net.field(x))),
        "f0 r0",
        "f1 r1",
    ),
    # The outer checkpoint reruns the inner one's forward, which reruns its own in its backward.
    "nested and reentrant": (
        _checkpointed(True, _checkpointed(True, lambda net, x: net.field(x))),
        "f0 r0 r0",
        "f1 r1 r1",
    ),
    "own": (lambda net, x: OwnCheckpoint.apply(net.field, x), "f0 r0", "f1 r1"),
    "own, twice inside": (
        lambda net, x: OwnCheckpoint.apply(lambda z: _twice(net, z), x),
        "f0 f1 r0 r1",
        "f2 f3 r2 r3",
    ),
    "own, of a view": (
        lambda net, x: OwnCheckpoint.apply(lambda z: net.field(z.view(-1, 3)), x),
        "f0 r0",
        "f1 r1",
    ),
    "own, twice": (
        lambda net, x: OwnCheckpoint.apply(net.field, OwnCheckpoint.apply(net.field, x)),
        "f0 f1 r1 r0",
        "f2 f3 r3 r2",
    ),
    # A limit: the module's input is not the input of the function.
    "own, after an operation": (
        lambda net, x: OwnCheckpoint.apply(lambda z: net.field(z * 2), x),
        "f0 f1",
        "f2 f3",
    ),
    "a hook": (lambda net, x: _calls_in_hook(net, net.field(x)), "f0 f1", "f2 f3"),
    "a hook that calls it first": (lambda net, x: _calls_in_hook(net, net.out(x)), "f0", "f1"),
    "a hook on a reentrant checkpoint": (
        lambda net, x: _calls_in_hook(net, _checkpointed(True, lambda net, x: net.field(x))(net, x)),
        "f0 f1 r0",
        "f2 f3 r2",
    ),
    # The hook runs in the pass inside the checkpoint's backward.
    "a hook in a reentrant checkpoint": (
        _checkpointed(True, lambda net, x: net.field(_calls_in_hook(net, x * 2) if torch.is_grad_enabled() else x)),
        "f0 r0 f1",
        "f2 r2 f3",
    ),
    "a penalty on gradients": (_penalty, "f0", "f1"),
}


def record(engine: EngineName, net: Net) -> modtrace.Timeline:
    with modtrace.record(engine=engine) as recording:
        for _ in range(STEPS):
            net(torch.ones(2, 3)).sum().backward()
            recording.step()
    return recording.timeline()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("case", CASES)
def test_each_call_is_forward_or_recompute_as_expected(engine: EngineName, case: str) -> None:
    body, *expected = CASES[case]
    net = Net(body)

    timeline = record(engine, net)

    told: list[list[str]] = [[] for _ in range(STEPS)]
    for span in timeline.spans:
        if span.module_class == "Field" and span.phase != "backward":
            told[span.step].append(f"{span.phase[0]}{span.call}")
    assert [" ".join(calls) for calls in told] == expected
    assert sum(map(len, told)) == net.field.ran
    (row,) = [row for row in timeline.summary().rows if row.module_class == "Field"]
    again = "r" in " ".join(expected)
    assert row.calls == " ".join(expected).count("f")
    assert bool(row.recompute_ns) is again
    assert ("checkpointing costs" in str(timeline.summary())) is again
    assert_nested(timeline)
    assert_adds_up(timeline)


def assert_nested(timeline: modtrace.Timeline) -> None:
    """Assert that each span lies within its parent, on its track, and that no two siblings overlap."""
    columns = timeline.columns
    last_end: dict[tuple[int, int], int] = {}
    for row in range(len(columns)):
        parent, track = int(columns.parent[row]), int(columns.track[row])
        assert last_end.get((track, parent), 0) <= columns.start[row]
        last_end[track, parent] = int(columns.end[row])
        if parent >= 0:
            assert columns.track[parent] == track
            assert columns.start[parent] <= columns.start[row]
            assert columns.end[row] <= columns.end[parent]


def assert_adds_up(timeline: modtrace.Timeline) -> None:
    """Assert that the outermost modules' totals, and all self times, are the time in any module."""
    rows = timeline.summary().rows
    columns = timeline.columns
    outermost = columns.parent < 0
    in_modules = int((columns.end - columns.start)[outermost].sum())
    assert sum(row.self_ns for row in rows) == in_modules
    assert sum(row.total_ns for row in rows if "." not in row.fqn) == in_modules


def test_a_forward_inside_backward_lies_in_it_and_has_a_backward_of_its_own(engine: EngineName) -> None:
    net = Net(_adjoint(1, 2))

    timeline = record(engine, net)

    told = [
        (span.fqn, span.phase, span.call, span.depth, timeline.tracks[columns_track].kind)
        for span, columns_track in zip(timeline.spans, timeline.columns.track.tolist(), strict=True)
        if span.step == 0 and not span.fqn.endswith("inner") and span.start_ns >= timeline.backward_passes[0].start_ns
    ]
    assert told == [
        ("Net", "backward", 0, 0, "backward"),
        ("Net.out", "backward", 0, 1, "backward"),
        ("Net.field", "forward", 1, 1, "backward"),
        ("Net.field", "backward", 1, 1, "backward"),
        ("Net.field", "forward", 2, 1, "backward"),
        ("Net.field", "backward", 2, 1, "backward"),
        ("Net.into", "backward", 0, 1, "backward"),
    ]


def test_where_and_trackers_know_a_forward_inside_backward(engine: EngineName) -> None:
    net = Net(_adjoint(1, 1))
    stacks: list[list[tuple[str, str]]] = []
    parents: list[tuple[bool, bool]] = []

    def note(*_: object) -> None:
        stacks.append([(call.fqn, call.phase) for call in recording.where()[0].calls])
        parents.append((tracker.is_bw, "Net.field" in tracker.parents))

    net.field.register_forward_pre_hook(note)
    with modtrace.ModuleTracker() as tracker, modtrace.record(engine=engine) as recording:
        net(torch.ones(2, 3)).sum().backward()

    assert stacks == [
        [("Net", "forward"), ("Net.field", "forward")],
        [("Net", "backward"), ("Net.field", "forward")],
    ]
    assert parents == [(False, True), (True, True)]
