"""Rows of device times through every reader, filter, comparison and writer; all times follow a formula."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

import modtrace
from modtrace import Timeline
from modtrace.checking import check
from modtrace.timeline.select import on_gpu, without_gpu
from tests.support.device_steps import device_steps
from tests.support.event_script import WALL
from tests.support.kineto import trace, x
from tests.support.timelines import build_timeline

Row = tuple[str, str, str, int, int, int]
"""Track, fqn, phase, step, start and end in ns from the wall's origin."""

_EVENTS_OF_A_STEP = 15
_SPANS = [
    ("gpu 0 · stream 1", "Loader", "forward", 0, 1),
    ("gpu 0 · stream 0", "Net", "forward", 2, 7),
    ("gpu 0 · stream 0", "Net.0", "forward", 3, 4),
    ("gpu 0 · stream 0", "Net.1", "forward", 5, 6),
    ("gpu 0 · stream 0", "Net", "backward", 8, 14),
    ("gpu 0 · stream 0", "Net.1", "backward", 8, 9),
    ("gpu 0 · stream 0", "Net.0", "backward", 9, 14),
    ("gpu 0 · stream 0", "Net.0", "recompute", 10, 13),
    ("gpu 0 · stream 0", "Net.0.mlp", "recompute", 11, 12),
]
"""Spans of a step, with the events at which each starts and ends."""


def reached(step: int, event: int) -> int:
    """Return when the device reaches an event, as `device_steps` has it."""
    number = _EVENTS_OF_A_STEP * step + event
    return 2_000 + 3_000 * (16 * step + event + 1) + number % 7


def expected(steps: Iterable[int]) -> list[Row]:
    return sorted(
        (track, fqn, phase, step, reached(step, first), reached(step, last))
        for step in steps
        for track, fqn, phase, first, last in _SPANS
    )


def rows(timeline: Timeline, origin: int = WALL) -> list[Row]:
    return sorted(
        (span.track, span.fqn, span.phase, span.step, span.start_ns - origin, span.end_ns - origin)
        for span, chosen in zip(timeline.spans, on_gpu(timeline).tolist(), strict=True)
        if chosen
    )


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return build_timeline(device_steps().snapshot())


def test_steps_and_modules_choose_from_streams_as_from_threads(timeline: Timeline) -> None:
    assert rows(timeline) == expected(range(3))
    # Work that the host queued in a step belongs to that step, whenever the device runs it.
    assert rows(timeline.steps(1, 2)) == expected([1])
    assert rows(timeline.only("Net.0*")) == [row for row in expected(range(3)) if row[1].startswith("Net.0")]
    outermost = [("Loader", "forward"), ("Net", "forward"), ("Net", "backward")]
    assert rows(timeline.only(max_depth=1)) == [row for row in expected(range(3)) if (row[1], row[2]) in outermost]


def test_a_window_cuts_the_work_of_a_device_at_its_edges(timeline: Timeline) -> None:
    start, end = reached(0, 9), reached(0, 11)

    window = timeline.window(WALL + start, WALL + end)

    assert rows(window) == sorted(
        ("gpu 0 · stream 0", fqn, phase, 0, first, end)
        for fqn, phase, first in [
            ("Net", "backward", start),
            ("Net.0", "backward", start),
            ("Net.0", "recompute", reached(0, 10)),
        ]
    )


