"""Late ranks, found in each part of a run and then joined over all parts.

For the ranks of a pipeline, self times of modules per rank and step are compared with the slowest like module.
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
from ...live.windows import LateArrival
from ...record_options import StepRange
from ...ring import RingSnapshot
from ...ring.event_text import UNSEEN_BY_PYTHON
from ...timeline import PHASES, RingAnalysis
from ...timeline.contents import process_label
from ..rank_folder import (
    JobTime,
    Location,
    RankRecording,
    absolute_location,
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
    LateVerdict,
    ModuleExcess,
    OwnTime,
    StepFinding,
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
    """Self times of modules in each step, compared with like modules; arrays of equal length.

    Modules are alike if they have one class and their names differ only in numbers (`layers.3.up`, `layers.7.up`).
    """

    fqns: list[str]  # the texts of `fqn`
    rank: Int64Array
    step: Int64Array
    fqn: Int64Array  # index into `fqns`
    phase: Int64Array  # index into `timeline.PHASES`
    self_ns: Int64Array
    excess_ns: Int64Array  # `self_ns` minus the slowest like module on other ranks; 0 if there is none
    noise_ns: Float64Array  # standard deviation of the self times of like modules over the steps

    def module_excess(self, row: int) -> ModuleExcess:
        """Return the `ModuleExcess` of a row, for a finding."""
        return ModuleExcess(
            self.fqns[self.fqn[row]], PHASES[self.phase[row]], int(self.excess_ns[row]), int(self.self_ns[row])
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
    rank, step, fqn_index, phase, like_index, self_ns = np.concatenate(rows, axis=1)
    like, module = like_index * len(PHASES) + phase, fqn_index * len(PHASES) + phase
    excess = _excess(rank, step, like, self_ns)
    # The deviations of like modules, each from its own median over the steps.
    noise = MAD_TO_SIGMA * medians_within(np.abs(self_ns - medians_within(self_ns, module, rank)), like)
    return LikeModuleTimes(list(fqns), rank, step, fqn_index, phase, self_ns, excess, noise)


def _rank_rows(spans: SpanTable, own_time: OwnTime, fqn: Int64Array, like: Int64Array) -> Int64Array:
    rank = int(spans.rank[0])
    segments = segments_of(spans, own_time, rank)
    name, phase = np.divmod(segments.key, len(PHASES))
    step = spans.step[segments.owner].astype(np.int64)
    key, index = np.unique(np.stack([step, fqn[name], phase, like[name]]), axis=1, return_inverse=True)
    total = np.bincount(index.ravel(), segments.own_ns, key.shape[1]).astype(np.int64)
    step, fqn_index, phase, like_index = key
    return np.stack([np.full(len(total), rank), step, fqn_index, phase, like_index, total])


def _excess(rank: Int64Array, step: Int64Array, kind: Int64Array, self_ns: Int64Array) -> Int64Array:
    order = np.lexsort((self_ns, rank, step, kind))
    starts = group_starts(kind[order], step[order], rank[order])
    sizes = group_lengths(starts, len(order))
    # The slowest module of each rank is the last of each group.
    slowest = order[starts + sizes - 1]
    by_size = np.lexsort((self_ns[slowest], step[slowest], kind[slowest]))
    ordered = slowest[by_size]
    groups = group_starts(kind[ordered], step[ordered])
    count = group_lengths(groups, len(ordered))
    slowest_peer, peer_of_row = np.empty(len(slowest), np.int64), np.empty(len(self_ns), np.int64)
    # If a step has one rank only, the value found belongs to another step and is replaced by -1.
    slowest_peer[by_size] = np.where(np.repeat(count, count) > 1, slowest_of_others(self_ns[ordered], groups), -1)
    peer_of_row[order] = np.repeat(slowest_peer, sizes)
    return np.where(peer_of_row >= 0, self_ns - peer_of_row, 0)


_CHUNK = 256
"""Number of ranks whose spans are read at a time."""
_MAX_CANDIDATES = 8
"""Maximum number of ranks that are replayed in a part of a run: those with the largest excess."""


def late_senders(
    table: CollectiveTable, own_time: OwnTime, replay: Replay, tables: RankTables, *, first: int, stop: int
) -> list[tuple[StepFinding, Int64Array]]:
    """Return the finding of each step with messages, and the ns by which its rank's own times are too long."""
    events, lateness_of = replay.events, _late_to_messages(table)
    steps = np.unique([step for _, step in lateness_of if first <= step < stop]).tolist()
    if not steps:
        return []
    ranks = sorted({rank for rank, _ in lateness_of})
    parts = (ranks[start : start + _CHUNK] for start in range(0, len(ranks), _CHUNK))
    chunks = (tables.read(SpanTable, first, stop, part) for part in parts)
    times = like_module_times(chunks, own_time)
    is_counted = times.excess_ns > np.maximum(COUNTED_NOISES * times.noise_ns, 0)
    # The variation of a rank without step numbers is unknown.
    is_counted &= counts_steps(times.rank, times.step)
    totals = _totals_beyond_noise(times, is_counted)
    excess_by_rank = Counter[int]()
    for (rank, _), (total, _) in totals.items():
        excess_by_rank[rank] += total
    cuts: dict[int, Int64Array] = {}
    for rank, _ in excess_by_rank.most_common(_MAX_CANDIDATES):
        own_steps = [step for late_rank, step in totals if late_rank == rank]
        rows = np.flatnonzero(is_counted & (times.rank == rank) & np.isin(times.step, own_steps))
        cuts[rank] = _cut_of_modules(events, times, rows, tables.read(SpanTable, first, stop, [rank]), own_time)
    saved = {rank: replay.saved_by_step(cut_ns) for rank, cut_ns in cuts.items()}
    bounds = tables.bounds()

    def late_sender(step: int) -> tuple[StepFinding, Int64Array]:
        # A rank is late if another rank waited for it and the step would be shorter without its excess.
        late_ranks = [
            rank
            for rank, saved_by_step in saved.items()
            if (rank, step) in totals
            and lateness_of.get((rank, step), (0, 0))[0] > 0
            and saved_by_step.get(step, 0) > totals[rank, step][1]
        ]
        if not late_ranks:
            rank = min(rank for rank, late_step in lateness_of if late_step == step)
            return StepFinding(step, "even", rank), np.zeros(len(events.time_ns), np.int64)
        rank = max(late_ranks, key=lambda late_rank: saved[late_rank][step])
        total, limit = totals[rank, step]
        lateness, peer = lateness_of[rank, step]
        bound = bounds.largest_bound(rank, np.array([peer]))
        verdict: LateVerdict = "late" if lateness > bound else "cannot tell"
        rows = np.flatnonzero(is_counted & (times.rank == rank) & (times.step == step))
        rows = rows[np.argsort(-times.excess_ns[rows], kind="stable")][:MODULES_PER_STEP]
        modules = tuple(map(times.module_excess, rows.tolist())) if verdict == "late" else ()
        finding = StepFinding(step, verdict, rank, total, saved[rank][step], lateness, bound, limit, modules)
        return finding, cuts[rank]

    return [late_sender(step) for step in steps]


