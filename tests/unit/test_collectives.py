"""Collectives and waits from rings by hand: times, bytes, launches, windows, and how groups and names are written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import modtrace
from modtrace import Timeline
from modtrace.ring import Kind
from modtrace.ring.event_text import CollectiveName, collective_text, parse_collective, parse_ranks, rank_list
from modtrace.ring.slot_format import NO_NAME
from modtrace.timeline import Group, launching_spans
from modtrace.timeline.summary.overview import communication_line, sum_up_communication
from tests.support.event_script import WALL, EventScript
from tests.support.timelines import build_timeline

ALL_REDUCE, SEND = '["all_reduce", "0"]', '["send", "0", 3]'


def two_layers() -> EventScript:
    """A layer launches an all_reduce, which completes while the model waits for it; then follows a send."""
    script = EventScript()
    script.note_group("0", "0-3", "default_pg")
    model, layer = script.name("Net"), script.name("Net.a")
    script.enter(10, model)
    script.enter(20, layer)
    script.collective(30, Kind.COLLECTIVE_ENTER, ALL_REDUCE, 0)
    script.collective(40, Kind.COLLECTIVE_EXIT, ALL_REDUCE, 4096)
    script.exit(50, layer)
    script.collective(60, Kind.WAIT_ENTER, ALL_REDUCE, 0)
    script.collective(70, Kind.COLLECTIVE_DONE, ALL_REDUCE, 0)
    script.collective(80, Kind.WAIT_EXIT, ALL_REDUCE, 0)
    script.exit(90, model)
    script.step(95, 0)
    script.collective(100, Kind.COLLECTIVE_ENTER, SEND, 0)
    script.collective(110, Kind.COLLECTIVE_EXIT, SEND, 20)
    return script


def timeline() -> Timeline:
    return build_timeline(two_layers().snapshot())


def test_collectives_have_the_times_counters_and_bytes_of_their_events() -> None:
    rows = [
        (
            *(row.operator, row.group, row.peer, row.is_wait, row.counter, row.nbytes, row.start_ns - WALL),
            *(row.end_ns - WALL, row.done_ns and row.done_ns - WALL, row.step, row.complete),
        )
        for row in timeline().collectives
    ]
    assert rows == [
        ("all_reduce", "0", None, False, 0, 4096, 30, 40, 70, 0, True),
        ("all_reduce", "0", None, True, 0, 0, 60, 80, None, 0, True),
        ("send", "0", 3, False, 0, 20, 100, 110, None, 1, True),
    ]
    assert timeline().collectives.groups == [Group("0", (0, 1, 2, 3), "default_pg")]
    assert {row.track for row in timeline().collectives} == {"communication · MainThread"}


def test_spans_are_the_same_as_without_collectives() -> None:
    plain = EventScript()
    model, layer = plain.name("Net"), plain.name("Net.a")
    plain.enter(10, model)
    plain.enter(20, layer)
    plain.exit(50, layer)
    plain.exit(90, model)
    plain.step(95, 0)
    assert list(timeline().spans) == list(build_timeline(plain.snapshot()).spans)


def test_a_collective_is_launched_by_the_innermost_span_around_it() -> None:
    spans = timeline().spans
    launched_by = [spans[span].fqn if span >= 0 else None for span in launching_spans(timeline()).tolist()]
    assert launched_by == ["Net.a", "Net", None]


@pytest.mark.parametrize("suffix", [".json", ".json.gz", ".pftrace", ".pftrace.gz"])
def test_saved_collectives_are_loaded_again(suffix: str, tmp_path: Path) -> None:
    saved = timeline()
    saved.save(tmp_path / f"t{suffix}")
    loaded = modtrace.load(tmp_path / f"t{suffix}")
    assert list(loaded.collectives) == list(saved.collectives)
    assert loaded.collectives.groups == saved.collectives.groups
    assert list(loaded.spans) == list(saved.spans)
    assert loaded.tracks == saved.tracks
    assert np.array_equal(launching_spans(loaded), launching_spans(saved))


def test_a_call_without_its_exit_ends_with_the_last_event() -> None:
    script = EventScript()
    script.collective(10, Kind.COLLECTIVE_ENTER, ALL_REDUCE, 7)
    script.step(50, 0)
    (row,) = build_timeline(script.snapshot()).collectives
    assert (row.counter, row.start_ns - WALL, row.end_ns - WALL, row.done_ns, row.complete) == (7, 10, 50, None, False)


def test_a_call_with_a_lost_exit_ends_with_the_next_of_its_thread() -> None:
    script = EventScript()
    script.collective(10, Kind.COLLECTIVE_ENTER, ALL_REDUCE, 0)
    script.collective(30, Kind.COLLECTIVE_ENTER, SEND, 0)
    script.collective(40, Kind.COLLECTIVE_EXIT, SEND, 8)
    first, second = build_timeline(script.snapshot()).collectives
    assert (first.end_ns - WALL, first.complete, second.end_ns - WALL, second.complete) == (30, False, 40, True)


def test_an_exit_whose_enter_was_overwritten_is_left_out() -> None:
    script = EventScript()
    script.collective(10, Kind.COLLECTIVE_EXIT, ALL_REDUCE, 8)
    script.collective(20, Kind.WAIT_EXIT, ALL_REDUCE, 0)
    assert not len(build_timeline(script.snapshot()).collectives)


def test_a_wait_for_something_unknown_has_no_operator_and_no_counter() -> None:
    script = EventScript()
    script.event(10, Kind.WAIT_ENTER, NO_NAME, -1)
    script.event(20, Kind.WAIT_EXIT, NO_NAME, -1)
    (row,) = build_timeline(script.snapshot()).collectives
    assert (row.operator, row.group, row.counter, row.is_wait, row.duration_ns) == ("", "", None, True, 10)


def test_a_window_cuts_collectives_and_steps_choose_them() -> None:
    part = timeline().window(WALL + 35, WALL + 65).collectives
    assert [(row.start_ns - WALL, row.end_ns - WALL, row.done_ns, row.complete) for row in part] == [
        (35, 40, None, False),
        (60, 65, None, False),
    ]
    assert [row.operator for row in timeline().steps(1).collectives] == ["send"]


def test_a_summary_counts_collectives_apart_from_modules() -> None:
    summary = timeline().summary()
    assert [(row.fqn, row.calls, row.total_ns) for row in summary.rows] == [("Net", 1, 80), ("Net.a", 1, 30)]
    totals = sum_up_communication(timeline().collectives)
    assert {operator: tuple(total) for operator, total in totals.items()} == {
        "all_reduce": (1, 4096, 10, 20),
        "send": (1, 20, 10, 0),
    }
    assert communication_line(totals) == (
        "communication: 1 all_reduce (4.00 KiB), 1 send (20 B); calls take 0.000 ms, waits 0.000 ms"
    )


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1, 2, 3], "0-3"),
        ([0, 8, 16, 24], "0-24:8"),
        ([5, 0], "0,5"),
        ([0, 1, 4, 6, 8], "0-1,4-8:2"),
    ],
)
def test_ranks_are_written_as_ranges(ranks: list[int], text: str) -> None:
    assert rank_list(ranks) == text
    assert parse_ranks(text) == sorted(ranks)


@given(st.sets(st.integers(0, 1000)))
def test_any_ranks_are_read_back(ranks: set[int]) -> None:
    assert parse_ranks(rank_list(ranks)) == sorted(ranks)


@pytest.mark.parametrize("text", ["a", "1,,2", "3-1", "0-9999999999", "-1", "0-4:0"])
def test_text_that_is_not_a_range_of_ranks_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"range|invalid literal|zero"):
        parse_ranks(text)


def test_names_of_collectives_are_read_back_and_any_text_is_a_name() -> None:
    assert parse_collective(collective_text("send", "mesh|dp", 3)) == CollectiveName("send", "mesh|dp", 3)
    assert parse_collective(collective_text("barrier", "0")) == CollectiveName("barrier", "0")
    assert parse_collective(collective_text("send", "0", 3, "cuda")) == CollectiveName("send", "0", 3, "cuda")
    assert parse_collective(collective_text("all_reduce", "0", -1, "cuda")) == CollectiveName(
        "all_reduce", "0", -1, "cuda"
    )
    assert parse_collective("#12") == CollectiveName("#12", "")
    assert parse_collective('["a", 1]') == CollectiveName('["a", 1]', "")
