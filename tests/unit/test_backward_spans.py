"""Backward spans of nodes written by hand, compared with a plain rule that shares no code."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from modtrace.timeline.decode.attribution import attribute_nodes
from modtrace.timeline.decode.intervals import build_intervals
from modtrace.timeline.decode.spans import call_path_lengths, cut_backward_spans
from tests.support.event_script import EventScript

Cut = tuple[str, int, int, int]
"""A backward span: its fqn, start and end in ns, and the number of calls of its call path around it."""


class CallPath:
    """Calls made before all nodes: "a", "a.b", "a.b.c", "a.e" and "d"; each has one sequence number."""

    def __init__(self) -> None:
        self.script = script = EventScript(capacity=256)
        self.names = {fqn: script.name(fqn) for fqn in ("a", "a.b", "a.b.c", "a.e", "d")}
        self.sequence = {"none": 0, "a": 1, "a.b": 2, "a.b.c": 3, "a.e": 5, "d": 6}
        script.enter(1, self.names["a"], sequence=1)
        script.enter(2, self.names["a.b"], sequence=2)
        script.enter(3, self.names["a.b.c"], sequence=3)
        script.exit(4, self.names["a.b.c"], sequence=4)
        script.exit(5, self.names["a.b"], sequence=5)
        script.enter(6, self.names["a.e"], sequence=5)
        script.exit(7, self.names["a.e"], sequence=6)
        script.exit(8, self.names["a"], sequence=6)
        script.enter(9, self.names["d"], sequence=6)
        script.exit(10, self.names["d"], sequence=7)

    def node(self, begin: int, end: int, whose: str, task: int = 0) -> None:
        self.script.node(begin, end, self.sequence[whose], graph_task=task)

    def cut(self) -> list[Cut]:
        events = self.script.events()
        intervals = build_intervals(events)
        call = attribute_nodes(intervals, events, np.array([1]))
        spans = cut_backward_spans(intervals, call, call_path_lengths(intervals))
        fqn = {number: name for name, number in self.names.items()}
        return sorted(
            (
                (fqn[int(intervals.name[c])], int(intervals.start_ns[first]), int(intervals.end_ns[last]), int(level))
                for first, last, c, level in zip(*spans, strict=True)
            ),
            key=lambda cut: (cut[1], cut[3]),
        )


def test_without_nodes_there_are_no_backward_spans() -> None:
    assert CallPath().cut() == []


def test_a_node_has_spans_for_its_whole_call_path() -> None:
    path = CallPath()
    path.node(20, 29, "a.b.c")

    assert path.cut() == [("a", 20, 29, 0), ("a.b", 20, 29, 1), ("a.b.c", 20, 29, 2)]


def test_adjacent_nodes_share_the_spans_of_common_calls() -> None:
    path = CallPath()
    path.node(20, 21, "d")
    path.node(30, 31, "a.e")
    path.node(40, 41, "a")
    path.node(50, 51, "a.b.c")
    path.node(60, 61, "a.b")

    # Each node lasts until the next node starts.
    assert path.cut() == [
        ("d", 20, 30, 0),
        ("a", 30, 61, 0),
        ("a.e", 30, 40, 1),
        ("a.b", 50, 61, 1),
        ("a.b.c", 50, 60, 2),
    ]


def test_a_call_whose_nodes_are_interleaved_has_several_spans() -> None:
    path = CallPath()
    for at, whose in enumerate(["a.b", "d", "a.b", "d"]):
        path.node(20 + 10 * at, 25 + 10 * at, whose)

    assert path.cut() == [
        ("a", 20, 30, 0),
        ("a.b", 20, 30, 1),
        ("d", 30, 40, 0),
        ("a", 40, 50, 0),
        ("a.b", 40, 50, 1),
        ("d", 50, 55, 0),
    ]


def test_a_node_outside_modules_ends_the_spans() -> None:
    path = CallPath()
    path.node(20, 21, "a")
    path.node(30, 31, "none")
    path.node(40, 41, "a")

    assert path.cut() == [("a", 20, 30, 0), ("a", 40, 41, 0)]


def test_another_backward_pass_starts_other_spans() -> None:
    path = CallPath()
    path.node(20, 21, "a", task=1)
    path.node(30, 31, "a", task=2)

    assert path.cut() == [("a", 20, 21, 0), ("a", 30, 31, 0)]


def test_a_call_between_two_nodes_separates_their_spans() -> None:
    path = CallPath()
    path.node(20, 21, "a")
    path.script.enter(24, path.names["d"], 1, sequence=7)
    path.script.exit(25, path.names["d"], 1, sequence=8)
    path.node(30, 31, "a")

    assert path.cut() == [("a", 20, 21, 0), ("a", 30, 31, 0)]


def test_an_inner_backward_pass_has_spans_of_its_own() -> None:
    path = CallPath()
    path.script.node_begin(20, path.sequence["a"], graph_task=1)
    path.node(22, 23, "a.b", task=2)
    path.node(24, 25, "a", task=2)
    path.script.node_end(29, path.sequence["a"], graph_task=1)

    assert path.cut() == [("a", 20, 29, 0), ("a", 22, 25, 0), ("a.b", 22, 24, 1)]


def reference(whose: list[str]) -> list[Cut]:
    """Spans of nodes at 20, 30, …, by a plain rule: a span stays open if the next node is in the same call."""
    cuts: list[Cut] = []
    open_: list[tuple[str, int]] = []
    for at, (one, following) in enumerate(itertools.pairwise([*whose, "none"])):
        begin, end = 20 + 10 * at, 30 + 10 * at if at + 1 < len(whose) else 25 + 10 * at
        parts = one.split(".") if one != "none" else []
        call_path = [".".join(parts[: count + 1]) for count in range(len(parts))]
        open_ += [(fqn, begin) for fqn in call_path[len(open_) :]]
        after = following.split(".") if following != "none" else []
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(parts, after, strict=False)))
        cuts += [(fqn, since, end, level) for level, (fqn, since) in enumerate(open_) if level >= shared]
        del open_[shared:]
    return sorted(cuts, key=lambda cut: (cut[1], cut[3]))


@given(st.lists(st.sampled_from(["none", "a", "a.b", "a.b.c", "a.e", "d"]), min_size=1, max_size=20))
def test_backward_spans_equal_those_of_the_plain_rule(whose: list[str]) -> None:
    path = CallPath()
    for at, fqn in enumerate(whose):
        path.node(20 + 10 * at, 25 + 10 * at, fqn)

    assert path.cut() == reference(whose)
