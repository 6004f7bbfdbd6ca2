"""Devices that take no more work, or do not answer: scenarios of `device_times_job`, which check what they see."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import modtrace
from modtrace.ring import Kind
from tests.support import fake_device
from tests.support.fake_streams import FakeStreams

__all__ = ["SCENARIOS", "Scenario"]

Scenario: TypeAlias = Callable[[modtrace.Recording, FakeStreams], None]
OTHER_STREAM = 7
READERS_STREAM = 101
"""The first that the pretended device gives out."""


def _input() -> Tensor:
    x: Tensor = fake_device.on_device(torch.ones(2))
    return x


def _wait_until_written(recording: modtrace.Recording, kind: Kind, count: int) -> None:
    while np.count_nonzero(recording._require_capture().ring.read().slots.events.kind == kind) < count:
        pass


def _wait_until(holds: Callable[[], bool]) -> None:
    while not holds():
        pass


def _calls_on_device(recording: modtrace.Recording) -> list[tuple[str, int]]:
    return [(span.fqn, span.call) for span in recording.timeline().spans if span.track.startswith("gpu")]


def _start_a_call_that_waits(model: nn.Module, x: Tensor, streams: FakeStreams) -> threading.Thread:
    """Call the model on another thread, whose stream takes no more work; return when it waits for that."""
    streams.fill(OTHER_STREAM, True)

    def run() -> None:
        streams.use_stream(OTHER_STREAM)
        model(x)

    thread = threading.Thread(target=run)
    thread.start()
    _wait_until(lambda: streams.waiting == 1)
    return thread


def forward_waits(recording: modtrace.Recording, streams: FakeStreams) -> None:
    """A call that waits as its stream takes no more work, until another thread of Python lets it."""
    thread = _start_a_call_that_waits(nn.Identity(), _input(), streams)
    streams.fill(OTHER_STREAM, False)
    thread.join()
    recording.stop()
    assert _calls_on_device(recording) == [("Identity", 0)]


def forward_waits_behind_the_end(recording: modtrace.Recording, streams: FakeStreams) -> None:
    """The same of a call that ends in another recording than that in which it began."""
    model, x = nn.Identity(), _input()
    thread = _start_a_call_that_waits(model, x, streams)
    recording.stop()
    with modtrace.record(engine="native") as own:
        model(x)
        streams.fill(OTHER_STREAM, False)
        thread.join()
        model(x)
    kinds = own._require_capture().ring.read().slots.events.kind.tolist()
    assert [kind for kind in kinds if kind != Kind.COLLECTION] == 2 * [Kind.FORWARD_ENTER, Kind.FORWARD_EXIT]


def failed_backward_waits(recording: modtrace.Recording, streams: FakeStreams) -> None:
    """A backward pass that fails, and whose end waits as the stream takes no more work."""

    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            streams.fill(0, True)
            raise ValueError("as of the user")

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = Fail.apply(x)
            return out

    def go_on() -> None:
        _wait_until(lambda: streams.waiting == 1)
        streams.fill(0, False)

    thread = threading.Thread(target=go_on)
    thread.start()
    with pytest.raises(ValueError, match="as of the user"):
        Failing()(_input().requires_grad_()).sum().backward()
    thread.join()


def reader_waits(recording: modtrace.Recording, streams: FakeStreams) -> None:
    """A device that no longer takes even the event by which its clock is read; captures, the end, and what follows."""
    model, x = nn.Identity(), _input()
    graph: Any = object()
    model(x)
    _wait_until_written(recording, Kind.DEVICE_REACHED, 2)
    streams.fill(READERS_STREAM, True)
    while streams.waiting == 0:
        model(x)

    def capture() -> None:
        torch.cuda.CUDAGraph.capture_begin(graph)
        torch.cuda.CUDAGraph.capture_end(graph)

    thread = threading.Thread(target=capture)
    thread.start()
    recording.stop()
    assert thread.is_alive()
    streams.fill(READERS_STREAM, False)
    thread.join()
    with modtrace.record(engine="native", device_times=True) as own:
        model(x)
    assert _calls_on_device(own) == [("Identity", 0)]


def hangs_full(recording: modtrace.Recording, streams: FakeStreams) -> None:
    """A hang in which no stream takes more work; that the device was asked meanwhile is told."""
    model, x = nn.Identity(), _input()
    model(x)
    _wait_until(lambda: streams.asked >= 2)
    streams.hold(True)
    model(x)
    # Behind two rounds a reading of the clock that had begun before is over.
    asked = streams.asked
    _wait_until(lambda: streams.asked >= asked + 2)
    streams.fill(READERS_STREAM, True)
    _wait_until_written(recording, Kind.DEVICE_PENDING, 2)
    assert streams.waiting == 0
    streams.fill(READERS_STREAM, False)
    streams.hold(False)


def starts_in_a_capture(recording: modtrace.Recording, streams: FakeStreams) -> None:
    """Two recordings that start within the capture of a graph, of which the second goes on behind it."""
    recording.stop()
    model, x = nn.Identity(), _input()
    graph: Any = object()
    cuda: Any = torch.cuda
    cuda.is_initialized = lambda: True
    cuda.is_current_stream_capturing = lambda: True
    cuda.CUDAGraph.capture_begin(graph)
    streams.capture(False)  # which not every torch tells
    with modtrace.record(engine="native", device_times=True):
        model(x)
    with modtrace.record(engine="native", device_times=True) as own:
        model(x)
        assert streams.timed == []
        cuda.CUDAGraph.capture_end(graph)
        model(x)
    assert _calls_on_device(own) == [("Identity", 1)]


def does_not_tell_captures(recording: modtrace.Recording, streams: FakeStreams) -> None:
    """A call on a stream that does not say whether it captures, as others do, and one when it does again."""
    model, x = nn.Identity(), _input()
    streams.make_ambiguous(True)
    model(x)
    streams.make_ambiguous(False)
    model(x)
    recording.stop()
    assert _calls_on_device(recording) == [("Identity", 1)]


SCENARIOS: dict[str, Scenario] = {
    run.__name__: run
    for run in (
        *(forward_waits, forward_waits_behind_the_end, failed_backward_waits, reader_waits, hangs_full),
        *(starts_in_a_capture, does_not_tell_captures),
    )
}
