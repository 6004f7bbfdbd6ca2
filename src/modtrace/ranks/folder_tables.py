"""The tables of a folder of recordings, in memory."""

from __future__ import annotations

from collections.abc import Sequence

from .all_ranks import load_rank
from .job_time import JobTime
from .rank_folder import RankFile
from .rank_tables import (
    CollectiveTable,
    SpanTable,
    StepTable,
    collective_table,
    join_collectives,
    join_spans,
    join_steps,
    span_table,
    step_table,
    take,
)
from .slow import Bounds

__all__ = ["FolderTables"]


class FolderTables:
    """Reads all recordings of a folder.

    Args:
        files: the recordings.
        job: where they lie in the job's time.

    Raises:
        ModtraceError: one cannot be read.
    """

    def __init__(self, files: Sequence[RankFile], job: JobTime) -> None:
        loaded = [load_rank(file, job[file.rank]) for file in files]
        self._bounds = Bounds(
            [one.rank for one in loaded], [one.bound_ns for one in loaded], [job[one.rank].clock for one in loaded]
        )
        self._spans = {one.rank: span_table(one.timeline, one.rank) for one in loaded}
        self._collectives = join_collectives([collective_table(one.timeline, one.rank) for one in loaded])
        self._steps = join_steps([step_table(one.timeline, one.rank) for one in loaded])

    @property
    def step_count(self) -> int:
        """One more than the last step that has a collective."""
        return int(self._collectives.step.max(initial=-1)) + 1

    def bounds(self) -> Bounds:
        """Return how far the times of each rank are off."""
        return self._bounds

    def collectives(self, first: int, last: int) -> CollectiveTable:
        """Return the collectives of the steps from `first` to before `last`, of all ranks."""
        table = self._collectives
        return take(table, (table.step >= first) & (table.step < last))

    def spans(self, ranks: Sequence[int], first: int, last: int) -> SpanTable:
        """Return the spans of some ranks in the steps from `first` to before `last`."""
        parts = []
        for rank in ranks:
            table = self._spans[rank]
            parts.append(take(table, (table.step >= first) & (table.step < last)))
        return join_spans(parts)

    def steps(self, first: int, last: int) -> StepTable:
        """Return when the steps from `first` to before `last` ended."""
        return take(self._steps, (self._steps.step >= first) & (self._steps.step < last))
