"""A step in parts: every nanosecond of a step belongs to exactly one part, so that the parts add up to the step.

The time of a step is cut at each start and end of its thread's spans, backward passes, collectives, ranges and garbage
collections. Layers of these are laid over each other, from the least to the most specific: the last layer wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..._arrays import (
    INT64_MAX,
    INT64_MIN,
    AnyArray,
    BoolArray,
    Int64Array,
    Numbering,
    distinct,
    expand_ranges,
    number_values,
    split_by,
    sums_at,
)
from ...ring.slot_format import GENERATION_MASK
from ..nesting import union_of
from ..select import first_process_tracks
from ..slices import (
    BACKWARD,
    BACKWARD_PASS,
    COLLECTIVE,
    GARBAGE_COLLECTION,
    MODULE,
    RANGE,
    RECOMPUTE,
    TRIGGERS,
    WAIT,
    Arg,
    Slices,
)
from ..step_pieces import backward_starts
from .step_bounds import GENERATE, OPTIMIZER, StepBounds, ThreadLine, find_step_bounds, once_per_timeline

if TYPE_CHECKING:
    from ..timeline import Timeline

PARTS = (
    *("data loading", "forward", "loss", "backward", "recompute", "communication"),
    *("optimizer", "gc", "compile", "saving", "evaluation"),
)
"""The parts of a step, in the order in which they are shown; user ranges by name and `other` follow."""
OTHER = "other"

_MODEL_PARTS = ("forward", "backward", "recompute", "evaluation")
_LOSS_SUFFIXES = ("Loss", "Criterion")
"""Endings of the names of loss classes: their outermost calls are the loss, without the model that they call."""


class _Layer(NamedTuple):
    """Intervals that do not overlap, and the part of each."""

    start_ns: Int64Array
    end_ns: Int64Array
    part: Int64Array


class DividedSteps(NamedTuple):
    """The steps of a piece of a timeline in parts."""

    bounds: StepBounds  # start and end of each step
    ns: Int64Array  # int64[steps, parts]
    names: Sequence[str]  # names of the parts
    longest: Mapping[tuple[int, str], str]  # name of the longest range, by (index of the step, category)
    gaps: StepBounds  # the times before, between and after the steps
    gap_ns: Int64Array  # int64[gaps, parts]
    other_ns: Int64Array  # int64[parts], ns of the part `other` that directly follow each part, in all steps


class Around(NamedTuple):
    """Time outside steps: nanoseconds by part, the longest part first.

    Attributes:
        before: time before the first whole step.
        between: time between steps: between two trainings, or between calls.
        after: time after the last whole step.
    """

    before: Mapping[str, int] = {}
    between: Mapping[str, int] = {}
    after: Mapping[str, int] = {}


@once_per_timeline
def divide_piece(timeline: Timeline, step_by: str) -> DividedSteps:
    """Return the steps of a piece in parts, without causes of slow steps: these need all pieces."""
    bounds, parts = find_step_bounds(timeline, step_by), _part_numbers()
    gaps = bounds.between(timeline)
    times = StepBounds.joined([bounds, gaps])
    if not len(times.number):
        nothing = np.zeros((0, len(parts)), np.int64)
        return DividedSteps(bounds, nothing, list(parts), {}, gaps, nothing, np.zeros(len(parts), np.int64))
    order = np.argsort(times.start_ns, kind="stable")
    ns, other_ns, tid = _divide(timeline, times.take(order), parts)
    step_rows, gap_rows = np.split(np.argsort(order, kind="stable"), [len(bounds.number)])
    longest = _longest_ranges(timeline, bounds, tid[step_rows])
    other_ns = other_ns[step_rows].sum(axis=0)
    return DividedSteps(bounds, ns[step_rows], list(parts), longest, gaps, ns[gap_rows], other_ns)


def join_divided(pieces: Sequence[DividedSteps]) -> DividedSteps:
    """Return the steps of consecutive pieces as one."""
    if len(pieces) == 1:
        return pieces[0]
    parts, longest, first = _part_numbers(), dict[tuple[int, str], str](), 0
    columns_of = [[parts[name] for name in piece.names] for piece in pieces]
    ns, gap_ns, gaps = list[Int64Array](), list[Int64Array](), list[StepBounds]()
    other_ns = np.zeros(len(parts), np.int64)
    for piece, columns in zip(pieces, columns_of, strict=True):
        gap_rows = np.flatnonzero(piece.gaps.is_whole | (piece is pieces[-1]))
        for tables, table in ((ns, piece.ns), (gap_ns, piece.gap_ns[gap_rows])):
            wide = np.zeros((len(table), len(parts)), np.int64)
            wide[:, columns] = table
            tables.append(wide)
        gaps.append(piece.gaps.take(gap_rows))
        other_ns[columns] += piece.other_ns
        longest |= {(first + step, category): name for (step, category), name in piece.longest.items()}
        first += len(piece.ns)
    bounds = StepBounds.joined([piece.bounds for piece in pieces])
    joined_gaps = StepBounds.joined(gaps)
    return DividedSteps(bounds, np.concatenate(ns), list(parts), longest, joined_gaps, np.concatenate(gap_ns), other_ns)


def sum_up_around(divided: DividedSteps) -> Around:
    """Return the time outside steps; if marks end steps, also the time of steps that are not whole."""
    bounds, gaps, gap_ns = divided.bounds, divided.gaps, divided.gap_ns
    is_before = is_after = np.zeros(len(gaps.number), np.bool_)
    if not len(bounds.number):
        return Around()
    if bounds.step_by == OPTIMIZER:
        counted, cut = bounds.take(np.flatnonzero(bounds.counted)), np.flatnonzero(~bounds.counted)
        gaps, gap_ns = StepBounds.joined([gaps, bounds.take(cut)]), np.concatenate([gap_ns, divided.ns[cut]])
        is_before, is_after = gaps.end_ns <= counted.start_ns[0], gaps.start_ns >= counted.end_ns[-1]

    def by_part(rows: BoolArray) -> dict[str, int]:
        total = zip(divided.names, gap_ns[rows].sum(axis=0).tolist(), strict=True)
        return dict(sorted(((name, ns) for name, ns in total if ns), key=lambda pair: -pair[1]))

    return Around(by_part(is_before), by_part(~is_before & ~is_after), by_part(is_after))


def _divide(timeline: Timeline, bounds: StepBounds, parts: Numbering[str]) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return (ns, other_ns, tid): int64[steps, parts] each step's time, and `other` after each part; and its thread.

    A step of the whole process is divided on the thread that spent most of it in modules; if no thread ran modules, on
    the thread that spent most of it in anything with a name.
    """
    if not timeline.tracks:  # a piece with nothing except the ends of steps
        ns = np.zeros((len(bounds.number), len(parts)), np.int64)
        ns[:, parts[OTHER]] = bounds.end_ns - bounds.start_ns
        return ns, ns, bounds.tid
    line = ThreadLine(timeline, bounds)
    ends = bounds.end_ns if bounds.step_by == OPTIMIZER else bounds.end_ns[:0]
    start, part = _paint(list(_layers(timeline, line, ends, parts)))
    thread = np.searchsorted(line.tids, bounds.tid)
    if bounds.step_by == OPTIMIZER:
        thread = _busiest(line, bounds, start, part, [parts[name] for name in _MODEL_PARTS])
    low, high = line.move(thread, bounds.start_ns), line.move(thread, bounds.end_ns)
    edges = np.sort(np.append(low, high))
    index = np.searchsorted(start, edges)
    start, part = np.insert(start, index, edges), np.insert(part, index, np.append(part, 0)[index - 1])
    ns = np.diff(start, append=start[-1:])
    order = np.argsort(low, kind="stable")
    step = order[np.searchsorted(low[order], start, side="right") - 1]
    in_step = (low[step] <= start) & (start < high[step])
    shape = len(bounds.number), len(parts)
    table = sums_at(shape, (step[in_step], part[in_step]), ns[in_step])
    # The first interval of a thread follows no part of that thread.
    has_name = part > 0  # `other` is 0
    has_name[line.first_of_threads(start)] = True
    last_named = np.maximum.accumulate(np.where(has_name, np.arange(len(part)), 0))
    unnamed = np.flatnonzero(in_step & (part == 0))
    other_ns = sums_at(shape, (step[unnamed], part[last_named[unnamed]]), ns[unnamed])
    return table, other_ns, line.tids[thread]