@pytest.mark.parametrize("suffix", [".json", ".pftrace"])
def test_a_saved_file_has_the_device_times_and_no_fault(timeline: Timeline, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"saved{suffix}"
    timeline.save(path)

    loaded = modtrace.load(path)

    assert check(path).faults == []
    assert rows(loaded) == expected(range(3))
    assert loaded.summary().device == timeline.summary().device


def test_flame_graphs_have_a_root_per_device(timeline: Timeline, tmp_path: Path) -> None:
    timeline.save(tmp_path / "a.folded")
    timeline.save(tmp_path / "a.speedscope.json")

    stacks = dict(line.rsplit(" ", 1) for line in (tmp_path / "a.folded").read_text().splitlines())
    mlp = sum(reached(step, 12) - reached(step, 11) for step in range(3))
    assert int(stacks["gpu 0;Net;0: Block;0: Block (recompute);mlp: MLP (recompute)"]) == mlp
    own = sum(reached(step, 7) - reached(step, 2) for step in range(3)) - sum(
        reached(step, last) - reached(step, first) for step in range(3) for first, last in ((3, 4), (5, 6))
    )
    assert int(stacks["gpu 0;Net"]) == own
    profiles = json.loads((tmp_path / "a.speedscope.json").read_text())["profiles"]
    assert [profile["name"].rpartition("stream")[2] for profile in profiles[-2:]] == [" 0", " 1"]
    assert [len(profile["events"]) for profile in profiles[-2:]] == [2 * 8 * 3, 2 * 3]


def test_a_diff_compares_streams_apart_from_threads(timeline: Timeline, tmp_path: Path) -> None:
    timeline.save(tmp_path / "a.json")
    timeline.save(tmp_path / "b.json")

    changes = modtrace.diff(tmp_path / "a.json", tmp_path / "b.json").changes

    on_gpu = {(change.fqn, change.phase): change for change in changes if change.phase.startswith("GPU")}
    assert set(on_gpu) == {(fqn, f"GPU {phase}") for _, fqn, phase, _, _ in _SPANS}
    # The first of three steps warms up: the median is of the others' times.
    own = [reached(step, 12) - reached(step, 11) for step in range(3)]
    mlp = on_gpu["Net.0.mlp", "GPU recompute"]
    assert min(own) <= mlp.base_ns <= max(own)


def test_a_report_has_the_streams_and_their_losses(timeline: Timeline, tmp_path: Path) -> None:
    timeline.save(tmp_path / "bug.zip")

    reported = modtrace.load(tmp_path / "bug.zip")

    moved = reported.spans[0].start_ns - timeline.spans[0].start_ns + WALL
    assert rows(reported, moved) == expected(range(3))
    assert reported.summary().device == timeline.summary().device
    with zipfile.ZipFile(tmp_path / "bug.zip") as archive:
        (summary,) = [name for name in archive.namelist() if name.endswith(".md")]
        assert "2 streams of devices: in modules" in archive.read(summary).decode()


def profile(folder: Path) -> Path:
    """A trace of the profiler: operators of the thread, a launch in `Net.0`, and its kernel."""
    events = [x("Trace", "PyTorch Profiler (0)", 0, 300_000, pid="Spans", tid="PyTorch Profiler")]
    events += [x("cpu_op", "aten::mm", at, at + 200, pid=7, tid=1) for at in range(1_100, 48_000, 1_000)]
    events.append(x("cuda_runtime", "cudaLaunchKernel", 4_400, 4_450, pid=7, tid=1, correlation=1))
    events.append(x("kernel", "gemm", 20_000, 21_000, pid=0, tid=0, correlation=1, device=0, stream=0))
    path = folder / "profile.json"
    path.write_bytes(trace(*events, base=WALL))
    return path


@pytest.mark.parametrize("suffix", [".json", ".pftrace"])
def test_a_merge_leaves_device_times_to_the_profilers_kernels_and_says_so(
    timeline: Timeline, suffix: str, tmp_path: Path
) -> None:
    out, alone = tmp_path / f"merged{suffix}", tmp_path / f"alone{suffix}"
    path = profile(tmp_path)

    merged = modtrace.merge(path, timeline, out)
    without = modtrace.merge(path, without_gpu(timeline), alone)

    note = "the recording's device times were left out"
    assert [note in text for text in merged.notes].count(True) == 1
    assert [text for text in merged.notes if note not in text] == [text for text in without.notes if note not in text]
    assert check(out).faults == []
    loaded = modtrace.load(out)
    kernels = [("gpu 0 · stream 0", "Net.0", "forward", 0, 20_000, 21_000)]
    assert [row for row in rows(loaded) if row[1] == "Net.0"] == kernels
    assert {row[-2:] for row in rows(loaded)} == {(20_000, 21_000)}
    assert loaded.summary().device is None
