"""A ring's events of ranges, garbage collections and collectives, and evaluations → slices on tracks of their own.

A training script evaluates where it calls a model that trains, and the calls are not for training.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..._arrays import INT64_MAX, INT64_MIN, AnyArray, BoolArray, Int64Array, begins_run, is_any
from ...ring import Kind
from ...ring.event_text import EVAL, TRAIN, parse_collective, parse_range
from ...ring.slot_format import (
    AUTOMATIC_BIT,
    COLLECTED_BITS,
    COLLECTED_MASK,
    COMMUNICATION_KINDS,
    GENERATION_BITS,
    GENERATION_MASK,
    NO_NAME,
    NOT_AWAITED_BIT,
    RANGE_KINDS,
    REQUESTED_BIT,
    SEQUENCE_MASK,
    Events,
)
from ..collectives import Group, collective_args
from ..contents import COMMUNICATION, RANGES, WITHOUT_GRADIENTS, Process, Track, range_name
from ..nesting import clip_and_nest
from ..slices import (
    BACKWARD,
    COLLECTIVE,
    FORWARD,
    GARBAGE_COLLECTION,
    KINDS,
    RANGE,
    TRIGGERS,
    WAIT,
    Arg,
    ArgColumn,
    Slices,
)
from ..timeline import Timeline
from .analysis import RingAnalysis, device_points
from .intervals import find_key, pair_by_value
from .name_lookup import NameLookup
from .spans import SpanRows

_COUNTER_BITS = 39


def is_communication(events: Events) -> BoolArray:
    """Return which events are of torch.distributed."""
    return is_any(events.kind, COMMUNICATION_KINDS)


def build_collectives(analysis: RingAnalysis) -> tuple[Slices, list[Group]]:
    """Return collectives and waits, and the groups; `track` holds their threads, by the number in the name table."""
    events, clock, groups = analysis.all_events, analysis.clock, list(analysis.lookup.groups.values())
    index = np.flatnonzero(is_communication(events))
    if not len(index):
        return Slices.empty(), groups
    calls = events.kind[index] != Kind.COLLECTIVE_DONE
    begin, end, complete = _pair(events, index[calls])
    order = np.lexsort((begin, events.time[begin]))
    begin, end, complete = begin[order], end[order], complete[order]
    is_wait = events.kind[begin] == Kind.WAIT_ENTER
    counter = np.where(events.value[begin] < 1 << _COUNTER_BITS, np.maximum(events.value[begin], -1), -1)
    done = _find_done(events, index[~calls], begin, is_wait)
    used, name = np.unique(np.where(events.name[begin] == NO_NAME, -1, events.name[begin]), return_inverse=True)
    known = used[used >= 0]
    exit_value = np.where(complete & ~is_wait, events.value[end], 0)
    names = [parse_collective(analysis.lookup.texts[number]) for number in known.tolist()]
    # Up to 100 ms pass between the end of the work and the question whether it is done. The stream's event has the end.
    on_device = np.array([bool(name.device) for name in names] + [False])[name - (len(used) - len(known))]
    done = np.where(on_device, _find_done_on_device(analysis, begin, end, is_wait), done)
    nbytes = np.where(exit_value > 0, exit_value & (NOT_AWAITED_BIT - 1), 0)
    done = np.where(done >= 0, clock.to_other(done), -1)
    rows = Slices.of_kind(
        np.where(is_wait, WAIT, COLLECTIVE),
        clock.to_other(events.time[begin]),
        end=clock.to_other(events.time[end]),
        track=events.thread[begin],
        step=analysis.steps_before(analysis.positions_between(events.serial[begin])),
        complete=complete,
        args=collective_args(names, name - (len(used) - len(known)), counter, nbytes, done),
    )
    return rows, groups


def assign_communication_tracks(
    tracks: Sequence[Track], collectives: Slices, threads: Sequence[tuple[str, int]], process: Process
) -> tuple[list[Track], Slices]:
    """Add a track for each thread that has collectives. Return all tracks, and the collectives on the new ones."""
    used, track = np.unique(collectives.track, return_inverse=True)
    described = [threads[thread] for thread in used.tolist()]
    added = [Track(COMMUNICATION, name, tid, process) for name, tid in described]
    table = replace(collectives, track=(len(tracks) + track).astype(np.int32))
    return [*tracks, *added], table


def _pair(events: Events, index: AnyArray) -> tuple[Int64Array, Int64Array, BoolArray]:
    """Return each enter, what ends it, and whether that is its exit.

    An enter whose exit is lost ends with the next event of its thread, or, as what is open, with the last of all.
    """
    index = index[np.argsort(events.thread[index], kind="stable")]
    enter = is_any(events.kind[index], (Kind.COLLECTIVE_ENTER, Kind.WAIT_ENTER))
    thread, name = events.thread[index], events.name[index]
    following = np.minimum(np.arange(len(index)) + 1, len(index) - 1)
    same_thread = (thread[following] == thread) & (following != np.arange(len(index)))
    paired = same_thread & ~enter[following] & (name[following] == name)
    paired &= events.kind[index[following]] == events.kind[index] + 1
    last = len(events) - 1
    end = np.where(same_thread, index[following], last)
    chosen = np.flatnonzero(enter)
    return index[chosen].astype(np.int64), end[chosen].astype(np.int64), paired[chosen]


def _key(events: Events, index: AnyArray) -> Int64Array:
    """Return a number for each event, the same for those of one collective."""
    counter = events.value[index] & (1 << _COUNTER_BITS) - 1
    return np.asarray(events.name[index].astype(np.int64) << _COUNTER_BITS | counter, np.int64)


def _find_done(events: Events, done: AnyArray, begin: Int64Array, is_wait: BoolArray) -> Int64Array:
    """Return when each call was complete, monotonic nanoseconds; -1 for waits and where it is not known."""
    if not len(done):
        return np.full(len(begin), -1, np.int64)
    position = find_key(_key(events, done), _key(events, begin))
    time = events.time[done[position]]
    return np.where((position >= 0) & ~is_wait & (time >= events.time[begin]), time, -1)


def _find_done_on_device(analysis: RingAnalysis, begin: Int64Array, end: Int64Array, is_wait: BoolArray) -> Int64Array:
    """Return the same for calls that a device runs: when its stream passed the end of the call, or of a first wait."""
    done = np.full(len(begin), -1, np.int64)
    events = analysis.all_events
    points = device_points(events, analysis.queued, of_collectives=True)
    if not len(points.event):
        return done
    reached = np.full(len(events), -1, np.int64)
    for device, clock in analysis.device_clocks.items():
        own = points.device == device
        reached[points.event[own]] = clock.to_other(points.device_ns[own])
    # Only the end of a call that leaves nothing to wait for has an event.
    ends = is_any(events.kind[end], (Kind.COLLECTIVE_EXIT, Kind.WAIT_EXIT))
    moment = np.where(ends & (reached[end] >= 0), np.maximum(reached[end], events.time[end]), -1)
    key = _key(events, begin)
    waits = np.flatnonzero(is_wait & (moment >= 0))
    waits = waits[np.argsort(-moment[waits], kind="stable")]
    first_wait = dict(zip(key[waits].tolist(), moment[waits].tolist(), strict=True))
    for row in np.flatnonzero(~is_wait).tolist():
        done[row] = moment[row] if moment[row] >= 0 else first_wait.get(int(key[row]), -1)
    return done


class Evaluations(NamedTuple):
    """From when to when a thread calls models to evaluate; the first three as in `Intervals`."""

    thread: Int64Array  # index into the threads of the name table
    start: Int64Array  # monotonic nanoseconds, when the first call began
    end: Int64Array  # monotonic nanoseconds, when the last call ended
    position: Int64Array  # of the first call's enter
    complete: BoolArray  # False if the last call did not end
    # Monotonic nanoseconds, when the thread trained last before it; the least number there is: not at all.
    after: Int64Array
    before: Int64Array  # monotonic nanoseconds, when it trains again; the largest number there is: not at all
    in_training_mode: BoolArray  # whether the first call's module is: it plays, or generates, rather than evaluates


def find_evaluations(analysis: RingAnalysis, rows: SpanRows) -> Evaluations:
    """Return where each thread evaluates. Calls follow each other without a backward pass or a step's end in between.

    A call is an evaluation if it is in no other call, no backward came of it, other calls of its module had one, and
    its module is in eval mode. If this model is also trained in eval mode, the call must have made no autograd node
    either. Two more are one if fewer than half of the steps have such calls: of a module in training mode, if it made
    no node (a generator that runs under `no_grad` in each step belongs to the step), and of a module in eval mode that
    never trains, as an average of weights (a frozen teacher runs in each step).
    """
    roots, enter, leave = find_roots(analysis, rows)
    events = analysis.events
    in_eval_mode = events.kind[enter] == Kind.EVAL_ENTER
    made_none = (events.value[enter] ^ events.value[leave]) & SEQUENCE_MASK == 0
    step = analysis.steps_before(rows["start_position"][roots])
    fqns = np.unique([name.fqn for name in analysis.lookup.names] or [""], return_inverse=True)[1]
    fqn, is_backward = fqns[rows["name"]], rows["phase"] == BACKWARD
    trains = np.isin(fqn[roots], fqn[is_backward])
    has_backward = np.isin(rows["link"][roots], rows["link"][is_backward]) & (rows["link"][roots] >= 0)
    trains_in_eval_mode = np.isin(fqn[roots], fqn[roots][has_backward & in_eval_mode])
    is_whole = rows["has_start"][roots]
    candidate = trains & ~has_backward & is_whole
    evaluates = candidate & in_eval_mode & (~trains_in_eval_mode | made_none)
    unsure = candidate & ~in_eval_mode & made_none & rows["has_end"][roots]
    unsure |= ~trains & in_eval_mode & is_whole
    trained_steps = len(np.unique(step[has_backward]))
    for number in np.unique(fqn[roots][unsure]).tolist():
        own = unsure & (fqn[roots] == number)
        evaluates |= own & (2 * len(np.unique(step[own])) < trained_steps)
    between = _moments_between(analysis, rows, roots[has_backward])
    return _joined(rows, roots[evaluates], between, ~in_eval_mode[evaluates])


def find_roots(analysis: RingAnalysis, rows: SpanRows) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return the forward calls that are in no other call and in no backward, in order of (thread, start).

    The others are the indices of the events by which each was entered and left, for one that lacks these the nearest.
    """
    roots = np.flatnonzero((rows["phase"] == FORWARD) & ~rows["on_backward"] & (rows["depth"] == 0))
    roots = roots[np.lexsort((rows["start_position"][roots], rows["thread"][roots]))]
    last = len(analysis.events) - 1
    enter, leave = (np.clip((rows[f"{edge}_position"][roots] - 1) // 2, 0, last) for edge in ("start", "end"))
    return roots, enter, leave


def _moments_between(analysis: RingAnalysis, rows: SpanRows, trained: Int64Array) -> Int64Array:
    """Return int64[3, n]: thread, position and time of what ends an evaluation, in the order of positions.

    These are calls for training, backward passes, and ends of steps. These are of all threads: their thread is -1.
    """
    passes, time = analysis.passes, analysis.events.time
    begun = passes.begin >= 0
    begin, ends = passes.begin[begun], analysis.step_ends.event
    moments = [
        (rows["thread"][trained], rows["start_position"][trained], rows["start"][trained]),
        (passes.thread[begun], 2 * begin + 1, time[begin]),
        (np.full(len(ends), -1), 2 * ends + 1, time[ends]),
    ]
    between = np.concatenate([np.stack(columns) for columns in moments], axis=1).astype(np.int64)
    return between[:, np.argsort(between[1], kind="stable")]


def _joined(rows: SpanRows, chosen: Int64Array, between: Int64Array, in_training_mode: BoolArray) -> Evaluations:
    """Return evaluations of the chosen calls: those that have as many of the other moments before them are one."""
    thread, position = rows["thread"][chosen], rows["start_position"][chosen]
    count = np.zeros(len(chosen), np.int64)
    after, before = np.full(len(chosen), INT64_MIN), np.full(len(chosen), INT64_MAX)
    for number in [-1, *np.unique(thread).tolist()]:
        own = slice(None) if number == -1 else thread == number
        _, other, time = between[:, between[0] == number]
        at = np.searchsorted(other, position[own])
        count[own] += at
        after[own] = np.maximum(after[own], np.append(INT64_MIN, time)[at])
        before[own] = np.minimum(before[own], np.append(time, INT64_MAX)[at])
    first = np.flatnonzero(begins_run(thread, count))
    last = np.append(first[1:], len(chosen))[: len(first)] - 1
    start, end, complete = rows["start"][chosen[first]], rows["end"][chosen[last]], rows["has_end"][chosen[last]]
    moments = after[first], before[first]
    return Evaluations(thread[first], start, end, position[first], complete, *moments, in_training_mode[first])


_MAX_ROWS = 8
"""Per thread; ranges that overlap without one being in the other take a row each."""
_NO_TEXT = -1
_EVALUATION, _IN_TRAINING_MODE = -2, -3
_OWN_NAMES = {
    _NO_TEXT: range_name(KINDS[GARBAGE_COLLECTION].label, "gc"),
    _EVALUATION: range_name("evaluation", "evaluation"),
    _IN_TRAINING_MODE: range_name(WITHOUT_GRADIENTS, "evaluation"),
}
"""The names of what has no text in the ring."""


def add_ranges(
    timeline: Timeline, analysis: RingAnalysis, tracks: Sequence[Track], process: Process, evaluations: Evaluations
) -> tuple[Timeline, Slices]:
    """Return the timeline with the names and the tracks of ranges and garbage collections, and these slices."""
    timeline = replace(timeline, tracks=[*tracks])
    events, clock, lookup = analysis.all_events, analysis.clock, analysis.lookup
    collection, collected_from, collection_args = _collections(events)
    count = len(evaluations.thread)
    begin, end = pair_by_value(events, *RANGE_KINDS)
    if not len(begin) and not len(collection) and not count:
        return timeline, Slices.empty()
    kind = np.repeat([RANGE, GARBAGE_COLLECTION], [len(begin), len(collection)])
    kind = np.append(kind, np.full(count, RANGE))
    complete = np.append((begin >= 0) & (end >= 0), np.ones(len(collection), np.bool_))
    complete = np.append(complete, evaluations.complete)
    known = np.append(np.where(begin >= 0, begin, end), collection)
    start_ns = np.append(np.where(begin >= 0, events.time[begin], analysis.extent[0]), collected_from)
    end_ns = np.append(np.where(end >= 0, events.time[end], analysis.extent[1]), events.time[collection])
    whole = np.stack([begin, end])[:, (begin >= 0) & (end >= 0)]
    since, until = _from_eval_to_train(evaluations, events, whole, lookup)
    start_ns, end_ns = np.append(start_ns, since), np.append(end_ns, until)
    end_ns = np.maximum(end_ns, start_ns)
    thread = np.append(events.thread[known].astype(np.int64), evaluations.thread)
    position = analysis.positions_between(events.serial[known])
    position[: len(begin)][begin < 0] = -1
    row, end_ns = _rows(thread, start_ns, end_ns, complete)
    places, place = np.unique(np.stack([thread, row], axis=1), axis=0, return_inverse=True)
    added = []
    for number, nth in places.tolist():
        name, tid = lookup.threads[number]
        added.append(Track(RANGES, name if nth == 0 else f"{name} ({nth + 1})", tid, process))
    own_names = np.where(evaluations.in_training_mode, _IN_TRAINING_MODE, _EVALUATION)
    text_id = np.append(events.name[known].astype(np.int64), own_names)
    texts, text = np.unique(np.where(kind == RANGE, text_id, _NO_TEXT), return_inverse=True)
    slices = Slices.of_kind(
        kind,
        clock.to_other(start_ns),
        end=clock.to_other(end_ns),
        name=len(timeline.names) + text,
        track=len(timeline.tracks) + place.reshape(-1),
        step=analysis.steps_before(np.append(position, evaluations.position)),
        complete=complete,
        args={
            name: ArgColumn(np.arange(len(collection)) + len(begin), own, TRIGGERS if name == Arg.TRIGGER else None)
            for name, own in collection_args.items()
        }
        if len(collection)
        else {},
    )
    names = [
        _OWN_NAMES[number] if number in _OWN_NAMES else range_name(*parse_range(lookup.texts[number]))
        for number in texts.tolist()
    ]
    return replace(timeline, names=[*timeline.names, *names], tracks=[*timeline.tracks, *added]), slices


def _from_eval_to_train(
    evaluations: Evaluations, events: Events, edges: Int64Array, lookup: NameLookup
) -> tuple[Int64Array, Int64Array]:
    """Return when each evaluation begins and ends.

    It begins with the last `eval()` before its first call. It ends with the `train()` after its last call, or where
    another range begins before that: no code that is known says what comes between the two.
    """
    since, until = evaluations.start.copy(), evaluations.end.copy()
    if not len(since):
        return since, until
    names = [parse_range(text).name for text in lookup.texts]
    is_eval, is_train = (
        np.array([*(name.startswith(prefix) for name in names), False], np.bool_)[events.name[edges[0]]]
        for prefix in (EVAL, TRAIN)
    )
    thread, (begin, end) = events.thread[edges[0]], events.time[edges]
    for number in np.unique(evaluations.thread).tolist():
        rows = np.flatnonzero(evaluations.thread == number)
        own = np.flatnonzero(thread == number)
        own = own[np.argsort(begin[own], kind="stable")]
        evals = begin[own[is_eval[own]]]
        last_eval = np.append(evals, INT64_MIN)[np.searchsorted(evals, since[rows]) - 1]  # -1 takes the last one: none
        since[rows] = np.where(last_eval > evaluations.after[rows], last_eval, since[rows])
        ends = np.append(np.where(is_train[own], end[own], begin[own]), until.max())
        following = np.searchsorted(begin[own], until[rows])
        is_before = np.append(begin[own], INT64_MAX)[following] < evaluations.before[rows]
        until[rows] = np.where(is_before & evaluations.complete[rows], ends[following], until[rows])
    return since, until


def _collections(events: Events) -> tuple[Int64Array, Int64Array, dict[str, Int64Array]]:
    """Return the positions of garbage collections, when each began, and its args; in the order of their begins."""
    collections = np.flatnonzero(events.kind == Kind.COLLECTION)
    value = np.maximum(events.value[collections], 0)
    begin = events.time[collections] - ((value & REQUESTED_BIT - 1) >> COLLECTED_BITS + GENERATION_BITS)
    order = np.lexsort((-events.time[collections], begin))
    generation, collected = value[order] & GENERATION_MASK, value[order] >> GENERATION_BITS & COLLECTED_MASK
    trigger = np.where(value[order] & REQUESTED_BIT, 2, value[order] & AUTOMATIC_BIT > 0)
    return (
        collections[order],
        begin[order],
        {Arg.GENERATION: generation, Arg.COLLECTED: collected, Arg.TRIGGER: trigger},
    )


def _rows(thread: Int64Array, start: Int64Array, end: Int64Array, complete: BoolArray) -> tuple[Int64Array, Int64Array]:
    """Return the row of each range among those of its thread, and its end.

    A range that outlasts the one around it takes another row: another thread may end it, as for a collective. A range
    whose end is lost ends with the one around it.
    """
    row, end = np.zeros(len(thread), np.int64), end.copy()
    left = np.arange(len(thread))
    for number in range(_MAX_ROWS):
        until, _, _ = clip_and_nest(thread[left], start[left], end[left], left)
        moves = (until < end[left]) & complete[left] & (number + 1 < _MAX_ROWS)
        row[left], end[left[~moves]] = number, until[~moves]
        left = left[moves]
        if not len(left):
            break
    return row, end
