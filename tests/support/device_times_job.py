"""Device times on the device that pretends: `python -m tests.support.device_times_job SCENARIO LIBRARY`.

Each layer launches kernels of known durations, in forward and in backward, behind a kernel that ends when all of them
are launched; so no duration depends on the host. Prints what the recording shows, and what is true, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import modtrace
from modtrace.ring import Kind
from modtrace.timeline.decode.analysis import wall_clock
from tests.support import device_stalls, fake_device
from tests.support.fake_streams import FakeStreams

__all__ = ["MS", "SCENARIOS"]

MS = 1_000_000
_BLOCK_NS = 400 * MS
_ORIGIN_NS = 123_456_789_000
_streams: FakeStreams


class _Kernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_ns: int, backward_ns: int) -> Tensor:
        ctx.backward_ns = backward_ns
        _streams.launch(forward_ns)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _streams.launch(ctx.backward_ns)
        return gradients[0].clone(), None, None


class Layer(nn.Module):
    """Launches one kernel in forward and one in backward."""

    def __init__(self, forward_ns: int, backward_ns: int) -> None:
        super().__init__()
        self.forward_ns, self.backward_ns = forward_ns, backward_ns

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Kernels.apply(x, self.forward_ns, self.backward_ns)
        return out


class Net(nn.Module):
    """1 and 3 ms in forward, 2 and 4 ms in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Layer(1 * MS, 2 * MS), Layer(3 * MS, 4 * MS)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x))
        return out


