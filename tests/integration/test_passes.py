"""Passes that the native engine hooks, and passes that it observes node by node: both give the same result."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import modtrace
from modtrace import Timeline
from modtrace.ring import Kind
from tests.support.forked_python import run_forked
from tests.support.random_models import Spec, Tree, specs
from tests.support.small_modules import Failing, Scale
from tests.support.test_scale import scaled

Slice = tuple[str, int, int]

pytestmark = pytest.mark.usefixtures("native_engine")


def recorded(run: Callable[[], object]) -> tuple[Timeline, set[str]]:
    """Return the timeline of a recording of `run`, and how the nodes got into it: "hooked", "observed" or both."""
    with modtrace.record(engine="native") as recording:
        run()
    kinds = set(recording._require_capture().ring.read().slots.events.kind.tolist())
    ways = {"hooked": Kind.SEGMENT_BEGIN, "observed": Kind.NODE_BEGIN}
    return recording.timeline(), {way for way, kind in ways.items() if kind in kinds}


def backward(timeline: Timeline) -> list[Slice]:
    return [(span.fqn, span.call, span.depth) for span in timeline.spans if span.phase == "backward"]


class Chain(nn.Module):
    """Three modules in a row, with nodes of its own between the second and the third."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Scale(), Scale(), Scale()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(self.b(self.a(x)).cos())
        return out


ONCE = [("Chain", 0, 0), ("Chain.c", 0, 1), ("Chain.b", 0, 1), ("Chain.a", 0, 1)]


@given(spec=specs())
@settings(max_examples=scaled(20, 60, 1000))
def test_a_hooked_pass_comes_out_as_an_observed_one(spec: Spec) -> None:
    torch.manual_seed(0)
    model = Tree(spec)
    inputs: list[Tensor] = []

    def loss() -> Tensor:
        x = torch.ones(3, requires_grad=True)
        inputs[:] = [x, *model.parameters()]
        out: Any = model(x=x)
        while not isinstance(out, Tensor):
            out = out["out"] if isinstance(out, dict) else out[0]
        return out.sum() + x.sum()

    hooked, how = recorded(lambda: loss().backward())
    observed, how_else = recorded(lambda: torch.autograd.backward(loss(), inputs=inputs))

    assert (how, how_else) == ({"hooked"}, {"observed"})
    assert backward(hooked) == backward(observed)


def test_segments_take_one_event_each() -> None:
    model = Chain()
    with modtrace.record(engine="native") as recording:
        model(torch.ones(2)).sum().backward()

    events = recording._require_capture().ring.read().slots.events
    # Events: the sum (outside modules), c, the cosine, b, a, the end of the pass, and "parameters have gradients".
    kinds = [Kind.PASS_BEGIN] + [Kind.SEGMENT_BEGIN] * 5 + [Kind.BACKWARD_OVER, Kind.PASS_END, Kind.GRADIENTS]
    assert events.kind.tolist()[-9:] == kinds
    assert events.serial.tolist() == list(range(8 + 9))


def test_a_graph_run_twice_is_hooked_twice() -> None:
    model = Chain()

    def run() -> None:
        loss = model(torch.ones(2)).sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        # A part of the graph, and another root.
        out = model.c(torch.ones(2))
        torch.autograd.backward([loss, out.sum()])

    timeline, how = recorded(run)

    assert how == {"hooked"}
    assert backward(timeline) == [*ONCE, *ONCE, ("Chain.c", 1, 0), *ONCE]


def test_hooks_of_an_earlier_recording_are_silent() -> None:
    model = Chain()
    with modtrace.record(engine="native"):
        loss = model(torch.ones(2)).sum()
        loss.backward(retain_graph=True)

    timeline, how = recorded(lambda: torch.autograd.backward(loss, inputs=[model.a.weight], retain_graph=True))

    assert how == {"observed"}
    assert backward(timeline) == []
    loss.backward()


