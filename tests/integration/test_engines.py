"""Each engine on graphs of each shape: the module that backward time is given to, and the numbering of calls."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import modtrace
from modtrace import Timeline
from modtrace.record_options import EngineName
from modtrace.timeline.decode.analysis import wall_clock
from tests.support.models import ARCHITECTURES
from tests.support.profiler_truth import measure, share_nested
from tests.support.small_modules import Scale

Row = tuple[str, str, int]
ENOUGH: dict[EngineName, float] = {"native": 0.999, "python": 0.95}


def rows(timeline: Timeline) -> list[Row]:
    """Name, phase and call of each span, in start order."""
    return [(span.fqn, span.phase, span.call) for span in timeline.spans]


def backward(timeline: Timeline) -> list[tuple[str, int, int]]:
    """Name, call and depth of each backward slice, in start order."""
    return [(span.fqn, span.call, span.depth) for span in timeline.spans if span.phase == "backward"]


def on_wall_clock(recording: modtrace.Recording, monotonic_ns: int) -> int:
    """Convert a monotonic time to the clock of the recording's spans."""
    clock = wall_clock(recording._require_capture().ring.read().records)
    return int(clock.to_other(np.array([monotonic_ns]))[0])


def recorded(engine: EngineName, run: Callable[[], object], model: nn.Module | None = None) -> Timeline:
    with modtrace.record(engine=engine, model=model) as recording:
        run()
    timeline = recording.timeline()
    assert share_nested(timeline) == 1
    assert all(span.complete for span in timeline.spans)
    return timeline


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.filterwarnings("ignore:.*enable_nested_tensor:UserWarning")
def test_backward_time_lies_under_the_right_module(engine: EngineName, name: str) -> None:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    for _ in range(3):
        accuracy = measure(engine, ARCHITECTURES[name](), steps=4)
        # On a busy machine the profiler's clock drifts further than is allowed for; a real error stays in each attempt.
        if accuracy.nodes_right >= ENOUGH[engine]:
            break

    torch.set_num_threads(threads)
    assert accuracy.nodes > 100
    assert accuracy.nodes_right >= ENOUGH[engine]
    assert accuracy.nested == 1


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Scale(), Scale()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x))
        return out


def test_a_plain_backward(engine: EngineName) -> None:
    model = Pair()

    timeline = recorded(engine, lambda: model(torch.ones(2)).sum().backward())

    assert rows(timeline) == [
        ("Pair", "forward", 0),
        ("Pair.a", "forward", 0),
        ("Pair.b", "forward", 0),
        ("Pair", "backward", 0),
        ("Pair.b", "backward", 0),
        ("Pair.a", "backward", 0),
    ]
    assert timeline.columns.depth.tolist() == [0, 1, 1, 0, 1, 1]
    # Each call's forward and backward are linked, and no two calls are.
    link = timeline.columns.link.tolist()
    assert [link[0], link[2], link[1]] == link[3:]
    assert sorted(set(link)) == [0, 1, 2]


def test_a_second_backward_through_the_same_graph(engine: EngineName) -> None:
    model = Pair()

    def run() -> None:
        loss = model(torch.ones(2)).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    once = [("Pair", 0, 0), ("Pair.b", 0, 1), ("Pair.a", 0, 1)]
    assert backward(recorded(engine, run)) == once + once


def test_gradients_by_autograd_grad(engine: EngineName) -> None:
    model, x = Pair(), torch.ones(2, requires_grad=True)

    timeline = recorded(engine, lambda: torch.autograd.grad(model(x).sum(), [x]))

    assert backward(timeline) == [("Pair", 0, 0), ("Pair.b", 0, 1), ("Pair.a", 0, 1)]


def test_gradients_accumulate_over_micro_batches(engine: EngineName) -> None:
    model = Pair()

    def run() -> None:
        for _ in range(2):
            model(torch.ones(2)).sum().backward()

    assert backward(recorded(engine, run)) == [
        row for call in range(2) for row in (("Pair", call, 0), ("Pair.b", call, 1), ("Pair.a", call, 1))
    ]


def test_one_backward_of_two_forwards(engine: EngineName) -> None:
    model = Pair()

    timeline = recorded(engine, lambda: (model(torch.ones(2)) + model(torch.ones(2))).sum().backward())

    assert backward(timeline) == [
        row for call in (1, 0) for row in (("Pair", call, 0), ("Pair.b", call, 1), ("Pair.a", call, 1))
    ]