def order_parts(names: Sequence[str], is_used: BoolArray) -> list[int]:
    """Return the indices of used parts in the order of `PARTS`, then the user's ranges by name, then `other`."""
    order = {name: number for number, name in enumerate(PARTS)} | {OTHER: len(PARTS) + 1}
    used: list[int] = np.flatnonzero(is_used).tolist()
    return sorted(used, key=lambda part: (order.get(names[part], len(PARTS)), names[part]))


def _part_numbers() -> Numbering[str]:
    """Return the numbers of the parts: `other` is 0, then `PARTS`, then the user's ranges in the order of their use."""
    parts = Numbering[str]()
    parts.update({name: number for number, name in enumerate((OTHER, *PARTS))})
    return parts


def _paint(layers: Sequence[_Layer]) -> tuple[Int64Array, Int64Array]:
    """Return the edges of all layers, and the part between each edge and the next; the last layer wins."""
    edges = distinct(np.concatenate([edge for layer in layers for edge in layer[:2]]))
    part = np.zeros(len(edges), np.int64)
    for layer in layers:
        interval = np.searchsorted(layer.start_ns, edges, side="right") - 1
        rows = np.flatnonzero(interval >= 0)
        rows = rows[edges[rows] < layer.end_ns[interval[rows]]]
        part[rows] = layer.part[interval[rows]]
    return edges, part