class Outer(nn.Module):
    """The net, below one more module."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


def _input() -> Tensor:
    x: Tensor = fake_device.on_device(torch.ones(2))
    return x.requires_grad_()


def _behind_a_kernel() -> contextlib.AbstractContextManager[None]:
    return _streams.behind_a_kernel(_BLOCK_NS)


def _step(model: nn.Module) -> None:
    model(_input()).sum().backward()


def _wait_until_read(recording: modtrace.Recording) -> None:
    while recording.snapshot().metadata.get("device_events_unread", 1):
        pass


def plain(recording: modtrace.Recording) -> None:
    """Two steps, of which the second is launched 0.4 s later."""
    model = Net()
    for _ in range(2):
        with _behind_a_kernel():
            _step(model)
        _wait_until_read(recording)
        recording.step()


def nested(recording: modtrace.Recording) -> None:
    """One step of a net below another module."""
    with _behind_a_kernel():
        _step(Outer())


def streams(recording: modtrace.Recording) -> None:
    """A step on one stream, and one of another thread on another."""

    def train() -> None:
        _streams.use_stream(7)
        with _behind_a_kernel(), torch.no_grad():
            Net()(_input())

    with _behind_a_kernel():
        _step(Net())
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()


def held(recording: modtrace.Recording) -> None:
    """9,000 calls with two events each, none of which is done; and a step when all were."""
    empty, x = nn.Identity(), _input()
    _streams.hold(True)
    for _ in range(9000):
        empty(x)
    _streams.hold(False)
    _wait_until_read(recording)
    with _behind_a_kernel(), torch.no_grad():
        Net()(x)


def captured(recording: modtrace.Recording) -> None:
    """A net that a graph captures while events are queued, the replay of the graph, and the net again."""
    graph: Any = object()
    model, x = Net(), _input()
    with _behind_a_kernel(), torch.no_grad():
        model(x)
        torch.cuda.CUDAGraph.capture_begin(graph)
        model(x)
        until = threading.Event()
        until.wait(0.05)  # the reader would ask ten times
        torch.cuda.CUDAGraph.capture_end(graph)
        torch.cuda.CUDAGraph.replay(graph)
        model(x)


def captured_in_halves(recording: modtrace.Recording) -> None:
    """A graph whose capture ends by the first half of `capture_end`, which leaves it to be looked at; then the net."""
    graphs: Any = torch.cuda.CUDAGraph
    graph = object()
    graphs.capture_begin(graph)
    graphs.capture_end_pre(graph)
    with _behind_a_kernel(), torch.no_grad():
        Net()(_input())


def captured_by_others(recording: modtrace.Recording) -> None:
    """The same of a graph that something else captures, which only the stream tells."""
    model, x = Net(), _input()
    with torch.no_grad():
        _streams.capture(True)
        model(x)
        _streams.capture(False)
        with _behind_a_kernel():
            model(x)


def shared(recording: modtrace.Recording) -> None:
    """A step on a device that others keep busy, so that its clock takes 3 ms to be read."""
    _streams.delay_the_clock(3 * MS)
    with _behind_a_kernel():
        _step(Net())


def too_busy(recording: modtrace.Recording) -> None:
    """A step on a device whose clock cannot be read."""
    _streams.delay_the_clock(60_000 * MS)
    with _behind_a_kernel():
        _step(Net())


def broken(recording: modtrace.Recording) -> None:
    """A step before the device breaks, and one after."""
    model = Net()
    with _behind_a_kernel():
        _step(model)
    _wait_until_read(recording)
    # The events of autograd are the device's too.
    with torch.no_grad():
        _streams.break_down()
        model(_input())


def interrupted(recording: modtrace.Recording) -> None:
    """A call that an interrupt leaves, and a step."""

    class Interrupted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            _streams.launch(5 * MS)
            raise KeyboardInterrupt

    with _behind_a_kernel():
        try:
            Interrupted()(_input())
        except KeyboardInterrupt:
            _step(Net())


def died(recording: modtrace.Recording) -> None:
    """A step whose events are read, one whose events are not read, and the end."""
    with _behind_a_kernel():
        _step(Net())
    _wait_until_read(recording)
    _streams.hold(True)
    _step(Net())
    os._exit(0)


def hung(recording: modtrace.Recording) -> None:
    """A kernel in the forward of b that takes an hour, a step behind it, and on request a device that breaks."""
    model = Net()
    _step(model)
    _wait_until_read(recording)
    model.b.forward_ns = 3600 * 1000 * MS
    for _ in range(2):
        _step(model)
    print("hangs", flush=True)
    sys.stdin.readline()
    _streams.break_down()
    with torch.no_grad():
        model(_input())
    print("broken", flush=True)
    sys.stdin.readline()


def full(recording: modtrace.Recording) -> None:
    """A backward that waits as its stream takes no more work, while another one's events are recorded and read."""
    snapshot = recording._require_capture().ring.read

    def wait_for(kind: Kind, count: int) -> None:
        while np.count_nonzero(snapshot().slots.events.kind == kind) < count:
            pass

    def train() -> None:
        _streams.use_stream(7)
        loss = Net()(_input()).sum()
        _streams.fill(7, True)
        loss.backward()

    thread = threading.Thread(target=train)
    thread.start()
    wait_for(Kind.DEVICE_QUEUED, 7)
    with _behind_a_kernel(), torch.no_grad():
        Net()(_input())
    wait_for(Kind.DEVICE_REACHED, 12)
    _streams.fill(7, False)
    thread.join()


def forked(recording: modtrace.Recording) -> None:
    """A child that trains too, and records for itself, while its parent goes on."""
    model, x = Net(), _input()
    with torch.no_grad():
        with _behind_a_kernel():
            model(x)
        child = os.fork()
        if child == 0:
            model(x)
            with modtrace.record() as own:
                model(x)
            os._exit(0 if len(own.timeline().spans) == 3 else 1)
        _, status = os.waitpid(child, 0)
        assert status == 0
        with _behind_a_kernel():
            model(x)


def unused(recording: modtrace.Recording) -> None:
    """A step while torch has not initialized the device."""
    _step(Net())


def late(recording: modtrace.Recording) -> None:
    """The same, and a step of another net after that."""
    _step(Net())
    assert _streams.events_made == 0
    fake_device.backend.initialized = True
    with _behind_a_kernel():
        _step(Net())


def late_of_the_same(recording: modtrace.Recording) -> None:
    """The same, and a step of the same net, whose names are known."""
    model = Net()
    _step(model)
    fake_device.backend.initialized = True
    with _behind_a_kernel():
        _step(model)


def first_used_in_a_capture(recording: modtrace.Recording) -> None:
    """A device that is initialized when a graph is captured; the net is called in the capture, and behind it."""
    graph: Any = object()
    model, x = Net(), _input()
    fake_device.backend.initialized = True
    with torch.no_grad():
        torch.cuda.CUDAGraph.capture_begin(graph)
        _streams.capture(False)  # which not every torch tells
        model(x)
        assert _streams.events_made == 0
        torch.cuda.CUDAGraph.capture_end(graph)
        with _behind_a_kernel():
            model(x)


