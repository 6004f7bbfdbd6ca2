"""The call that each backward node belongs to, from sequence numbers by hand and for any tree of calls."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from modtrace.timeline.decode.attribution import attribute_nodes, enclosing_call
from modtrace.timeline.decode.intervals import Intervals, build_intervals
from tests.support.event_script import EventScript

ONE_THREAD = np.array([1])


def owners(
    script: EventScript, torch_threads: list[int] | None = None
) -> tuple[Intervals, dict[tuple[int, int], int | None]]:
    """Return the intervals, and the name of the call of each node (forward thread or -1, sequence)."""
    events = script.events()
    intervals = build_intervals(events)
    call = attribute_nodes(intervals, events, np.array(torch_threads or [1]))
    nodes = np.flatnonzero(intervals.is_node).tolist()
    assert all(call[at] == -1 for at in range(len(intervals)) if at not in nodes)
    return intervals, {
        (int(intervals.forward_thread[at]), int(intervals.sequence[at])): None
        if call[at] < 0
        else int(intervals.name[call[at]])
        for at in nodes
    }


def test_a_node_belongs_to_the_innermost_call_whose_range_holds_it() -> None:
    script = EventScript()
    a, b, c, d = (script.name(name) for name in ("A", "A.b", "A.c", "A.d"))
    script.enter(1, a, sequence=10)
    script.enter(2, b, sequence=12)
    script.exit(3, b, sequence=14)
    script.enter(4, c, sequence=14)
    script.exit(5, c, sequence=14)
    script.enter(6, d, sequence=14)
    script.exit(7, d, sequence=15)
    script.exit(8, a, sequence=17)
    for at, sequence in enumerate(reversed(range(9, 19))):
        script.node(10 + 2 * at, 11 + 2 * at, sequence)

    _, owner = owners(script)

    # b made two nodes, c none, d one; A made two before b and two after d.
    assert [owner[1, sequence] for sequence in range(9, 19)] == [None, a, a, b, b, d, a, a, None, None]


def test_sequence_numbers_of_two_threads_are_independent() -> None:
    script = EventScript()
    worker = script.add_thread("worker", 2, torch_thread_id=7)
    a, b = script.name("A"), script.name("B")
    script.enter(1, a, sequence=0)
    script.on_thread(worker)
    script.enter(2, b, sequence=1)
    script.exit(3, b, sequence=3)
    script.on_thread(0)
    script.exit(4, a, sequence=2)
    # Backward runs on the first thread for the nodes of both threads.
    for at, (forward_thread, sequence) in enumerate([(7, 2), (7, 1), (7, 0), (1, 1), (1, 0), (9, 1)]):
        script.node(10 + 2 * at, 11 + 2 * at, sequence, forward_thread=forward_thread)

    _, owner = owners(script, [1, 7])

    assert owner == {(7, 2): b, (7, 1): b, (7, 0): None, (1, 1): a, (1, 0): a, (9, 1): None}


def test_nodes_made_by_create_graph_belong_to_the_call_whose_node_made_them() -> None:
    script = EventScript()
    a, b = script.name("A"), script.name("A.b")
    script.enter(1, a, sequence=0)
    script.enter(2, b, sequence=1)
    script.exit(3, b, sequence=2)
    script.exit(4, a, sequence=2)
    # backward(create_graph=True): the node of b makes 2 and 3, the node of A makes 4; no node of a call makes 5.
    script.node_begin(10, 1, graph_task=1)
    script.graph_built(11, 2)
    script.graph_built(12, 4)
    script.node_end(13, 1, graph_task=1)
    script.node_begin(14, 0, graph_task=1)
    script.graph_built(15, 4)
    script.graph_built(16, 5)
    script.node_end(17, 0, graph_task=1)
    for at, sequence in enumerate([5, 4, 3, 2]):
        script.node(20 + 2 * at, 21 + 2 * at, sequence, graph_task=2)

    _, owner = owners(script)

    assert owner == {(1, 0): a, (1, 1): b, (1, 2): b, (1, 3): b, (1, 4): a, (1, 5): None}


def test_a_recomputation_has_a_range_of_its_own() -> None:
    script = EventScript()
    a = script.name("A")
    script.enter(1, a, sequence=0)
    script.exit(2, a, sequence=2)
    script.node_begin(10, 1, graph_task=1)
    script.enter(11, a, sequence=5, recompute=True)
    script.exit(12, a, sequence=7, recompute=True)
    script.node(13, 14, 6, graph_task=2)
    script.node_end(15, 1, graph_task=1)

    intervals, owner = owners(script)
    call = attribute_nodes(intervals, script.events(), ONE_THREAD)
    node = int(np.flatnonzero(intervals.sequence == 6)[0])

    assert owner == {(1, 1): a, (1, 6): a}
    assert intervals.is_recompute[call[node]]


def test_nodes_of_the_python_engine_belong_to_the_call_they_name() -> None:
    script = EventScript()
    a = script.name("A")
    for number in range(2):
        script.enter(1 + 2 * number, a, number, sequence=9)
        script.exit(2 + 2 * number, a, number, sequence=9)
    script.call_backward(10, a, 1, graph_task=1)
    script.call_backward(11, a, 0, graph_task=1)
    script.call_backward(12, a, 5, graph_task=1)
    script.backward_over(13, graph_task=1)

    events = script.events()
    intervals = build_intervals(events)
    call = attribute_nodes(intervals, events, ONE_THREAD)
    nodes = np.flatnonzero(intervals.is_node)

    assert [int(intervals.call_key[call[at]]) if call[at] >= 0 else None for at in nodes.tolist()] == [1, 0, None]


def test_the_enclosing_call_is_found_through_nodes() -> None:
    script = EventScript()
    a, b = script.name("A"), script.name("B")
    script.enter(1, a)
    script.node_begin(2, 0, graph_task=1)
    script.node_begin(3, 5, graph_task=2)
    script.enter(4, b, recompute=True)
    script.exit(5, b, recompute=True)
    script.node_end(6, 5, graph_task=2)
    script.node_end(7, 0, graph_task=1)
    script.exit(8, a)

    intervals = build_intervals(script.events())

    assert intervals.depth.tolist() == [0, 1, 2, 3]
    assert enclosing_call(intervals).tolist() == [-1, 0, 0, 0]


@given(seed=st.integers(0, 1 << 30), calls=st.integers(1, 15))
def test_every_node_of_any_tree_of_calls_belongs_to_the_call_that_made_it(seed: int, calls: int) -> None:
    choose = random.Random(seed)
    script = EventScript(capacity=256)
    names: list[int] = []
    made: list[int | None] = []
    stack: list[int] = []
    for at in range(calls * 4):
        action = choose.randrange(3)
        if action == 0 and len(names) < calls:
            names.append(script.name(f"module {len(names)}"))
            script.enter(at, names[-1], sequence=len(made))
            stack.append(names[-1])
        elif action == 1 and stack:
            script.exit(at, stack.pop(), sequence=len(made))
        else:
            made.append(stack[-1] if stack else None)
    while stack:
        script.exit(200, stack.pop(), sequence=len(made))
    order = choose.sample(range(len(made)), len(made))
    for sequence in order:
        script.node(300, 301, sequence)

    _, owner_of = owners(script)

    assert owner_of == {(1, sequence): owner for sequence, owner in enumerate(made)}
