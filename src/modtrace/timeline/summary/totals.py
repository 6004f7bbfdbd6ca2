"""Calls and times per module or class, added up from the columns of a timeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..._typing import BoolArray, Int64Array
from ..gpu_tracks import without_gpu
from ..select import first_process_tracks
from ..slices import FORWARD, PHASES, RECOMPUTE, Columns
from .device_summary import summarize_device
from .flop_summary import describe_flops, read_flops, with_flops
from .memory_summary import summarize_memory
from .module_rows import GroupBy, Groups, ModuleTimes, group_modules
from .module_summary import Summary
from .overview import describe_recording
from .parts import divide_outside, divide_steps
from .percentiles import median_and_p95_by_group
from .self_times import is_outermost, self_times, times_in_phase
from .step_bounds import OPTIMIZER, find_step_bounds
from .step_times import is_in_evaluation, measure_steps
from .units import measure_units

if TYPE_CHECKING:
    from ..timeline import Timeline


def summarize(timeline: Timeline, by: GroupBy = "module", step_by: str | None = None) -> Summary:
    """Add up calls and CPU times per module or per class; device times are in a table of their own.

    See `Timeline.summary`.
    """
    device = summarize_device(timeline)
    timeline = without_gpu(timeline)
    columns = timeline.columns
    groups = group_modules(timeline.names, by)
    group = groups.of_name[columns.name]
    self_ns = self_times(columns)
    in_phase_ns, outermost = times_in_phase(columns), is_outermost(columns, group)
    # A call inside backward may be in that of any module: it counts to those that contain it by name.
    on_backward = np.array([track.kind == "backward" for track in timeline.tracks], np.bool_)[columns.track]
    inside = (columns.phase == RECOMPUTE) | (columns.phase == FORWARD) & on_backward
    timed = np.flatnonzero(outermost & ~inside)
    total_ns = _add_up(columns, groups, timed, inside, in_phase_ns, self_ns)
    phase_self_ns = np.zeros_like(total_ns)
    np.add.at(phase_self_ns, (columns.phase, group), self_ns)
    calls = np.bincount(group[columns.phase == FORWARD], minlength=len(groups))
    bounds, steps = find_step_bounds(timeline, step_by), measure_steps(timeline, step_by)
    # Steps are those of one process; they say nothing about the spans of others.
    own, step = first_process_tracks(timeline)[columns.track], bounds.of_spans(timeline)
    own = own & (~is_in_evaluation(timeline) if bounds.step_by == OPTIMIZER else step >= 0)
    flops = read_flops(timeline)
    total_flops = None if flops is None else _add_up(columns, groups, timed, inside, flops.total, flops.own)
    timed, calls_inside = timed[own[timed]], np.flatnonzero(inside & own)
    inner_group, inner_step, inner_ns = _with_outer_groups(columns, step, groups, calls_inside, self_ns[calls_inside])
    p50_ns, p95_ns = median_and_p95_by_group(
        np.concatenate([group[timed], inner_group]),
        np.concatenate([step[timed], inner_step]),
        np.concatenate([in_phase_ns[timed], inner_ns]),
        whole_steps=[whole.step for whole in steps if whole.whole],
        groups=len(groups),
    )
    by_phase = [times[phase] for phase in range(len(PHASES)) for times in (total_ns, phase_self_ns)]
    numbers = [calls, *by_phase, p50_ns, p95_ns]
    called, first = np.unique(group, return_index=True)
    order = called[np.argsort(first)].tolist()
    memory = summarize_memory(timeline, groups, order, bounds)
    rows = [
        ModuleTimes(
            groups.fqns[index],
            groups.classes[index],
            *(int(counted[index]) for counted in numbers),
        )
        for index in order
    ]
    if memory is not None:
        rows = [
            row._replace(retained_bytes=took.retained_bytes, peak_bytes=took.peak_bytes)
            for row, took in zip(rows, memory.rows, strict=True)
        ]
    costs = None
    if flops is not None and total_flops is not None:
        rows = with_flops(rows, total_flops[:, order], flops.is_unknown(columns, group, len(groups))[:, order])
        self_flops = np.zeros(len(groups), np.int64)
        np.add.at(self_flops, group, flops.own)
        in_steps = flops.in_steps(columns, np.where(own, step, -1), [whole.step for whole in steps])
        costs = describe_flops(timeline, rows, self_flops[order].tolist(), in_steps, steps, device)
    incomplete = int(np.count_nonzero(~columns.complete))
    return Summary(
        rows,
        len(rows),
        incomplete,
        timeline.stats.overwritten,
        overview=describe_recording(timeline)._replace(step_by=bounds.step_by),
        steps=steps,
        by=by,
        others_ns=_time_of_others(timeline),
        device=device,
        step_parts=divide_steps(timeline, step_by),
        units=measure_units(timeline, step_by),
        outside=divide_outside(timeline, step_by),
        memory=memory,
        flops=costs,
    )


def _add_up(
    columns: Columns, groups: Groups, timed: Int64Array, inside: BoolArray, in_phase: Int64Array, own: Int64Array
) -> Int64Array:
    """Return int64[phases, groups]: totals.

    Args:
        columns: the spans.
        groups: what has a row.
        timed: the outermost spans of each group, without those that ran inside backward.
        inside: bool, per span whether it ran inside backward.
        in_phase: of each span, with those of its phase inside it.
        own: of each span, without those inside it.
    """
    total = np.zeros((len(PHASES), len(groups)), np.int64)
    np.add.at(total, (columns.phase[timed], groups.of_name[columns.name[timed]]), in_phase[timed])
    for phase in (FORWARD, RECOMPUTE):
        spans = np.flatnonzero(inside & (columns.phase == phase))
        outer, _, inner = _with_outer_groups(columns, columns.step, groups, spans, own[spans])
        np.add.at(total[phase], outer, inner)
    return total


def _time_of_others(timeline: Timeline) -> int:
    """Return what the processes but the first took, in ns: each from the start of its first span to its last end."""
    index_of = {
        process: index for index, process in enumerate(dict.fromkeys(track.process for track in timeline.tracks))
    }
    if len(index_of) < 2:
        return 0
    process = np.array([index_of[track.process] for track in timeline.tracks], np.int64)[timeline.columns.track]
    first_start = np.full(len(index_of), np.iinfo(np.int64).max)
    last_end = np.full(len(index_of), np.iinfo(np.int64).min)
    np.minimum.at(first_start, process, timeline.columns.start)
    np.maximum.at(last_end, process, timeline.columns.end)
    ran = np.flatnonzero(np.bincount(process, minlength=len(index_of))[1:]) + 1
    return int((last_end[ran] - first_start[ran]).sum())


def _with_outer_groups(
    columns: Columns, step: Int64Array, groups: Groups, span: Int64Array, self_ns: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return (group, step, ns), in no order: the self time of each span for every group that its module counts to."""
    names = len(groups.of_name)
    key, inverse = np.unique(step[span] * max(names, 1) + columns.name[span], return_inverse=True)
    ns = np.zeros(len(key), np.int64)
    np.add.at(ns, inverse, self_ns)
    step, name = np.divmod(key, max(names, 1))
    count = np.bincount(groups.inner_name, minlength=names)
    first = np.cumsum(count) - count
    row = np.repeat(np.arange(len(key)), count[name])
    within = np.arange(len(row)) - np.repeat(np.cumsum(count[name]) - count[name], count[name])
    return groups.outer_group[first[name[row]] + within], step[row], ns[row]