def stopped_before(recording: modtrace.Recording) -> None:
    """A device that is initialized when the recording has ended."""
    recording.stop()
    fake_device.backend.initialized = True
    _step(Net())
    assert _streams.events_made == 0


def stopped_meanwhile(recording: modtrace.Recording) -> None:
    """A device that is initialized while the recording is stopped."""

    def initialized() -> bool:
        fake_device.backend.initialized = True
        recording.stop()
        return True

    fake_device.backend.is_initialized = initialized  # type: ignore[method-assign]
    _step(Net())
    _step(Net())
    assert _streams.events_made == 0


def _on_streams(run: device_stalls.Scenario) -> Callable[[modtrace.Recording], None]:
    return lambda recording: run(recording, _streams)


_AT_FIRST_UNUSED = (unused, late, late_of_the_same, first_used_in_a_capture, stopped_before, stopped_meanwhile)
SCENARIOS: dict[str, Callable[[modtrace.Recording], None]] = {
    run.__name__: run
    for run in (
        *(plain, nested, streams, held, captured, captured_in_halves, captured_by_others),
        *(shared, too_busy, broken, interrupted, died, hung, full, forked),
        *_AT_FIRST_UNUSED,
    )
} | {name: _on_streams(run) for name, run in device_stalls.SCENARIOS.items()}


def _use_graphs_of_the_fake() -> None:
    graph: Any = torch.cuda.CUDAGraph
    graph.capture_begin = lambda self: _streams.capture(True)
    if "capture_end_pre" in vars(graph):  # from torch 2.14 on
        graph.capture_end_pre = lambda self: _streams.capture(False)
        graph.capture_end = lambda self: graph.capture_end_pre(self)
    else:
        graph.capture_end = lambda self: _streams.capture(False)
    graph.replay = lambda self: _streams.launch(5 * MS)


def _spans(timeline: modtrace.Timeline) -> list[tuple[object, ...]]:
    return [
        (span.track, span.fqn, span.phase, span.call, span.step, span.depth, span.start_ns, span.end_ns)
        for span in timeline.spans
        if span.track.startswith("gpu")
    ]


def main() -> None:
    """Run what the command line names; further arguments are the drift in ppm, and options as JSON."""
    global _streams
    scenario, library, ppm, options = SCENARIOS[sys.argv[1]], sys.argv[2], float(sys.argv[3]), json.loads(sys.argv[4])
    logging.basicConfig()
    fake_device.set_up()
    _streams = FakeStreams(library, _ORIGIN_NS, ppm)
    _use_graphs_of_the_fake()
    fake_device.backend.initialized = scenario not in _AT_FIRST_UNUSED
    with modtrace.record(engine="native", **{"device_times": True, **options}) as recording:
        scenario(recording)
    timeline = recording.timeline()
    snapshot = recording._require_capture().ring.read()
    clock = wall_clock(snapshot.records)
    timed = _streams.timed
    origin = min((int(event.host_ns) for event in timed), default=0)
    truth = [float(clock.to_other(torch.tensor([int(event.host_ns)]).numpy())[0]) for event in timed]
    events = snapshot.slots.events
    kinds = [Kind(kind).name for kind in events.kind.tolist()]
    is_read = events.kind == Kind.DEVICE_CLOCK
    told = {
        "spans": _spans(timeline),
        "host": [(s.fqn, s.phase, s.call) for s in timeline.spans if not s.track.startswith("gpu")],
        "truth": truth,
        "elapsed_ns": max((event.host_ns for event in timed), default=0) - origin,
        "metadata": {key: value for key, value in timeline.metadata.items() if key.startswith("device")},
        "clock_read_ns": events.time_ns[is_read].tolist(),
        "clock_width_ns": events.name[is_read].tolist(),
        "queued": kinds.count("DEVICE_QUEUED"),
        "synchronized": _streams.synchronized,
        "asked_while_capturing": _streams.asked_while_capturing,
        "events_made": _streams.events_made,
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
