"""Ranges of threads: their slices, lost ranges, and every format that keeps them."""

from __future__ import annotations

from pathlib import Path

import pytest

import modtrace
from modtrace import Timeline
from modtrace.reporting.names import ReportNames
from modtrace.ring import Kind
from modtrace.ring.event_text import RangeName, parse_range, range_text
from modtrace.ring.slot_format import AUTOMATIC_BIT, COLLECTED_BITS, GENERATION_BITS, NO_NAME, REQUESTED_BIT
from modtrace.timeline import Range
from modtrace.timeline.contents import range_name
from modtrace.timeline.slices import GARBAGE_COLLECTION
from modtrace.track.ranges import category_of
from tests.support.event_script import WALL, EventScript
from tests.support.timelines import build_timeline

FETCH = range_text("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "data loading")
STEP, MINE, INNER = range_text("Optimizer.step#SGD.step", "optimizer"), range_text("mine", "user"), '["user", "inner"]'


def a_step() -> EventScript:
    """A fetch, a user's range around a module with another range in it, and an optimizer step."""
    script = EventScript()
    model = script.name("Net", module_class="Net")
    script.collective(10, Kind.RANGE_BEGIN, FETCH, 2)
    script.collective(20, Kind.RANGE_END, FETCH, 2)
    script.collective(30, Kind.RANGE_BEGIN, MINE, 4)
    script.enter(40, model)
    script.collective(50, Kind.RANGE_BEGIN, INNER, 1)
    script.collective(60, Kind.RANGE_END, INNER, 1)
    script.exit(70, model)
    script.collective(80, Kind.RANGE_END, MINE, 4)
    script.collective(90, Kind.RANGE_BEGIN, STEP, 6)
    script.step(95, 0)
    script.collective(100, Kind.RANGE_END, STEP, 6)
    script.collective(110, Kind.RANGE_BEGIN, FETCH, 8)
    script.collective(120, Kind.RANGE_END, FETCH, 8)
    return script


def timeline() -> Timeline:
    return build_timeline(a_step().snapshot())


def rows(timeline: Timeline) -> list[tuple[object, ...]]:
    return [
        (row.name, row.category, row.start_ns - WALL, row.end_ns - WALL, row.depth, row.track, row.step, row.complete)
        for row in timeline.ranges
    ]


TRACK = "ranges · MainThread"
EXPECTED = [
    ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "data loading", 10, 20, 0, TRACK, 0, True),
    ("mine", "user", 30, 80, 0, TRACK, 0, True),
    ("inner", "user", 50, 60, 1, TRACK, 0, True),
    ("Optimizer.step#SGD.step", "optimizer", 90, 100, 0, TRACK, 0, True),
    ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "data loading", 110, 120, 0, TRACK, 1, True),
]


def test_ranges_have_the_times_and_names_of_their_events() -> None:
    assert rows(timeline()) == EXPECTED
    assert {(row.thread, row.process) for row in timeline().ranges} == {("MainThread", timeline().tracks[0].process)}
    assert timeline().ranges[1].duration_ns == 50
    assert isinstance(timeline().ranges[0], Range)


def test_ranges_do_not_change_modules() -> None:
    assert [(span.fqn, span.depth, span.track) for span in timeline().spans] == [("Net", 0, "forward · MainThread")]
    assert [row.fqn for row in timeline().summary().rows] == ["Net"]
    assert [row.name for row in timeline().only("Net").ranges] == [row[0] for row in EXPECTED]


@pytest.mark.parametrize("suffix", ["json", "json.gz", "pftrace", "pftrace.gz"])
def test_every_format_keeps_ranges(suffix: str, tmp_path: Path) -> None:
    timeline().save(tmp_path / f"trace.{suffix}")

    assert rows(modtrace.load(tmp_path / f"trace.{suffix}")) == EXPECTED


def test_steps_and_windows_keep_their_ranges() -> None:
    assert [row[0] for row in rows(timeline().steps(1, 2))] == [EXPECTED[4][0]]
    assert rows(timeline().window(WALL + 55, WALL + 95)) == [
        ("mine", "user", 55, 80, 0, TRACK, 0, False),
        ("inner", "user", 55, 60, 1, TRACK, 0, False),
        ("Optimizer.step#SGD.step", "optimizer", 90, 95, 0, TRACK, 0, False),
    ]


def test_a_range_with_a_lost_start_or_end_reaches_to_the_edge_of_the_known_time() -> None:
    script = EventScript()
    model = script.name("Net")
    script.enter(10, model)
    script.collective(20, Kind.RANGE_END, MINE, 4)
    script.collective(30, Kind.RANGE_BEGIN, STEP, 6)
    script.collective(35, Kind.RANGE_BEGIN, INNER, 1)
    script.collective(40, Kind.RANGE_END, STEP, 6)
    script.exit(50, model)

    assert rows(build_timeline(script.snapshot())) == [
        ("mine", "user", 10, 20, 0, TRACK, 0, False),
        ("Optimizer.step#SGD.step", "optimizer", 30, 40, 0, TRACK, 0, True),
        ("inner", "user", 35, 40, 1, TRACK, 0, False),
    ]


