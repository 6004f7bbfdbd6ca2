"""Device times on a simulated device: its kernels take the times that the layers set, and its clock has a formula."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import modtrace
from modtrace.live.rank_state import read_rank_state
from modtrace.live.streams import StreamState
from tests.support import fake_device
from tests.support.device_times_job import MS
from tests.support.fake_streams import compile_fake_streams
from tests.support.forked_python import run_forked, start_forked
from tests.support.python_process import run_python

pytestmark = pytest.mark.usefixtures("native_engine")

STREAM = "gpu 0 · stream 0"
FORWARD = [("Net", 4 * MS), ("Net.a", 1 * MS), ("Net.b", 3 * MS)]
BACKWARD = [("Net", 6 * MS), ("Net.b", 4 * MS), ("Net.a", 2 * MS)]
GUARD = Path(torch.__file__).parent / "include/c10/core/impl/DeviceGuardImplInterface.h"
# Events: enters and exits of Net, a and b; the loss, b and a in backward; the end of the pass.
EDGES = [(0, 5), (1, 2), (3, 4), (7, 9), (7, 8), (8, 9)]
RUN = "from tests.support.device_times_job import main; main()"
MAX_FLOAT_ERROR_NS = 64
"""Error of the difference of two times that are floats of up to 500 ms."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    reason = fake_device.missing()
    if reason is not None:
        pytest.skip(reason)
    path = tmp_path_factory.mktemp("fake") / "fake_streams.so"
    compile_fake_streams(path)
    return path


def run(library: Path, scenario: str, ppm: float = 0.0, **options: Any) -> dict[str, Any]:
    done = run_forked("-c", RUN, scenario, library, ppm, json.dumps(options))
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    told["log"] = done.stderr
    assert told["synchronized"] == 0
    return told


def assert_durations(
    told: dict[str, Any], expected: list[tuple[str, int]], spans: list[Any] | None = None, ppm: float = 0.0
) -> None:
    """Assert that each span is of the expected module, and takes as long as its kernels."""
    spans = told["spans"] if spans is None else spans
    assert [span[1] for span in spans] == [name for name, _ in expected]
    # Two readings of the clock give its rate, and each is off by half of its duration. Both ends of a span are off by
    # the bound at most, which is all that is known if the last reading is close to another.
    readings = pairwise(zip(told["clock_read_ns"], told["clock_width_ns"], strict=True))
    errors = [(before + width) / 2 / max(end - start - width, 1) for (start, before), (end, width) in readings]
    for span, (_, device_ns) in zip(spans, expected, strict=True):
        stretch = min(2 * told["metadata"]["device_clock_bound_ns"], device_ns * max(errors))
        assert span[7] - span[6] == pytest.approx(device_ns / (1 + ppm * 1e-6), abs=MAX_FLOAT_ERROR_NS + stretch)