def test_a_backward_of_a_backward(engine: EngineName) -> None:
    model, x = Pair(), torch.ones(2, requires_grad=True)

    def run() -> None:
        out = model(x)
        (gradient,) = torch.autograd.grad((out**2).sum(), [x], create_graph=True)
        gradient.sum().backward()

    timeline = recorded(engine, run)

    forward_nodes = [("Pair", 0, 0), ("Pair.b", 0, 1), ("Pair.a", 0, 1)]
    # The second pass runs the nodes that the first one made for each call, the last first, then the forward's again.
    # Only the native engine knows the modules of nodes that a backward makes.
    made_in_backward = [("Pair", 0, 0), ("Pair.a", 0, 1), ("Pair.b", 0, 1)] if engine == "native" else []
    assert backward(timeline) == forward_nodes + made_in_backward + forward_nodes


class InnerBackward(torch.autograd.Function):
    """Its backward runs a whole forward and backward of another module."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inner: nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        ctx.inner = inner
        with torch.no_grad():
            out: Tensor = inner(x)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(ctx.inner(x), gradients)
        return x.grad, None


class Checkpointing(nn.Module):
    def __init__(self, kind: str, blocks: int = 2) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Pair() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.kind == "own":
                x = InnerBackward.apply(x, block)
            else:
                x = checkpoint(block, x, use_reentrant=self.kind == "reentrant")
        return x


@pytest.mark.parametrize("kind", ["reentrant", "own"])
def test_a_backward_inside_a_backward(engine: EngineName, kind: str) -> None:
    model = Checkpointing(kind)

    timeline = recorded(engine, lambda: model(torch.ones(2, requires_grad=True)).sum().backward())

    again = [(span.fqn, span.phase, span.call, span.depth) for span in timeline.spans if span.phase != "forward"]
    expected = [("Checkpointing", "backward", 0, 0)]
    for block in (1, 0):
        name = f"Checkpointing.blocks.{block}"
        for phase, order in (("recompute", "ab"), ("backward", "ba")):
            expected += [(name, phase, 0, 1), *[(f"{name}.{part}", phase, 0, 2) for part in order]]
    assert again == expected


def test_non_reentrant_checkpoints(engine: EngineName) -> None:
    model = Checkpointing("non-reentrant")

    timeline = recorded(engine, lambda: model(torch.ones(2, requires_grad=True)).sum().backward())

    # Each block is rerun inside the backward of the part that needed it first: its part b.
    phases = Counter((span.fqn, span.phase, span.call) for span in timeline.spans)
    for block in (0, 1):
        name = f"Checkpointing.blocks.{block}"
        for part in ("", ".a", ".b"):
            assert phases[name + part, "forward", 0] == 1
            assert phases[name + part, "recompute", 0] == 1
            assert phases[name + part, "backward", 0] == 1
    by_row = list(timeline.spans)
    for at, span in enumerate(by_row):
        if span.phase == "recompute" and span.fqn.count(".") == 2:
            around = by_row[timeline.columns.parent[at]]
            assert (around.fqn, around.phase) == (f"{span.fqn}.b", "backward")


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_recomputations_have_the_number_of_the_call_that_they_repeat(engine: EngineName, kind: str) -> None:
    class Repeats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Pair()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = checkpoint(self.block, x, use_reentrant=kind == "reentrant")
            return x

    model = Repeats()

    def run() -> None:
        for _ in range(2):
            model(torch.ones(2, requires_grad=True)).sum().backward()

    timeline = recorded(engine, run)

    again = [(fqn, call) for fqn, phase, call in rows(timeline) if phase == "recompute"]
    calls = [2, 1, 0, 5, 4, 3]
    assert [call for fqn, call in again if fqn == "Repeats.block"] == calls
    assert [call for fqn, call in again if fqn == "Repeats.block.a"] == calls
    assert [call for fqn, call, _ in backward(timeline) if fqn == "Repeats.block.b"] == calls


def test_a_module_deleted_before_its_backward(engine: EngineName) -> None:
    def forward() -> tuple[Tensor, weakref.ref[nn.Module]]:
        model = Pair()
        return model(torch.ones(2)).sum(), weakref.ref(model)

    def run() -> None:
        loss, alive = forward()
        gc.collect()
        assert alive() is None
        loss.backward()

    assert backward(recorded(engine, run)) == [("Pair", 0, 0), ("Pair.b", 0, 1), ("Pair.a", 0, 1)]


def test_new_modules_with_old_addresses_have_their_own_names(engine: EngineName) -> None:
    def run() -> None:
        for number in range(50):
            nn.Sequential(nn.ReLU() if number % 2 else nn.Tanh())(torch.ones(2))

    spans = recorded(engine, run).spans
    inner = [span.module_class for span in spans if span.fqn in ("Sequential.0", "Sequential.0#2")]
    assert inner == ["Tanh", "ReLU"] * 25


def test_a_module_that_calls_itself(engine: EngineName) -> None:
    class Countdown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = Scale()

        def forward(self, x: Tensor, left: int) -> Tensor:
            x = self.scale(x)
            out: Tensor = self(x, left - 1) if left else x
            return out

    timeline = recorded(engine, lambda: Countdown()(torch.ones(2), 2).sum().backward())

    assert [(span.fqn, span.call, span.depth) for span in timeline.spans if span.phase == "forward"] == [
        row for call in range(3) for row in (("Countdown", call, call), ("Countdown.scale", call, call + 1))
    ]
    # The innermost call's node runs first, deep in its chain.
    assert [row for row in backward(timeline) if row[0] == "Countdown.scale"] == [
        ("Countdown.scale", 2, 3),
        ("Countdown.scale", 1, 2),
        ("Countdown.scale", 0, 1),
    ]


def test_a_shared_module_has_the_name_of_its_path(engine: EngineName) -> None:
    model = nn.Sequential(nn.Sequential(shared := Scale()), nn.Sequential(shared))

    timeline = recorded(engine, lambda: model(torch.ones(2)).sum().backward())

    assert backward(timeline) == [
        ("Sequential", 0, 0),
        ("Sequential.1", 0, 1),
        ("Sequential.1.0", 0, 2),
        ("Sequential.0", 0, 1),
        ("Sequential.0.0", 0, 2),
    ]


def test_with_a_model_names_begin_there(engine: EngineName) -> None:
    model = Pair()

    timeline = recorded(engine, lambda: model.b(model.a(torch.ones(2))).sum().backward(), model)

    assert rows(timeline) == [
        ("Pair.a", "forward", 0),
        ("Pair.b", "forward", 0),
        ("Pair.b", "backward", 0),
        ("Pair.a", "backward", 0),
    ]


def test_hard_inputs_and_outputs(engine: EngineName) -> None:
    class InPlace(nn.Module):
        def forward(self, *, x: Tensor) -> dict[str, list[Tensor]]:
            x = x.clone()
            x[0].mul_(2)
            x.add_(1).relu_()
            return {"parts": list(x.unbind())}

    class Hard(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.unused = Scale(), InPlace(), Scale()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            parts = self.inner(x=self.first(x))["parts"]
            return parts[0], self.unused(x)

    model = Hard()
    timeline = recorded(engine, lambda: model(torch.ones(2, 2))[0].sum().backward())

    assert backward(timeline) == [("Hard", 0, 0), ("Hard.inner", 0, 1), ("Hard.first", 0, 1)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_a_graph_there_is_no_backward(engine: EngineName, mode: Callable[[], Any]) -> None:
    def run() -> None:
        with mode():
            Pair().eval()(torch.ones(2))

    assert {phase for _, phase, _ in rows(recorded(engine, run))} == {"forward"}


class Runs(torch.autograd.Function):
    """Its backward runs a function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, work: Callable[[], object]) -> Tensor:
        ctx.work = work
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with torch.enable_grad():
            ctx.work()
        return gradients[0], None