def test_an_end_that_was_written_again_does_not_count() -> None:
    script = EventScript()
    script.collective(10, Kind.RANGE_BEGIN, MINE, 4)
    script.collective(20, Kind.RANGE_END, MINE, 4)
    script.collective(30, Kind.RANGE_END, MINE, 4)

    assert rows(build_timeline(script.snapshot())) == [("mine", "user", 10, 20, 0, TRACK, 0, True)]


def test_the_end_of_a_garbage_collection_has_its_duration() -> None:
    script = EventScript()
    model = script.name("Net")
    script.enter(0, model)
    script.collective(10, Kind.RANGE_BEGIN, MINE, 4)
    script.event(300, Kind.COLLECTION, NO_NAME, REQUESTED_BIT | (200 << COLLECTED_BITS | 7) << GENERATION_BITS | 2)
    script.collective(400, Kind.RANGE_END, MINE, 4)
    script.exit(450, model)
    script.step(450, 0)
    script.event(500, Kind.COLLECTION, NO_NAME, AUTOMATIC_BIT | 30 << COLLECTED_BITS + GENERATION_BITS)
    script.event(600, Kind.COLLECTION, NO_NAME, 40 << COLLECTED_BITS + GENERATION_BITS)  # from an older version
    script.event(700, Kind.COLLECTION, NO_NAME, -1)  # damaged

    timeline = build_timeline(script.snapshot())
    assert rows(timeline) == [
        ("mine", "user", 10, 400, 0, TRACK, 0, True),
        ("garbage collection", "gc", 100, 300, 1, TRACK, 0, True),
        ("garbage collection", "gc", 470, 500, 0, TRACK, 1, True),
        ("garbage collection", "gc", 560, 600, 0, TRACK, 1, True),
        ("garbage collection", "gc", 700, 700, 0, TRACK, 1, True),
    ]
    first = timeline.slices.block_of(GARBAGE_COLLECTION).start
    assert timeline.span_args[first + 1] == {"generation": 2, "collected": 7, "trigger": "gc.collect()"}
    assert [timeline.span_args[first + row]["trigger"] for row in (2, 3)] == ["automatic", "unknown"]
    parts = {part.part: part.total_ns for part in timeline.summary().parts}
    assert (parts["gc"], parts["forward"]) == (200, 250)


def test_overlapping_ranges_have_a_row_each() -> None:
    script = EventScript()
    for number in range(3):
        script.collective(10 * number, Kind.RANGE_BEGIN, range_text(f"gloo:{number}", "communication"), 2 * number)
    for number in range(3):
        script.collective(100 + 10 * number, Kind.RANGE_END, range_text(f"gloo:{number}", "communication"), 2 * number)

    timeline = build_timeline(script.snapshot())
    assert rows(timeline) == [
        ("gloo:0", "communication", 0, 100, 0, TRACK, 0, True),
        ("gloo:1", "communication", 10, 110, 0, "ranges · MainThread (2)", 0, True),
        ("gloo:2", "communication", 20, 120, 0, "ranges · MainThread (3)", 0, True),
    ]


def test_the_text_of_a_name_is_read_back_and_other_text_is_a_name() -> None:
    assert parse_range(FETCH).category == "data loading"
    assert parse_range(range_text('a "name" · ü', "user")) == RangeName('a "name" · ü', "user")
    for text in ("#3", "[1, 2]", '["nonsense", "x"]', "[" * 100_000, "null"):
        assert parse_range(text) == RangeName(text, "user")


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "data loading"),
        ("Optimizer.zero_grad#AdamW.zero_grad", "optimizer"),
        ("FSDP::pre_forward (0)", "communication"),
        ("gloo:all_reduce", "communication"),
        ("DistributedDataParallel.forward", "torch"),
        ("ProfilerStep#3", "torch"),
        ("my step", "user"),
    ],
)
def test_torchs_names_have_their_categories(name: str, category: str) -> None:
    assert category_of(name) == category


@pytest.mark.parametrize(
    ("name", "category", "reported"),
    [
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "data loading", None),
        ("clip_grad_norm_", "optimizer", None),
        ("Optimizer.step#AdamW.step", "optimizer", None),
        ("torch.compile 0/1: tensor 'secret' size mismatch", "compile", "torch.compile 0/1"),
        ("gloo:all_reduce", "communication", None),
        ("train on secret data", "user", "annotation 1"),
        ("torch.compile secret", "user", "annotation 1"),
    ],
)
def test_a_report_replaces_the_users_names(name: str, category: str, reported: str | None) -> None:
    names = ReportNames(str)

    assert names.name(range_name(name, category)) == range_name(reported or name, category)