def _busiest(
    line: ThreadLine, bounds: StepBounds, start: Int64Array, part: Int64Array, model_parts: Sequence[int]
) -> Int64Array:
    """Return the index of the thread that spent most of each step in modules, or without any, in named parts."""
    busiest, threads = np.zeros(len(bounds.number), np.int64), len(line.tids)
    if threads == 1:
        return busiest
    intervals = np.flatnonzero(part > 0)  # `other` is 0
    thread, low = line.back(start[intervals])
    high = low + start[intervals + 1] - start[intervals]
    first, last = np.searchsorted(bounds.end_ns, low, side="right"), np.searchsorted(bounds.start_ns, high)
    step, row = expand_ranges(first, last)
    ns = np.minimum(high[row], bounds.end_ns[step]) - np.maximum(low[row], bounds.start_ns[step])
    keys, pair = np.unique(step * threads + thread[row], return_inverse=True)
    in_any, in_model = (
        sums_at(len(keys), pair, values) for values in (ns, np.where(np.isin(part[intervals[row]], model_parts), ns, 0))
    )
    step, thread = np.divmod(keys, threads)
    has_model = np.bincount(step[in_model > 0], minlength=len(busiest)) > 0
    busy_ns = np.where(has_model[step], in_model, in_any)
    order = np.lexsort((-thread, busy_ns, step))  # the first of equally busy threads comes last, and wins
    order = order[busy_ns[order] > 0]
    busiest[step[order]] = thread[order]
    return busiest


