"""A ring's events of ranges, garbage collections and collectives, and evaluations → slices on tracks of their own.

A training script evaluates where it calls a model that trains, and the calls are not for training.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..._arrays import INT64_MAX, INT64_MIN, AnyArray, BoolArray, Int64Array, begins_run, is_any, stack_parts
from ...ring import Kind, slot_format
from ...ring.event_text import EVAL, TRAIN, parse_collective, parse_range
from ...ring.slot_format import Events
from .. import slices
from ..collectives import collective_args
from ..contents import COMMUNICATION, RANGES, WITHOUT_GRADIENTS, Process, Track, range_name
from ..nesting import clip_and_nest
from ..slices import Arg, ArgColumn, Slices
from ..timeline import Timeline
from .analysis import RingAnalysis, device_points
from .intervals import find_key, pair_by_value
from .name_lookup import NameLookup
from .spans import SpanRows

_COUNTER_BITS = 39


def is_communication(events: Events) -> BoolArray:
    """Return which events are of torch.distributed."""
    return is_any(events.kind, slot_format.COMMUNICATION_KINDS)


def build_collectives(analysis: RingAnalysis, tracks: Sequence[Track], process: Process) -> tuple[list[Track], Slices]:
    """Return the tracks with one more for each thread that has collectives, and the collectives and waits on these."""
    events, clock, lookup = analysis.all_events, analysis.clock, analysis.lookup
    index = np.flatnonzero(is_communication(events))
    if not len(index):
        return [*tracks], Slices.empty()
    calls = events.kind[index] != Kind.COLLECTIVE_DONE
    begin, end, complete = _pair(events, index[calls])
    order = np.lexsort((begin, events.time[begin]))
    begin, end, complete = begin[order], end[order], complete[order]
    is_wait = events.kind[begin] == Kind.WAIT_ENTER
    counter = np.where(events.value[begin] < 1 << _COUNTER_BITS, np.maximum(events.value[begin], -1), -1)
    text_ids, name = np.unique(
        np.where(events.name[begin] == slot_format.NO_NAME, -1, events.name[begin]), return_inverse=True
    )
    names = [parse_collective(lookup.texts[number]) for number in text_ids.tolist() if number >= 0]
    name = name - (len(text_ids) - len(names))
    # Up to 100 ms pass between the end of the work and the question whether it is done. The stream's event has the end.
    on_device = np.array([bool(name.device) for name in names] + [False])[name]
    host_done = np.append(index[~calls], -1)[find_key(_key(events, index[~calls]), _key(events, begin))]
    is_done = (host_done >= 0) & ~is_wait & (events.time[host_done] >= events.time[begin])
    done_on_host = np.where(is_done, events.time[host_done], -1)
    done = np.where(on_device, _find_done_on_device(analysis, begin, end, is_wait), done_on_host)
    exit_value = np.where(complete & ~is_wait, events.value[end], 0)
    nbytes = np.where(exit_value > 0, exit_value & (slot_format.NOT_AWAITED_BIT - 1), 0)
    threads, thread = np.unique(events.thread[begin], return_inverse=True)
    rows = Slices.of_kind(
        np.where(is_wait, slices.WAIT, slices.COLLECTIVE),
        clock.to_other(events.time[begin]),
        end=clock.to_other(events.time[end]),
        track=len(tracks) + thread,
        step=analysis.steps_before(analysis.positions_between(events.serial[begin])),
        complete=complete,
        args=collective_args(names, name, counter, nbytes, np.where(done >= 0, clock.to_other(done), -1)),
    )
    described = map(lookup.threads.__getitem__, threads.tolist())
    return [*tracks, *(Track(COMMUNICATION, name, tid, process) for name, tid in described)], rows


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


def _find_done_on_device(analysis: RingAnalysis, begin: Int64Array, end: Int64Array, is_wait: BoolArray) -> Int64Array:
    """Return when calls that a device runs were complete, monotonic nanoseconds; -1 for waits and what is not known.

    That is when its stream passed the end of the call, or of the first wait for it.
    """
    events = analysis.all_events
    points = device_points(events, analysis.queued, of_collectives=True)
    reached = np.full(len(events), -1, np.int64)
    for device, clock in analysis.device_clocks.items():
        on_device = points.device == device
        reached[points.event[on_device]] = clock.to_other(points.device_ns[on_device])
    # Only the end of a call that leaves nothing to wait for has an event.
    ends = is_any(events.kind[end], (Kind.COLLECTIVE_EXIT, Kind.WAIT_EXIT))
    moment = np.where(ends & (reached[end] >= 0), np.maximum(reached[end], events.time[end]), -1)
    key = _key(events, begin)
    waits = np.flatnonzero(is_wait & (moment >= 0))
    waits = waits[np.argsort(moment[waits], kind="stable")]
    first_wait = np.append(moment[waits], -1)[find_key(key[waits], key)]
    return np.where(is_wait, -1, np.where(moment >= 0, moment, first_wait))


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

    A call is an evaluation if it is in no other call and has no backward, while other calls of its module have one, and
    if its module is in eval mode. If this model is also trained in eval mode, the call must have made no autograd node
    either. Two kinds of calls more are evaluations if fewer than half of the steps have them. The first is a call of a
    module in training mode that made no node: a generator that runs under `no_grad` in each step belongs to the step.
    The second is a call of a module in eval mode that never trains, as an average of weights: a frozen teacher runs in
    each step.
    """
    events = analysis.events
    roots = np.flatnonzero((rows["phase"] == slices.FORWARD) & ~rows["on_backward"] & (rows["depth"] == 0))
    roots = roots[np.lexsort((rows["start_position"][roots], rows["thread"][roots]))]
    # Of a call that lacks its enter or exit the nearest event counts.
    enter, leave = (
        np.clip((rows[f"{edge}_position"][roots] - 1) // 2, 0, len(events) - 1) for edge in ("start", "end")
    )
    in_eval_mode = events.kind[enter] == Kind.EVAL_ENTER
    made_none = (events.value[enter] ^ events.value[leave]) & slot_format.SEQUENCE_MASK == 0
    step = analysis.steps_before(rows["start_position"][roots])
    fqns = np.unique([name.fqn for name in analysis.lookup.names] or [""], return_inverse=True)[1]
    fqn, is_backward = fqns[rows["name"]], rows["phase"] == slices.BACKWARD
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
        of_module = unsure & (fqn[roots] == number)
        evaluates |= of_module & (2 * len(np.unique(step[of_module])) < trained_steps)
    between = _moments_between(analysis, rows, roots[has_backward])
    return _joined(rows, roots[evaluates], between, ~in_eval_mode[evaluates])


def _moments_between(analysis: RingAnalysis, rows: SpanRows, trained: Int64Array) -> Int64Array:
    """Return int64[3, n]: thread, position and time of what ends an evaluation, in the order of positions.

    These are calls for training, backward passes, and ends of steps. These are of all threads: their thread is -1.
    """
    passes, time = analysis.passes, analysis.events.time
    begun = passes.start >= 0
    begin, ends = passes.start[begun], analysis.step_ends.event
    moments = stack_parts(
        (rows["thread"][trained], rows["start_position"][trained], rows["start"][trained]),
        (passes.thread[begun], 2 * begin + 1, time[begin]),
        (-1, 2 * ends + 1, time[ends]),
    )
    return moments[:, np.argsort(moments[1], kind="stable")]


def _joined(rows: SpanRows, chosen: Int64Array, between: Int64Array, in_training_mode: BoolArray) -> Evaluations:
    """Return evaluations of the chosen calls: those that have as many of the other moments before them are one."""
    thread, position = rows["thread"][chosen], rows["start_position"][chosen]
    count = np.zeros(len(chosen), np.int64)
    after, before = np.full(len(chosen), INT64_MIN), np.full(len(chosen), INT64_MAX)
    for number in [-1, *np.unique(thread).tolist()]:
        of_thread = slice(None) if number == -1 else thread == number
        _, moment, time = between[:, between[0] == number]
        place = np.searchsorted(moment, position[of_thread])
        count[of_thread] += place
        after[of_thread] = np.maximum(after[of_thread], np.append(INT64_MIN, time)[place])
        before[of_thread] = np.minimum(before[of_thread], np.append(time, INT64_MAX)[place])
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
    _NO_TEXT: range_name(slices.KINDS[slices.GARBAGE_COLLECTION].label, "gc"),
    _EVALUATION: range_name("evaluation", "evaluation"),
    _IN_TRAINING_MODE: range_name(WITHOUT_GRADIENTS, "evaluation"),
}
"""The names of what has no text in the ring."""


