"""Who is late: what the steps of a part of a run say, and then all parts of the run.

For the ranks of a pipeline, self times of modules per rank and step are compared with the slowest of their like.
"""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..._arrays import (
    INT64_MAX,
    INT64_MIN,
    BoolArray,
    Float32Array,
    Float64Array,
    Int64Array,
    group_lengths,
    group_starts,
    medians_within,
    slowest_of_others,
    split_by,
)
from ..._errors import ModtraceError
from ..._pools import map_in_processes, processor_count
from ...live.hangs import find_hangs
from ...live.rank_state import rank_state_of, read_clocks
from ...live.windows import CameLate
from ...record_options import StepRange
from ...ring import RingSnapshot
from ...ring.event_text import UNSEEN_BY_PYTHON
from ...timeline import PHASES, RingAnalysis
from ...timeline.contents import process_label
from ..rank_folder import (
    JobTime,
    Place,
    RankRecording,
    absolute,
    as_folder,
    check_size,
    find_rank_recordings,
    is_dataset,
)
from ..rank_tables import (
    CALL,
    INFERRED_WAIT,
    WAIT,
    CollectiveTable,
    FolderTables,
    RangeTable,
    RankTables,
    SpanTable,
    StepTable,
    take,
)
from .late_steps import (
    COUNTED_NOISES,
    MAD_TO_SIGMA,
    MIN_NOISES,
    MODULES_PER_STEP,
    Arrivals,
    LateStep,
    ModuleExcess,
    OwnTime,
    StepFinding,
    Verdict,
    find_arrivals,
    late_steps,
    module_excess,
    noise_limit,
    peers_of,
    segments_of,
)
from .replay import RankEvents, Replay, counts_steps, message_ends, rank_events, shared_keys, shorten, without_excess
from .role_waits import RoleTimes, find_role_waits, join_role_times, role_times
from .slow_run import PartOfRun, SlowRun, join_parts

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


class LikeModuleTimes(NamedTuple):
    """Self times of modules in each step, compared with like modules; arrays of equal length."""

    fqns: list[str]  # what `fqn` points into
    rank: Int64Array
    step: Int64Array
    fqn: Int64Array
    phase: Int64Array  # index into `timeline.PHASES`
    self_ns: Int64Array  # self time, ns
    # By how much that is more than the slowest of its like took on other ranks, ns; 0 if there is none. Alike are
    # modules of one class whose names differ by numbers (`layers.3.up` and `layers.7.up`).
    excess: Int64Array
    noise: Float64Array  # how much the self times of its like vary from step to step, as a deviation, ns

    def module_excess(self, row: int) -> ModuleExcess:
        """Return a row as a finding names it."""
        return ModuleExcess(
            self.fqns[self.fqn[row]], PHASES[self.phase[row]], int(self.excess[row]), int(self.self_ns[row])
        )


def like_module_times(parts: Iterable[SpanTable], own_time: OwnTime) -> LikeModuleTimes:
    """Return the self times of the modules of some ranks."""
    fqns: dict[str, int] = {}
    likes: dict[tuple[str, str], int] = {}
    rows = [np.empty((6, 0), np.int64)]
    for spans in parts:
        fqn = np.array([fqns.setdefault(name.fqn, len(fqns)) for name in spans.names] or [0])
        names = [(_NUMBER.sub("*", name.fqn), name.module_class) for name in spans.names]
        like = np.array([likes.setdefault(name, len(likes)) for name in names] or [0])
        rows += [_rank_rows(take(spans, rank_rows), own_time, fqn, like) for rank_rows in split_by(spans.rank)]
    rank, step, name, phase, kind, rank_rows = np.concatenate(rows, axis=1)
    like, module = kind * len(PHASES) + phase, name * len(PHASES) + phase
    excess = _excess(rank, step, like, rank_rows)
    # The deviations of the modules of a kind from what each takes at the median of its steps.
    noise = MAD_TO_SIGMA * medians_within(np.abs(rank_rows - medians_within(rank_rows, module, rank)), like)
    return LikeModuleTimes(list(fqns), rank, step, name, phase, rank_rows, excess, noise)