def _layers(timeline: Timeline, line: ThreadLine, ends: Int64Array, parts: Numbering[str]) -> Iterator[_Layer]:
    """Yield the layers of all threads, the lowest layer first."""
    slices, tracks = line.slices, timeline.tracks
    thread = line.of_track[slices.track]
    is_forward, is_backward = (
        np.array([track.kind == kind for track in tracks], np.bool_) for kind in ("forward", "backward")
    )
    is_own = thread >= 0
    modules = np.flatnonzero(is_own & (slices.kind == MODULE))
    passes = np.flatnonzero(is_own & (slices.kind == BACKWARD_PASS))
    on_backward = modules[is_backward[slices.track[modules]]]
    calls = modules[is_forward[slices.track[modules]]]
    losses, models = _losses_and_models(timeline, line, calls, passes, ends)
    ranges = np.flatnonzero(is_own & (slices.kind == RANGE))
    names, index = number_values(slices.name[ranges].astype(np.int64))
    category = np.array([timeline.names[name].category or "" for name in names.tolist()] or [""])[index]
    users, optimizers = ranges[np.isin(category, ("user", GENERATE))], ranges[category == "optimizer"]
    encloses = np.zeros(len(slices), np.bool_)
    encloses[ranges] = _hold_any(slices, ranges, np.concatenate([models, passes]))

    yield from _layers_by_name(timeline, slices, users[encloses[users]], parts)
    # On a thread that was saved without passes, outermost backward spans replace them.
    pass_rows = on_backward[slices.parent[on_backward] < 0]
    pass_rows = np.append(passes, pass_rows[~np.isin(thread[pass_rows], thread[passes])])
    # A closure that torch's optimizer calls has a loss too. Another object's `step` that runs the model is a trainer's.
    is_torchs = np.array([name.label.startswith("Optimizer.") for name in timeline.names] or [False], np.bool_)
    closures = optimizers[encloses[optimizers] & is_torchs[slices.name[optimizers]]]
    yield _union_layer(slices, closures, parts["optimizer"])
    optimizers = optimizers[~encloses[optimizers]]
    yield _gaps_before_passes(line, models, pass_rows, optimizers=optimizers, ends=ends, part=parts["loss"])
    yield from _layers_by_name(timeline, slices, users[~encloses[users]], parts)
    yield _union_layer(slices, optimizers, parts["optimizer"])
    yield _union_layer(slices, losses, parts["loss"])
    yield _union_layer(slices, models, parts["forward"])
    yield _union_layer(slices, np.concatenate([passes, on_backward]), parts["backward"])
    yield _recompute(timeline, line, modules[slices.phase[modules] == RECOMPUTE], passes, parts["recompute"])
    waits = np.flatnonzero(is_own & np.isin(slices.kind, (COLLECTIVE, WAIT)))
    yield _union_layer(slices, np.concatenate([waits, ranges[category == "communication"]]), parts["communication"])
    for part in ("data loading", "saving", "compile"):
        yield _union_layer(slices, ranges[category == part], parts[part])
    yield _union_layer(slices, np.flatnonzero(is_own & (slices.kind == GARBAGE_COLLECTION)), parts["gc"])
    yield _union_layer(slices, ranges[category == "evaluation"], parts["evaluation"])


def measure_collections(timeline: Timeline) -> Int64Array:
    """Return the numbers of the first process's garbage collections and freed objects: see `RuleInput.collections`."""
    slices, generations = timeline.slices, 1 + GENERATION_MASK
    generation, column = slices.arg(Arg.GENERATION), slices.arg(Arg.TRIGGER)
    is_own = first_process_tracks(timeline)[slices.track[generation.rows]]
    rows, trigger = generation.rows[is_own], np.zeros(len(slices), np.int64)
    trigger_of_text = [TRIGGERS.index(text) if text in TRIGGERS else 0 for text in column.texts or ()]
    trigger[column.rows] = np.array(trigger_of_text, np.int64)[column.values]
    cell = trigger[rows], generation.values[is_own]
    freed = slices.arg(Arg.COLLECTED).dense(len(slices), 0)[rows]
    return np.stack([sums_at((len(TRIGGERS), generations), cell, values) for values in (1, freed)])


def _union_layer(slices: Slices, rows: AnyArray, part: int) -> _Layer:
    """Return the time that any of the rows covers."""
    times = union_of(slices.start[rows], slices.end[rows])
    return _Layer(times.start_ns, times.end_ns, np.full(len(times.start_ns), part, np.int64))


