"""Where each rank of a run is, or was when it died: from its ring file, also while the process runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._files import find_each
from .._interrupts import cached_property
from .._processes import ParallelReader
from ..ring import find_rings
from .flight_recorder import FlightRecord as FlightRecord
from .flight_recorder import rank_of_dump, read_flight_record
from .hangs import Hang as Hang
from .hangs import find_all_hangs, hung_sentences
from .places import RankGroup as RankGroup
from .places import group_ranks, headline
from .rank_state import RankState as RankState
from .rank_state import read_rank_state

_Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class WhereResult:
    """Where the ranks of a job are, or were when they ended.

    Attributes:
        ranks: the state of each ring that could be read, in the order of the files.
        records: what the dumps of flight recorders say.
        errors: why files could not be read.
        older: the rings of earlier runs in the folders, which are not read: of each rank the newest is.
    """

    ranks: list[RankState]
    records: list[FlightRecord]
    errors: list[str]
    older: Sequence[str] = ()

    @cached_property
    def worlds(self) -> list[WhereResult]:
        """The ranks that count together: all, but where roles have ranks of their own those of each, without dumps."""
        ranks = [state.rank for state in self.ranks if state.rank is not None]
        roles = sorted({state.role for state in self.ranks})
        if len(roles) < 2 or len(set(ranks)) == len(ranks):
            return [self]
        return [WhereResult([state for state in self.ranks if state.role == role], [], []) for role in roles]

    @cached_property
    def groups(self) -> list[RankGroup]:
        """The ranks that are in the same modules, together; smaller groups first."""
        return [group for world in self.worlds for group in group_ranks(world.ranks)]

    @cached_property
    def hangs(self) -> list[Hang]:
        """The collectives, sends and receives that ranks wait in; those that others follow from come first."""
        return [hang for world in self.worlds for hang in find_all_hangs(world.ranks, world.records)]

    @property
    def sentence(self) -> str:
        """Which ranks others wait for, and which seem hung; then where each rank is, or was, that these do not name."""
        if len(self.worlds) > 1:
            told = [(world.ranks[0].role, [state._replace(role="") for state in world.ranks]) for world in self.worlds]
            return "; ".join(f"{role or 'others'}: {WhereResult(ranks, [], []).sentence}" for role, ranks in told)
        causes = [hang for hang in self.hangs if hang.is_cause]
        named = {rank for hang in causes for rank in (*hang.waiting, *hang.blamed)}
        in_hangs = {rank for hang in self.hangs for rank in (*hang.waiting, *hang.blamed)}
        others = [
            state
            for state in self.ranks
            if state.rank not in named and (state.rank in in_hangs or not state.hung_threads)
        ]
        texts = [*(hang.text for hang in causes), *hung_sentences(self.ranks, self.hangs)]
        return "; ".join(filter(None, [*texts, headline(group_ranks(others))]))

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values: `sentence`, `hangs`, `ranks` (as `RankState.to_json`), `errors`."""
        return {
            "sentence": self.sentence,
            "hangs": [hang.to_json() for hang in self.hangs],
            "ranks": [rank.to_json() for rank in self.ranks],
            "errors": self.errors,
        }


def where(paths: _Paths, *, flight_recorder: _Paths = ()) -> WhereResult:
    """Read which modules each process of a job is in, or was in when it ended.

    Args:
        paths: ring files, folders of them, patterns. The processes may run, hang or be dead. Of a folder and a pattern
            the newest ring of each rank counts, and those of running processes.
        flight_recorder: dumps of torch's flight recorder, folders of them, patterns.

    Returns:
        The state of each rank, and who waits for whom; what could not be read is in its `errors`.

    Raises:
        ModtraceError: a process that reads files was killed.

    Example:
        >>> modtrace.where("/dev/shm/job").sentence  # doctest: +SKIP
        'rank 3 is in GPT.h.7.mlp, the other 63 in GPT.h.8.attn'
    """
    with ParallelReader() as reader:
        return read_job(reader, paths, flight_recorder)


def read_job(reader: ParallelReader, paths: _Paths, flight_recorder: _Paths = ()) -> WhereResult:
    """Do what `where` does, with a reader that the caller keeps for the next look."""
    rings, older, no_rings = find_rings(_texts(paths))
    dumps, no_dumps = find_each(_texts(flight_recorder), lambda path: rank_of_dump(path) is not None)
    states, ring_errors = reader.read(read_rank_state, rings)
    records, dump_errors = reader.read(read_flight_record, dumps)
    return WhereResult(states, records, [*no_rings, *no_dumps, *ring_errors, *dump_errors], older)


def _texts(paths: _Paths) -> list[str]:
    return [os.fspath(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
