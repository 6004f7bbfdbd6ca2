"""CUDA graphs beside device times: captures are left alone, by whichever thread, and a replay is a span of its own."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import modtrace
from tests.gpu.spinning import Spin, device_spans, spin

pytestmark = pytest.mark.usefixtures("cuda", "native_engine")


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def capture(model: nn.Module, x: Tensor, mode: str = "global") -> tuple[Any, Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        out = model(x)
    return graph, out


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_graph_that_was_captured_under_a_recording_computes_right(mode: str) -> None:
    model, x = Doubling(), torch.ones(4, device="cuda")
    model(x)
    torch.cuda.synchronize()
    with modtrace.record(engine="native", device_times=True) as recording:
        model(x)
        graph, out = capture(model, x, mode)
        x.fill_(21)
        graph.replay()
        model(x)
        torch.cuda.synchronize()

    assert out.tolist() == [42] * 4
    # The second call is the capture.
    assert [(s.module_class, s.call) for s in device_spans(recording.timeline())] == [
        *(("Doubling", 0), ("CUDAGraph", 0), ("Doubling", 2)),
    ]


def test_a_replay_takes_as_long_as_its_kernels() -> None:
    x = torch.ones(2, device="cuda")
    spin(1)
    graph, _ = capture(Spin(50, 0), x)
    torch.cuda.synchronize()
    with modtrace.record(engine="native", device_times=True) as recording:
        spin(100)
        graph.replay()
        torch.cuda.synchronize()

    (replay,) = device_spans(recording.timeline())
    assert (replay.fqn, replay.phase) == ("CUDAGraph", "forward")
    assert (replay.end_ns - replay.start_ns) / 1e6 == pytest.approx(50, rel=0.1, abs=1)


def test_a_capture_that_fails_leaves_device_times_on() -> None:
    model, x = Doubling(), torch.ones(4, device="cuda")
    model(x)
    torch.cuda.synchronize()
    with modtrace.record(engine="native", device_times=True) as recording:
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(RuntimeError, match="capture error mode"):
            # Before torch has changed anything: what fails later leaves its random numbers capturing before 2.13.
            graph.capture_begin(capture_error_mode="none such")
        model(x)
        torch.cuda.synchronize()

    assert [(s.module_class, s.call) for s in device_spans(recording.timeline())] == [("Doubling", 0)]


def test_a_recording_that_ends_in_a_capture_does_not_spoil_it_and_the_next_one_has_times() -> None:
    model, x = Doubling(), torch.ones(4, device="cuda")
    model(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recording = modtrace.record(engine="native", device_times=True)
        recording.start()
        out = model(x)
        recording.stop()
    x.fill_(21)
    graph.replay()
    with modtrace.record(engine="native", device_times=True) as after:
        model(x)
        torch.cuda.synchronize()

    assert out.tolist() == [42] * 4
    assert device_spans(recording.timeline()) == []
    assert [(s.module_class, s.call) for s in device_spans(after.timeline())] == [("Doubling", 0)]


def test_a_capture_in_one_thread_while_another_one_records() -> None:
    """The capture has the mode that other threads can spoil; their work has no device times and is not in the graph."""
    model, x, other = Doubling(), torch.ones(4, device="cuda"), torch.ones(4, device="cuda")
    model(x)
    torch.cuda.synchronize()
    captures, done, side = threading.Event(), threading.Event(), torch.cuda.Stream()

    def call() -> None:
        with torch.cuda.stream(side):
            # All memory that it needs is there, as to get some would spoil the capture itself.
            assert captures.wait(60)
            for _ in range(200):
                Identity()(other)
            done.set()

    thread = threading.Thread(target=call)
    with modtrace.record(engine="native", device_times=True) as recording:
        for _ in range(50):
            model(x)
        thread.start()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(x)
            captures.set()
            assert done.wait(60)
        thread.join()
        x.fill_(21)
        graph.replay()
        torch.cuda.synchronize()

    assert out.tolist() == [42] * 4
    timeline = recording.timeline()
    classes = [span.module_class for span in device_spans(timeline)]
    assert classes == ["Doubling"] * 50 + ["CUDAGraph"]
    assert sum(span.module_class == "Identity" for span in timeline.spans) == 200


class Identity(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x
