"""Sums of calls and times per module or class, from the columns of a timeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..._arrays import INT64_MIN, BoolArray, Int64Array, Numbering, expand_ranges, sums_at
from ..contents import COMMUNICATION_KIND, MIN_CALLS_IN_STEP, NO_PHASE, GpuWork, Process
from ..nesting import extents, is_outermost, self_times, times_in_phase
from ..select import first_process_tracks, without_gpu
from ..slices import BACKWARD, BACKWARD_PASS, FORWARD, PHASES, RECOMPUTE, Arg, Slices
from ..step_pieces import step_pieces
from . import units
from .compiled import compiled_modules
from .device_summary import DeviceSummary, summarize_device
from .findings import CallCounts, RuleInput, find_findings, lines_of_parts, looked_at
from .flop_summary import FlopSummary, GroupFlops, describe_flops, read_flops
from .memory_summary import MeasuredMemory, measure_memory, summarize_memory
from .module_rows import GpuStepTimes, GpuTotals, GroupBy, Groups, ModuleTimes, group_modules, outer_modules
from .module_summary import Summary
from .overview import SpanCounts, count_spans, describe_recording
from .parts import DividedSteps, divide_piece, join_divided, measure_collections, sum_up_around
from .slow_steps import explain_steps, name_places
from .step_bounds import OPTIMIZER, find_step_bounds
from .step_times import Steps, is_in_evaluation, measure_steps
from .units import GroupTimes, Percentiles

if TYPE_CHECKING:
    from ..timeline import Timeline


def summarize(timeline: Timeline, by: GroupBy = "module", step_by: str | None = None) -> Summary:
    """Return the summary of a timeline, see `Timeline.summary`; device times are in a table of their own."""
    device = summarize_device(timeline, by)
    timeline = without_gpu(timeline)
    step_by = find_step_bounds(timeline, step_by).step_by
    summary = replace(
        summarize_pieces(step_pieces(timeline) if step_by == OPTIMIZER else [timeline], by, step_by, device),
        others_ns=_time_of_others(timeline),
        units=units.measure_units(timeline, step_by),
    )
    return summary if timeline.gpu_work is None else with_gpu_times(summary, timeline.gpu_work)


def summarize_pieces(
    pieces: Iterable[Timeline], by: GroupBy = "module", step_by: str = OPTIMIZER, device: DeviceSummary | None = None
) -> Summary:
    """Return the summary of one process's timeline in pieces; memory use grows with its steps, modules and one piece.

    The last piece has the stats and metadata of all. If steps are calls or ranges, there is only one piece.
    """
    pieces_by: dict[GroupBy, list[_PieceTotals]] = {"module": [], by: []}  # findings need the sums by module
    for timeline in pieces:
        spans: dict[GroupBy, _Spans] = {key: _classify(timeline, key, step_by) for key in pieces_by}
        for key, totals in pieces_by.items():
            totals.append(_measure(timeline, spans[key], step_by))
    sums = {key: _sum_up(timeline, key, spans[key].groups, totals, device) for key, totals in pieces_by.items()}
    rule_input = sums["module"]
    findings = find_findings(rule_input)
    has_finding = {finding.part for finding in findings}
    lines = [line for part, line in lines_of_parts(rule_input).items() if part not in has_finding]
    return replace(sums[by].summary, findings=findings, looked_at=looked_at(rule_input), lines=lines)


class _Spans(NamedTuple):
    """The group and the step of each span (row of `Timeline.columns`), and whether it counts."""

    groups: Groups  # the rows of the summary
    group: Int64Array  # int64[spans], the span's group
    in_backward: BoolArray  # bool[spans], True if the span ran inside backward
    timed: Int64Array  # indices of the outermost spans of each group, without spans that ran inside backward
    is_counted: BoolArray  # bool[spans], True in a step outside evaluations, and in other processes
    step: Int64Array  # int64[spans], the span's step; -2 in other processes


_OTHER_PROCESS = -2


def _classify(timeline: Timeline, by: GroupBy, step_by: str) -> _Spans:
    """Return the group and the step of each span, and whether it counts."""
    columns, groups = timeline.columns, group_modules(tuple(timeline.names), by)
    group = groups.of_name[columns.name]
    # Any module's backward may call a module: a call inside backward counts to the modules that contain it by name.
    on_backward = np.array([track.kind == "backward" for track in timeline.tracks], np.bool_)[columns.track]
    in_backward = (columns.phase == RECOMPUTE) | (columns.phase == FORWARD) & on_backward
    timed = np.flatnonzero(is_outermost(columns, group) & ~in_backward)
    bounds = find_step_bounds(timeline, step_by)
    # Steps belong to the first process, and do not divide the spans of other processes.
    is_own, step = first_process_tracks(timeline)[columns.track], bounds.of_spans(timeline)
    in_step = is_own & (step >= 0)
    if bounds.step_by == OPTIMIZER:
        in_step &= ~is_in_evaluation(timeline)
    return _Spans(groups, group, in_backward, timed, in_step | ~is_own, np.where(is_own, step, _OTHER_PROCESS))


class _PieceTotals(NamedTuple):
    """The sums of one piece of a timeline."""

    total_ns: Int64Array  # int64[phases, groups], with inner calls
    self_ns: Int64Array  # int64[phases, groups], without them
    calls: Int64Array  # int64[groups], numbers of calls
    order: list[int]  # indices of the groups, in the order of their first calls
    in_steps: GroupTimes  # times of the groups in each step
    steps: Steps
    divided: DividedSteps  # parts of the steps
    counts: SpanCounts
    memory: MeasuredMemory | None  # None if memory was not recorded
    flops: GroupFlops | None  # None if no operators were counted
    ranges: Mapping[tuple[str, str], Int64Array]  # see `units.measure_ranges`
    call_counts: Int64Array  # int64[2, 11, groups], see `findings.CallCounts`: in whole steps, and elsewhere
    collections: Int64Array  # see `RuleInput.collections`


def _measure_flops(timeline: Timeline, spans: _Spans, steps: Steps) -> GroupFlops | None:
    """Return the FLOPs of the groups of a piece; None if no operators were counted."""
    span_flops = read_flops(timeline, Arg.FLOPS, Arg.BYTES_ACCESSED, Arg.RECOMPUTE_FLOPS)
    if not span_flops:
        return None
    flops, nbytes, rerun = span_flops
    columns, count = timeline.columns, len(spans.groups)
    in_backward = _add_up(columns, spans, rerun.total_flops, rerun.self_flops)
    total = _add_up(columns, spans, flops.total_flops, flops.self_flops)
    total[[BACKWARD, RECOMPUTE]] += [-in_backward[BACKWARD], in_backward[BACKWARD]]
    cell = columns.phase, spans.group
    spans_in_phase, known, self_flops = (
        sums_at((len(PHASES), count), cell, values) for values in (1, flops.is_known, flops.self_flops)
    )
    numbers = steps.columns.step
    step = np.where(spans.is_counted, spans.step, -1)
    in_steps = flops.in_steps(columns, step, numbers)
    rerun_in_steps = rerun.in_steps(columns, step, numbers)[BACKWARD]
    in_steps[[BACKWARD, RECOMPUTE]] += [-rerun_in_steps, rerun_in_steps]
    moved = _add_up(columns, spans, nbytes.total_flops, nbytes.self_flops)
    return GroupFlops(spans_in_phase, known, total, self_flops, in_backward, moved, in_steps)


def _measure(timeline: Timeline, spans: _Spans, step_by: str) -> _PieceTotals:
    """Return the sums of a piece of a timeline."""
    columns, (groups, group, in_backward, timed, counts, step) = timeline.columns, spans
    self_ns, in_phase_ns = self_times(columns), times_in_phase(columns)
    total_ns = _add_up(columns, spans, in_phase_ns, self_ns)
    timed, calls_inside = timed[counts[timed]], np.flatnonzero(in_backward & counts)
    inner = _self_times_by_group(columns, step, groups, calls_inside, self_ns[calls_inside])
    outer = GroupTimes(group[timed], step[timed], in_phase_ns[timed])
    called, first = np.unique(group, return_index=True)
    steps = measure_steps(timeline, step_by)
    return _PieceTotals(
        total_ns=total_ns,
        self_ns=sums_at(total_ns.shape, (columns.phase, group), self_ns),
        calls=np.bincount(group[columns.phase == FORWARD], minlength=len(groups)),
        order=called[np.argsort(first)].tolist(),
        in_steps=units.sum_by_group_and_step(units.join_times([outer, inner])),
        steps=steps,
        divided=divide_piece(timeline, step_by),
        counts=count_spans(timeline),
        memory=measure_memory(timeline, groups, find_step_bounds(timeline, step_by)),
        flops=_measure_flops(timeline, spans, steps),
        ranges=units.measure_ranges(timeline),
        call_counts=_count_calls(timeline, spans, steps, in_phase_ns, self_ns),
        collections=measure_collections(timeline),
    )


def _count_calls(
    timeline: Timeline, spans: _Spans, steps: Steps, in_phase_ns: Int64Array, self_ns: Int64Array
) -> Int64Array:
    """Return int64[2, 11, groups], see `findings.CallCounts`: in whole steps, and elsewhere in the first process."""
    columns, unused = timeline.columns, timeline.columns.arg(Arg.UNUSED_NODES).rows
    is_elsewhere = ~np.isin(spans.step, steps.columns.step[steps.columns.whole])

    def sums(rows: Int64Array, values: Int64Array | None = None) -> Int64Array:
        """Return int64[2, groups], the number of the spans (or the sum of values) in whole steps and elsewhere."""
        cell = is_elsewhere[rows].astype(np.int64), spans.group[rows]
        return sums_at((2, len(spans.groups)), cell, 1 if values is None else values[rows])

    is_own = spans.step != _OTHER_PROCESS
    calls = np.flatnonzero((columns.phase == FORWARD) & spans.is_counted & is_own & ~spans.in_backward)
    has_backward = np.isin(columns.link[calls], columns.link[columns.phase == BACKWARD]) & (columns.link[calls] >= 0)
    alone, backed = calls[~has_backward], calls[has_backward]
    outermost, growth_ns = alone[columns.depth[alone] == 0], np.zeros(len(columns), np.int64)
    growth_ns[outermost] = _growth_in_steps(spans.group[outermost], spans.step[outermost], in_phase_ns[outermost])
    evaluated = unused[is_own[unused] & is_in_evaluation(timeline)[unused]] if len(unused) else unused
    in_evaluations = np.stack([sums(evaluated).sum(axis=0), np.zeros(len(spans.groups), np.int64)])
    reruns, is_first_in_pass = _passes_again(timeline)
    rerun, is_first = reruns[is_own[reruns]], is_first_in_pass[is_own[reruns]]
    tables = (
        *(sums(calls), sums(backed), sums(calls[np.isin(calls, unused)])),
        *(sums(alone, in_phase_ns), sums(backed, in_phase_ns)),
        *(sums(calls, columns.arg(Arg.OWN_NODES).dense(len(columns), missing=0)), in_evaluations),
        *(sums(rerun[is_first]), sums(rerun, in_phase_ns), sums(calls, self_ns)),
        sums(outermost, growth_ns),
    )
    return np.stack(tables, axis=1)


def _growth_in_steps(group: Int64Array, step: Int64Array, ns: Int64Array) -> Int64Array:
    """Return int64[calls], the time of each call minus the mean of the first quarter of its group's calls in its step.

    The calls are in the order of their starts. It is 0 if the step has fewer than `MIN_CALLS_IN_STEP` of them.
    """
    order = np.lexsort((step, group))
    starts = np.flatnonzero(np.append(True, (np.diff(group[order]) != 0) | (np.diff(step[order]) != 0))[: len(order)])
    count = np.diff(np.append(starts, len(order)))
    total_ns = np.append(0, np.cumsum(ns[order]))
    quarter = np.maximum(count // 4, 1)
    mean_ns = (total_ns[starts + quarter] - total_ns[starts]) / quarter
    growth_ns = np.zeros(len(ns), np.int64)
    growth_ns[order] = ns[order] - np.repeat(mean_ns, count).astype(np.int64)
    growth_ns[order[np.repeat(count < MIN_CALLS_IN_STEP, count)]] = 0
    return growth_ns


def _passes_again(timeline: Timeline) -> tuple[Int64Array, BoolArray]:
    """Return (spans, is_first) of calls' repeated backward passes: outermost backward spans, and the first per pass.

    A repeated pass runs at least half of the innermost modules that the call's first pass ran: a pass for a few weights
    runs fewer. Both arrays are empty if several threads run passes.
    """
    columns, slices = timeline.columns, timeline.slices
    passes = slices.take(np.flatnonzero(slices.kind == BACKWARD_PASS))
    passes = passes.take(np.argsort(passes.start, kind="stable"))
    is_backward = columns.phase == BACKWARD
    spans = np.flatnonzero(is_backward & (columns.depth == 0) & (columns.link >= 0))
    if not len(spans) or len(np.unique(passes.track)) != 1:
        return np.zeros(0, np.int64), np.zeros(0, np.bool_)
    is_outer = passes.start >= np.append(INT64_MIN, np.maximum.accumulate(passes.end)[:-1])
    number = np.searchsorted(passes.start[is_outer], columns.start[spans], "right")
    # Sorted by call and pass; a call may have several spans in a pass.
    order = np.lexsort((number, columns.link[spans]))
    spans, number, link = spans[order], number[order], columns.link[spans[order]]
    is_new_call = np.append(True, np.diff(link) != 0)
    is_first = is_new_call | np.append(True, np.diff(number) != 0)
    first = np.flatnonzero(is_new_call)[np.cumsum(is_new_call) - 1]
    if not np.any(number > number[first]):
        return np.zeros(0, np.int64), np.zeros(0, np.bool_)
    outermost = np.arange(len(is_backward))
    for _ in range(int(columns.depth.max())):
        outermost = np.where(columns.parent[outermost] >= 0, columns.parent[outermost], outermost)
    is_innermost = is_backward.copy()
    is_innermost[columns.parent[is_backward & (columns.parent >= 0)]] = False
    size = np.bincount(outermost[is_innermost], minlength=len(is_backward))[spans]
    in_pass = np.add.reduceat(size, np.flatnonzero(is_first))[np.cumsum(is_first) - 1]
    is_again = (number > number[first]) & (2 * in_pass > in_pass[first])
    return spans[is_again], is_first[is_again]


def _sum_up(
    timeline: Timeline, by: GroupBy, groups: Groups, pieces: list[_PieceTotals], device: DeviceSummary | None
) -> RuleInput:
    """Return the summary of the pieces, the last of which is `timeline`, and the data for its findings."""
    steps = Steps(*(piece.steps.table for piece in pieces))
    divided = join_divided([piece.divided for piece in pieces])
    in_steps, counted = [piece.in_steps for piece in pieces], divided.bounds.number[divided.bounds.counted]
    if not divided.bounds.is_whole.any():  # then the steps' numbers are unknown too
        counted = np.unique(np.concatenate([piece.step[piece.step >= 0] for piece in in_steps]))
    percentiles = units.percentiles_by_group(in_steps, steps=counted, groups=len(groups))
    order = list(dict.fromkeys(group for piece in pieces for group in piece.order))
    columns = _module_columns(pieces, order, counted, percentiles)
    counts = SpanCounts.joined([piece.counts for piece in pieces])
    memory = summarize_memory(timeline, groups, order, [piece.memory for piece in pieces if piece.memory is not None])
    if memory is not None:
        columns |= {name: [getattr(row, name) for row in memory.rows] for name in ("retained_bytes", "peak_bytes")}
    costs = _join_flops(pieces, len(groups), order)
    if costs is not None:
        columns |= costs.columns
    rows = [
        ModuleTimes(groups.fqns[group], groups.classes[group], **dict(zip(columns, values, strict=True)))
        for group, *values in zip(order, *columns.values(), strict=True)
    ]
    flops = costs and describe_flops(timeline, rows, costs, steps, device=device, compiled=counts.compiled)
    summary = Summary(
        rows,
        len(rows),
        counts.incomplete_count,
        timeline.stats.overwritten,
        overview=describe_recording(timeline, counts)._replace(step_by=divided.bounds.step_by),
        steps=steps,
        by=by,
        step_parts=name_places(explain_steps(divided, forward_of_calls=True), in_steps, percentiles.p50, groups),
        around=sum_up_around(divided),
        device=device,
        memory=memory,
        flops=flops,
        ranges=units.sum_up_ranges([piece.ranges for piece in pieces]),
        compiled=compiled_modules(timeline.metadata),
    )
    call_counts = _sum_groups((piece.call_counts for piece in pieces), len(groups))
    step_counts = call_counts[0] if len(steps.counted) < len(steps) else call_counts.sum(axis=0)
    return RuleInput(
        summary,
        divided,
        p10_ns=percentiles.p10[order],
        call_counts=CallCounts(*step_counts[:, order]),
        communication=counts.own_communication,
        collections=np.sum([piece.collections for piece in pieces], axis=0),
        metadata=timeline.metadata,
        in_steps=in_steps,
        order=order,
    )


def _sum_groups(tables: Iterable[Int64Array], groups: int) -> Int64Array:
    """Return int64[..., groups], the sum of the pieces' tables, which may have fewer groups.

    The groups of ranges, which contain no span, follow the groups of modules, and are not in all pieces.
    """
    cut_tables = [table[..., :groups] for table in tables]
    sums = np.zeros((*cut_tables[0].shape[:-1], groups), np.int64)
    for table in cut_tables:
        sums[..., : table.shape[-1]] += table
    return sums


def _module_columns(
    pieces: Sequence[_PieceTotals], order: list[int], counted: Int64Array, percentiles: Percentiles
) -> dict[str, list[Any]]:
    """Return the fields of the rows of the groups `order`; `counted`: numbers of the steps that statistics cover."""
    in_steps_ns = np.zeros_like(percentiles.p50)
    for group, step, ns in (piece.in_steps for piece in pieces):
        counts = (step == _OTHER_PROCESS) | np.isin(step, counted)
        np.add.at(in_steps_ns, group[counts], ns[counts])
    calls, totals, self_ns = (
        _sum_groups((getattr(piece, name) for piece in pieces), len(in_steps_ns))
        for name in ("calls", "total_ns", "self_ns")
    )
    columns = {
        **{f"{name}_ns": totals[phase] for phase, name in enumerate(PHASES)},
        **{f"{name}_self_ns": self_ns[phase] for phase, name in enumerate(PHASES)},
        "calls": calls,
        "step_p50_ns": percentiles.p50,
        "step_p95_ns": percentiles.p95,
        "in_steps_ns": in_steps_ns,
    }
    return {name: column[order].tolist() for name, column in columns.items()}


def _join_flops(pieces: Sequence[_PieceTotals], groups: int, order: list[int]) -> GroupFlops | None:
    """Return the FLOPs of the groups `order` in all pieces; None if no operators were counted."""
    measured = [piece.flops for piece in pieces if piece.flops is not None]
    if not measured:
        return None
    tables = zip(*(piece[:-1] for piece in measured), strict=True)
    in_steps = np.concatenate([piece.in_steps for piece in measured], axis=1)
    return GroupFlops._make([*(_sum_groups(columns, groups)[:, order] for columns in tables), in_steps])


def _add_up(columns: Slices, spans: _Spans, in_phase: Int64Array, self_values: Int64Array) -> Int64Array:
    """Return int64[phases, groups], the groups' totals of `in_phase`: values of spans with inner spans of their phase.

    A call inside backward adds `self_values`, its value without inner spans, to all groups that contain it by name.
    """
    groups, timed, in_backward = spans.groups, spans.timed, spans.in_backward
    cell = columns.phase[timed], groups.of_name[columns.name[timed]]
    total = sums_at((len(PHASES), len(groups)), cell, in_phase[timed])
    for phase in (FORWARD, RECOMPUTE):
        rows = np.flatnonzero(in_backward & (columns.phase == phase))
        inner = _self_times_by_group(columns, columns.step, groups, rows, self_values[rows])
        np.add.at(total[phase], inner.group, inner.ns)
    return total


def _time_of_others(timeline: Timeline) -> int:
    """Return the total ns of all processes except the first, each from its first start to its last end."""
    index_of = Numbering[Process]()
    process = np.array([index_of[track.process] for track in timeline.tracks], np.int64)[timeline.columns.track]
    if len(index_of) < 2:
        return 0
    first, last = extents(process, timeline.columns.start, timeline.columns.end, len(index_of))
    return int((last - first)[1:][first[1:] <= last[1:]].sum())


def _self_times_by_group(
    columns: Slices, step: Int64Array, groups: Groups, span: Int64Array, self_ns: Int64Array
) -> GroupTimes:
    """Return the self time of each span for every group that its module counts to, in any order."""
    names = len(groups.of_name)
    key, inverse = np.unique(step[span] * max(names, 1) + columns.name[span], return_inverse=True)
    ns = sums_at(len(key), inverse, self_ns)
    step, name = np.divmod(key, max(names, 1))
    count = np.bincount(groups.inner_name, minlength=names)
    end = np.cumsum(count)
    pair, row = expand_ranges((end - count)[name], end[name])
    return GroupTimes(groups.outer_group[pair], step[row], ns[row])


def with_gpu_times(summary: Summary, work: GpuWork) -> Summary:
    """Return a summary with GPU columns, and with additional rows for modules that only launched GPU work."""
    by_module = summary.by == "module"
    modules = {module for index in np.unique(work.place).tolist() for module, _ in work.places[index]}
    rows = {row.fqn if by_module else row.module_class: row for row in summary.rows}
    keys = [fqn if by_module or not module_class else module_class for fqn, module_class in work.modules]
    for module in sorted(modules):
        fqn, module_class = work.modules[module]
        rows.setdefault(keys[module], ModuleTimes(*((fqn, module_class) if by_module else ("", keys[module]))))
    index = {key: number for number, key in enumerate(rows)}
    paths = [[(phase, index.get(keys[module], -1)) for module, phase in path] for path in work.places]
    phase, row = np.array([path[-1] if path else (0, 0) for path in paths] or [(0, 0)], np.int64).T
    phase, row = phase[work.place], row[work.place]
    computes = work.kind < COMMUNICATION_KIND
    launched = sums_at(len(paths), work.place[computes], work.duration[computes])
    # A call within a call of the same module counts once.
    total_ns = np.zeros((len(PHASES), len(rows)), np.int64)
    for number in np.flatnonzero(launched).tolist():
        for outer_phase, outer in set(paths[number]):
            if outer_phase != NO_PHASE:
                total_ns[outer_phase, outer] += launched[number]
    has_phase = computes & (phase != NO_PHASE)
    self_ns = sums_at(total_ns.shape, (phase[has_phase], row[has_phase]), work.duration[has_phase])
    by_kind = COMMUNICATION_KIND + 1, len(rows)
    counts, times = (sums_at(by_kind, (work.kind, row), values) for values in (work.count, work.duration))
    times = np.vstack([times, sums_at(len(rows), row, work.overlap)])
    columns = {
        "kernels": counts[0],
        **{f"gpu_{name}_ns": total_ns[code] for code, name in enumerate(PHASES)},
        **{f"gpu_{name}_self_ns": self_ns[code] for code, name in enumerate(PHASES)},
        **dict(zip(GpuTotals._fields, times, strict=True)),
        "collectives": counts[COMMUNICATION_KIND],
    }
    return replace(
        summary,
        flops=_add_rates(summary.flops, rows, self_ns) if by_module else summary.flops,
        rows=[
            ModuleTimes(**row._asdict() | {name: int(column[number]) for name, column in columns.items()})
            for number, row in enumerate(rows.values())
        ],
        modules=len(rows),
        gpu=GpuTotals(*times.sum(axis=1).tolist()),
        gpu_steps=tuple(_step_times(work, computes, step) for step in np.unique(work.step).tolist() if step >= 0),
    )


def _add_rates(flops: FlopSummary | None, rows: Mapping[str, ModuleTimes], self_ns: Int64Array) -> FlopSummary | None:
    """Return FLOPs with rates by the kernels' times, int64[phases, rows]; unchanged if a CPU computed them."""
    if flops is None or flops.on_cpu:
        return flops
    index, with_inner = {fqn: number for number, fqn in enumerate(rows)}, self_ns.copy()
    for fqn, outer in outer_modules(list(rows)).items():
        # Recompute counts to the modules that contain its module by name, as in the FLOPs.
        for outer_fqn in outer:
            with_inner[:, index[outer_fqn]] += self_ns[:, index[fqn]]
    keys = [(row.fqn, row.module_class) for row in rows.values()]
    return flops.timed(dict(zip(keys, with_inner.T.tolist(), strict=True)))


def _step_times(work: GpuWork, computes: BoolArray, step: int) -> GpuStepTimes:
    """Return the times of the GPU work that one step launched."""
    computing, communicating = (np.flatnonzero((work.step == step) & rows) for rows in (computes, ~computes))
    return GpuStepTimes(
        step=step,
        gpu_ns=int(work.duration[computing].sum()),
        communication_ns=int(work.duration[communicating].sum()),
        communication_overlap_ns=int(work.overlap[communicating].sum()),
    )