def _rank_rows(spans: SpanTable, own_time: OwnTime, fqn: Int64Array, like: Int64Array) -> Int64Array:
    rank = int(spans.rank[0])
    segments = segments_of(spans, own_time, rank)
    name, phase = np.divmod(segments.key, len(PHASES))
    step = spans.step[segments.owner].astype(np.int64)
    key, index = np.unique(np.stack([step, fqn[name], phase, like[name]]), axis=1, return_inverse=True)
    total = np.bincount(index.ravel(), segments.own_ns, key.shape[1]).astype(np.int64)
    step, number, phase, kind = key
    return np.stack([np.full(len(total), rank), step, number, phase, kind, total])


def _excess(rank: Int64Array, step: Int64Array, kind: Int64Array, self_ns: Int64Array) -> Int64Array:
    order = np.lexsort((self_ns, rank, step, kind))
    begins = group_starts(kind[order], step[order], rank[order])
    sizes = group_lengths(begins, len(order))
    # The slowest of each rank: the last of each run.
    slowest = order[begins + sizes - 1]
    by_size = np.lexsort((self_ns[slowest], step[slowest], kind[slowest]))
    ordered = slowest[by_size]
    groups = group_starts(kind[ordered], step[ordered])
    count = group_lengths(groups, len(ordered))
    usual, of_row = np.empty(len(slowest), np.int64), np.empty(len(self_ns), np.int64)
    # A rank that is alone in a step has no others: what is found then is of another step.
    usual[by_size] = np.where(np.repeat(count, count) > 1, slowest_of_others(self_ns[ordered], groups), -1)
    of_row[order] = np.repeat(usual, sizes)
    return np.where(of_row >= 0, self_ns - of_row, 0)


_CHUNK = 256
"""Ranks whose spans are read at a time."""
_MAX_CANDIDATES = 8
"""Ranks of a part of a run that are replayed: those that took most more."""


def late_senders(
    table: CollectiveTable, own_time: OwnTime, replay: Replay, tables: RankTables, *, first: int, last: int
) -> list[tuple[StepFinding, Int64Array]]:
    """Return the finding of each step with messages, and by how many ns its rank's own times are too long."""
    events, late = replay.events, _late_to_messages(table)
    steps = np.unique([step for _, step in late if first <= step < last]).tolist()
    if not steps:
        return []
    ranks = sorted({rank for rank, _ in late})
    parts = (ranks[begin : begin + _CHUNK] for begin in range(0, len(ranks), _CHUNK))
    chunks = (tables.read(SpanTable, first, last, part) for part in parts)
    times = like_module_times(chunks, own_time)
    counted = times.excess > np.maximum(COUNTED_NOISES * times.noise, 0)
    # How much a rank varies from step to step is not known if it counts none.
    counted &= counts_steps(times.rank, times.step)
    totals = _totals_beyond_noise(times, counted)
    worst = Counter[int]()
    for (rank, _), (total, _) in totals.items():
        worst[rank] += total
    shorter: dict[int, Int64Array] = {}
    for rank, _ in worst.most_common(_MAX_CANDIDATES):
        own_steps = [step for late_rank, step in totals if late_rank == rank]
        rows = np.flatnonzero(counted & (times.rank == rank) & np.isin(times.step, own_steps))
        shorter[rank] = _shorter(events, times, rows, tables.read(SpanTable, first, last, [rank]), own_time)
    saved = {rank: replay.saved_by_step(without) for rank, without in shorter.items()}
    bounds = tables.bounds()

    def late_sender(step: int) -> tuple[StepFinding, Int64Array]:
        # Late is whom another one waited for, and without whose excess the step would have been shorter.
        here = [
            rank
            for rank, of_steps in saved.items()
            if (rank, step) in totals
            and late.get((rank, step), (0, 0))[0] > 0
            and of_steps.get(step, 0) > totals[rank, step][1]
        ]
        if not here:
            rank = min(rank for rank, step_of in late if step_of == step)
            return StepFinding(step, "even", rank), np.zeros(len(events.time), np.int64)
        rank = max(here, key=lambda late_rank: saved[late_rank][step])
        total, limit = totals[rank, step]
        lateness, other = late[rank, step]
        bound = bounds.largest_bound(rank, np.array([other]))
        verdict: Verdict = "late" if lateness > bound else "cannot tell"
        rows = np.flatnonzero(counted & (times.rank == rank) & (times.step == step))
        rows = rows[np.argsort(-times.excess[rows], kind="stable")][:MODULES_PER_STEP]
        modules = tuple(map(times.module_excess, rows.tolist())) if verdict == "late" else ()
        finding = StepFinding(step, verdict, rank, total, saved[rank][step], lateness, bound, limit, modules)
        return finding, shorter[rank]

    return [late_sender(step) for step in steps]


