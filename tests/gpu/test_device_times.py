"""Device times of kernels whose duration is known, compared with the host's clock around `torch.cuda.synchronize`."""

from __future__ import annotations

import ctypes
import itertools
import json
import threading
import time
from typing import Any

import pytest
import torch

import modtrace
from tests.gpu.spinning import Net, Spin, device_spans, spin
from tests.support.python_process import run_python

pytestmark = pytest.mark.usefixtures("cuda", "native_engine")
MS = 1_000_000
DURATIONS = [
    ("Net", "forward", 40),
    ("Net.a", "forward", 10),
    ("Net.b", "forward", 30),
    ("Net", "backward", 60),
    ("Net.b", "backward", 40),
    ("Net.a", "backward", 20),
]
SLOWER, LATE_MS = 0.1, 1
"""A kernel counts cycles of a clock that varies by so much, and starts so late."""


def queue() -> None:
    """Keep the stream busy for longer than it takes to launch what comes next."""
    spin(200)


def step(model: torch.nn.Module) -> None:
    model(torch.ones(2, device="cuda", requires_grad=True)).sum().backward()


def recorded(**options: Any) -> modtrace.Recording:
    spin(1)  # the context, and how long a cycle takes
    return modtrace.record(engine="native", **{"device_times": True, **options})


def assert_durations(spans: list[Any], expected: list[tuple[str, str, int]]) -> None:
    assert [(span.fqn, span.phase) for span in spans] == [(name, phase) for name, phase, _ in expected]
    for span, (_, _, ms) in zip(spans, expected, strict=True):
        assert (span.end_ns - span.start_ns) / MS == pytest.approx(ms, rel=SLOWER, abs=LATE_MS)


def test_spans_take_as_long_as_their_kernels() -> None:
    step(Net())
    with recorded() as recording:
        queue()
        step(Net())
        torch.cuda.synchronize()

    timeline = recording.timeline()
    assert_durations(device_spans(timeline), DURATIONS)
    assert timeline.metadata["device_events_dropped"] == timeline.metadata["device_events_unread"] == 0


def test_spans_lie_between_the_hosts_launch_and_its_synchronize() -> None:
    model, x = Spin(20, 0), torch.ones(2, device="cuda")
    around = []
    with recorded() as recording, torch.no_grad():
        for _ in range(20):
            torch.cuda.synchronize()
            begin = time.time_ns()
            model(x)
            torch.cuda.synchronize()
            around.append((begin, time.time_ns()))

    timeline = recording.timeline()
    spans = device_spans(timeline)
    bound: Any = timeline.metadata["device_clock_bound_ns"]
    assert len(spans) == 20
    assert bound < MS
    for span, (begin, end) in zip(spans, around, strict=True):
        assert begin - bound <= span.start_ns <= span.end_ns <= end + bound
        # What the host measured besides is a launch, and the waking of a thread.
        assert (end - begin) - (span.end_ns - span.start_ns) < MS


def test_each_stream_has_its_own_row() -> None:
    side, model, x = torch.cuda.Stream(), Spin(30, 0), torch.ones(2, device="cuda")
    torch.cuda.synchronize()
    with recorded() as recording, torch.no_grad():
        model(x)
        with torch.cuda.stream(side):
            model(x)
        torch.cuda.synchronize()

    spans = device_spans(recording.timeline())
    assert sorted(span.call for span in spans) == [0, 1]
    assert len({span.track for span in spans}) == 2
    assert_durations(spans, [("Spin", "forward", 30)] * 2)
    # They ran side by side.
    assert max(span.start_ns for span in spans) < min(span.end_ns for span in spans)


def test_two_threads_on_two_streams() -> None:
    one_by_one = threading.Lock()

    def train() -> None:
        # The device overlaps them, the host does not: their passes share its one thread.
        with torch.cuda.stream(torch.cuda.Stream()):
            with one_by_one:
                step(Net())
            torch.cuda.current_stream().synchronize()

    with recorded() as recording:
        threads = [threading.Thread(target=train) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    spans = device_spans(recording.timeline())
    keys = sorted((span.fqn, span.phase, span.call) for span in spans)
    assert keys == sorted((name, phase, call) for name, phase, _ in DURATIONS for call in (0, 1))
    assert len({span.track for span in spans}) == 2


def test_a_full_launch_queue_is_read_to_its_end() -> None:
    """More calls than a stream takes launches (1,024), each with two events, behind a kernel of 0.2 s."""
    empty, x = Spin(0, 0), torch.ones(2, device="cuda")
    with recorded() as recording, torch.no_grad():
        queue()
        for _ in range(3000):
            empty(x)
        torch.cuda.synchronize()

    timeline = recording.timeline()
    spans = device_spans(timeline)
    assert [span.call for span in spans] == list(range(3000))
    assert all(span.end_ns >= span.start_ns for span in spans)
    assert timeline.metadata["device_events_dropped"] == timeline.metadata["device_events_unread"] == 0


def test_no_time_goes_backwards_over_seconds() -> None:
    """Behind half a second, elapsed times are taken from another event."""
    model, x = Spin(1, 0), torch.ones(2, device="cuda")
    until = time.monotonic() + 3
    with recorded() as recording, torch.no_grad():
        while time.monotonic() < until:
            model(x)
            torch.cuda.synchronize()

    spans = device_spans(recording.timeline())
    assert len(spans) > 500
    assert all(span.end_ns > span.start_ns for span in spans)
    assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(spans))


