"""Who is late: what the steps of a part of a run say, and of all parts the run."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ..._errors import ModtraceError
from ..._system.processes import map_in_processes, processor_count
from ..._typing import Float32Array, Int64Array
from ..groups import group_starts, medians_within
from ..job_time import JobTime
from ..rank_folder import RankRecording, find_rank_recordings, is_dataset
from ..rank_tables import FolderTables, RankTables, StepTable, take
from .late_senders import late_senders
from .late_steps import (
    MODULES_PER_STEP,
    Arrivals,
    LateStep,
    ModuleExcess,
    StepFinding,
    Verdict,
    find_arrivals,
    late_steps,
    module_excess,
    peers_of,
)
from .own_time import OwnTime
from .replay import Replay, rank_events, without_excess
from .slow_run import PartOfRun, SlowRun, join_parts

_NO_STEP = 1 << 30
"""Behind the last step of any recording."""
_VERDICTS: tuple[Verdict, ...] = ("even", "cannot tell", "late")
"""What says more comes last."""


def find_late(tables: RankTables, first: int, last: int) -> PartOfRun:
    """Say who was late in the steps from `first` to before `last`. The same function runs wherever the part does."""
    # From the step before on: what a rank did until its first collective begins behind its last one.
    table = tables.collectives(first - 1, last)
    own_time = OwnTime(table)
    arrivals = find_arrivals(table, own_time)
    chosen = arrivals.step >= first
    arrivals = Arrivals._make(column[chosen] for column in arrivals)
    duration = step_durations(tables.steps(first - 1, last))
    in_steps = late_steps(arrivals, tables.bounds())
    modules = _modules_of(arrivals, in_steps, tables, own_time)
    by_step = {
        late.finding.step: late.finding._replace(modules=modules.get(late.finding.step, ())) for late in in_steps
    }
    events = rank_events(table, own_time)
    replay = Replay(events)
    without: dict[int, Int64Array] = {}
    for late in in_steps:
        if late.finding.verdict == "late":
            _add(without, late.finding.rank, without_excess(events, arrivals, late.slower.tolist()))
    for finding, shorter in late_senders(table, own_time, replay, tables, first, last):
        if finding.step not in by_step or _weight(finding) > _weight(by_step[finding.step]):
            by_step[finding.step] = finding
            if finding.verdict == "late":
                _add(without, finding.rank, shorter)
    saved = {rank: replay.saved_by_step(shorter) for rank, shorter in without.items()}
    steps = [
        finding._replace(saved_ns=saved.get(finding.rank, {}).get(step, 0), duration_ns=duration.get(step, 0))
        if finding.verdict == "late"
        else finding._replace(duration_ns=duration.get(step, 0))
        for step, finding in sorted(by_step.items())
    ]
    each = {rank: sum(own.values()) for rank, own in saved.items()}
    together = sum(each.values())
    if len(without) > 1:
        together = sum(replay.saved_by_step(np.sum(list(without.values()), axis=0)).values())
    ranks = events.rank[group_starts(events.rank)]
    return PartOfRun(steps, ranks, _lateness(arrivals, steps, ranks), each, together)


def _add(without: dict[int, Int64Array], rank: int, shorter: Int64Array) -> None:
    without[rank] = np.maximum(without[rank], shorter) if rank in without else shorter


def _weight(finding: StepFinding) -> tuple[int, int]:
    return _VERDICTS.index(finding.verdict), finding.cost_ns


def _lateness(arrivals: Arrivals, steps: Sequence[StepFinding], ranks: Int64Array) -> Float32Array:
    """Return the most that each rank was behind in each step; of pipelines only of who was late in it."""
    arrived = set(arrivals.step.tolist())
    late = [step for step in steps if step.step not in arrived and step.verdict == "late"]
    index = np.searchsorted(ranks, np.append(arrivals.rank, [step.rank for step in late]).astype(np.int64))
    numbers = np.array([step.step for step in steps], np.int64)
    of_step = np.searchsorted(numbers, np.append(arrivals.step, [step.step for step in late]).astype(np.int64))
    behind = np.append(arrivals.lateness, [step.lateness_ns for step in late]).astype(np.float32)
    lateness = np.full((len(ranks), len(numbers)), -np.inf, np.float32)
    np.maximum.at(lateness, (index, of_step), behind)
    lateness[np.isinf(lateness)] = np.nan
    return lateness


def _modules_of(
    arrivals: Arrivals, steps: Sequence[LateStep], tables: RankTables, own_time: OwnTime
) -> dict[int, tuple[ModuleExcess, ...]]:
    """Return for the late steps where their ranks took more; the spans are read once for each of these ranks."""
    by_rank: dict[int, list[tuple[LateStep, list[int]]]] = {}
    for late in steps:
        if late.finding.verdict == "late":
            by_rank.setdefault(late.finding.rank, []).append((late, peers_of(arrivals, late)))
    modules = {}
    for rank, of_rank in by_rank.items():
        numbers = [late.finding.step for late, _ in of_rank]
        ranks = sorted({rank, *(peer for _, peers in of_rank for peer in peers)})
        spans = tables.spans(ranks, min(numbers) - 1, max(numbers) + 1)
        ranges = tables.ranges(ranks, min(numbers) - 1, max(numbers) + 1)
        # In the order of steps, so that each finds its spans without looking at all.
        by_step = np.argsort(spans.step, kind="stable")
        for late, peers in of_rank:
            step = late.finding.step
            first, last = np.searchsorted(spans.step, [step - 1, step + 1], sorter=by_step)
            near = take(spans, np.sort(by_step[first:last]))
            near_ranges = take(ranges, (ranges.step >= step - 1) & (ranges.step <= step))
            modules[step] = tuple(module_excess(arrivals, late, peers, near, near_ranges, own_time)[:MODULES_PER_STEP])
    return modules


def step_durations(table: StepTable) -> dict[int, int]:
    """Return the median duration of each step over the ranks."""
    order = np.lexsort((table.step, table.rank))
    rank, step, end = table.rank[order], table.step[order], table.end[order]
    follows = (np.diff(rank) == 0) & (np.diff(step) == 1)
    step = step[1:][follows]
    medians = medians_within(np.diff(end)[follows], step)
    return dict(zip(step.tolist(), medians.astype(np.int64).tolist(), strict=True))


def find_slow_ranks(
    source: str | os.PathLike[str], *, on_left_out: Callable[[ModtraceError], None] | None = None
) -> SlowRun:
    """Say who is late in a folder of recordings, all of which are read into memory, or in a dataset, bucket by bucket.

    Args:
        source: a folder with a recording of each rank, or a dataset of `modtrace ranks pack`.
        on_left_out: is called with what is wrong with a recording that is not taken; None: that is raised.

    Raises:
        ModtraceError: there are no recordings, one cannot be read, or no two ranks waited for each other.
    """
    if not is_dataset(source):
        files = find_rank_recordings(source, on_left_out)
        return slow_of_recordings(files, JobTime(files))
    from ..dataset_tables import DatasetTables

    buckets = DatasetTables(source).buckets("collectives")
    parts = map_in_processes(partial(_slow_bucket, os.fspath(source)), buckets, processor_count())
    return _checked(join_parts(part for _, part in parts), source)


def slow_of_recordings(files: Sequence[RankRecording], job: JobTime) -> SlowRun:
    """Say who is late in recordings, all of which are read into memory.

    Raises:
        ModtraceError: one cannot be read, or no two ranks waited for each other.
    """
    tables = FolderTables(files, job)
    run = join_parts([find_late(tables, 0, _NO_STEP)])
    return _checked(replace(run, peak_bytes=tables.peak_bytes), files[0].path.parent)


def worst_ranks(run: SlowRun, count: int) -> list[int]:
    """Return the ranks that cost most, and behind them those that were late most, by the mean over the steps."""
    arrivals = [one.rank for one in run.late]
    matrix, ranks, _ = run.lateness
    mean = {rank: float(np.nanmean(row)) for rank, row in zip(ranks, matrix, strict=True)}
    arrivals += sorted(mean.keys() - set(arrivals), key=lambda rank: -mean[rank])
    return arrivals[:count]


def _slow_bucket(dataset: str, steps: tuple[int, int]) -> PartOfRun:
    from ..dataset_tables import DatasetTables

    return find_late(DatasetTables(dataset), *steps)


def _checked(run: SlowRun, path: str | os.PathLike[str]) -> SlowRun:
    if not run.steps:
        raise ModtraceError(
            f"{os.fspath(path)}: no two ranks called one collective or sent each other something; the portable engine "
            "does not see what DDP and FSDP call, the native one does (modtrace build)"
        )
    return run