def run_inside(count: int, work: Callable[[], object]) -> None:
    """Run `work` inside `count` backward passes, each inside another one."""
    if count == 0:
        work()
    else:
        x = torch.ones(1, requires_grad=True)
        Runs.apply(x, lambda: run_inside(count - 1, work)).backward()


# Inside 61 other passes, torch runs a pass on a thread of its own.
@pytest.mark.parametrize("around", [0, 1, 61])
def test_a_backward_that_fails_ends(engine: EngineName, around: int) -> None:
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            raise ValueError("bad gradient")

    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = Bad.apply(x)
            return out

    model = nn.Sequential(Scale(), Inner(), Scale())
    with modtrace.record(engine=engine) as recording:
        with pytest.raises(ValueError, match="bad gradient"):
            run_inside(around, lambda: model(torch.ones(2)).sum().backward())
        failed_ns = time.monotonic_ns()
        Pair()(torch.ones(2)).sum().backward()
    timeline = recording.timeline()

    assert share_nested(timeline) == 1
    assert [row for row in backward(timeline) if row[0].startswith("Pair")] == [
        ("Pair", 0, 0),
        ("Pair.b", 0, 1),
        ("Pair.a", 0, 1),
    ]
    failed = {fqn for fqn, _, _ in backward(timeline) if fqn.startswith("Sequential")}
    assert {"Sequential", "Sequential.2", "Sequential.1"} <= failed
    # The pass was over when the error came out, so its spans are complete.
    assert all(span.complete for span in timeline.spans)
    ends = [span.end_ns for span in timeline.spans if span.fqn.startswith("Sequential")]
    assert max(ends) <= on_wall_clock(recording, failed_ns)