def add_ranges(
    timeline: Timeline, analysis: RingAnalysis, tracks: Sequence[Track], process: Process, evaluations: Evaluations
) -> tuple[Timeline, Slices]:
    """Return the timeline with the names and the tracks of ranges and garbage collections, and these slices."""
    events, clock, lookup = analysis.all_events, analysis.clock, analysis.lookup
    begin, end = pair_by_value(events, *slot_format.RANGE_KINDS)
    is_whole, either = (begin >= 0) & (end >= 0), np.where(begin >= 0, begin, end)
    position = np.where(begin >= 0, analysis.positions_between(events.serial[either]), -1)
    begin_ns = np.where(begin >= 0, events.time[begin], analysis.extent[0])
    end_ns = np.where(end >= 0, events.time[end], analysis.extent[1])
    collection, collected_from, collection_args = _collections(events)
    collected = analysis.positions_between(events.serial[collection])
    since, until = _from_eval_to_train(evaluations, events, np.stack([begin, end])[:, is_whole], lookup)
    own_name = np.where(evaluations.in_training_mode, _IN_TRAINING_MODE, _EVALUATION)
    kind, thread, start, end, complete, position, text_id = stack_parts(
        (slices.RANGE, events.thread[either], begin_ns, end_ns, is_whole, position, events.name[either]),
        (
            slices.GARBAGE_COLLECTION,
            events.thread[collection],
            collected_from,
            events.time[collection],
            1,
            collected,
            _NO_TEXT,
        ),
        (slices.RANGE, evaluations.thread, since, until, evaluations.complete, evaluations.position, own_name),
    )
    if not len(kind):
        return replace(timeline, tracks=[*tracks]), Slices.empty()
    row, end = _rows(thread, start, np.maximum(end, start), complete > 0)
    places, place = np.unique(np.stack([thread, row], axis=1), axis=0, return_inverse=True)
    added = []
    for number, nth in places.tolist():
        name, tid = lookup.threads[number]
        added.append(Track(RANGES, name if nth == 0 else f"{name} ({nth + 1})", tid, process))
    texts, text = np.unique(text_id, return_inverse=True)
    rows_of_args = len(begin) + np.arange(len(collection))
    rows = Slices.of_kind(
        kind,
        clock.to_other(start),
        end=clock.to_other(end),
        name=len(timeline.names) + text,
        track=len(tracks) + place.reshape(-1),
        step=analysis.steps_before(position),
        complete=complete,
        args=slices.without_empty(
            {
                name: ArgColumn(rows_of_args, values, slices.TRIGGERS if name == Arg.TRIGGER else None)
                for name, values in collection_args.items()
            }
        ),
    )
    names = [_OWN_NAMES.get(number) or range_name(*parse_range(lookup.texts[number])) for number in texts.tolist()]
    return replace(timeline, names=[*timeline.names, *names], tracks=[*tracks, *added]), rows


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
        of_thread = np.flatnonzero(thread == number)
        of_thread = of_thread[np.argsort(begin[of_thread], kind="stable")]
        evals, begins = begin[of_thread[is_eval[of_thread]]], begin[of_thread]
        last_eval = np.append(evals, INT64_MIN)[np.searchsorted(evals, since[rows]) - 1]  # -1 takes the last one: none
        since[rows] = np.where(last_eval > evaluations.after[rows], last_eval, since[rows])
        ends = np.append(np.where(is_train[of_thread], end[of_thread], begins), until.max())
        following = np.searchsorted(begins, until[rows])
        is_before = np.append(begins, INT64_MAX)[following] < evaluations.before[rows]
        until[rows] = np.where(is_before & evaluations.complete[rows], ends[following], until[rows])
    return since, until


def _collections(events: Events) -> tuple[Int64Array, Int64Array, dict[str, Int64Array]]:
    """Return the positions of garbage collections, when each began, and its args; in the order of their begins."""
    collections = np.flatnonzero(events.kind == Kind.COLLECTION)
    value = np.maximum(events.value[collections], 0)
    begin = events.time[collections] - (
        (value & slot_format.REQUESTED_BIT - 1) >> slot_format.COLLECTED_BITS + slot_format.GENERATION_BITS
    )
    order = np.lexsort((-events.time[collections], begin))
    generation, collected = (
        value[order] & slot_format.GENERATION_MASK,
        value[order] >> slot_format.GENERATION_BITS & slot_format.COLLECTED_MASK,
    )
    trigger = np.where(value[order] & slot_format.REQUESTED_BIT, 2, value[order] & slot_format.AUTOMATIC_BIT > 0)
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
