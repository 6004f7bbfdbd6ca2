"""Parts of runs replayed with some own time shorter, against jobs that are run anew with it."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from modtrace.ranks.slow.late_steps import OwnTime
from modtrace.ranks.slow.replay import RankEvents, Replay, rank_events
from tests.support.simulated_ranks import Job, Op, run, table_of


def events_of(job: Job, *, with_done: bool = True) -> RankEvents:
    table = table_of(job, with_done=with_done)
    return rank_events(table, OwnTime(table))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Job, list[list[int]]]:
    """A job that comes to an end, and by how much shorter the own time before each operation is."""
    ranks = draw(st.integers(2, 5))
    own = st.integers(1, 100)
    programs: list[list[Op]] = [[] for _ in range(ranks)]
    members: list[list[int]] = []
    transfer: list[list[int]] = []
    pending: list[list[int]] = [[] for _ in range(ranks)]
    for key in range(draw(st.integers(1, 8))):
        inside = sorted(draw(st.sets(st.integers(0, ranks - 1), min_size=2)))
        members.append(inside)
        transfer.append([draw(st.integers(1, 50)) for _ in range(ranks)])
        for rank in inside:
            programs[rank].append(Op(draw(own), "call", key))
            pending[rank].append(key)
            for waited_for in pending[rank][: draw(st.integers(0, len(pending[rank])))]:
                programs[rank].append(Op(draw(own), "wait", waited_for))
                pending[rank].remove(waited_for)
    shorter = [[draw(st.integers(0, op.own - 1)) if n else 0 for n, op in enumerate(one)] for one in programs]
    return Job(programs, members, transfer), shorter


@given(jobs())
def test_a_replay_is_what_the_job_would_have_been(made: tuple[Job, list[list[int]]]) -> None:
    job, shorter = made
    programs = [
        [op._replace(own=op.own - less) for op, less in zip(program, lesses, strict=True)]
        for program, lesses in zip(job.programs, shorter, strict=True)
    ]

    events = events_of(job)

    assert (
        Replay(events).times(np.zeros(len(events.time_ns), np.int64)).tolist()
        == events.time_ns.tolist()
        == flat(run(job))
    )
    faster = job._replace(programs=programs)
    assert Replay(events).times(np.array(flat(shorter), np.int64)).tolist() == flat(run(faster))


def flat(lists: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


def waiting(rank: int, *own: int) -> list[Op]:
    """A rank that calls collectives one after the other and waits for each."""
    return [op for key, ns in enumerate(own) for op in (Op(ns, "call", key), Op(1, "wait", key))]


def test_a_rank_that_is_late_once_saves_no_more_than_the_next_one_allows() -> None:
    # Rank 0 takes 10 in place of 4 before one collective, rank 1 takes 8 before another; no rank waits in between.
    programs = [
        [Op(1, "call", 0), Op(10, "call", 1), Op(1, "call", 2), Op(1, "wait", 1), Op(1, "wait", 2)],
        [Op(1, "call", 0), Op(4, "call", 1), Op(8, "call", 2), Op(1, "wait", 1), Op(1, "wait", 2)],
    ]
    events = events_of(Job(programs, [[0, 1]] * 3, [[1, 1]] * 3))
    shorter = np.where((events.rank == 0) & (events.own_ns == 10), 6, 0)

    # Rank 1 calls the last one at 13 and waits for it at 15, rank 0 at 12 and 14: nothing is to be saved.
    assert sum(Replay(events).saved_by_step(shorter).values()) == 0


def test_a_rank_that_is_late_in_every_step_would_save_time_in_every_step() -> None:
    # Rank 1 takes 7 more than rank 0 before each of three collectives, and both wait for each.
    events = events_of(Job([waiting(0, 5, 5, 5), waiting(1, 12, 12, 12)], [[0, 1]] * 3, [[2, 2]] * 3))
    shorter = np.where((events.rank == 1) & (events.own_ns == 12), 7, 0)

    assert Replay(events).saved_by_step(shorter) == {0: 0, 1: 7, 2: 7}  # the first event of a rank is where it begins


def test_nothing_of_completion_is_known_and_a_late_rank_is_not_held_by_its_own_wait() -> None:
    # Rank 1 takes 100 and finds the collective complete but for its own call.
    events = events_of(Job([waiting(0, 1, 10), waiting(1, 1, 100)], [[0, 1]] * 2, [[3, 3]] * 2), with_done=False)
    shorter = np.where((events.rank == 1) & (events.own_ns == 100), 90, 0)

    assert Replay(events).saved_by_step(shorter) == {0: 0, 1: 90}


def test_a_message_binds_its_receiver() -> None:
    # Rank 0 computes 50 and sends; rank 1 asked for that at 1, computes 20 and sends on to rank 2.
    programs = [
        [Op(1, "call", 0), Op(1, "wait", 0), Op(50, "call", 1), Op(1, "wait", 1)],
        [Op(1, "call", 0), Op(1, "wait", 0), Op(1, "call", 1), Op(1, "wait", 1), Op(20, "call", 2), Op(1, "wait", 2)],
        [Op(1, "call", 0), Op(1, "wait", 0), Op(1, "call", 2), Op(1, "wait", 2)],
    ]
    events = events_of(Job(programs, [[0, 1, 2], [0, 1], [1, 2]], [[1, 1, 1]] * 3))
    shorter = np.where((events.rank == 0) & (events.own_ns == 50), 40, 0)

    assert Replay(events).saved_by_step(shorter) == {0: 0, 1: 40, 2: 0}


def test_a_broadcast_binds_who_waited_for_its_source() -> None:
    # Rank 0 computes 50 and broadcasts what the others asked for at 1; they use it for 10, then all meet.
    programs = [waiting(rank, 1, 50 if rank == 0 else 1, 1 if rank == 0 else 10) for rank in range(3)]
    table = table_of(Job(programs, [[0, 1, 2]] * 3, [[1, 1, 1]] * 3))
    operator = np.where(table.counter == 1, 1, 0).astype(np.int32)
    table = table._replace(operators=[*table.operators, "broadcast"], operator=operator)
    events = rank_events(table, OwnTime(table))
    shorter = np.where((events.rank == 0) & (events.own_ns == 50), 40, 0)

    assert Replay(events).saved_by_step(shorter) == {0: 0, 1: 40, 2: 0}


def test_a_rank_that_counts_no_steps_ends_none() -> None:
    # Rank 1 takes 7 more in each step; the run of rank 2 is one step.
    programs = [waiting(0, 5, 5, 5, 5), waiting(1, 12, 12, 12, 12), waiting(2, 5, 5, 5, 5)]
    table = table_of(Job(programs, [[0, 1, 2]] * 4, [[2, 2, 2]] * 4))
    table = table._replace(step=np.where(table.rank == 2, 0, table.step).astype(np.int32))
    events = rank_events(table, OwnTime(table))
    shorter = np.where((events.rank == 1) & (events.own_ns == 12), 7, 0)

    assert Replay(events).saved_by_step(shorter) == {0: 0, 1: 7, 2: 7, 3: 7}


def test_ranks_may_have_any_numbers() -> None:
    # As where files are numbered by dates.
    job = Job([waiting(0, 5, 5, 5), waiting(1, 12, 12, 12)], [[0, 1]] * 3, [[2, 2]] * 3)
    table = table_of(job)
    table = table._replace(rank=np.array([3, 2_026_112_233], np.int32)[table.rank])
    events = rank_events(table, OwnTime(table))
    shorter = np.where((events.rank > 3) & (events.own_ns == 12), 7, 0)

    assert Replay(events).saved_by_step(shorter) == {0: 0, 1: 7, 2: 7}
