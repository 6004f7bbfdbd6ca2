"""A step in parts: every nanosecond of a step belongs to exactly one, so that the parts add up to the step.

The time of a step is cut at each edge of what its thread did: spans, backward passes, collectives, ranges and garbage
collections. The layers are then painted over each other, from what says least to what says most: the last one wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..._numbering import Numbering, distinct, number_values
from ..._typing import AnyArray, BoolArray, Int64Array
from ...ring.slot_format import GENERATION_MASK
from ..select import first_process_tracks
from ..slices import (
    BACKWARD,
    BACKWARD_PASS,
    COLLECTED,
    COLLECTIVE,
    GARBAGE_COLLECTION,
    GENERATION,
    MODULE,
    RANGE,
    RECOMPUTE,
    TRIGGER,
    TRIGGERS,
    WAIT,
    Slices,
)
from ..step_begins import NEVER, backward_starts
from ..time_intervals import union_of
from .step_bounds import (
    GENERATE,
    OPTIMIZER,
    StepBounds,
    find_step_bounds,
    once_per_timeline,
)

if TYPE_CHECKING:
    from ..timeline import Timeline

PARTS = (
    *("data loading", "forward", "loss", "backward", "recompute", "communication"),
    *("optimizer", "gc", "compile", "saving", "evaluation"),
)
"""The parts of a step, in the order in which they are shown; user ranges by name and `other` follow."""
OTHER = "other"

_LOSSES = ("Loss", "Criterion")
"""How the names of classes end whose outermost calls are the loss, but for the model that they call."""


class _Layer(NamedTuple):
    """Intervals that do not overlap, and the part that each belongs to."""

    start: Int64Array
    end: Int64Array
    part: Int64Array


class DividedSteps(NamedTuple):
    """The steps of a piece of a timeline in parts.

    Attributes:
        bounds: the steps.
        ns: int64[steps, parts].
        names: of the parts.
        longest: the name of the longest range, by index of the step and category.
        gaps: the times before, between and after the steps.
        gap_ns: int64[gaps, parts].
        other_ns: int64[parts], what of the part `other` of all steps follows each part.
    """

    bounds: StepBounds
    ns: Int64Array
    names: Sequence[str]
    longest: Mapping[tuple[int, str], str]
    gaps: StepBounds
    gap_ns: Int64Array
    other_ns: Int64Array


class Around(NamedTuple):
    """What is in no step: nanoseconds by part, the longest first.

    Attributes:
        before: before the first whole step.
        between: between steps: of trainings that follow each other, or of calls.
        after: after the last whole step.
    """

    before: Mapping[str, int] = {}
    between: Mapping[str, int] = {}
    after: Mapping[str, int] = {}


@once_per_timeline
def divide_piece(timeline: Timeline, step_by: str) -> DividedSteps:
    """Return the steps of a timeline in parts, without a reason why any was slow: for that, all pieces are needed."""
    bounds, parts = find_step_bounds(timeline, step_by), _part_numbers()
    gaps = bounds.between(timeline)
    both = StepBounds.joined([bounds, gaps])
    if not len(both.number):
        nothing = np.zeros((0, len(parts)), np.int64)
        return DividedSteps(bounds, nothing, list(parts), {}, gaps, nothing, np.zeros(len(parts), np.int64))
    order = np.argsort(both.start, kind="stable")
    (ns, other_ns, tid), place = _divide(timeline, both.take(order), parts), np.argsort(order, kind="stable")
    of_steps, of_gaps = np.split(place, [len(bounds.number)])
    longest = _longest_ranges(timeline, bounds, tid[of_steps])
    other_ns = other_ns[of_steps].sum(axis=0)
    return DividedSteps(bounds, ns[of_steps], list(parts), longest, gaps, ns[of_gaps], other_ns)


def join_divided(pieces: Sequence[DividedSteps]) -> DividedSteps:
    """Return the steps of pieces that follow each other as those of one."""
    if len(pieces) == 1:
        return pieces[0]
    parts, longest, first = _part_numbers(), dict[tuple[int, str], str](), 0
    at = [[parts[name] for name in piece.names] for piece in pieces]
    ns, gap_ns, gaps = list[Int64Array](), list[Int64Array](), list[StepBounds]()
    other_ns = np.zeros(len(parts), np.int64)
    for piece, columns in zip(pieces, at, strict=True):
        kept = np.flatnonzero(piece.gaps.whole | (piece is pieces[-1]))
        for tables, table in ((ns, piece.ns), (gap_ns, piece.gap_ns[kept])):
            wide = np.zeros((len(table), len(parts)), np.int64)
            wide[:, columns] = table
            tables.append(wide)
        gaps.append(piece.gaps.take(kept))
        other_ns[columns] += piece.other_ns
        longest |= {(first + step, category): name for (step, category), name in piece.longest.items()}
        first += len(piece.ns)
    bounds = StepBounds.joined([piece.bounds for piece in pieces])
    joined_gaps = StepBounds.joined(gaps)
    return DividedSteps(bounds, np.concatenate(ns), list(parts), longest, joined_gaps, np.concatenate(gap_ns), other_ns)


def sum_up_around(divided: DividedSteps) -> Around:
    """Return what is in no step; if marks end steps, those that are not whole are in none either."""
    bounds, gaps, gap_ns = divided.bounds, divided.gaps, divided.gap_ns
    before = after = np.zeros(len(gaps.number), np.bool_)
    if not len(bounds.number):
        return Around()
    if bounds.step_by == OPTIMIZER:
        counted, cut = bounds.take(np.flatnonzero(bounds.counted)), np.flatnonzero(~bounds.counted)
        gaps, gap_ns = StepBounds.joined([gaps, bounds.take(cut)]), np.concatenate([gap_ns, divided.ns[cut]])
        before, after = gaps.end <= counted.start[0], gaps.start >= counted.end[-1]

    def by_part(rows: BoolArray) -> dict[str, int]:
        total = zip(divided.names, gap_ns[rows].sum(axis=0).tolist(), strict=True)
        return dict(sorted(((name, ns) for name, ns in total if ns), key=lambda pair: -pair[1]))

    return Around(by_part(before), by_part(~before & ~after), by_part(after))


def _divide(timeline: Timeline, bounds: StepBounds, parts: Numbering[str]) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return int64[steps, parts] twice, each step's time and what of `other` follows each part, and their threads."""
    if bounds.step_by != OPTIMIZER:
        tables = {tid: _divide_on_thread(timeline, own, tid, parts) for tid, own in bounds.by_thread().items()}
        if len(tables) == 1:
            [(table, other, _)] = tables.values()
            return table, other, bounds.tid
        ns = np.zeros((2, len(bounds.number), len(parts)), np.int64)
        for tid, (table, other, _) in tables.items():
            own, known = np.flatnonzero(bounds.tid == tid), table.shape[1]
            ns[0, own, :known], ns[1, own, :known] = table, other
        return ns[0], ns[1], bounds.tid
    if not timeline.tracks:  # a piece in which nothing but the ends of steps is known
        ns = np.zeros((len(bounds.number), len(parts)), np.int64)
        ns[:, parts[OTHER]] = bounds.end - bounds.start
        return ns, ns, bounds.tid
    process = timeline.tracks[0].process
    threads = sorted({track.tid for track in timeline.tracks if track.process == process and track.device is None})
    divided = [_divide_on_thread(timeline, bounds, tid, parts) for tid in threads]
    by_thread, other = np.zeros((2, len(threads), len(bounds.number), len(parts)), np.int64)
    for index, (table, after, _) in enumerate(divided):
        by_thread[index, :, : table.shape[1]], other[index, :, : table.shape[1]] = table, after
    busy, named = np.stack([busy for *_, busy in divided]), by_thread[:, :, 1:].sum(axis=2)  # `other` is 0
    busiest, step = np.argmax(np.where(busy.any(axis=0), busy, named), axis=0), np.arange(len(bounds.number))
    return by_thread[busiest, step], other[busiest, step], np.array(threads)[busiest]