def _totals_beyond_noise(times: LikeModuleTimes, counted: BoolArray) -> dict[tuple[int, int], tuple[int, int]]:
    """Return the sum of what counts and its limit, ns, of each rank and step in which it is beyond the limit."""
    of_ranks, rank_of = np.unique(times.rank, return_inverse=True)
    of_steps, step_of = np.unique(times.step, return_inverse=True)

    def each(values: Int64Array | Float64Array) -> Float64Array:
        sums = np.zeros((len(of_ranks), len(of_steps)))
        np.add.at(sums, (rank_of, step_of), np.where(counted, values, 0))
        return sums

    sums = each(times.excess)
    # Some of many modules always take long; ranks vary by that.
    as_a_rule = np.sort(np.median(sums, axis=1)) if sums.size else np.zeros(1)
    typical = as_a_rule[(len(as_a_rule) - 1) // 2]
    limits = np.maximum(noise_limit(each(times.noise**2), np.bincount(step_of)), MIN_NOISES * typical)
    return {
        (int(of_ranks[rank]), int(of_steps[step])): (int(sums[rank, step]), round(limits[rank, step]))
        for rank, step in np.argwhere(sums > limits).tolist()
    }


def _shorter(
    events: RankEvents, times: LikeModuleTimes, rows: Int64Array, spans: SpanTable, own_time: OwnTime
) -> Int64Array:
    """Return by how much the own time before each event is shorter without the excess of some modules of a rank."""
    rank = int(times.rank[rows[0]])
    segments = segments_of(spans, own_time, rank)
    inside = slice(*np.searchsorted(events.rank, [rank, rank + 1]).tolist())
    event = np.searchsorted(events.place[inside], segments.end)
    count = inside.stop - inside.start
    step, fqn = spans.step[segments.owner], np.array([name.fqn for name in spans.names], object)
    name, phase = np.divmod(segments.key, len(PHASES))
    shorter = np.zeros(len(events.time), np.int64)
    for row in rows.tolist():
        chosen = (step == times.step[row]) & (phase == times.phase[row]) & (event < count)
        chosen[chosen] = fqn[name[chosen]] == times.fqns[times.fqn[row]]
        weights = np.bincount(event[chosen], segments.own_ns[chosen].astype(np.float64), count).astype(np.float64)
        shorten(shorter, events, inside, weights, int(times.excess[row]))
    return shorter


def _late_to_messages(table: CollectiveTable) -> dict[tuple[int, int], tuple[int, int]]:
    """Return for each rank and step with messages the longest time that a peer waited for it, and which peer."""
    sender, receiver = message_ends(table)
    is_message = sender >= 0
    if not np.any(is_message):
        return {}
    key = shared_keys(table)
    is_receiver = (table.rank == receiver).astype(np.int64)
    began = np.full((int(key.max()) + 1, 2), INT64_MAX)
    waits, calls = (np.flatnonzero(is_message & (table.kind == kind)) for kind in (WAIT, CALL))
    np.minimum.at(began, (key[waits], is_receiver[waits]), table.start[waits])
    other_began = began[key[calls], 1 - is_receiver[calls]]
    is_known = other_began < INT64_MAX
    lateness = np.where(is_known, table.start[calls] - np.where(is_known, other_began, 0), INT64_MIN)
    other = np.where(is_receiver == 1, sender, receiver)[calls]
    order = np.argsort(lateness, kind="stable")
    columns = table.rank[calls], table.step[calls], lateness, other
    in_order = zip(*(column[order].tolist() for column in columns), strict=True)
    return {(rank, step): (ns, peer) for rank, step, ns, peer in in_order}  # of equal keys the last one, the largest


_UNSEEN_ON_DEVICES = (
    "a device runs the collectives, and not when it came to them is known, but when threads called them; merge a "
    "profile of each rank, or record its device times"
)
_NO_STEP = 1 << 30
"""After the last step of any recording."""
_VERDICTS: tuple[Verdict, ...] = ("even", "cannot tell", "late")
"""From the verdict that says least to the one that says most."""


def find_late(tables: RankTables, first: int, last: int) -> PartOfRun:
    """Say who was late in the steps from `first` to before `last`. The same function runs wherever the part does."""
    # From the step before on: what a rank did until its first collective begins after its last one.
    table = tables.read(CollectiveTable, first - 1, last)
    own_time = OwnTime(table)
    arrivals = find_arrivals(table, own_time)
    chosen = arrivals.step >= first
    arrivals = Arrivals._make(column[chosen] for column in arrivals)
    ends = tables.read(StepTable, first - 1, last)
    duration, last_end = step_durations(ends), int(ends.step.max(initial=-1))
    in_steps = late_steps(arrivals, tables.bounds())
    modules = _modules_of(arrivals, in_steps, tables, own_time)
    by_step = {
        late.finding.step: late.finding._replace(modules=modules.get(late.finding.step, ())) for late in in_steps
    }
    events = rank_events(table, own_time)
    replay = Replay(events)
    shorter = defaultdict[int, Int64Array](lambda: np.zeros(len(events.time), np.int64))
    for late in in_steps:
        if late.finding.verdict == "late":
            without = without_excess(events, arrivals, late.slower.tolist())
            shorter[late.finding.rank] = np.maximum(shorter[late.finding.rank], without)
    for finding, without in late_senders(table, own_time, replay, tables, first=first, last=last):
        if finding.step not in by_step or _weight(finding) > _weight(by_step[finding.step]):
            by_step[finding.step] = finding
            if finding.verdict == "late":
                shorter[finding.rank] = np.maximum(shorter[finding.rank], without)
    saved = {rank: replay.saved_by_step(without) for rank, without in shorter.items()}
    steps = []
    for step, finding in sorted(by_step.items()):
        is_late = finding.verdict == "late"
        # No step follows the last end of one; but a rank that was late there is named.
        if is_late or step <= last_end or last_end < 0:
            saved_ns = saved.get(finding.rank, {}).get(step, 0) if is_late else finding.saved_ns
            steps.append(finding._replace(saved_ns=saved_ns, duration_ns=duration.get(step, 0)))
    saved_of = {rank: sum(by_step.values()) for rank, by_step in saved.items()}
    saved_ns = sum(saved_of.values())
    if len(shorter) > 1:
        saved_ns = sum(replay.saved_by_step(np.sum(list(shorter.values()), axis=0)).values())
    ranks = events.rank[group_starts(events.rank)]
    waits = (table.kind == WAIT) & (table.counter >= 0) | (table.kind == INFERRED_WAIT) | (table.done >= 0)
    return PartOfRun(steps, ranks, _lateness(arrivals, steps, ranks), saved_of, saved_ns, bool(waits.any()))


def _weight(finding: StepFinding) -> tuple[int, int]:
    return _VERDICTS.index(finding.verdict), finding.cost_ns


def _lateness(arrivals: Arrivals, steps: Sequence[StepFinding], ranks: Int64Array) -> Float32Array:
    """Return the most by which each rank was late in each step; of pipelines only of who was late in it."""
    numbers = np.array([step.step for step in steps], np.int64)
    lateness = np.full((len(ranks), len(numbers)), np.nan, np.float32)
    counted = np.isin(arrivals.step, numbers)
    places = np.searchsorted(ranks, arrivals.rank[counted]), np.searchsorted(numbers, arrivals.step[counted])
    np.fmax.at(lateness, places, arrivals.lateness[counted].astype(np.float32))
    for column, step in enumerate(steps):
        if step.verdict == "late" and np.isnan(lateness[:, column]).all():
            lateness[np.searchsorted(ranks, step.rank), column] = step.lateness_ns
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
        spans = tables.read(SpanTable, min(numbers) - 1, max(numbers) + 1, ranks)
        ranges = tables.read(RangeTable, min(numbers) - 1, max(numbers) + 1, ranks)
        # In the order of steps, so that each finds its spans without looking at all.
        by_step = np.argsort(spans.step, kind="stable")
        for late, peers in of_rank:
            step = late.finding.step
            first, last = np.searchsorted(spans.step, [step - 1, step + 1], sorter=by_step)
            near = take(spans, np.sort(by_step[first:last]))
            near_ranges = take(ranges, ranges.apart & (ranges.step >= step - 1) & (ranges.step <= step))
            excess = module_excess(arrivals, late, peers, spans=near, ranges=near_ranges, own_time=own_time)
            modules[step] = tuple(excess[:MODULES_PER_STEP])
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
    source: Place,
    *,
    steps: StepRange | None = None,
    role: str | None = None,
    on_left_out: Callable[[ModtraceError], None] | None = None,
    executor: Executor | None = None,
) -> SlowRun:
    """Find the ranks that others wait for, in a folder of recordings or in a dataset.

    All recordings are read into memory. A dataset is read one bucket of steps at a time.

    Args:
        source: a folder with a recording of each rank, or a dataset of `modtrace ranks pack`; or the URL of one, see
            `places`.
        steps: those from the first number to before the second, as `Timeline.steps` takes them; None: all.
        role: of recordings, take the processes of this role; None: all.
        on_left_out: is called with what is wrong with a recording that is not taken; None: that is raised.
        executor: reads recordings and buckets, such as Dask's `Client.get_executor(pure=False)`; its workers see the
            same files by the same names. None: this process reads recordings, processes of this machine buckets.

    Raises:
        ModtraceError: there are no recordings, one cannot be read, or is a ring with more than 4 million events and no
            steps are chosen; no two ranks waited for each other; or a role of a dataset is chosen.
    """
    if not is_dataset(source):
        with as_folder(source, executor) as folder:
            files = find_rank_recordings(folder, on_left_out, role)
            return slow_of_recordings(files, JobTime(files), steps, executor)
    if role is not None:
        raise ModtraceError(f"{os.fspath(source)}: all of a dataset is looked at; leave out `role` (--role)")
    from ..dataset_tables import DatasetTables

    tables = DatasetTables(source)
    buckets = tables.buckets("collectives", steps=steps or (None, None))
    parts = dict(map_in_processes(partial(_slow_bucket, absolute(source)), buckets, processor_count(), executor))
    waits = find_role_waits(join_role_times(parts[bucket][1] for bucket in sorted(parts)))
    run = _run((part for part, _ in parts.values()), tables)
    return _checked(replace(run, waits=waits), tables.engines, source)


