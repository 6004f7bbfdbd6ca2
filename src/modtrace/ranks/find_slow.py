"""Who is late in a folder of recordings or in a dataset."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from .._errors import ModtraceError
from .folder_tables import FolderTables
from .job_time import JobTime
from .rank_folder import RankFile, find_rank_files
from .slow import PartOfRun, SlowRun, find_late, join_parts, lateness_matrix

__all__ = ["slow_of_dataset", "slow_of_files", "slow_of_folder", "worst_ranks"]


def slow_of_folder(folder: str | os.PathLike[str]) -> SlowRun:
    """Say who is late in a folder of recordings, all of which are read into memory.

    Raises:
        ModtraceError: there are none, one cannot be read, or no two ranks waited for each other.
    """
    files = find_rank_files(folder)
    return slow_of_files(files, JobTime(files))


def slow_of_files(files: Sequence[RankFile], job: JobTime) -> SlowRun:
    """Say who is late in recordings, all of which are read into memory.

    Raises:
        ModtraceError: one cannot be read, or no two ranks waited for each other.
    """
    tables = FolderTables(files, job)
    return _checked(join_parts([find_late(tables, 0, tables.step_count)]), files[0].path.parent)


def slow_of_dataset(dataset: str | os.PathLike[str], *, engine: str = "local") -> SlowRun:
    """Say who is late in a dataset, bucket by bucket.

    Args:
        dataset: its folder.
        engine: where the buckets are looked at: `local`, `ray` or `ray://HOST:PORT`.

    Raises:
        ModtraceError: it is none, there is no such engine, or no two ranks waited for each other.
    """
    from .dataset.dataset_tables import DatasetTables
    from .dataset.engines import map_buckets

    buckets = DatasetTables(dataset).buckets("collectives")
    parts = map_buckets(_slow_bucket, os.fspath(dataset), buckets, engine=engine)
    return _checked(join_parts(part for _, part in parts), dataset)


def worst_ranks(run: SlowRun, count: int) -> list[int]:
    """Return the ranks that cost most, and behind them those that were late most, by the mean over the steps."""
    found = [one.rank for one in run.late]
    matrix, ranks, _ = lateness_matrix(run)
    mean = {rank: float(np.nanmean(row)) for rank, row in zip(ranks, matrix, strict=True)}
    found += sorted(mean.keys() - set(found), key=lambda rank: -mean[rank])
    return found[:count]


def _slow_bucket(dataset: str, first: int, last: int) -> PartOfRun:
    from .dataset.dataset_tables import DatasetTables

    return find_late(DatasetTables(dataset), first, last)


def _checked(run: SlowRun, path: str | os.PathLike[str]) -> SlowRun:
    if not run.steps:
        raise ModtraceError(
            f"{os.fspath(path)}: no two ranks called one collective or sent each other something; the portable engine "
            "does not see what DDP and FSDP call, the native one does (modtrace build)"
        )
    return run
