"""Pairing and nesting of starts and ends: calls, nodes and segments, with lost events, and random events."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modtrace.ring import Kind
from modtrace.ring.slot_format import ABANDONED_BIT, CALL_KEY_BITS, NO_NAME, SEQUENCE_BITS
from modtrace.timeline.decode.intervals import Intervals, build_intervals
from tests.support.event_script import EventScript


def rows(intervals: Intervals, *fields: str) -> list[tuple[int, ...]]:
    return list(zip(*(getattr(intervals, field).tolist() for field in fields), strict=True))


def test_without_events_there_are_no_intervals() -> None:
    assert len(build_intervals(EventScript().events())) == 0


def test_calls_pair_by_name_and_number() -> None:
    script = EventScript()
    outer, inner = script.name("A"), script.name("A.b")
    script.enter(10, outer, sequence=3)
    script.enter(11, inner, 0, sequence=4)
    script.exit(12, inner, 0, sequence=6)
    script.enter(13, inner, 1, sequence=6)
    script.exit(15, inner, 1, sequence=6)
    script.exit(19, outer, sequence=9)

    intervals = build_intervals(script.events())

    assert rows(intervals, "name", "call_key", "start_ns", "end_ns", "sequence", "exit_sequence") == [
        (outer, 0, 10, 19, 3, 9),
        (inner, 0, 11, 12, 4, 6),
        (inner, 1, 13, 15, 6, 6),
    ]
    assert rows(intervals, "depth", "parent", "has_start", "has_end") == [(0, -1, 1, 1), (1, 0, 1, 1), (1, 0, 1, 1)]
    assert not intervals.is_node.any()


def test_a_module_that_calls_itself_nests_in_itself() -> None:
    script = EventScript()
    name = script.name("A")
    for number in range(3):
        script.enter(number, name, number)
    for number in reversed(range(3)):
        script.exit(10 - number, name, number)

    assert rows(build_intervals(script.events()), "call_key", "start_ns", "end_ns", "depth", "parent") == [
        (0, 0, 10, 0, -1),
        (1, 1, 9, 1, 0),
        (2, 2, 8, 2, 1),
    ]


def test_calls_open_at_the_end_last_until_the_last_event() -> None:
    script = EventScript()
    outer, inner = script.name("A"), script.name("A.b")
    script.enter(1, outer)
    script.enter(2, inner)
    script.mark(7, "here")

    intervals = build_intervals(script.events())
    assert rows(intervals, "start_ns", "end_ns", "depth", "has_end") == [
        (1, 7, 0, 0),
        (2, 7, 1, 0),
    ]


def test_calls_open_before_the_first_event_nest_by_their_exits() -> None:
    script = EventScript(capacity=16)
    outer, inner, other = script.name("A"), script.name("A.b"), script.name("A.c")
    script.enter(1, outer)
    script.enter(2, inner)
    for at in range(3, 16):
        script.mark(at, "fills the ring")
    script.exit(16, inner)
    script.enter(17, other)
    script.exit(18, other)
    script.exit(19, outer)
    intervals = build_intervals(script.events())

    # Nineteen events in sixteen slots: the first three are overwritten, so the first left is at 4.
    assert rows(intervals, "name", "start_ns", "end_ns", "depth", "parent", "has_start", "has_end") == [
        (outer, 4, 19, 0, -1, 0, 1),
        (inner, 4, 16, 1, 0, 0, 1),
        (other, 17, 18, 1, 0, 1, 1),
    ]


def test_an_inner_call_without_an_exit_ends_with_the_outer_one() -> None:
    script = EventScript()
    outer, inner, after = script.name("A"), script.name("A.b"), script.name("B")
    script.enter(1, outer)
    script.enter(2, inner)
    script.exit(5, outer)
    script.enter(8, after)
    script.exit(9, after)

    assert rows(build_intervals(script.events()), "name", "start_ns", "end_ns", "depth", "parent", "has_end") == [
        (outer, 1, 5, 0, -1, 1),
        (inner, 2, 5, 1, 0, 0),
        (after, 8, 9, 0, -1, 1),
    ]


def test_threads_do_not_nest_in_each_other() -> None:
    script = EventScript()
    name, other = script.name("A"), script.add_thread("worker", 2)
    script.enter(1, name, 0)
    script.on_thread(other)
    script.enter(2, name, 1)
    script.exit(3, name, 1)
    script.on_thread(0)
    script.exit(4, name, 0)

    assert rows(build_intervals(script.events()), "thread", "start_ns", "end_ns", "depth", "parent") == [
        (0, 1, 4, 0, -1),
        (other, 2, 3, 0, -1),
    ]


def test_a_node_lasts_until_the_next_starts() -> None:
    script = EventScript()
    script.node(10, 12, sequence=5)
    script.accumulate_end(14)
    script.node(15, 16, sequence=4)
    script.accumulate_end(18)
    script.accumulate_end(19)

    intervals = build_intervals(script.events())

    # After the last node, only gradient accumulation is recorded.
    assert rows(intervals, "sequence", "start_ns", "end_ns") == [(5, 10, 15), (4, 15, 19)]
    assert intervals.is_node.all()
    assert rows(intervals, "name", "call_key", "forward_thread", "backward_pass") == [
        (NO_NAME, -1, 1, 0),
        (NO_NAME, -1, 1, 0),
    ]


def test_a_node_does_not_last_into_another_task_or_a_call() -> None:
    script = EventScript()
    script.node(10, 12, sequence=5, graph_task=1)
    script.node(15, 16, sequence=4, graph_task=2)
    name = script.name("A")
    script.enter(20, name)
    script.exit(21, name)
    script.node(25, 26, sequence=7, graph_task=2)

    intervals = build_intervals(script.events())

    nodes = [(start, end) for node, start, end in rows(intervals, "is_node", "start_ns", "end_ns") if node]
    assert nodes == [(10, 12), (15, 16), (25, 26)]


def test_waiting_for_nodes_of_another_thread_is_not_a_nodes_own_time() -> None:
    script = EventScript()
    worker = script.add_thread("worker", 2)
    script.node(10, 12, sequence=5)
    script.on_thread(worker)
    script.node(14, 15, sequence=4)
    script.on_thread(0)
    script.node(20, 21, sequence=3)

    assert rows(build_intervals(script.events()), "thread", "start_ns", "end_ns") == [
        (0, 10, 12),
        (0, 20, 21),
        (worker, 14, 15),
    ]


def test_nodes_of_an_inner_backward_nest() -> None:
    script = EventScript()
    script.node_begin(1, 9, graph_task=1)
    script.node(2, 3, 12, graph_task=2)
    script.node(4, 5, 11, graph_task=2)
    script.node_end(6, 9, graph_task=1)

    assert rows(build_intervals(script.events()), "sequence", "start_ns", "end_ns", "depth", "parent") == [
        (9, 1, 6, 0, -1),
        (12, 2, 4, 1, 0),
        (11, 4, 5, 1, 0),
    ]


def test_nodes_pair_if_one_end_is_missing() -> None:
    script = EventScript()
    script.node_begin(1, 9)
    script.node_begin(2, 8)
    script.node_end(5, 9)
    script.node(6, 7, 7)
    script.node_end(8, 6)

    intervals = build_intervals(script.events())

    assert rows(intervals, "sequence", "start_ns", "end_ns", "depth", "has_start") == [
        (6, 1, 8, 0, 0),
        (9, 1, 6, 1, 1),
        (8, 2, 6, 2, 1),
        (7, 6, 7, 1, 1),
    ]


def test_a_segment_lasts_until_the_next_of_its_pass() -> None:
    script = EventScript()
    a, b = script.name("A"), script.name("A.b")
    script.call_backward(10, a, 4, graph_task=7)
    script.call_backward(13, b, 2, graph_task=7)
    script.call_backward(15, NO_NAME, graph_task=7)
    script.backward_over(19, graph_task=7)

    intervals = build_intervals(script.events())

    assert rows(intervals, "name", "call_key", "start_ns", "end_ns", "has_end") == [
        (a, 4, 10, 13, 1),
        (b, 2, 13, 15, 1),
        (NO_NAME, 0, 15, 19, 1),
    ]
    assert intervals.is_node.all()
    assert intervals.forward_thread.tolist() == [-1, -1, -1]


def test_an_abandoned_segment_ends_with_the_last_event_that_is_known() -> None:
    script = EventScript()
    a = script.name("A")
    script.call_backward(10, a, graph_task=7)
    script.mark(14, "the last sign of life")
    script.backward_over(99, graph_task=7, abandoned=True)

    assert rows(build_intervals(script.events()), "start_ns", "end_ns", "has_end") == [(10, 14, 0)]


def test_a_segment_after_the_abandoned_end_of_its_pass_has_no_end() -> None:
    script = EventScript()
    script.backward_over(5, graph_task=7, abandoned=True)
    script.call_backward(10, script.name("A"), graph_task=7)
    script.mark(14, "the last event")

    assert rows(build_intervals(script.events()), "start_ns", "end_ns", "has_end") == [(10, 14, 0)]


def test_segments_of_an_inner_backward_nest_in_the_outer_one() -> None:
    script = EventScript()
    a, b = script.name("A"), script.name("B")
    script.call_backward(1, a, graph_task=1)
    script.call_backward(2, b, graph_task=2)
    script.backward_over(3, graph_task=2)
    script.backward_over(5, graph_task=1)

    assert rows(build_intervals(script.events()), "name", "start_ns", "end_ns", "depth", "parent") == [
        (a, 1, 5, 0, -1),
        (b, 2, 3, 1, 0),
    ]


Flat = list[tuple[int, bool, int]]
"""Starts and ends in order: thread, whether it is a start, number of the interval."""


@pytest.mark.parametrize(("time", "end"), [(5, 21), (30, 30), (10**15, 40)])
def test_a_segment_ended_by_another_thread_ends_among_its_own_threads_events(time: int, end: int) -> None:
    script = EventScript()
    outer, inner, other = script.name("A"), script.name("A.b"), script.add_thread("other", 2)
    script.enter(20, outer)
    script.enter(21, inner)
    script.on_thread(other)
    script.exit(time, inner)
    script.on_thread(0)
    script.exit(40, outer)

    assert rows(build_intervals(script.events()), "start_ns", "end_ns", "has_end") == [(20, 40, 1), (21, end, 1)]


def test_segments_that_other_threads_end_in_turn_nest() -> None:
    script = EventScript()
    outer, inner = script.name("A"), script.name("A.b")
    script.enter(20, outer)
    script.enter(21, inner)
    script.on_thread(script.add_thread("one", 2))
    script.exit(90, inner)
    script.on_thread(script.add_thread("two", 3))
    script.exit(50, outer)

    assert rows(build_intervals(script.events()), "start_ns", "end_ns", "depth") == [(20, 90, 0), (21, 90, 1)]


@st.composite
def nested_intervals(draw: st.DrawFn) -> Flat:
    """Well-nested intervals on up to three threads, interleaved."""
    shuffle = random.Random(draw(st.integers(0, 1 << 30)))
    flat: Flat = []
    stacks: list[list[int]] = [[] for _ in range(draw(st.integers(1, 3)))]
    for number in range(draw(st.integers(1, 12))):
        thread = shuffle.randrange(len(stacks))
        for _ in range(shuffle.randrange(len(stacks[thread]) + 1)):
            flat.append((thread, False, stacks[thread].pop()))
        stacks[thread].append(number)
        flat.append((thread, True, number))
    for thread, stack in enumerate(stacks):
        flat.extend((thread, False, number) for number in reversed(stack))
    return flat


@pytest.mark.parametrize("nodes", [False, True], ids=["calls", "nodes"])
@given(flat=nested_intervals(), data=st.data())
def test_intervals_of_any_window_nest_as_they_did(nodes: bool, flat: Flat, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(flat) - 1))
    window = flat[first : data.draw(st.integers(first + 1, len(flat)))]
    script = EventScript(capacity=64)
    threads = [0, script.add_thread("one", 2), script.add_thread("two", 3)]
    name = script.name("A")
    for at, (thread, opens, number) in enumerate(window):
        script.on_thread(threads[thread])
        if nodes:
            # No node belongs to a call, and each has its own graph task, so that no node is lengthened.
            (script.node_begin if opens else script.node_end)(at, number, graph_task=number)
        else:
            (script.enter if opens else script.exit)(at, name, number)

    intervals = build_intervals(script.events())

    seen = {number for _, _, number in window}
    outer_numbers: dict[int, list[int]] = {}
    stacks: dict[int, list[int]] = {}
    for thread, opens, number in flat:
        stack = stacks.setdefault(thread, [])
        if opens:
            outer_numbers[number] = [outer for outer in stack if outer in seen]
            stack.append(number)
        else:
            stack.pop()
    numbers = (intervals.sequence if nodes else intervals.call_key).tolist()
    places = {(number, opens): at for at, (_, opens, number) in enumerate(window)}
    assert sorted(numbers) == sorted(seen)
    for at, number in enumerate(numbers):
        outer = outer_numbers[number]
        assert intervals.depth[at] == len(outer)
        assert (numbers[intervals.parent[at]] if intervals.parent[at] >= 0 else None) == (outer[-1] if outer else None)
        assert intervals.has_start[at] == ((number, True) in places)
        assert intervals.has_end[at] == ((number, False) in places)
        assert intervals.start_ns[at] == places.get((number, True), 0)
        assert intervals.end_ns[at] == places.get((number, False), len(window) - 1)


VALUES = [0, 1, 1 << CALL_KEY_BITS, 1 << SEQUENCE_BITS, ABANDONED_BIT, ABANDONED_BIT | 1]


@given(
    st.lists(
        st.tuples(st.sampled_from(Kind), st.integers(0, 2), st.sampled_from(VALUES), st.integers(0, 2)), min_size=1
    ),
    st.tuples(*3 * [st.integers(0, 100)]),
)
def test_intervals_nest_for_any_events(said: list[tuple[Kind, int, int, int]], clocks: tuple[int, ...]) -> None:
    script = EventScript(capacity=64)
    threads = [0, script.add_thread("one", 2), script.add_thread("two", 3)]
    for at, (kind, name, value, thread) in enumerate(said):
        script.on_thread(threads[thread])
        script.event(at + clocks[thread], kind, name, value)

    intervals = build_intervals(script.events())

    inner = np.flatnonzero(intervals.parent >= 0)
    outer = intervals.parent[inner]
    assert np.all(intervals.start_ns <= intervals.end_ns)
    assert np.all(intervals.thread[inner] == intervals.thread[outer])
    assert np.all(intervals.depth[inner] == intervals.depth[outer] + 1)
    assert np.all(intervals.depth[intervals.parent < 0] == 0)
    assert np.all(intervals.start_ns[outer] <= intervals.start_ns[inner])
    assert np.all(intervals.end_ns[inner] <= intervals.end_ns[outer])
