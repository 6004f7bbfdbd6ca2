"""The parts of steps as a table and as Perfetto's counters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import modtrace
from modtrace import Timeline
from modtrace.write.written_parts import part_counters, part_table
from tests.support.device_steps import device_steps
from tests.support.gpt_timeline import BASE, gpt_timeline
from tests.support.timelines import build_timeline
from tests.support.trace_processor import TraceProcessor

FIRST_END, SECOND_END = 2_780_000, 5_560_000
PARTS_NS = {"forward": 1_020_000, "loss": 20_000, "backward": 1_700_000, "other": 40_000}
"""Parts of each step of `gpt_timeline(2, 1)`, worked out by hand from its units of 20 µs."""


def with_an_empty_step() -> Timeline:
    """Return two steps, and between them one of 10 ns in which no call starts."""
    timeline = gpt_timeline(2, 1)
    first, second = timeline.marks
    return replace(timeline, marks=[first._replace(time_ns=first.time_ns - 10), first, second])


def test_the_table_has_the_parts_of_each_step_in_order() -> None:
    table = part_table(gpt_timeline(2, 1))

    assert table is not None
    assert table.parts == [*PARTS_NS]
    assert table.names == ["step 0", "step 1"]
    assert table.causes == [None, None]
    assert (table.start_ns - BASE).tolist() == [0, FIRST_END]
    assert (table.end_ns - BASE).tolist() == [FIRST_END, SECOND_END]
    assert table.is_whole.tolist() == [True, True]
    assert table.ns.tolist() == [[*PARTS_NS.values()]] * 2
    assert table.share == [ns / FIRST_END for ns in PARTS_NS.values()]


def test_a_counter_is_0_if_no_step_follows_at_once() -> None:
    forward = part_counters(with_an_empty_step())[0]

    assert forward.name == "step: forward"
    assert (forward.time_ns - BASE).tolist() == [0, FIRST_END - 10, FIRST_END, SECOND_END]
    assert forward.ns.tolist() == [1_020_000, 0, 1_020_000, 0]


def test_a_recording_without_an_ended_step_has_no_counters() -> None:
    timeline = replace(gpt_timeline(1, 1), marks=[])
    table = part_table(timeline)

    assert table is not None
    assert table.is_whole.tolist() == [False]
    assert part_counters(timeline) == []
    assert part_table(replace(timeline, slices=timeline.slices.take(slice(0)))) is None


@pytest.mark.parametrize("suffix", ["json", "pftrace"])
def test_perfetto_shows_a_counter_per_part_and_no_other(
    trace_processor: type[TraceProcessor], tmp_path: Path, suffix: str
) -> None:
    gpt_timeline(2, 1).save(tmp_path / f"t.{suffix}")
    opened = trace_processor.open(tmp_path / f"t.{suffix}")
    rows = opened.query(
        "select t.name, c.ts, c.value from counter c join counter_track t on c.track_id = t.id "
        "where t.name like 'step: %' order by t.name, c.ts"
    )

    assert opened.import_problems() == {}
    begin = rows[0]["ts"]
    assert {row["name"]: [] for row in rows}.keys() == {f"step: {part} ms" for part in PARTS_NS}
    assert [(row["name"], row["ts"] - begin, row["value"]) for row in rows] == [
        (f"step: {part} ms", moment, value)
        for part in sorted(PARTS_NS)
        for moment, value in ((0, PARTS_NS[part] / 1e6), (FIRST_END, PARTS_NS[part] / 1e6), (SECOND_END, 0))
    ]


@pytest.mark.parametrize("suffix", ["json", "json.gz", "pftrace", "pftrace.gz"])
def test_parts_are_not_read_back_as_recorded_counters(tmp_path: Path, suffix: str) -> None:
    timeline = gpt_timeline(2, 1, ranks=2)
    timeline.save(tmp_path / f"first.{suffix}")
    again = modtrace.load(tmp_path / f"first.{suffix}")
    again.save(tmp_path / f"second.{suffix}")

    assert [counter.name for counter in again.counters] == ["process RSS"] * 2
    for counter, before in zip(again.counters, timeline.counters, strict=True):
        assert np.array_equal(counter.time, before.time)
        assert np.array_equal(counter.value, before.value)
    if not suffix.endswith("gz"):
        assert (tmp_path / f"first.{suffix}").read_bytes() == (tmp_path / f"second.{suffix}").read_bytes()


def test_steps_belong_to_threads_and_not_to_later_device_work() -> None:
    timeline = build_timeline(device_steps().snapshot())
    marks = [mark.time_ns for mark in timeline.marks if mark.kind == "step"]
    assert int(timeline.columns.end.max()) > marks[-1]

    table = part_table(timeline)
    assert table is not None
    assert (list(table.names), table.end_ns.tolist()) == (["step 0", "step 1", "step 2"], marks)
    assert {counter.name for counter in part_counters(timeline)} == {f"step: {part}" for part in table.parts}
    assert max(int(counter.time_ns.max()) for counter in part_counters(timeline)) == marks[-1]