def test_a_pass_that_builds_a_graph_is_observed_and_its_graph_is_hooked() -> None:
    model, x = Chain(), torch.ones(2, requires_grad=True)

    def run() -> None:
        (gradient,) = torch.autograd.grad((model(x) ** 2).sum(), [x], create_graph=True)
        gradient.sum().backward()

    timeline, how = recorded(run)

    assert how == {"hooked", "observed"}
    made = [("Chain", 0, 0), ("Chain.a", 0, 1), ("Chain.b", 0, 1), ("Chain.c", 0, 1)]
    assert backward(timeline) == ONCE + made + ONCE


def test_a_graph_of_two_threads_is_observed() -> None:
    model, other = Chain(), Chain()
    outputs: list[Tensor] = []

    def run() -> None:
        thread = threading.Thread(target=lambda: outputs.append(other(torch.ones(2))))
        thread.start()
        thread.join()
        (model(torch.ones(2)) + outputs[0]).sum().backward()

    timeline, how = recorded(run)

    assert how == {"observed"}
    assert sorted(span.fqn for span in timeline.spans if span.phase == "backward" and "." not in span.fqn)[0] == "Chain"
    assert timeline.stats.unattributed == 1  # the addition and the sum, one after the other


def test_a_pass_from_a_gradient_edge_is_observed() -> None:
    model = Chain()

    def run() -> None:
        out = model(torch.ones(2))
        edge = torch.autograd.graph.get_gradient_edge(out)
        torch.autograd.backward([edge], [torch.ones(2)])

    timeline, how = recorded(run)

    assert how == {"observed"}
    assert backward(timeline) == ONCE


@pytest.mark.parametrize("age", [1, 60, 64, 4000, 4096, 9000, 1_000_000])
def test_old_nodes_are_hooked_where_their_calls_begin(age: int) -> None:
    model = Chain()

    def run() -> None:
        y = torch.ones((), requires_grad=True)
        old = model.a(torch.ones(2, requires_grad=True))
        between = old + 1
        for _ in range(age):
            y.t()
        (model.b(old) + model.c(between)).sum().backward()

    timeline, how = recorded(run)

    assert how == {"hooked"}
    assert [span.fqn for span in timeline.spans if span.phase == "forward"] == ["Scale", "Scale#2", "Scale#3"]
    assert backward(timeline) == [("Scale#3", 0, 0), ("Scale#2", 0, 0), ("Scale", 0, 0)]


def test_a_node_older_than_a_million_others_is_observed() -> None:
    model = Chain()

    def run() -> None:
        x = torch.ones(2, requires_grad=True)
        old = model.a(x)
        y = torch.ones((), requires_grad=True)
        for _ in range(1 << 20):
            y.t()
        model.b(old).sum().backward()
        # Notes from a million nodes ago are forgotten by now, and give no answer.
        model(torch.ones(2)).sum().backward()

    timeline, how = recorded(run)

    assert how == {"hooked", "observed"}
    assert backward(timeline) == [("Scale#2", 0, 0), ("Scale", 0, 0), *ONCE]


def test_the_work_after_a_pass_belongs_to_no_module() -> None:
    model = Chain()
    with modtrace.record(engine="native") as recording:
        x = torch.ones(2, requires_grad=True)
        out = model(x)
        engine = torch.autograd.Variable._execution_engine
        # As DDP and FSDP do: at the end of the pass, wait for data that other ranks still send.
        x.register_hook(lambda _: engine.queue_callback(lambda: recording.mark("final")))
        out.sum().backward()

    timeline = recording.timeline()
    (mark,) = (mark for mark in timeline.marks if mark.kind == "mark")
    assert all(span.end_ns <= mark.time_ns for span in timeline.spans if span.phase == "backward")


def test_a_pass_that_fails_is_over() -> None:
    model = Chain()

    def run() -> None:
        with pytest.raises(ValueError, match="on purpose"):
            model.c(Failing.apply(model.b(torch.ones(2, requires_grad=True)))).sum().backward()
        model(torch.ones(2)).sum().backward()

    timeline, how = recorded(run)

    assert how == {"hooked"}
    assert backward(timeline) == [("Scale#2", 0, 0), *ONCE]
    assert all(span.complete for span in timeline.spans)