def slow_of_recordings(
    files: Sequence[RankRecording], job: JobTime, steps: StepRange | None = None, executor: Executor | None = None
) -> SlowRun:
    """Say who is late in recordings, or some of their steps; raises ModtraceError if no two ranks waited."""
    if steps is None:
        check_size(files)
    worlds: dict[str, list[RankRecording]] = {}
    for file in files:
        worlds.setdefault(file.world, []).append(file)
    tables = {world: FolderTables(world_tables, job, steps, executor) for world, world_tables in worlds.items()}
    waits = find_role_waits(role_times([*tables.values()], 0, _NO_STEP))
    runs = {world: _run([find_late(world_tables, 0, _NO_STEP)], world_tables) for world, world_tables in tables.items()}
    [run] = runs.values() if len(runs) == 1 else [SlowRun([], len(files), [], 0, [], roles=runs)]
    engines = {engine for world_tables in tables.values() for engine in world_tables.engines}
    return _checked(replace(run, waits=waits), engines, files[0].path.parent)


def find_late_in_rings(rings: Mapping[int, RingSnapshot]) -> list[CameLate]:
    """Return who came late, or not yet while others wait, by rings; raises ModtraceError if two do not fit together."""
    files = [RankRecording(rank, Path(f"rank {rank}"), True, snapshot) for rank, snapshot in sorted(rings.items())]
    run = join_parts([find_late(FolderTables(files, JobTime(files)), 0, _NO_STEP)])
    names = {rank: process_label(snapshot.metadata.get("role", ""), rank) for rank, snapshot in rings.items()}
    late = [
        CameLate(step.rank, step.step, step.cost_ns, step.sentence_of(names[step.rank]))
        for step in run.steps
        if step.verdict == "late" and step.modules
    ]
    now, whole = read_clocks(), [rank for rank, snapshot in rings.items() if not snapshot.missing_bytes]
    states = [rank_state_of(f"rank {rank}", RingAnalysis(rings[rank]), now) for rank in whole]
    next_step = 1 + max((state.step for state in states if state.step is not None), default=-1)
    return late + [
        CameLate(min(hang.blamed), next_step, hang.wait_ns, hang.text)
        for hang in find_hangs(states)
        if hang.is_cause and hang.blamed
    ]


