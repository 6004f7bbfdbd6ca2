"""Backward passes inside others over shared nodes: each node belongs to its own module, in both passes.

Each layer's own autograd function marks the recording when its backward runs; the innermost span at the mark has to
be the layer's.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import modtrace
from modtrace.record_options import EngineName

Action = Callable[[], object]
_recording: modtrace.Recording
_actions: dict[str, list[Action]] = {}


class _Marks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x * 1.01

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _recording.mark(ctx.name)
        for act in _actions.pop(ctx.name, []):
            act()
        return gradients[0] * 1.01, None


class Layer(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = _Marks.apply(x * self.weight, self.name)
        second: Tensor = _Marks.apply(first.sin(), self.name)
        return second


class Net(nn.Module):
    """Four layers; the outputs of each layer's last call are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(f"Net.layers.{index}") for index in range(4))
        self.outputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.outputs = []
        for layer in self.layers:
            x = layer(x)
            self.outputs.append(x)
        return x


def _leaf() -> Tensor:
    return torch.ones(2, requires_grad=True)


def _partial_loss(net: Net, layer: int) -> Tensor:
    return net.outputs[layer].sum()


def a_loss_of_shared_layers(net: Net) -> int:
    loss = net(_leaf()).sum()
    early = _partial_loss(net, 1)
    _actions["Net.layers.3"] = [lambda: early.backward(retain_graph=True)]
    loss.backward()
    return 8 + 4


def gradients_over_shared_layers(net: Net) -> int:
    x = _leaf()
    loss = net(x).sum()
    early = _partial_loss(net, 1)
    _actions["Net.layers.3"] = [lambda: torch.autograd.grad(early, x, retain_graph=True)]
    loss.backward()
    return 8 + 4


def all_of_it_again(net: Net) -> int:
    loss = net(_leaf()).sum()
    _actions["Net.layers.2"] = [lambda: loss.backward(retain_graph=True)]
    loss.backward(retain_graph=True)
    loss.backward()
    return 3 * 8


def two_within_one(net: Net) -> int:
    loss = net(_leaf()).sum()
    late, early = _partial_loss(net, 2), _partial_loss(net, 0)
    _actions["Net.layers.3"] = [lambda: late.backward(retain_graph=True)]
    _actions["Net.layers.2"] = [lambda: early.backward(retain_graph=True)]
    loss.backward()
    return 8 + 6 + 2


def from_the_hook_of_a_parameter(net: Net) -> int:
    loss = net(_leaf()).sum()
    early, left = _partial_loss(net, 1), [True]

    def run(parameter: Tensor) -> None:
        if left:
            left.clear()
            early.backward(retain_graph=True)

    layer: Any = net.layers[3]
    layer.weight.register_post_accumulate_grad_hook(run)
    loss.backward()
    return 8 + 4


def on_another_thread(net: Net) -> int:
    loss = net(_leaf()).sum()
    early = _partial_loss(net, 1)

    def run() -> None:
        thread = threading.Thread(target=lambda: early.backward(retain_graph=True))
        thread.start()
        thread.join()

    _actions["Net.layers.3"] = [run]
    loss.backward()
    return 8 + 4


def one_that_fails(net: Net) -> int:
    loss = net(_leaf()).sum()
    early = _partial_loss(net, 1)

    def fail() -> None:
        raise KeyError

    def run() -> None:
        _actions["Net.layers.1"] = [fail]
        with pytest.raises(KeyError):
            early.backward(retain_graph=True)

    _actions["Net.layers.3"] = [run]
    loss.backward()
    return 8 + 1


@pytest.mark.parametrize(
    "scenario",
    [
        *(a_loss_of_shared_layers, gradients_over_shared_layers, all_of_it_again, two_within_one),
        *(from_the_hook_of_a_parameter, on_another_thread, one_that_fails),
    ],
)
def test_each_node_belongs_to_its_own_module(scenario: Callable[[Net], int], engine: EngineName) -> None:
    global _recording
    _actions.clear()
    net = Net()
    with modtrace.record(engine=engine) as _recording:
        expected = scenario(net)

    timeline = _recording.timeline()
    marks = [mark for mark in timeline.marks if mark.kind == "mark"]
    assert len(marks) == expected
    backward = [span for span in timeline.spans if span.phase == "backward"]
    for mark in marks:
        around = [span for span in backward if span.start_ns <= mark.time_ns <= span.end_ns]
        # The innermost span on each thread.
        innermost = {span.track: span.fqn for span in sorted(around, key=lambda span: span.depth)}
        assert mark.text in innermost.values()


@pytest.mark.parametrize("on_thread", [False, True])
def test_a_recording_that_stops_inside_a_call_keeps_no_module(on_thread: bool, engine: EngineName) -> None:
    class Stopping(nn.Module):
        def forward(self, stop: Action) -> None:
            stop()

    def record_a_call(model: nn.Module) -> None:
        recording = modtrace.record(engine=engine).start()
        thread = threading.Thread(target=recording.stop)

        def stop() -> None:
            if on_thread:
                thread.start()
                thread.join()
            else:
                recording.stop()

        model(stop)

    model = Stopping()
    record_a_call(model)
    kept = weakref.ref(model)
    del model
    gc.collect()

    assert kept() is None