class Timed(torch.autograd.Function):
    """Its backward takes 5 ms, and appends its times to a list."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noted: list[tuple[int, int]]) -> Tensor:
        ctx.noted = noted
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        began_ns = time.monotonic_ns()
        while time.monotonic_ns() < began_ns + 5_000_000:
            pass
        ctx.noted.append((began_ns, time.monotonic_ns()))
        return gradients[0], None


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_backward_after_an_interrupted_forward_belongs_to_its_module(
    engine: EngineName, error: type[BaseException]
) -> None:
    taken: list[Tensor] = []
    noted: list[tuple[int, int]] = []

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Timed.apply(x * 2, noted)  # type: ignore[no-any-return]

    def stop(_module: nn.Module, _args: object, output: Tensor) -> None:
        taken.append(output)
        raise error

    model = nn.Sequential(*(Slow() for _ in range(4)))
    model[2].register_forward_hook(stop)

    with modtrace.record(engine=engine) as recording:
        for _ in range(3):
            with pytest.raises(error):
                model(torch.ones(2, requires_grad=True))
            taken.pop().sum().backward()

    timeline = recording.timeline()
    assert share_nested(timeline) == 1
    assert all(span.complete for span in timeline.spans)
    slices = [span for span in timeline.spans if span.phase == "backward" and span.depth == 1]
    assert [(span.fqn, span.call) for span in slices] == [
        (f"Sequential.{index}", call) for call in range(3) for index in (2, 1, 0)
    ]
    for span, (began_ns, ended_ns) in zip(slices, noted, strict=True):
        assert span.start_ns <= on_wall_clock(recording, began_ns)
        assert on_wall_clock(recording, ended_ns) <= span.end_ns


class Metric(nn.Module):
    """Makes nodes that no pass ever runs."""

    def forward(self, x: Tensor) -> float:
        return (x * 2).sum().item()


def count_sequence_numbers_asked_for(run: Callable[[], object]) -> int:
    """Return the number of nodes that Python asks for a sequence number while `run` runs."""
    asked: list[str] = []

    def count(_frame: object, event: str, function: Any) -> None:
        if event == "c_call" and getattr(function, "__name__", "") == "_sequence_nr":
            asked.append(event)

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return len(asked)


def test_the_graph_is_searched_in_few_passes_for_nodes_that_no_pass_runs() -> None:
    class Model(nn.Module):
        def __init__(self, *metrics: nn.Module) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(Scale() for _ in range(50)))
            self.metrics = nn.ModuleList(metrics)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layers(x)
            for metric in self.metrics:
                metric(out)
            return out

    plain, measured = Model(), Model(Metric())
    with modtrace.record(engine="python"):
        (least,) = {count_sequence_numbers_asked_for(plain(torch.ones(1)).sum().backward) for _ in range(3)}
        asked = [count_sequence_numbers_asked_for(measured(torch.ones(1)).sum().backward) for _ in range(40)]

    assert least < 10
    assert min(asked[1:32]) >= 50  # in the first pass all nodes that may lead there are newer than the node left over
    assert asked[32:] == [least] * 8


def test_nodes_of_another_thread_are_not_mistaken_for_nodes_that_a_call_left(engine: EngineName) -> None:
    made: list[Tensor] = []
    turns = [threading.Event(), threading.Event()]

    def leave_and_run() -> None:
        Metric()(torch.ones(2, requires_grad=True))
        turns[0].set()
        turns[1].wait(30)
        made[0].sum().backward()

    def make() -> None:
        turns[0].wait(30)
        made.append(nn.Sequential(*(Scale() for _ in range(8)))(torch.ones(2)))
        turns[1].set()

    def run() -> None:
        # Sequence numbers of both threads start at 0.
        threads = [threading.Thread(target=work) for work in (leave_and_run, make)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    of_modules = {fqn for fqn, _, _ in backward(recorded(engine, run))}
    assert of_modules == {"Sequential", *(f"Sequential.{index}" for index in range(8))}


def test_a_graph_made_before_the_recording(engine: EngineName) -> None:
    loss = Pair()(torch.ones(2)).sum()

    with modtrace.record(engine=engine) as recording:
        loss.backward()

    assert len(recording.timeline().spans) == 0


def test_a_graph_that_outlives_the_recording(engine: EngineName) -> None:
    model = Pair()
    with modtrace.record(engine=engine) as recording:
        loss = model(torch.ones(2)).sum()
    loss.backward()

    assert {phase for _, phase, _ in rows(recording.timeline())} == {"forward"}
    with modtrace.record(engine=engine) as other:
        model(torch.ones(2)).sum().backward()
    assert backward(other.timeline()) == [("Pair", 0, 0), ("Pair.b", 0, 1), ("Pair.a", 0, 1)]


def test_a_ring_that_wraps_inside_backward_stays_sound(engine: EngineName) -> None:
    model = nn.Sequential(*[Pair() for _ in range(20)])
    for capacity in (16, 33, 64, 100, 150):
        with modtrace.record(engine=engine, capacity=capacity) as recording:
            for _ in range(3):
                model(torch.ones(2)).sum().backward()
        timeline = recording.timeline()
        stats, columns = timeline.stats, timeline.columns

        assert share_nested(timeline) == 1
        assert stats.recorded - stats.overwritten == capacity
        assert stats.unstarted + stats.unfinished >= int(np.count_nonzero(~columns.complete))
        assert np.all(columns.start <= columns.end)


class ByClass(nn.Module):
    """Calls its child by `nn.Module.__call__`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = BySuper()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = nn.Module.__call__(self.inner, x)
        return out