def worst_ranks(run: SlowRun, count: int) -> list[int]:
    """Return the ranks that cost most, then those that were late most, by the mean over the steps, then the others."""
    worst = [late.rank for late in run.late]
    matrix, ranks, _ = run.lateness
    lateness = {rank: row[~np.isnan(row)] for rank, row in zip(ranks, matrix, strict=True)}
    mean = {rank: float(row.mean()) if len(row) else -np.inf for rank, row in lateness.items()}
    worst += sorted(mean.keys() - set(worst), key=lambda rank: -mean[rank])
    return worst[:count]


def _slow_bucket(dataset: str, steps: tuple[int, int]) -> tuple[PartOfRun, RoleTimes | None]:
    from ..dataset_tables import DatasetTables

    tables = DatasetTables(dataset)
    return find_late(tables, *steps), role_times([tables], *steps)


def _run(parts: Iterable[PartOfRun], tables: RankTables) -> SlowRun:
    run = join_parts(parts)
    unseen = "" if any(part.waits for part in run.parts) else _UNSEEN_ON_DEVICES
    return replace(
        run,
        peak_bytes={entry.rank: entry.peak_bytes for entry in tables.ranks if entry.peak_bytes >= 0},
        lines={entry.rank: entry.lines for entry in tables.ranks if entry.lines},
        damage={entry.rank: entry.damage for entry in tables.ranks if entry.damage},
        unseen=(UNSEEN_BY_PYTHON if "python" in tables.engines else unseen) if run.steps else "",
        role_of={rank: role for rank, role in tables.roles.items() if role},
    )


def _checked(run: SlowRun, engines: Iterable[str], path: str | os.PathLike[str]) -> SlowRun:
    if not run.steps and not run.waits and not any(role_run.steps for role_run in run.roles.values()):
        unseen = f"; {UNSEEN_BY_PYTHON}" if "python" in engines else ""
        raise ModtraceError(
            f"{os.fspath(path)}: no two ranks called one collective or sent each other something{unseen}"
        )
    return run