def order_parts(names: Sequence[str], is_used: BoolArray) -> list[int]:
    """Return the indices of used parts in the order of `PARTS`, then the user's ranges by name, then `other`."""
    place = {name: number for number, name in enumerate(PARTS)} | {OTHER: len(PARTS) + 1}
    used: list[int] = np.flatnonzero(is_used).tolist()
    return sorted(used, key=lambda part: (place.get(names[part], len(PARTS)), names[part]))


def _part_numbers() -> Numbering[str]:
    """Return the parts by number: `other` is 0, `PARTS` follow, then the names of the user's ranges as they come."""
    parts = Numbering[str]()
    parts.update({name: number for number, name in enumerate((OTHER, *PARTS))})
    return parts


def _divide_on_thread(
    timeline: Timeline, bounds: StepBounds, tid: int, parts: Numbering[str]
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return int64[steps, parts] twice, what one thread did and what of `other` follows each part.

    The third is int64[steps], its time in modules and passes.
    """
    layers = list(_layers(timeline, bounds, tid, parts))
    edges = distinct(np.concatenate([bounds.start, bounds.end, *(edge for one in layers for edge in one[:2])]))
    start = edges[:-1]
    part = np.zeros(len(start), np.int64)
    for layer in layers:
        at = np.searchsorted(layer.start, start, side="right") - 1
        inside = np.flatnonzero(at >= 0)
        inside = inside[start[inside] < layer.end[at[inside]]]
        part[inside] = layer.part[at[inside]]
    step = bounds.index_at(start, np.full(len(start), tid))
    in_step = step >= 0
    table, after = np.zeros((2, len(bounds.number), len(parts)), np.int64)
    np.add.at(table.reshape(-1), (step * len(parts) + part)[in_step], (edges[1:] - start)[in_step])
    named = np.maximum.accumulate(np.where(part > 0, np.arange(len(part)), 0))  # `other` is 0
    others = np.flatnonzero(in_step & (part == 0))
    np.add.at(after.reshape(-1), step[others] * len(parts) + part[named[others]], (edges[1:] - start)[others])
    of_model = [parts[name] for name in ("forward", "backward", "recompute", "evaluation")]
    return table, after, table[:, of_model].sum(axis=1)


def _layers(timeline: Timeline, bounds: StepBounds, tid: int, parts: Numbering[str]) -> Iterator[_Layer]:
    """Yield the layers of a thread, the one that is painted first at the beginning."""
    slices, tracks = timeline.slices, timeline.tracks
    process = tracks[0].process
    is_own = np.array([track.process == process and track.device is None for track in tracks], np.bool_)
    on_thread = is_own & np.array([track.tid == tid for track in tracks], np.bool_)
    is_forward, is_backward = (
        np.array([track.kind == kind for track in tracks], np.bool_) for kind in ("forward", "backward")
    )
    own = on_thread[slices.track]
    modules = np.flatnonzero(own & (slices.kind == MODULE))
    passes = np.flatnonzero(own & (slices.kind == BACKWARD_PASS))
    on_backward = modules[is_backward[slices.track[modules]]]
    calls = modules[is_forward[slices.track[modules]]]
    ends = bounds.end if bounds.step_by == OPTIMIZER else bounds.end[:0]
    losses, models = _losses_and_models(timeline, calls, np.sort(np.append(slices.start[passes], ends)))
    ranges = np.flatnonzero(own & (slices.kind == RANGE))
    names, place = number_values(slices.name[ranges].astype(np.int64))
    category = np.array([timeline.names[name].category or "" for name in names.tolist()] or [""])[place]
    users, optimizers = ranges[np.isin(category, ("user", GENERATE))], ranges[category == "optimizer"]
    encloses = np.zeros(len(slices), np.bool_)
    encloses[ranges] = _hold_any(slices, ranges, np.concatenate([models, passes]))

    yield from _by_name(timeline, users[encloses[users]], parts)
    # A timeline that was saved without whole passes has the first backward spans in their place.
    begins = passes if len(passes) else on_backward[slices.parent[on_backward] < 0]
    # A closure that an optimizer calls has a loss too. What no optimizer of torch is and runs the model is a trainer.
    is_torchs = np.array([name.label.startswith("Optimizer.") for name in timeline.names] or [False], np.bool_)
    closures = optimizers[encloses[optimizers] & is_torchs[slices.name[optimizers]]]
    yield _union_layer(slices, closures, parts["optimizer"])
    optimizers = optimizers[~encloses[optimizers]]
    yield _gaps_before_passes(slices, models, begins, optimizers, ends, parts["loss"])
    yield from _by_name(timeline, users[~encloses[users]], parts)
    yield _union_layer(slices, optimizers, parts["optimizer"])
    yield _union_layer(slices, losses, parts["loss"])
    yield _union_layer(slices, models, parts["forward"])
    yield _union_layer(slices, np.concatenate([passes, on_backward]), parts["backward"])
    yield _recompute(slices, is_own, passes, on_backward, parts["recompute"])
    waits = np.flatnonzero(own & np.isin(slices.kind, (COLLECTIVE, WAIT)))
    yield _union_layer(slices, np.concatenate([waits, ranges[category == "communication"]]), parts["communication"])
    for part in ("data loading", "saving", "compile"):
        yield _union_layer(slices, ranges[category == part], parts[part])
    yield _union_layer(slices, np.flatnonzero(own & (slices.kind == GARBAGE_COLLECTION)), parts["gc"])
    yield _union_layer(slices, ranges[category == "evaluation"], parts["evaluation"])


def measure_collections(timeline: Timeline) -> Int64Array:
    """Return how many garbage collections the first process had, and what they freed: see `Measured.collections`."""
    slices, numbers = timeline.slices, np.zeros((2, len(TRIGGERS), 1 + GENERATION_MASK), np.int64)
    generation, column = slices.arg(GENERATION), slices.arg(TRIGGER)
    own = first_process_tracks(timeline)[slices.track[generation.rows]]
    rows, began = generation.rows[own], np.zeros(len(slices), np.int64)
    place = [TRIGGERS.index(text) if text in TRIGGERS else 0 for text in column.texts or ()]
    began[column.rows] = np.array(place, np.int64)[column.values]
    of_kind = began[rows], generation.values[own]
    np.add.at(numbers[0], of_kind, 1)
    np.add.at(numbers[1], of_kind, slices.arg(COLLECTED).dense(len(slices), 0)[rows])
    return numbers


def _union_layer(slices: Slices, rows: AnyArray, part: int) -> _Layer:
    """Return the time that any of the rows covers."""
    times = union_of(slices.start[rows], slices.end[rows])
    return _Layer(times.start, times.end, np.full(len(times.start), part, np.int64))


def _by_name(timeline: Timeline, rows: AnyArray, parts: Numbering[str]) -> Iterator[_Layer]:
    """Yield a layer for each depth of ranges, the outermost first; a range is the part of its name."""
    slices = timeline.slices
    for depth in np.unique(slices.depth[rows]).tolist():
        level = rows[slices.depth[rows] == depth]
        level = level[np.argsort(slices.start[level], kind="stable")]
        number = np.array([parts[timeline.names[name].label] for name in slices.name[level].tolist()], np.int64)
        yield _Layer(slices.start[level], slices.end[level], number)


def _hold_any(slices: Slices, rows: AnyArray, inner: AnyArray) -> BoolArray:
    """Return for each row whether one of `inner` begins in it."""
    starts = np.sort(slices.start[inner])
    first, last = np.searchsorted(starts, slices.start[rows]), np.searchsorted(starts, slices.end[rows])
    return np.asarray(last > first, np.bool_)


def _losses_and_models(timeline: Timeline, calls: Int64Array, edges: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the calls of losses, and those of models: the outermost ones, and those that a loss module calls.

    In a loss module, what calls modules itself is a model, and so is a layer beside it in a module whose method the
    loss called. Any other layer there is a part of the loss, if a model is there too or the same backward pass trains
    another module. Else it is the model, and so is a loss module that calls none.

    Args:
        timeline: where they are.
        calls: all calls of a thread in forward.
        edges: int64[n], when its backward passes began and steps ended.
    """
    slices = timeline.slices
    of_name = np.array([name.module_class.endswith(_LOSSES) for name in timeline.names] or [False], np.bool_)
    parent, is_loss = slices.parent[calls], of_name[slices.name[calls]]
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
    group = np.searchsorted(edges, np.where(trained < NEVER, trained, slices.end[outermost]), "right")
    group = np.where(trained < NEVER, group, -1 - group)
    is_alone = ~has_model & ~np.isin(group[len(roots) :], group[: len(roots)])
    holder = _uncalled_holders(timeline, layers)
    in_model = (holder >= 0) & np.isin(holder, holder[is_model])
    layers = layers[is_model | in_model | is_alone[loss_of[layers]]]
    is_alone &= ~np.isin(losses, parent)
    return losses[~is_alone], np.sort(np.concatenate([roots, layers, losses[is_alone]]))


def _uncalled_holders(timeline: Timeline, calls: Int64Array) -> Int64Array:
    """Return for calls the module that holds them and was not called, one level below the caller; -1 if none does.

    `Loss.model.proj` that `Loss` called is held by `Loss.model`, whose method it was called in.
    """
    slices, names, holders = timeline.slices, timeline.names, Numbering[str]()
    pair = slices.name[calls].astype(np.int64) << 32 | slices.name[slices.parent[calls]]
    pairs, of_call = np.unique(pair, return_inverse=True)
    numbers = np.full(len(pairs), -1)
    for at, (name, caller) in enumerate(divmod(one, 1 << 32) for one in pairs.tolist()):
        around = f"{names[caller].fqn}."
        child, dot, _ = names[name].fqn.removeprefix(around).partition(".")
        if dot and names[name].fqn.startswith(around):
            numbers[at] = holders[around + child]
    return numbers[of_call]


def _gaps_before_passes(
    slices: Slices, models: AnyArray, passes: AnyArray, optimizers: AnyArray, ends: Int64Array, part: int
) -> _Layer:
    """Return the time of the loss: between forward and backward, outside of both.

    It is after each call that has a backward. It is before each backward pass of the step: after any call, or after
    another pass if a call came before that in the step and no optimizer ran in between.

    Args:
        slices: where they are.
        models: calls of models on a thread.
        passes: its backward passes.
        optimizers: what it ran of optimizers.
        ends: int64[n], when steps ended, ascending.
        part: its number.
    """
    both = np.concatenate([models, passes])
    busy = union_of(slices.start[both], slices.end[both])
    start, end = busy.end[:-1], busy.start[1:]
    backward = (slices.kind == MODULE) & (slices.phase == BACKWARD)
    backed = models[np.isin(slices.link[models], slices.link[backward]) & (slices.link[models] >= 0)]
    optimized = np.diff(np.searchsorted(np.sort(slices.start[optimizers]), np.stack([start, end]), "left"), axis=0)[0]
    step = np.searchsorted(ends, start, "right")
    before_pass = np.isin(end, slices.start[passes]) & (step == np.searchsorted(ends, end, "right"))
    call_ends = np.sort(slices.end[models])
    in_order = np.append(call_ends, np.iinfo(np.int64).max)
    first_end = in_order[np.searchsorted(call_ends, np.append(np.iinfo(np.int64).min, ends)[step])]
    kept = np.isin(start, slices.end[backed])
    kept |= before_pass & (np.isin(start, call_ends) | (optimized == 0) & (start >= first_end))
    return _Layer(start[kept], end[kept], np.full(int(np.count_nonzero(kept)), part, np.int64))


def _recompute(slices: Slices, is_own: BoolArray, passes: AnyArray, on_backward: AnyArray, part: int) -> _Layer:
    """Return when modules ran again: on this thread, or on a device's thread while this one was in a pass."""
    here = on_backward[slices.phase[on_backward] == RECOMPUTE]
    anywhere = np.flatnonzero((slices.kind == MODULE) & (slices.phase == RECOMPUTE) & is_own[slices.track])
    elsewhere = np.setdiff1d(anywhere, here)
    if len(passes) and len(elsewhere):
        begins = np.sort(slices.start[passes])
        at = np.searchsorted(begins, slices.start[elsewhere], side="right") - 1
        ends = slices.end[passes][np.argsort(slices.start[passes], kind="stable")]
        here = np.concatenate([here, elsewhere[(at >= 0) & (slices.end[elsewhere] <= ends[at])]])
    return _union_layer(slices, here, part)


def _longest_ranges(timeline: Timeline, bounds: StepBounds, of_step: Int64Array) -> dict[tuple[int, str], str]:
    """Return the name of the longest range by index of the step and category, on the thread of that step."""
    slices, tracks = timeline.slices, timeline.tracks
    rows = np.flatnonzero(slices.kind == RANGE)
    tid = np.array([track.tid for track in tracks] or [0])[slices.track[rows]]
    step = bounds.index_at(slices.start[rows], tid)
    kept = (step >= 0) & (np.append(of_step, -1)[step] == tid)
    rows, step = rows[kept], step[kept]
    order = np.argsort(slices.end[rows] - slices.start[rows], kind="stable")
    known, place = number_values(slices.name[rows[order]])
    names = [(timeline.names[name].category or "", timeline.names[name].label) for name in known.tolist()]
    longest = zip(step[order].tolist(), map(names.__getitem__, place.tolist()), strict=True)
    return {(index, category): label for index, (category, label) in longest}
