"""Sentences about hangs, from states by hand, and the progress of groups from rings by hand."""

from __future__ import annotations

from typing import Any

import pytest

from modtrace.ring import Kind
from modtrace.timeline import OpenCall, ThreadStack
from modtrace.where import RankState, find_hangs
from modtrace.where.rank_collectives import Blocked, GroupProgress, read_group_progress
from tests.support.event_script import EventScript

SECOND = 10**9
NOW = 100 * SECOND
ALL_REDUCE, BARRIER = '["all_reduce", "0"]', '["barrier", "0"]'


def called(*operators: str, waits_s: float | None = None, group: str = "0", ranks: int = 4) -> GroupProgress:
    """Progress after these collectives, the last of which has been waited in for so many seconds."""
    last = len(operators) - 1
    blocked = None if waits_s is None else Blocked(operators[-1], last, NOW - int(waits_s * SECOND), 7)
    return GroupProgress(group, tuple(range(ranks)), "default_pg", dict(enumerate(operators)), blocked)


def state(rank: int, *groups: GroupProgress, stack: tuple[OpenCall, ...] = (), **fields: Any) -> RankState:
    thread = ThreadStack("MainThread", 7, stack, NOW - 25 * SECOND)
    known = {"state": "running", "usual_ns": {}} | fields
    return RankState(
        f"{rank}.modtrace", rank, 100 + rank, "native", known["state"], 3, (thread,), NOW, 0, known["usual_ns"], groups
    )


def calls(*fqns: str, phase: str = "forward", since_s: float = 25) -> tuple[OpenCall, ...]:
    return tuple(OpenCall(fqn, phase, NOW - int(since_s * SECOND)) for fqn in fqns)


def text(*states: RankState) -> str:
    (hang,) = find_hangs(states)
    return hang.text


def test_a_rank_that_has_not_called_it_is_named_with_its_module() -> None:
    waiting = [
        state(rank, called("all_reduce", "all_reduce", waits_s=24), stack=calls("GPT.h.7", phase="backward"))
        for rank in range(3)
    ]
    late = state(3, called("all_reduce"), stack=calls("GPT", "GPT.h.6"), usual_ns={("GPT.h.6", "forward"): 50_000_000})
    assert text(*waiting, late) == (
        "ranks 0-2 wait in all_reduce #1 for 24.0 s, in backward GPT.h.7; "
        "rank 3 has not called it: in forward GPT › h.6 for 25.0 s (usually 50 ms)"
    )


def test_a_rank_that_called_another_collective_is_named_with_that() -> None:
    waiting = [state(rank, called("all_reduce", waits_s=5)) for rank in (0, 1, 3)]
    (hang,) = find_hangs([*waiting, state(2, called("barrier", waits_s=5))])
    assert hang.called_other == ((2, "barrier"),)
    assert hang.text == "ranks 0-1, 3 wait in all_reduce #0 for 5.0 s; rank 2 called barrier #0 instead"


def test_a_dead_rank_is_named_with_its_last_module() -> None:
    waiting = [state(rank, called("barrier", "all_reduce", waits_s=9)) for rank in (0, 2, 3)]
    dead = state(1, called("barrier"), stack=calls("GPT"), state="dead")
    assert text(*waiting, dead) == (
        "ranks 0, 2-3 wait in all_reduce #1 for 9.0 s; rank 1 died before calling it, in forward GPT"
    )


def test_a_rank_in_no_module_and_one_without_a_ring_are_named() -> None:
    waiting = [state(rank, called("all_reduce", waits_s=2)) for rank in (0, 1)]
    assert text(*waiting, state(2)) == (
        "ranks 0-1 wait in all_reduce #0 for 2.0 s; rank 2 has not called it: in no module for 25.0 s; "
        "of rank 3 there is no ring"
    )


def test_a_collective_that_all_called_is_said_not_to_complete() -> None:
    ranks = [state(rank, called("all_reduce", waits_s=rank + 2)) for rank in range(4)]
    assert text(*ranks) == (
        "ranks 0-3 wait in all_reduce #0 for 2.0 s to 5.0 s; all ranks called it, so it does not complete"
    )


def test_the_first_collective_that_anyone_waits_in_is_the_one_that_hangs() -> None:
    ahead = state(0, called("all_reduce", "all_reduce", waits_s=3, ranks=2))
    (hang,) = find_hangs([ahead, state(1, called("all_reduce", waits_s=4, ranks=2))])
    assert (hang.counter, hang.waiting, hang.not_called) == (0, (1,), ())


def test_a_wait_of_less_than_a_second_is_no_hang() -> None:
    assert find_hangs([state(0, called("all_reduce", waits_s=0.9)), state(1)]) == []


def test_subgroups_are_told_by_what_they_are_for() -> None:
    (hang,) = find_hangs([state(0, called("barrier", waits_s=2, group="3", ranks=2)._replace(description="mesh_dp"))])
    assert hang.text.startswith("rank 0 waits in barrier #0 of group mesh_dp for 2.0 s")


def progress(script: EventScript) -> GroupProgress:
    (found,) = read_group_progress(script.snapshot())
    return found


def test_a_wait_that_has_not_ended_blocks() -> None:
    script = EventScript()
    script.note_group("0", "0-1", "default_pg")
    script.collective(10, Kind.COLLECTIVE_ENTER, ALL_REDUCE, 0)
    script.collective(20, Kind.COLLECTIVE_EXIT, ALL_REDUCE, 8)
    script.collective(30, Kind.WAIT_ENTER, ALL_REDUCE, 0)
    assert progress(script) == GroupProgress(
        "0", (0, 1), "default_pg", {0: "all_reduce"}, Blocked("all_reduce", 0, 30, 1)
    )


def test_a_call_that_has_not_returned_blocks() -> None:
    script = EventScript()
    script.collective(10, Kind.COLLECTIVE_ENTER, BARRIER, 4)
    assert progress(script).blocked == Blocked("barrier", 4, 10, 1)


@pytest.mark.parametrize("completes", [True, False])
def test_what_was_not_seen_to_complete_blocks_only_where_its_kind_was_seen_to(completes: bool) -> None:
    script = EventScript()
    for counter in range(2):
        script.collective(10 * counter + 1, Kind.COLLECTIVE_ENTER, ALL_REDUCE, counter)
        script.collective(10 * counter + 2, Kind.COLLECTIVE_EXIT, ALL_REDUCE, 8)
        if completes and counter == 0:
            script.collective(5, Kind.COLLECTIVE_DONE, ALL_REDUCE, 0)
    assert progress(script).blocked == (Blocked("all_reduce", 1, 11, 1) if completes else None)


def test_what_is_complete_blocks_nothing() -> None:
    script = EventScript()
    script.collective(10, Kind.COLLECTIVE_ENTER, ALL_REDUCE, 0)
    script.collective(20, Kind.COLLECTIVE_EXIT, ALL_REDUCE, 8)
    script.collective(30, Kind.WAIT_ENTER, ALL_REDUCE, 0)
    script.collective(40, Kind.WAIT_EXIT, ALL_REDUCE, 0)
    assert (progress(script).blocked, progress(script).last) == (None, 0)
