"""Ranks that call collectives, wait for them and send each other messages, simulated one operation after the other.

Shares no code with what is tested: `run` says when each operation of a job is over, `table_of` what a recording of it
holds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from modtrace.ranks.rank_tables import CALL, WAIT, CollectiveTable

__all__ = ["BEGIN", "Job", "Op", "run", "table_of"]

BEGIN = 10**18


class Op(NamedTuple):
    """An operation of a rank after some own time: it calls or awaits a collective. A message has two ranks."""

    own: int
    what: str
    key: int


class Job(NamedTuple):
    """The operations of ranks, the ranks of each collective, and its duration from its last call on each rank.

    `steps` says in which step each is; else each is a step.
    """

    programs: list[list[Op]]
    members: list[list[int]]
    transfer: list[list[int]]
    steps: list[int] | None = None


def run(job: Job) -> list[list[int]]:
    """Return when each rank calls, and when it leaves each wait."""
    times: list[list[int]] = [[] for _ in job.programs]
    called: list[dict[int, int]] = [{} for _ in job.members]
    while sum(map(len, times)) < sum(map(len, job.programs)):
        for rank, program in enumerate(job.programs):
            while len(times[rank]) < len(program):
                op = program[len(times[rank])]
                now = (times[rank][-1] if times[rank] else BEGIN) + op.own
                if op.what == "call":
                    called[op.key][rank] = now
                elif len(called[op.key]) < len(job.members[op.key]):
                    break
                else:
                    now = max(now, max(called[op.key].values()) + job.transfer[op.key][rank])
                times[rank].append(now)
    return times


def table_of(job: Job, *, with_done: bool = True) -> CollectiveTable:
    """Return what a recording of the job holds."""
    rows: list[tuple[Any, ...]] = []
    times = run(job)
    calls: list[dict[int, int]] = [{} for _ in job.members]
    for rank, program in enumerate(job.programs):
        for op, time in zip(program, times[rank], strict=True):
            calls[op.key].setdefault(rank, time)
    for rank, program in enumerate(job.programs):
        before = BEGIN
        for op, time in zip(program, times[rank], strict=True):
            is_call = op.what == "call"
            done = max(calls[op.key].values()) + job.transfer[op.key][rank] if with_done else -1
            start = time if is_call else before + op.own
            members = job.members[op.key]
            is_message = len(members) == 2 and len(job.programs) > 2
            peer = 1 - members.index(rank) if is_message else -1
            operator = ("send", "recv")[members.index(rank)] if is_message else "all_reduce"
            group = f"g [{','.join(map(str, members))}]"
            rows.append((operator, group, rank, peer, CALL if is_call else WAIT, op.key, start, time, done))
            before = time
    operators, groups = (list(dict.fromkeys(row[column] for row in rows)) for column in (0, 1))
    numbers = np.array([row[2:] for row in rows], np.int64)
    rank_of, peer_of, kind, counter, start, end, done = numbers.T
    return CollectiveTable(
        operators,
        groups,
        rank_of.astype(np.int32),
        np.array(job.steps or range(len(job.members)), np.int32)[counter],
        np.array([operators.index(row[0]) for row in rows], np.int32),
        np.array([groups.index(row[1]) for row in rows], np.int32),
        peer_of.astype(np.int32),
        kind.astype(np.int8),
        counter,
        start,
        end,
        done,
        np.zeros(len(rows), np.int64),
    )
