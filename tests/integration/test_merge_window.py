"""Content of a merged file of a long recording: the profiled window, and nothing that grows with the recording."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import modtrace
from modtrace import Timeline
from modtrace.formats import own_table
from modtrace.timeline import CounterSeries, Name, Process, Track
from modtrace.timeline.slices import join_columns
from tests.support.gpt_timeline import gpt_timeline

LAYERS, STEPS = 2, 1000


@pytest.fixture(scope="module")
def long_recording() -> Timeline:
    return gpt_timeline(STEPS, LAYERS)


def profile(timeline: Timeline, first_step: int, folder: Path) -> Path:
    """A trace of two steps, with operators on the model's thread, in the profiler's own clock."""
    columns = timeline.columns
    in_steps = (columns.step == first_step) | (columns.step == first_step + 1)
    # It starts just within the first step and stops just before the last one's mark.
    start, end = int(columns.start[in_steps].min()) + 1_000, int(columns.end[in_steps].max())
    base = start - 1_000_000

    def event(category: str, name: str, begin: int, end: int, pid: int | str, tid: int | str) -> dict[str, object]:
        times = {"ts": (begin - base) / 1000, "dur": (end - begin) / 1000}
        return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, **times}

    events = [event("Trace", "PyTorch Profiler (0)", start, end, "Spans", "PyTorch Profiler")]
    events += [event("cpu_op", "op", time, time + 1_000, 1000, 1) for time in range(start, end - 2_000, 1_000_000)]
    path = folder / "profile.json"
    path.write_text(json.dumps({"baseTimeNanoseconds": base, "traceEvents": events}))
    return path


def merged(timeline: Timeline, first_step: int, folder: Path, suffix: str) -> bytes:
    """The bytes of a merged trace without its table, which names the modules that had trained before a chosen step."""
    out = folder / f"merged{suffix}"
    modtrace.merge(profile(timeline, first_step, folder), timeline, out)
    data = re.sub(rb'"modtraceTable":"[^"]*"', b"", out.read_bytes())
    return data.partition(own_table._PACKET_MARK)[0]


HOW = pytest.mark.parametrize("suffix", [".json", ".pftrace"])


@HOW
def test_two_steps_of_a_long_recording_take_the_bytes_of_a_recording_of_these_two(
    long_recording: Timeline, tmp_path: Path, suffix: str
) -> None:
    alone = long_recording.steps(STEPS - 2, STEPS)

    of_long = merged(long_recording, STEPS - 2, tmp_path, suffix)
    of_short = merged(alone, STEPS - 2, tmp_path, suffix)

    assert len(alone.columns) == len(long_recording.columns) // STEPS * 2
    assert of_long == of_short


def test_two_late_steps_differ_from_the_first_two_in_decimal_digits_alone(
    long_recording: Timeline, tmp_path: Path
) -> None:
    late = merged(long_recording, STEPS - 2, tmp_path, ".json")
    early = merged(gpt_timeline(2, LAYERS), 0, tmp_path, ".json")

    assert late != early
    assert re.sub(rb"\d+", b"0", late) == re.sub(rb"\d+", b"0", early)


@HOW
def test_threads_modules_and_counters_from_before_the_window_take_no_byte(
    long_recording: Timeline, tmp_path: Path, suffix: str
) -> None:
    threads, modules = len(long_recording.tracks), len(long_recording.names)
    process = Process(1000, 0)
    columns = long_recording.columns
    first = columns.take(np.flatnonzero(columns.step == 0))
    old = replace(
        first,
        name=first.name + np.int32(modules),
        track=first.track + np.int32(threads),
        link=np.full(len(first), -1),
    )
    crowded = replace(
        long_recording,
        slices=join_columns([old, columns]),
        names=[*long_recording.names, *(Name(f"old {n}: Old", f"Old.{n}", "Old") for n in range(modules))],
        tracks=[*long_recording.tracks, *(Track("forward", f"worker {n}", 70 + n, process) for n in range(threads))],
        counters=[
            *long_recording.counters,
            CounterSeries("of another time", "bytes", process, np.empty(0, np.int64), np.empty(0, np.int64)),
        ],
    )
    assert merged(crowded, STEPS - 2, tmp_path, suffix) == merged(long_recording, STEPS - 2, tmp_path, suffix)