class BySuper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = super().__call__(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.scale(x)
        return out


def test_calls_by_super_and_by_the_class_are_recorded_once_each(engine: EngineName) -> None:
    model, by_super = ByClass(), BySuper()

    def run() -> None:
        # Enough calls that CPython specializes them.
        for _ in range(20):
            nn.Module.__call__(model, torch.ones(2)).sum().backward()
            by_super(torch.ones(2)).sum().backward()

    timeline = recorded(engine, run)

    counts = Counter((span.fqn, span.phase, span.depth) for span in timeline.spans)
    assert counts == {
        (fqn, phase, depth): 20
        for phase in ("forward", "backward")
        for depth, fqn in (
            *enumerate(["ByClass", "ByClass.inner", "ByClass.inner.scale"]),
            *enumerate(["BySuper", "BySuper.scale"]),
        )
    }


@pytest.mark.parametrize(
    ("run", "count"),
    [
        (lambda model, x: model(x).sum().backward(), 1),
        (lambda model, x: (model(x * 2) ** 2).mean().backward(), 2),
        (lambda model, x: model[1](model[0](x).exp()).sum().backward(), 2),
        (lambda model, x: torch.autograd.grad(model(x).sum(), x), 1),
        (lambda model, x: [model(x).sum().backward() for _ in range(3)], 3),
        (lambda model, x: model(x).backward(torch.ones(2)), 0),
        (lambda model, x: (model(x).sum() + model(x).mean()).backward(), 2),
        (lambda model, x: [loss.backward() for loss in [model(x).sum(), model(x).sum()]], 2),
        (lambda model, x: checkpoint(model, x, use_reentrant=True).sum().backward(), 1),
    ],
    ids=[
        *("the loss", "an input and the loss", "between two calls", "a gradient", "three passes", "none"),
        *("a sum of two losses", "two losses, two passes later", "a reentrant checkpoint"),
    ],
)
def test_both_engines_count_the_same_nodes_outside_modules(
    engine: EngineName, run: Callable[[nn.Module, Tensor], object], count: int
) -> None:
    model, x = nn.Sequential(Scale(), Scale()), torch.ones(2, requires_grad=True)

    assert recorded(engine, lambda: run(model, x)).stats.unattributed == count