def test_passes_in_many_threads_at_once_are_hooked() -> None:
    models = [Chain() for _ in range(8)]

    def train(model: Chain) -> None:
        for _ in range(20):
            model(torch.ones(2)).sum().backward()

    def run() -> None:
        threads = [threading.Thread(target=train, args=(model,)) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    timeline, how = recorded(run)

    assert how == {"hooked"}
    spans = zip(timeline.columns.track.tolist(), timeline.spans, strict=True)
    slices: dict[int, list[tuple[str, int]]] = {}
    for track, span in spans:
        if span.phase == "backward":
            slices.setdefault(track, []).append((span.fqn, span.depth))
    # All models are alive at once, and are numbered in the order of their threads.
    roots = ["Chain", *(f"Chain#{number}" for number in range(2, 9))]
    expected = [[(fqn.replace("Chain", root), depth) for fqn, _, depth in ONCE] * 20 for root in roots]
    assert sorted(slices.values()) == expected


def test_a_pass_on_one_device_is_hooked_and_on_two_observed() -> None:
    first, second = Chain(), Chain().to("meta")

    def one() -> None:
        second(torch.ones(2, device="meta")).sum().backward()

    def two() -> None:
        # No gradient can come back from the meta device.
        with pytest.raises(NotImplementedError, match="meta"):
            second(first(torch.ones(2)).to("meta")).sum().backward()

    timeline, how = recorded(one)
    assert how == {"hooked"}
    assert backward(timeline) == ONCE

    timeline, how = recorded(two)
    assert how == {"observed"}
    # Only the second model's backward ran: in the graph, the first model is behind the meta device.
    assert backward(timeline) == [(fqn.replace("Chain", "Chain#2"), call, depth) for fqn, call, depth in ONCE]


def test_passes_of_two_threads_on_one_device_are_observed() -> None:
    # Passes of two threads take turns on the device; a pass inside another one has it for itself.
    outer, inner = Chain().to("meta"), Chain().to("meta")

    def run_pass(model: nn.Module) -> None:
        model(torch.ones(2, device="meta")).sum().backward()

    def nested(_: Tensor) -> None:
        with torch.enable_grad():
            run_pass(inner)

    def beside(_: Tensor) -> None:
        thread = threading.Thread(target=run_pass, args=(inner,))
        thread.start()
        thread.join()

    def during(hook: Callable[[Tensor], None]) -> Callable[[], None]:
        def run() -> None:
            out = outer(torch.ones(2, device="meta"))
            out.register_hook(hook)
            out.sum().backward()

        return run

    assert recorded(during(nested))[1] == {"hooked"}
    assert recorded(during(beside))[1] == {"hooked", "observed"}


def test_functions_that_run_a_pass_are_wrapped_once_and_stay_so() -> None:
    homes: list[Any] = [torch.autograd.graph, torch.autograd]
    wrappers = []
    for _ in range(3):
        with modtrace.record(engine="native"):
            wrappers.append([home._engine_run_backward for home in homes])
        wrappers.append([home._engine_run_backward for home in homes])

    assert wrappers == wrappers[:1] * 6


_FAILING_PASS = """
import traceback
import torch, modtrace
try:
    with modtrace.record(engine="native"):
        torch.ones(()).backward()
except RuntimeError as error:
    assert "does not require grad" in str(error)
    print(*(frame.filename.split("/")[-2] for frame in traceback.extract_tb(error.__traceback__)[1:]))
"""


def test_an_error_of_a_pass_shows_no_frame_of_modtrace() -> None:
    # In a new process: the Python engine's wrappers stay in place.
    assert run_forked("-c", _FAILING_PASS).stdout.split() == ["torch", "autograd", "autograd"]