def test_the_clock_is_read_where_all_streams_of_torchs_pool_are_busy() -> None:
    """The clock's own stream is one of 32 of the pool of highest priority, and gets work too."""
    model, x = Spin(10, 0), torch.ones(2, device="cuda")
    _, highest = torch.cuda.Stream().priority_range()
    streams = [torch.cuda.Stream(priority=highest) for _ in range(32)]
    torch.cuda.synchronize()
    with recorded() as recording, torch.no_grad():
        for _ in range(20):
            for stream in streams:
                with torch.cuda.stream(stream):
                    spin(5)
            model(x)
        torch.cuda.synchronize()

    timeline = recording.timeline()
    assert_durations(device_spans(timeline)[-1:], [("Spin", "forward", 10)])
    assert len(device_spans(timeline)) == 20


def test_events_on_the_legacy_default_stream_beside_a_blocking_stream() -> None:
    """The default stream waits for streams that block; its events do, and the durations are still those."""
    runtime: Any = ctypes.CDLL(None)
    made = ctypes.c_void_p()
    assert runtime.cudaStreamCreate(ctypes.byref(made)) == 0
    blocking = torch.cuda.ExternalStream(int(made.value or 0))
    model, x = Spin(20, 0), torch.ones(2, device="cuda")
    with recorded() as recording, torch.no_grad():
        queue()
        model(x)
        with torch.cuda.stream(blocking):
            model(x)
        model(x)
        torch.cuda.synchronize()

    spans = sorted(device_spans(recording.timeline()), key=lambda span: span.call)
    assert_durations(spans, [("Spin", "forward", 20)] * 3)
    assert all(a.end_ns <= b.start_ns + MS for a, b in itertools.pairwise(spans))
    assert runtime.cudaStreamDestroy(made) == 0


def test_the_runtime_is_found_by_name() -> None:
    """The engine has no CUDA headers; without this function it could spoil captures that torch does not report."""
    assert ctypes.CDLL(None).cudaThreadExchangeStreamCaptureMode


@pytest.mark.parametrize("ending", ["", "import os; os._exit(0)", "raise SystemExit(0)"])
def test_a_process_may_end_without_stop(ending: str) -> None:
    code = f"""
import torch, modtrace
from tests.gpu.spinning import Net, spin
spin(1)
recording = modtrace.record(engine="native", device_times=True)
recording.start()
Net()(torch.ones(2, device="cuda", requires_grad=True)).sum().backward()
print("trained", flush=True)
{ending}
"""
    done = run_python("-c", code)

    assert done.stdout == "trained\n"
    assert done.stderr == ""


def test_a_recording_without_cuda_in_use_does_not_begin_it() -> None:
    code = """
import json, torch, modtrace
with modtrace.record(engine="native", device_times=True):
    torch.nn.Linear(2, 2)(torch.ones(2))
print(json.dumps(torch.cuda.is_initialized()))
"""
    assert json.loads(run_python("-c", code).stdout) is False


def test_children_that_are_forked_before_cuda_is_used_can_use_it_and_so_can_their_parent() -> None:
    code = """
import os, torch, modtrace
from tests.gpu.spinning import Net
with modtrace.record(engine="native", device_times=True, memory_interval=0) as recording:
    torch.nn.Linear(2, 2)(torch.ones(2))
    child = os.fork()
    if child == 0:
        print(int(torch.ones(3, device="cuda").sum()), flush=True)
        os._exit(0)
    print(os.waitpid(child, 0)[1])
    Net()(torch.ones(2, device="cuda"))
    torch.cuda.synchronize()
print([span.fqn for span in recording.timeline().spans if span.track.startswith("gpu")])
"""
    assert run_python("-c", code).stdout == "3\n0\n['Net', 'Net.a', 'Net.b']\n"