def _totals_beyond_noise(times: LikeModuleTimes, counted: BoolArray) -> dict[tuple[int, int], tuple[int, int]]:
    """Return (sum of the counted excesses, limit) in ns of each rank and step with a sum above the limit."""
    ranks, rank_index = np.unique(times.rank, return_inverse=True)
    steps, step_index = np.unique(times.step, return_inverse=True)

    def sum_counted(values: Int64Array | Float64Array) -> Float64Array:
        sums = np.zeros((len(ranks), len(steps)))
        np.add.at(sums, (rank_index, step_index), np.where(counted, values, 0))
        return sums

    sums = sum_counted(times.excess_ns)
    # With many modules, a few are always slow by chance; this differs between ranks.
    rank_medians = np.sort(np.median(sums, axis=1)) if sums.size else np.zeros(1)
    typical = rank_medians[(len(rank_medians) - 1) // 2]
    limits = np.maximum(noise_limit(sum_counted(times.noise_ns**2), np.bincount(step_index)), MIN_NOISES * typical)
    return {
        (int(ranks[rank]), int(steps[step])): (int(sums[rank, step]), round(limits[rank, step]))
        for rank, step in np.argwhere(sums > limits).tolist()
    }


def _cut_of_modules(
    events: RankEvents, times: LikeModuleTimes, rows: Int64Array, spans: SpanTable, own_time: OwnTime
) -> Int64Array:
    """Return the ns to subtract from the own time before each event, to remove the excess of the modules in `rows`."""
    rank = int(times.rank[rows[0]])
    segments = segments_of(spans, own_time, rank)
    inside = slice(*np.searchsorted(events.rank, [rank, rank + 1]).tolist())
    event = np.searchsorted(events.axis_ns[inside], segments.end_ns)
    count = inside.stop - inside.start
    step, fqn = spans.step[segments.owner], np.array([name.fqn for name in spans.names], object)
    name, phase = np.divmod(segments.key, len(PHASES))
    cut_ns = np.zeros(len(events.time_ns), np.int64)
    for row in rows.tolist():
        in_module = (step == times.step[row]) & (phase == times.phase[row]) & (event < count)
        in_module[in_module] = fqn[name[in_module]] == times.fqns[times.fqn[row]]
        weights = np.bincount(event[in_module], segments.own_ns[in_module].astype(np.float64), count).astype(np.float64)
        shorten(cut_ns, events, inside, weights, int(times.excess_ns[row]))
    return cut_ns


def _late_to_messages(table: CollectiveTable) -> dict[tuple[int, int], tuple[int, int]]:
    """Return (longest wait of a peer, ns; the peer) for each (rank, step) with messages."""
    sender, receiver = message_ends(table)
    is_message = sender >= 0
    if not np.any(is_message):
        return {}
    key = shared_keys(table)
    is_receiver = (table.rank == receiver).astype(np.int64)
    wait_start = np.full((int(key.max()) + 1, 2), INT64_MAX)
    waits, calls = (np.flatnonzero(is_message & (table.kind == kind)) for kind in (WAIT, CALL))
    np.minimum.at(wait_start, (key[waits], is_receiver[waits]), table.start_ns[waits])
    peer_wait_start = wait_start[key[calls], 1 - is_receiver[calls]]
    is_known = peer_wait_start < INT64_MAX
    lateness = np.where(is_known, table.start_ns[calls] - np.where(is_known, peer_wait_start, 0), INT64_MIN)
    peer = np.where(is_receiver == 1, sender, receiver)[calls]
    order = np.argsort(lateness, kind="stable")
    columns = table.rank[calls], table.step[calls], lateness, peer
    in_order = zip(*(column[order].tolist() for column in columns), strict=True)
    return {(rank, step): (ns, peer) for rank, step, ns, peer in in_order}  # the last, largest value of a key wins


_UNSEEN_ON_DEVICES = (
    "a device runs the collectives, and only the times at which threads called them are known; merge a profile "
    "of each rank, or record its device times"
)
_NO_STEP = 1 << 30
"""A number above the steps of all recordings."""
_VERDICTS: tuple[LateVerdict, ...] = ("even", "cannot tell", "late")
"""The verdicts, the most significant last."""


def find_late(tables: RankTables, first: int, stop: int) -> PartOfRun:
    """Return the findings of the steps from `first` to before `stop`."""
    # Starts one step earlier: a rank's time before its first collective starts at its previous one.
    table = tables.read(CollectiveTable, first - 1, stop)
    own_time = OwnTime(table)
    arrivals = find_arrivals(table, own_time)
    in_steps = arrivals.step >= first
    arrivals = Arrivals._make(column[in_steps] for column in arrivals)
    ends = tables.read(StepTable, first - 1, stop)
    duration, last_end = step_durations(ends), int(ends.step.max(initial=-1))
    step_findings = late_steps(arrivals, tables.bounds())
    modules = _modules_of(arrivals, step_findings, tables, own_time)
    by_step = {
        finding.step: finding._replace(modules=modules.get(finding.step, ()))
        for finding in (late_step.finding for late_step in step_findings)
    }
    events = rank_events(table, own_time)
    replay = Replay(events)
    cuts = defaultdict[int, Int64Array](lambda: np.zeros(len(events.time_ns), np.int64))
    for late_step in step_findings:
        if late_step.finding.verdict == "late":
            cut_ns = without_excess(events, arrivals, late_step.slower.tolist())
            cuts[late_step.finding.rank] = np.maximum(cuts[late_step.finding.rank], cut_ns)
    for finding, cut_ns in late_senders(table, own_time, replay, tables, first=first, stop=stop):
        if finding.step not in by_step or _weight(finding) > _weight(by_step[finding.step]):
            by_step[finding.step] = finding
            if finding.verdict == "late":
                cuts[finding.rank] = np.maximum(cuts[finding.rank], cut_ns)
    saved = {rank: replay.saved_by_step(cut_ns) for rank, cut_ns in cuts.items()}
    steps = []
    for step, finding in sorted(by_step.items()):
        is_late = finding.verdict == "late"
        # Calls after the end of the last step form no step, but a rank that was late there is named.
        if is_late or step <= last_end or last_end < 0:
            saved_ns = saved.get(finding.rank, {}).get(step, 0) if is_late else finding.saved_ns
            steps.append(finding._replace(saved_ns=saved_ns, duration_ns=duration.get(step, 0)))
    saved_by_rank = {rank: sum(by_step.values()) for rank, by_step in saved.items()}
    saved_ns = sum(saved_by_rank.values())
    if len(cuts) > 1:
        saved_ns = sum(replay.saved_by_step(np.sum(list(cuts.values()), axis=0)).values())
    ranks = events.rank[group_starts(events.rank)]
    waits = (table.kind == WAIT) & (table.counter >= 0) | (table.kind == INFERRED_WAIT) | (table.done_ns >= 0)
    return PartOfRun(steps, ranks, _lateness(arrivals, steps, ranks), saved_by_rank, saved_ns, bool(waits.any()))


def _weight(finding: StepFinding) -> tuple[int, int]:
    return _VERDICTS.index(finding.verdict), finding.cost_ns


def _lateness(arrivals: Arrivals, steps: Sequence[StepFinding], ranks: Int64Array) -> Float32Array:
    """Return the maximum lateness of each rank in each step; in pipelines only of the late rank."""
    numbers = np.array([step.step for step in steps], np.int64)
    lateness = np.full((len(ranks), len(numbers)), np.nan, np.float32)
    is_counted = np.isin(arrivals.step, numbers)
    cells = np.searchsorted(ranks, arrivals.rank[is_counted]), np.searchsorted(numbers, arrivals.step[is_counted])
    np.fmax.at(lateness, cells, arrivals.lateness_ns[is_counted].astype(np.float32))
    for column, step in enumerate(steps):
        if step.verdict == "late" and np.isnan(lateness[:, column]).all():
            lateness[np.searchsorted(ranks, step.rank), column] = step.lateness_ns
    return lateness


def _modules_of(
    arrivals: Arrivals, steps: Sequence[LateStep], tables: RankTables, own_time: OwnTime
) -> dict[int, tuple[ModuleExcess, ...]]:
    """Return the slow modules of the late rank of each late step; spans are read once per late rank."""
    by_rank: dict[int, list[tuple[LateStep, list[int]]]] = {}
    for late_step in steps:
        if late_step.finding.verdict == "late":
            by_rank.setdefault(late_step.finding.rank, []).append((late_step, peers_of(arrivals, late_step)))
    modules = {}
    for rank, rank_steps in by_rank.items():
        numbers = [late_step.finding.step for late_step, _ in rank_steps]
        ranks = sorted({rank, *(peer for _, peers in rank_steps for peer in peers)})
        spans = tables.read(SpanTable, min(numbers) - 1, max(numbers) + 1, ranks)
        ranges = tables.read(RangeTable, min(numbers) - 1, max(numbers) + 1, ranks)
        # Sorted by step, so that the spans of a step are found by bisection.
        by_step = np.argsort(spans.step, kind="stable")
        for late_step, peers in rank_steps:
            step = late_step.finding.step
            first, last = np.searchsorted(spans.step, [step - 1, step + 1], sorter=by_step)
            near_spans = take(spans, np.sort(by_step[first:last]))
            near_ranges = take(ranges, ranges.apart & (ranges.step >= step - 1) & (ranges.step <= step))
            excess = module_excess(arrivals, late_step, peers, spans=near_spans, ranges=near_ranges, own_time=own_time)
            modules[step] = tuple(excess[:MODULES_PER_STEP])
    return modules


def step_durations(table: StepTable) -> dict[int, int]:
    """Return the median duration of each step over the ranks, ns."""
    order = np.lexsort((table.step, table.rank))
    rank, step, end = table.rank[order], table.step[order], table.end_ns[order]
    follows = (np.diff(rank) == 0) & (np.diff(step) == 1)
    step = step[1:][follows]
    medians = medians_within(np.diff(end)[follows], step)
    return dict(zip(step.tolist(), medians.astype(np.int64).tolist(), strict=True))


def find_slow_ranks(
    source: Location,
    *,
    steps: StepRange | None = None,
    role: str | None = None,
    on_left_out: Callable[[ModtraceError], None] | None = None,
    executor: Executor | None = None,
) -> SlowRun:
    """Find the ranks that others wait for, in a folder of recordings or in a dataset.

    All recordings are read into memory. A dataset is read one bucket of steps at a time.

    Args:
        source: a folder with a recording of each rank, a dataset made by `modtrace ranks pack`, or the URL of one.
        steps: (first, end) of the steps to read, without `end`; None reads all steps.
        role: role of the processes to read, for recordings only; None reads all roles.
        on_left_out: called with the error of each recording that is left out; None: the error is raised.
        executor: reads recordings and buckets, such as Dask's `Client.get_executor(pure=False)`; its workers must see
            the same files under the same names. None: this process reads recordings, local processes read buckets.

    Raises:
        ModtraceError: there are no recordings; a recording cannot be read, or is a ring with more than 4 million events
            and no `steps` are given; no two ranks waited for each other; or `role` is given for a dataset.
    """
    if not is_dataset(source):
        with as_folder(source, executor) as folder:
            files = find_rank_recordings(folder, on_left_out, role)
            return slow_of_recordings(files, JobTime(files), steps, executor)
    if role is not None:
        raise ModtraceError(f"{os.fspath(source)}: a dataset is always read for all roles; leave out `role` (--role)")
    from ..dataset_tables import DatasetTables

    tables = DatasetTables(source)
    buckets = tables.buckets("collectives", steps=steps or (None, None))
    parts = dict(
        map_in_processes(partial(_slow_bucket, absolute_location(source)), buckets, processor_count(), executor)
    )
    waits = find_role_waits(join_role_times(parts[bucket][1] for bucket in sorted(parts)))
    run = _run((part for part, _ in parts.values()), tables)
    return _checked(replace(run, waits=waits), tables.engines, source)


def slow_of_recordings(
    files: Sequence[RankRecording], job: JobTime, steps: StepRange | None = None, executor: Executor | None = None
) -> SlowRun:
    """Return the late ranks in recordings, or in `steps` of them; raise ModtraceError if no two ranks waited."""
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


def find_late_in_rings(rings: Mapping[int, RingSnapshot]) -> list[LateArrival]:
    """Return late arrivals, also of ranks still awaited; raise ModtraceError if two rings are not of one job."""
    files = [RankRecording(rank, Path(f"rank {rank}"), True, snapshot) for rank, snapshot in sorted(rings.items())]
    run = join_parts([find_late(FolderTables(files, JobTime(files)), 0, _NO_STEP)])
    names = {rank: process_label(snapshot.metadata.get("role", ""), rank) for rank, snapshot in rings.items()}
    late = [
        LateArrival(step.rank, step.step, step.cost_ns, step.sentence_of(names[step.rank]))
        for step in run.steps
        if step.verdict == "late" and step.modules
    ]
    now, readable_ranks = read_clocks(), [rank for rank, snapshot in rings.items() if not snapshot.missing_bytes]
    states = [rank_state_of(f"rank {rank}", RingAnalysis(rings[rank]), now) for rank in readable_ranks]
    next_step = 1 + max((state.step for state in states if state.step is not None), default=-1)
    return late + [
        LateArrival(min(hang.blamed), next_step, hang.wait_ns, hang.text)
        for hang in find_hangs(states)
        if hang.is_cause and hang.blamed
    ]


def worst_ranks(run: SlowRun, count: int) -> list[int]:
    """Return up to `count` ranks: late ranks by cost, then the others by their mean lateness."""
    late_ranks = [late.rank for late in run.late]
    matrix, ranks, _ = run.lateness
    lateness = {rank: row[~np.isnan(row)] for rank, row in zip(ranks, matrix, strict=True)}
    mean = {rank: float(row.mean()) if len(row) else -np.inf for rank, row in lateness.items()}
    late_ranks += sorted(mean.keys() - set(late_ranks), key=lambda rank: -mean[rank])
    return late_ranks[:count]


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
            f"{os.fspath(path)}: no two ranks called the same collective or exchanged a message{unseen}"
        )
    return run