@pytest.mark.parametrize("ppm", [0, 50, -50])
def test_spans_are_where_the_device_was_on_the_hosts_clock(library: Path, ppm: int) -> None:
    told = run(library, "plain", ppm)

    spans = told["spans"]
    assert [tuple(span[:6]) for span in spans] == [
        (STREAM, fqn, phase, step, step, int(fqn != "Net"))
        for step in (0, 1)
        for phase, order in (("forward", FORWARD), ("backward", BACKWARD))
        for fqn, _ in order
    ]
    bound = told["metadata"]["device_clock_bound_ns"]
    for index, span in enumerate(spans):
        first, last = EDGES[index % 6]
        event = 10 * (index // 6)
        assert abs(span[6] - told["truth"][event + first]) <= bound
        assert abs(span[7] - told["truth"][event + last]) <= bound
    assert_durations(told, 2 * (FORWARD + BACKWARD), ppm=ppm)
    assert len(told["truth"]) == told["queued"] == 20
    # The bound is useful: the error of a clock with unmeasured drift would be larger than that of its readings.
    assert bound < max(told["clock_width_ns"]) / 2 + told["elapsed_ns"] * 50e-6
    assert told["metadata"]["device_events_dropped"] == told["metadata"]["device_events_unread"] == 0


@pytest.mark.parametrize(
    ("options", "expected", "events"),
    [
        ({"device_times": 1}, [("Outer", 4), ("Outer", 6)], 5),
        ({}, [("Outer", 4), ("Outer.net", 4), ("Outer", 6), ("Outer.net", 6)], 7),
        ({"device_times": "*.b"}, [("Outer.net.b", 3), ("Outer.net.b", 4)], 6),
        ({"device_times": "*.b,2"}, [], 0),
        (
            {"device_times": "Outer.net*,9"},
            [
                *(("Outer.net", 4), ("Outer.net.a", 1), ("Outer.net.b", 3)),
                *(("Outer.net", 6), ("Outer.net.b", 4), ("Outer.net.a", 2)),
            ],
            10,
        ),
    ],
)
def test_calls_are_chosen_by_depth_and_name(
    library: Path, options: dict[str, Any], expected: list[tuple[str, int]], events: int
) -> None:
    told = run(library, "nested", **options)

    assert_durations(told, [(name, ms * MS) for name, ms in expected])
    # An enter and an exit per call; in backward the loss, the edges of chosen calls, and the end of the pass.
    assert told["queued"] == events


def test_each_stream_has_its_own_track(library: Path) -> None:
    told = run(library, "streams")

    assert_durations(told, FORWARD + BACKWARD, [span for span in told["spans"] if span[0] == STREAM])
    assert_durations(told, FORWARD, [span for span in told["spans"] if span[0] == "gpu 0 · stream 7"])


def test_a_pool_that_is_empty_drops_events_and_counts_them(library: Path) -> None:
    told = run(library, "held")

    assert told["metadata"]["device_events_dropped"] == 2 * 9000 - (1 << 14)
    assert told["metadata"]["device_events_unread"] == 0
    assert len(told["host"]) == 9000 + 3
    assert_durations(told, FORWARD, told["spans"][-3:])
    # Two events outside the pool: the anchor, and one to read the clock.
    assert told["events_made"] <= (1 << 14) + 2


def test_a_capture_is_left_alone_and_a_replay_is_a_span(library: Path) -> None:
    told = run(library, "captured")

    assert_durations(told, [*FORWARD, ("CUDAGraph", 5 * MS), *FORWARD])
    assert [call[0] for call in told["host"]] == ["Net", "Net.a", "Net.b"] * 2 + ["CUDAGraph", "Net", "Net.a", "Net.b"]
    assert told["asked_while_capturing"] == 0


@pytest.mark.skipif(not hasattr(torch.cuda.CUDAGraph, "capture_end_pre"), reason="this torch ends no capture in halves")
def test_a_capture_that_was_ended_in_halves_is_over(library: Path) -> None:
    assert_durations(run(library, "captured_in_halves"), FORWARD)


@pytest.mark.skipif("isStreamCapturing" not in GUARD.read_text("utf-8"), reason="this torch's devices do not tell")
def test_a_stream_that_captures_is_left_alone(library: Path) -> None:
    told = run(library, "captured_by_others")

    assert_durations(told, FORWARD)
    assert [span[3] for span in told["spans"]] == [1, 1, 1]


def test_a_device_that_others_keep_busy_has_times_with_a_wider_bound(library: Path) -> None:
    told = run(library, "shared")

    assert [span[1] for span in told["spans"]] == [name for name, _ in FORWARD + BACKWARD]
    bound = told["metadata"]["device_clock_bound_ns"]
    assert bound >= 1.5 * MS
    assert all(
        abs(span[6] - told["truth"][first]) <= bound for span, (first, _) in zip(told["spans"], EDGES, strict=True)
    )


def test_a_clock_that_cannot_be_read_is_reported(library: Path) -> None:
    told = run(library, "too_busy")

    assert told["spans"] == []
    assert told["log"].count("device_times: the device was too busy for its clock to be read") == 1


def test_a_device_that_breaks_ends_device_times_and_nothing_else(library: Path) -> None:
    told = run(library, "broken")

    assert_durations(told, FORWARD + BACKWARD)
    assert told["host"][-3:] == [["Net", "forward", 1], ["Net.a", "forward", 1], ["Net.b", "forward", 1]]
    assert told["log"].count("device_times: the device is lost") == 1
    assert "the recording goes on without it" in told["log"]


def test_a_stream_that_takes_no_more_work_keeps_neither_others_nor_the_reader_waiting(library: Path) -> None:
    told = run(library, "full")

    assert_durations(told, FORWARD, [span for span in told["spans"] if span[0] == STREAM])
    others = [(span[1], span[2]) for span in told["spans"] if span[0] == "gpu 0 · stream 7"]
    assert others == [
        (name, phase) for phase, order in (("forward", FORWARD), ("backward", BACKWARD)) for name, _ in order
    ]
    assert told["metadata"]["device_events_unread"] == 0


def test_an_interrupted_call_has_a_span_and_so_have_those_behind_it(library: Path) -> None:
    told = run(library, "interrupted")

    assert_durations(told, [("Interrupted", 5 * MS), *FORWARD, *BACKWARD])


def test_times_that_were_read_survive_the_process(library: Path, tmp_path: Path) -> None:
    ring = tmp_path / "run.modtrace"
    run_forked("-m", "tests.support.device_times_job", "died", library, 0, json.dumps({"ring": str(ring)}))

    timeline = modtrace.load(ring)

    spans = [span for span in timeline.spans if span.track == STREAM]
    expected = FORWARD + BACKWARD
    assert [(span.fqn, span.phase) for span in spans] == [
        (name, "forward" if index < 3 else "backward") for index, (name, _) in enumerate(expected)
    ]
    for span, (_, ns) in zip(spans, expected, strict=True):
        # After the last reading, the device's clock is assumed to run as between the two readings before.
        assert span.duration_ns == pytest.approx(ns, abs=2 * int(str(timeline.metadata["device_clock_bound_ns"])))
    assert timeline.metadata["device_events_unread"] == 10


def test_where_names_the_calls_that_a_device_hangs_in_until_queries_end(library: Path, tmp_path: Path) -> None:
    ring = tmp_path / "run.modtrace"
    arguments = ("-m", "tests.support.device_times_job", "hung", library, 0, json.dumps({"ring": str(ring)}))
    with start_forked(*arguments, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "hangs\n"

        def stream_when(holds: Callable[[StreamState], bool]) -> StreamState:
            while True:
                assert process.poll() is None
                state = read_rank_state(ring)
                (stream,) = state.streams
                if holds(stream):
                    return stream

        # After the query, the stream has passed everything in front of the kernel.
        asked = stream_when(lambda stream: stream.read_ns is not None and stream.calls[-1:] != () and stream.is_known)
        later = stream_when(lambda stream: (stream.read_ns or 0) > (asked.read_ns or 0) + 200 * MS)
        process.stdin.write("break\n")
        process.stdin.flush()
        assert process.stdout.readline() == "broken\n"
        unknown = stream_when(lambda stream: not stream.is_known)
        shown = run_python("-m", "modtrace", "where", ring).stdout
        process.kill()
        process.wait()
    (dead,) = read_rank_state(ring).streams

    # Behind the hang are backward of b and a in this step, and forward and backward in the next one.
    for hung in (later, unknown, dead):
        assert [(call.fqn, call.phase) for call in hung.calls] == [("Net", "forward"), ("Net.b", "forward")]
        assert (hung.device, hung.stream, hung.dropped) == (0, 0, 0)
    assert (later.is_known, later.queued, later.unread) == (True, 2 + 5, 6 + 10)
    assert (unknown.is_known, dead.is_known) == (False, False)
    assert "device 0, stream 0  unknown; last read: forward Net › b; 8 calls queued and not read" in shown


def test_a_forked_child_leaves_the_device_alone(library: Path) -> None:
    assert_durations(run(library, "forked"), FORWARD + FORWARD)


@pytest.mark.parametrize("scenario", ["late", "late_of_the_same"])
def test_a_device_is_left_alone_until_it_is_used(library: Path, scenario: str) -> None:
    told = run(library, scenario)

    assert_durations(told, FORWARD + BACKWARD)
    assert [span[3] for span in told["spans"]] == [1] * 6
    assert "device_times" not in told["log"]


def test_a_capture_in_which_a_device_is_first_used_is_left_alone(library: Path) -> None:
    told = run(library, "first_used_in_a_capture")

    assert_durations(told, FORWARD)
    assert [span[3] for span in told["spans"]] == [1, 1, 1]


@pytest.mark.parametrize("scenario", ["unused", "stopped_before", "stopped_meanwhile"])
def test_a_device_that_is_not_used_while_it_is_recorded_has_no_times_and_a_warning_says_so(
    library: Path, scenario: str
) -> None:
    told = run(library, scenario)

    assert (told["spans"], told["events_made"]) == ([], 0)
    assert told["log"].count("device_times: no module was called outside all other calls") == 1


@pytest.mark.parametrize("faked", [False, True])
def test_without_an_accelerator_one_warning_says_so(caplog: pytest.LogCaptureFixture, faked: bool) -> None:
    if faked:
        # For the rest of the process, torch then has a CUDA guard that reports one device.
        with FakeTensorMode():
            torch.ones(1)
    with modtrace.record(engine="native", device_times=True) as recording:
        pass

    assert len(recording.timeline().spans) == 0
    said = [message for message in caplog.messages if message.startswith("device_times: ")]
    # A torch that is built for a device, on a machine without one, names that device.
    built_for = torch.accelerator.current_accelerator()
    expected = (
        f"device_times: this torch ({torch.__version__}) has no accelerator; the recording goes on without it"
        if built_for is None
        else "device_times: no module was called outside all other calls after torch initialized "
        f"{built_for.type}; the recording goes on without it"
    )
    assert said == [expected], caplog.messages


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"device_times": True, "engine": "python"}, "device_times needs the native engine"),
        ({"device_times": 0}, "device_times is 0; it must be True, a number of levels of calls, 1 or more, or a"),
        ({"device_times": -1}, "device_times is -1; it must be True"),
        ({"device_times": 1.5}, "device_times is 1.5; it must be True"),
        ({"device_times": None}, "device_times is None; it must be True"),
        ({"device_times": ""}, "device_times is ''; it must be True"),
        ({"device_times": "GPT.*,0"}, "device_times is 'GPT.*,0'; it must be True"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(modtrace.RecordingError, match=fault):
        modtrace.record(**options)
