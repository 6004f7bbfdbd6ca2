"""Timelines of rings written by hand, of both engines, whole and wrapped: spans, steps, call numbers, lost events."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from modtrace import Timeline
from modtrace.ring import read_ring
from modtrace.timeline import Mark, Process, Track
from modtrace.timeline.nesting import find_parents, nest_by_time
from tests.support.event_script import WALL, EventScript
from tests.support.profiler_truth import share_nested
from tests.support.timelines import build_timeline

Row = tuple[str, str, int, int, int, int]


def rows(timeline: Timeline) -> list[Row]:
    """Name, phase, times since `WALL`, depth and call of each span."""
    return [
        (span.fqn, span.phase, span.start_ns - WALL, span.end_ns - WALL, span.depth, span.call)
        for span in timeline.spans
    ]


def two_calls(script: EventScript) -> tuple[int, int]:
    """Forward of "A" from 10 to 30 with "A.b" in it from 15 to 20, three nodes in all."""
    a, b = script.name("A", "A", "A"), script.name("A.b", "b: B", "B")
    script.enter(10, a, sequence=0)
    script.enter(15, b, sequence=1)
    script.exit(20, b, sequence=2)
    script.exit(30, a, sequence=3)
    return a, b


def test_an_empty_ring_is_an_empty_timeline() -> None:
    timeline = build_timeline(EventScript().snapshot())

    assert len(timeline.spans) == 0
    assert timeline.tracks == []
    assert dict(timeline.stats) == dict.fromkeys(timeline.stats, 0)


def test_a_step_of_the_native_engine_has_nested_forward_and_backward_spans() -> None:
    script = EventScript()
    two_calls(script)
    for begin, sequence in ((40, 2), (50, 1), (60, 0)):
        script.node(begin, begin + 5, sequence)
    script.accumulate_end(70)
    script.step(80, 0)

    timeline = build_timeline(script.snapshot())

    assert rows(timeline) == [
        ("A", "forward", 10, 30, 0, 0),
        ("A.b", "forward", 15, 20, 1, 0),
        ("A", "backward", 40, 70, 0, 0),
        ("A.b", "backward", 50, 60, 1, 0),
    ]
    assert [(span.name, span.module_class) for span in timeline.spans][:2] == [("A", "A"), ("b: B", "B")]
    assert timeline.columns.parent.tolist() == [-1, 0, -1, 2]
    assert timeline.columns.link.tolist() == [0, 1, 0, 1]
    assert timeline.tracks == [
        Track("forward", "MainThread", 1, Process(0)),
        Track("backward", "MainThread", 1, Process(0)),
    ]
    assert timeline.marks == [Mark(WALL + 80, "step", "step 0")]
    assert dict(timeline.stats) == {**dict.fromkeys(timeline.stats, 0), "recorded": 12}


def test_a_step_of_the_python_engine_has_the_spans_of_the_native_one() -> None:
    script = EventScript()
    a, b = two_calls(script)
    script.call_backward(40, a, graph_task=1)
    script.call_backward(50, b, graph_task=1)
    script.call_backward(60, a, graph_task=1)
    script.backward_over(70, graph_task=1)

    assert rows(build_timeline(script.snapshot())) == [
        ("A", "forward", 10, 30, 0, 0),
        ("A.b", "forward", 15, 20, 1, 0),
        ("A", "backward", 40, 70, 0, 0),
        ("A.b", "backward", 50, 60, 1, 0),
    ]


def test_spans_count_the_steps_that_had_ended() -> None:
    script = EventScript()
    a = script.name("A")
    for number in range(3):
        script.enter(10 * number, a, number)
        script.exit(10 * number + 5, a, number)
        script.step(10 * number + 6, number + 4)

    timeline = build_timeline(script.snapshot())

    # The first step that ends in the ring is the fifth: the recording had counted four before.
    assert [(span.call, span.step) for span in timeline.spans] == [(0, 4), (1, 5), (2, 6)]


def test_runs_of_nodes_outside_modules_are_counted_and_not_shown() -> None:
    script = EventScript()
    two_calls(script)
    script.node(40, 41, 3)
    script.node(50, 51, 4)
    script.node(60, 61, 4, graph_task=1)

    timeline = build_timeline(script.snapshot())

    assert timeline.stats.unattributed == 2
    assert [span.phase for span in timeline.spans] == ["forward", "forward"]


def test_a_node_inside_another_node_of_its_call_has_no_span() -> None:
    script = EventScript()
    two_calls(script)
    script.node_begin(40, 1, graph_task=1)
    script.node(42, 43, 1, graph_task=1)
    script.node_end(45, 1, graph_task=1)
    script.node_begin(50, 0, graph_task=1)
    script.node(52, 53, 0, graph_task=2)
    script.node_end(55, 0, graph_task=1)

    # The second node runs its own backward pass.
    assert rows(build_timeline(script.snapshot()))[2:] == [
        ("A", "backward", 40, 55, 0, 0),
        ("A.b", "backward", 40, 50, 1, 0),
        ("A", "backward", 52, 53, 1, 0),
    ]


def test_a_non_reentrant_recomputation_lies_inside_the_backward_that_asked_for_it() -> None:
    script = EventScript()
    _, b = two_calls(script)
    script.node_begin(40, 1)
    script.enter(42, b, 0, sequence=7, recompute=True)
    script.exit(44, b, 0, sequence=8, recompute=True)
    script.node_end(50, 1)
    script.node(60, 65, 0)

    timeline = build_timeline(script.snapshot())

    assert rows(timeline)[2:] == [
        ("A", "backward", 40, 65, 0, 0),
        ("A.b", "backward", 40, 60, 1, 0),
        ("A.b", "recompute", 42, 44, 2, 0),
    ]
    assert timeline.columns.parent.tolist()[2:] == [-1, 2, 3]
    # The recomputation has no arrow.
    assert timeline.columns.link.tolist() == [0, 1, 0, 1, -1]


def test_a_forward_inside_a_node_lies_on_the_backward_track_and_counts() -> None:
    script = EventScript()
    _, b = two_calls(script)
    script.node_begin(40, 0, graph_task=1)
    script.enter(42, b, 1, sequence=7)
    script.exit(44, b, 1, sequence=9)
    script.node(45, 47, 8, graph_task=2)
    script.node_end(50, 0, graph_task=1)

    timeline = build_timeline(script.snapshot())

    assert rows(timeline)[2:] == [
        ("A", "backward", 40, 50, 0, 0),
        ("A.b", "forward", 42, 44, 1, 1),
        ("A.b", "backward", 45, 47, 1, 1),
    ]
    assert [timeline.tracks[track].kind for track in timeline.columns.track] == ["forward"] * 2 + ["backward"] * 3
    assert timeline.columns.parent.tolist()[2:] == [-1, 2, 2]
    # An arrow leads from this forward to its backward, too.
    assert timeline.columns.link.tolist()[3:] == [1, 1]


def test_a_recomputation_of_several_calls_repeats_those_before_the_one_that_asked() -> None:
    script = EventScript()
    a, b, c = script.name("A"), script.name("A.b"), script.name("A.c")
    script.enter(1, a, sequence=0)
    for number, name in enumerate((c, b, c, b, b)):
        script.enter(2 + 2 * number, name, (0, 0, 1, 1, 2)[number], sequence=number)
        script.exit(3 + 2 * number, name, (0, 0, 1, 1, 2)[number], sequence=number + 1)
    script.enter(12, c, 2, sequence=5)
    script.exit(13, c, 2, sequence=6)
    script.exit(19, a, sequence=6)
    # Node 4, of the last b, asks for the recomputation of c, b, b; the node of the c after it has already run.
    script.node(20, 21, 5)
    script.node_begin(30, 4)
    for at, name, number in ((31, c, 0), (33, b, 0), (35, b, 1)):
        script.enter(at, name, number, sequence=9, recompute=True)
        script.exit(at + 1, name, number, sequence=9, recompute=True)
    script.node_end(40, 4)

    timeline = build_timeline(script.snapshot())

    again = [(span.fqn, span.call) for span in timeline.spans if span.phase == "recompute"]
    assert again == [("A.c", 1), ("A.b", 1), ("A.b", 2)]


def test_a_recomputation_has_the_call_index_of_the_call_that_it_repeats() -> None:
    script = EventScript()
    a, b = script.name("A"), script.name("A.b")
    script.enter(1, a, sequence=0)
    for number in range(3):
        script.enter(2 + 4 * number, b, number, sequence=3 * number)
        script.exit(3 + 4 * number, b, number, sequence=3 * number + 2)
    script.exit(19, a, sequence=9)
    # Reentrant checkpoints: A's own nodes 8, 5 and 2 repeat the calls, the last first; after each, its nodes run.
    for again, sequence in enumerate((8, 5, 2)):
        at = 20 + 10 * again
        script.node_begin(at, sequence, graph_task=1)
        script.enter(at + 1, b, again, sequence=20 + again, recompute=True)
        script.exit(at + 2, b, again, sequence=21 + again, recompute=True)
        script.node(at + 3, at + 4, 20 + again, graph_task=2 + again)
        script.node_end(at + 5, sequence, graph_task=1)

    timeline = build_timeline(script.snapshot())

    assert [(s.phase, s.call) for s in timeline.spans if s.fqn == "A.b" and s.phase != "forward"] == [
        ("recompute", 2),
        ("backward", 2),
        ("recompute", 1),
        ("backward", 1),
        ("recompute", 0),
        ("backward", 0),
    ]


def test_stats_of_a_ring_that_wrapped_are_exact() -> None:
    script = EventScript(capacity=16)
    a = script.name("A")
    for number in range(20):
        script.enter(10 * number, a, number)
        script.exit(10 * number + 5, a, number)
    script.enter(200, a, 20)

    timeline = build_timeline(script.snapshot())

    # The ring keeps the last 16 of 41 events: the exit of call 12, the calls 13 to 19, and the enter of call 20.
    assert dict(timeline.stats) == {
        "recorded": 41,
        "overwritten": 25,
        "torn": 0,
        "unfinished": 1,
        "unstarted": 1,
        "unattributed": 0,
    }
    assert [(span.call, span.complete) for span in timeline.spans] == [
        (12, False),
        *[(call, True) for call in range(13, 20)],
        (20, False),
    ]
    assert rows(timeline)[0] == ("A", "forward", 125, 125, 0, 12)
    assert rows(timeline)[-1] == ("A", "forward", 200, 200, 0, 20)


def test_times_follow_the_wall_clock_between_two_readings() -> None:
    script = EventScript()
    a = script.name("A")
    script.enter(1_000_000, a)
    script.exit(9_000_000, a)
    snapshot = script.snapshot()
    late = {"kind": "anchor", "monotonic": 10_000_000, "wall": WALL + 10_001_000}

    timeline = build_timeline(snapshot._replace(records=[*snapshot.records, late]))

    # The wall clock ran 100 ppm fast.
    assert [(row[2], row[3]) for row in rows(timeline)] == [(1_000_100, 9_000_900)]


def test_names_missing_in_a_cut_file_get_a_placeholder(tmp_path: Path) -> None:
    script = EventScript(path=tmp_path / "run.modtrace", clock=lambda time: 1 << 60 | time)
    script.enter(1, 5)
    script.exit(2, 5)

    timeline = build_timeline(read_ring(tmp_path / "run.modtrace"))
    assert [(span.fqn, span.module_class) for span in timeline.spans] == [("#5", "?")]


@given(seed=st.integers(0, 1 << 30), calls=st.integers(1, 12), capacity=st.sampled_from([16, 24, 256]))
def test_any_recording_nests_whatever_the_ring_lost(seed: int, calls: int, capacity: int) -> None:
    choose = random.Random(seed)
    script = EventScript(capacity)
    names = [script.name(f"module {number}") for number in range(4)]
    now = 0
    sequence = 0

    def tick() -> int:
        nonlocal now
        now += choose.randrange(3)
        return now

    for task in range(2):
        stack: list[tuple[int, int]] = []
        first = sequence
        for number in range(calls):
            while stack and choose.random() < 0.5:
                script.exit(tick(), *stack.pop(), sequence)
            call = (choose.choice(names), task * calls + number)
            script.enter(tick(), *call, sequence)
            stack.append(call)
            sequence += choose.randrange(3)
        while stack:
            script.exit(tick(), *stack.pop(), sequence)
            sequence += choose.randrange(2)
        for node in reversed(range(first, sequence)):
            script.node_begin(tick(), node, graph_task=task)
            script.node_end(tick(), node, graph_task=task)

    timeline = build_timeline(script.snapshot())
    columns = timeline.columns

    assert share_nested(timeline) == 1
    inner = np.flatnonzero(columns.parent >= 0)
    outer = columns.parent[inner]
    assert np.all(outer < inner)
    assert np.all(columns.track[outer] == columns.track[inner])
    assert np.all(columns.depth[inner] == columns.depth[outer] + 1)
    assert np.all(columns.start[outer] <= columns.start[inner])
    assert np.all(columns.end[inner] <= columns.end[outer])
    assert timeline.stats.recorded - timeline.stats.overwritten == len(script.events())
    # If no span is empty, the times give the same nesting.
    if np.all(columns.start < columns.end):
        assert nest_by_time(columns).parent.tolist() == columns.parent.tolist()


def test_spans_without_the_spans_around_them_have_no_parent() -> None:
    # The second track begins inside a span that is missing; so does the first, whose next span is complete.
    track, depth = np.array([0, 1, 0, 1, 0], np.int32), np.array([1, 1, 0, 2, 1], np.int32)

    assert find_parents(track, depth).tolist() == [-1, -1, -1, 1, 2]
    assert find_parents(track[:2], depth[:2]).tolist() == [-1, -1]