def _layers_by_name(timeline: Timeline, slices: Slices, rows: AnyArray, parts: Numbering[str]) -> Iterator[_Layer]:
    """Yield a layer for each depth of ranges, the outermost first; the part is the range's name."""
    for depth in np.unique(slices.depth[rows]).tolist():
        level = rows[slices.depth[rows] == depth]
        level = level[np.argsort(slices.start[level], kind="stable")]
        names, index = number_values(slices.name[level])
        number = np.array([parts[timeline.names[name].label] for name in names.tolist()], np.int64)
        yield _Layer(slices.start[level], slices.end[level], number[index])


def _hold_any(slices: Slices, rows: AnyArray, inner: AnyArray) -> BoolArray:
    """Return bool[rows], whether one of `inner` starts in the row."""
    starts = np.sort(slices.start[inner])
    first, last = np.searchsorted(starts, slices.start[rows]), np.searchsorted(starts, slices.end[rows])
    return np.asarray(last > first, np.bool_)


def _losses_and_models(
    timeline: Timeline, line: ThreadLine, calls: Int64Array, passes: Int64Array, ends: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Return the calls of losses, and the calls of models: outermost calls, and calls that a loss module makes.

    A module called in a loss module is a model if it calls modules itself, or if it shares an uncalled parent module
    with such a model. Any other module there is a layer of the loss if the loss also calls a model, or if the same
    backward pass trains another module. Otherwise it is the model; a loss module that calls no module is one too.
    """
    slices = line.slices
    is_loss_name = np.array(
        [name.module_class.endswith(_LOSS_SUFFIXES) for name in timeline.names] or [False], np.bool_
    )
    parent, is_loss = slices.parent[calls], is_loss_name[slices.name[calls]]
    roots, losses = calls[(parent < 0) & ~is_loss], calls[(parent < 0) & is_loss]
    if not len(losses):
        return losses, roots
    loss_of = np.full(len(slices) + 1, -1)  # the parent of an outermost call, -1, is the last entry
    loss_of[losses] = np.arange(len(losses))
    layers, level = losses[:0], np.flatnonzero(loss_of[parent] >= 0)
    while len(level):
        loss_of[calls[level]] = loss_of[parent[level]]
        layers = np.append(layers, calls[level[~is_loss[level]]])
        level = np.flatnonzero(np.isin(parent, calls[level[is_loss[level]]]))
    is_model = np.isin(layers, parent)
    has_model = np.bincount(loss_of[layers[is_model]], minlength=len(losses)) > 0
    outermost = np.append(roots, losses)
    trained = backward_starts(timeline, outermost)
    moment = np.where(trained < INT64_MAX, trained, timeline.slices.end[outermost])
    moment = line.move(line.of_track[slices.track[outermost]], moment)
    group = np.searchsorted(np.sort(slices.start[passes]), moment, "right") + line.number_between(ends, moment)
    group = np.where(trained < INT64_MAX, group, -1 - group)
    is_alone = ~has_model & ~np.isin(group[len(roots) :], group[: len(roots)])
    holder = _uncalled_holders(timeline, layers)
    in_model = (holder >= 0) & np.isin(holder, holder[is_model])
    layers = layers[is_model | in_model | is_alone[loss_of[layers]]]
    is_alone &= ~np.isin(losses, parent)
    return losses[~is_alone], np.sort(np.concatenate([roots, layers, losses[is_alone]]))


def _uncalled_holders(timeline: Timeline, calls: Int64Array) -> Int64Array:
    """Return a number for the uncalled module one level below the caller that contains each call; -1 without one.

    If `Loss` calls `Loss.model.proj`, this is `Loss.model`: `Loss` called one of its methods, not the module itself.
    """
    slices, names, holders = timeline.slices, timeline.names, Numbering[str]()
    pair = slices.name[calls].astype(np.int64) << 32 | slices.name[slices.parent[calls]]
    pairs, pair_of_call = np.unique(pair, return_inverse=True)
    numbers = np.full(len(pairs), -1)
    for index, (name, caller) in enumerate(divmod(name_pair, 1 << 32) for name_pair in pairs.tolist()):
        prefix = f"{names[caller].fqn}."
        child, dot, _ = names[name].fqn.removeprefix(prefix).partition(".")
        if dot and names[name].fqn.startswith(prefix):
            numbers[index] = holders[prefix + child]
    return numbers[pair_of_call]


def _gaps_before_passes(
    line: ThreadLine, models: AnyArray, passes: AnyArray, *, optimizers: AnyArray, ends: Int64Array, part: int
) -> _Layer:
    """Return the time of the loss: gaps between forward and backward.

    These are the gap after each call that has a backward, and the gap before each backward pass of the step. A gap
    between two passes counts only if a call came before them in the step, and no optimizer ran in the gap.
    """
    slices = line.slices
    rows = np.concatenate([models, passes])
    busy = union_of(slices.start[rows], slices.end[rows])
    start, end = busy.end_ns[:-1], busy.start_ns[1:]
    backward = (slices.kind == MODULE) & (slices.phase == BACKWARD)
    calls_with_backward = models[np.isin(slices.link[models], slices.link[backward]) & (slices.link[models] >= 0)]
    optimized = np.diff(np.searchsorted(np.sort(slices.start[optimizers]), np.stack([start, end]), "left"), axis=0)[0]
    (step, step_at_end), nothing = (line.number_between(ends, edge) for edge in (start, end)), INT64_MIN
    before_pass = np.isin(end, slices.start[passes]) & (step == step_at_end)
    call_ends = np.append(nothing, np.sort(slices.end[models]))
    last_call = call_ends[np.searchsorted(call_ends, start, "right") - 1]
    has_call = (last_call > nothing) & (line.number_between(ends, last_call) == step)
    is_loss = np.isin(start, slices.end[calls_with_backward]) & (line.back(start)[0] == line.back(end)[0])
    is_loss |= before_pass & ((last_call == start) | (optimized == 0) & has_call)
    return _Layer(start[is_loss], end[is_loss], np.full(int(np.count_nonzero(is_loss)), part, np.int64))


def _recompute(timeline: Timeline, line: ThreadLine, rerun: Int64Array, passes: Int64Array, part: int) -> _Layer:
    """Return the time of recompute: on its own thread, and on each thread that is in a backward pass meanwhile."""
    start, end = [line.slices.start[rerun]], [line.slices.end[rerun]]
    slices, thread = timeline.slices, line.of_track[timeline.slices.track[passes]]
    for thread_passes in split_by(thread, passes) if len(rerun) else ():
        starts, ends = slices.start[thread_passes], slices.end[thread_passes]
        inside = rerun[slice(*np.searchsorted(slices.start[rerun], (starts[0], ends.max())))]
        inside = inside[slices.end[inside] <= ends[np.searchsorted(starts, slices.start[inside], side="right") - 1]]
        pass_thread = line.of_track[slices.track[thread_passes[:1]]]
        start.append(line.move(pass_thread, slices.start[inside]))
        end.append(line.move(pass_thread, slices.end[inside]))
    times = union_of(np.concatenate(start), np.concatenate(end))
    return _Layer(times.start_ns, times.end_ns, np.full(len(times.start_ns), part, np.int64))


def _longest_ranges(timeline: Timeline, bounds: StepBounds, step_tid: Int64Array) -> dict[tuple[int, str], str]:
    """Return the name of the longest range by (index of the step, category), on the thread of that step."""
    slices, tracks = timeline.slices, timeline.tracks
    rows = np.flatnonzero(slices.kind == RANGE)
    tid = np.array([track.tid for track in tracks] or [0])[slices.track[rows]]
    step = bounds.index_at(slices.start[rows], tid)
    is_own = (step >= 0) & (np.append(step_tid, -1)[step] == tid)
    rows, step = rows[is_own], step[is_own]
    order = np.argsort(slices.end[rows] - slices.start[rows], kind="stable")
    numbers, index = number_values(slices.name[rows[order]])
    names = [(timeline.names[name].category or "", timeline.names[name].label) for name in numbers.tolist()]
    longest = zip(step[order].tolist(), map(names.__getitem__, index.tolist()), strict=True)
    return {(step_index, category): label for step_index, (category, label) in longest}
