"""A ring's events of ranges, garbage collections and collectives, and evaluations → slices on separate tracks.

Calls of a model that also trains are an evaluation if they are not for training.
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
    """Return True for events of torch.distributed."""
    return is_any(events.kind, slot_format.COMMUNICATION_KINDS)


def build_collectives(analysis: RingAnalysis, tracks: Sequence[Track], process: Process) -> tuple[list[Track], Slices]:
    """Return the tracks, followed by one per thread with collectives, and the collectives and waits on these."""
    events, clock, lookup = analysis.all_events, analysis.clock, analysis.lookup
    index = np.flatnonzero(is_communication(events))
    if not len(index):
        return [*tracks], Slices.empty()
    calls = events.kind[index] != Kind.COLLECTIVE_DONE
    start, end, complete = _pair(events, index[calls])
    order = np.lexsort((start, events.time_ns[start]))
    start, end, complete = start[order], end[order], complete[order]
    is_wait = events.kind[start] == Kind.WAIT_ENTER
    counter = np.where(events.value[start] < 1 << _COUNTER_BITS, np.maximum(events.value[start], -1), -1)
    text_ids, name = np.unique(
        np.where(events.name[start] == slot_format.NO_NAME, -1, events.name[start]), return_inverse=True
    )
    names = [parse_collective(lookup.texts[number]) for number in text_ids.tolist() if number >= 0]
    name = name - (len(text_ids) - len(names))
    # On the host, completion is noticed up to 100 ms late; for device work the stream's event has the exact end.
    on_device = np.array([bool(name.device) for name in names] + [False])[name]
    host_done = np.append(index[~calls], -1)[find_key(_key(events, index[~calls]), _key(events, start))]
    is_done = (host_done >= 0) & ~is_wait & (events.time_ns[host_done] >= events.time_ns[start])
    done_on_host = np.where(is_done, events.time_ns[host_done], -1)
    done = np.where(on_device, _find_done_on_device(analysis, start, end, is_wait), done_on_host)
    exit_value = np.where(complete & ~is_wait, events.value[end], 0)
    nbytes = np.where(exit_value > 0, exit_value & (slot_format.NOT_AWAITED_BIT - 1), 0)
    threads, thread = np.unique(events.thread[start], return_inverse=True)
    rows = Slices.of_kind(
        np.where(is_wait, slices.WAIT, slices.COLLECTIVE),
        clock.to_other(events.time_ns[start]),
        end=clock.to_other(events.time_ns[end]),
        track=len(tracks) + thread,
        step=analysis.steps_before(analysis.positions_between(events.serial[start])),
        complete=complete,
        args=collective_args(names, name, counter, nbytes, np.where(done >= 0, clock.to_other(done), -1)),
    )
    names_and_tids = map(lookup.threads.__getitem__, threads.tolist())
    return [*tracks, *(Track(COMMUNICATION, name, tid, process) for name, tid in names_and_tids)], rows


def _pair(events: Events, index: AnyArray) -> tuple[Int64Array, Int64Array, BoolArray]:
    """Return each enter event, its end event, and whether that is its exit.

    An enter without an exit ends with the next event of its thread, or with the last event of all.
    """
    index = index[np.argsort(events.thread[index], kind="stable")]
    enter = is_any(events.kind[index], (Kind.COLLECTIVE_ENTER, Kind.WAIT_ENTER))
    thread, name = events.thread[index], events.name[index]
    next_event = np.minimum(np.arange(len(index)) + 1, len(index) - 1)
    same_thread = (thread[next_event] == thread) & (next_event != np.arange(len(index)))
    paired = same_thread & ~enter[next_event] & (name[next_event] == name)
    paired &= events.kind[index[next_event]] == events.kind[index] + 1
    last = len(events) - 1
    end = np.where(same_thread, index[next_event], last)
    rows = np.flatnonzero(enter)
    return index[rows].astype(np.int64), end[rows].astype(np.int64), paired[rows]


def _key(events: Events, index: AnyArray) -> Int64Array:
    """Return one number per event, equal for the events of one collective."""
    counter = events.value[index] & (1 << _COUNTER_BITS) - 1
    return np.asarray(events.name[index].astype(np.int64) << _COUNTER_BITS | counter, np.int64)


def _find_done_on_device(analysis: RingAnalysis, start: Int64Array, end: Int64Array, is_wait: BoolArray) -> Int64Array:
    """Return the completion times of calls that run on a device, monotonic nanoseconds; -1 if unknown, and for waits.

    A call is complete when its stream reaches the end of the call, or of the first wait for it.
    """
    events = analysis.all_events
    points = device_points(events, analysis.queued, of_collectives=True)
    reached = np.full(len(events), -1, np.int64)
    for device, clock in analysis.device_clocks.items():
        on_device = points.device == device
        reached[points.event[on_device]] = clock.to_other(points.device_ns[on_device])
    # Only calls that nothing waits for have an event at their end.
    ends = is_any(events.kind[end], (Kind.COLLECTIVE_EXIT, Kind.WAIT_EXIT))
    moment = np.where(ends & (reached[end] >= 0), np.maximum(reached[end], events.time_ns[end]), -1)
    key = _key(events, start)
    waits = np.flatnonzero(is_wait & (moment >= 0))
    waits = waits[np.argsort(moment[waits], kind="stable")]
    first_wait = np.append(moment[waits], -1)[find_key(key[waits], key)]
    return np.where(is_wait, -1, np.where(moment >= 0, moment, first_wait))


class Evaluations(NamedTuple):
    """Times in which threads call models to evaluate; times are monotonic nanoseconds."""

    thread: Int64Array  # index into the threads of the name table
    start_ns: Int64Array  # start of the first call
    end_ns: Int64Array  # end of the last call
    position: Int64Array  # position of the first call's enter, see `Intervals`
    complete: BoolArray  # False if the last call did not end
    last_trained_ns: Int64Array  # last time before it at which the thread trained; INT64_MIN if none
    next_trained_ns: Int64Array  # next time after it at which the thread trains; INT64_MAX if none
    in_training_mode: BoolArray  # whether the module of the first call is in training mode, such as in rollouts


def find_evaluations(analysis: RingAnalysis, rows: SpanRows) -> Evaluations:
    """Return the evaluations of each thread: runs of calls without a backward pass or a step's end between them.

    An outermost call without a backward is an evaluation if its module is in eval mode and has other calls with a
    backward. If the module also trains in eval mode, the call must not have made an autograd node either.
    Two more kinds of outermost calls are evaluations if fewer than half of the steps contain them:
    - a call of a module in training mode that made no node (a generator under `no_grad` runs in each step);
    - a call in eval mode of a module that never trains, such as an average of weights (a frozen teacher runs in each).
    """
    events = analysis.events
    roots = np.flatnonzero((rows["phase"] == slices.FORWARD) & ~rows["on_backward"] & (rows["depth"] == 0))
    roots = roots[np.lexsort((rows["start_position"][roots], rows["thread"][roots]))]
    # The nearest event stands in for a missing enter or exit.
    enter, leave = (
        np.clip((rows[f"{edge}_position"][roots] - 1) // 2, 0, len(events) - 1) for edge in ("start", "end")
    )
    in_eval_mode = events.kind[enter] == Kind.EVAL_ENTER
    made_no_node = (events.value[enter] ^ events.value[leave]) & slot_format.SEQUENCE_MASK == 0
    step = analysis.steps_before(rows["start_position"][roots])
    fqns = np.unique([name.fqn for name in analysis.lookup.names] or [""], return_inverse=True)[1]
    fqn, is_backward = fqns[rows["name"]], rows["phase"] == slices.BACKWARD
    trains = np.isin(fqn[roots], fqn[is_backward])
    has_backward = np.isin(rows["link"][roots], rows["link"][is_backward]) & (rows["link"][roots] >= 0)
    trains_in_eval_mode = np.isin(fqn[roots], fqn[roots][has_backward & in_eval_mode])
    has_start = rows["has_start"][roots]
    candidate = trains & ~has_backward & has_start
    evaluates = candidate & in_eval_mode & (~trains_in_eval_mode | made_no_node)
    if_rare = candidate & ~in_eval_mode & made_no_node & rows["has_end"][roots]
    if_rare |= ~trains & in_eval_mode & has_start
    training_steps = len(np.unique(step[has_backward]))
    for number in np.unique(fqn[roots][if_rare]).tolist():
        is_call = if_rare & (fqn[roots] == number)
        evaluates |= is_call & (2 * len(np.unique(step[is_call])) < training_steps)
    moments = _training_moments(analysis, rows, roots[has_backward])
    return _join_calls(rows, roots[evaluates], moments, ~in_eval_mode[evaluates])


def _training_moments(analysis: RingAnalysis, rows: SpanRows, calls: Int64Array) -> Int64Array:
    """Return int64[3, n]: thread, position and time of the moments that end evaluations, in the order of positions.

    These are the starts of training calls and backward passes, and the ends of steps, which have thread -1 (all).
    """
    passes, time = analysis.passes, analysis.events.time_ns
    has_start = passes.start_event >= 0
    start, ends = passes.start_event[has_start], analysis.step_ends.event
    moments = stack_parts(
        (rows["thread"][calls], rows["start_position"][calls], rows["start_ns"][calls]),
        (passes.thread[has_start], 2 * start + 1, time[start]),
        (-1, 2 * ends + 1, time[ends]),
    )
    return moments[:, np.argsort(moments[1], kind="stable")]


def _join_calls(rows: SpanRows, calls: Int64Array, moments: Int64Array, in_training_mode: BoolArray) -> Evaluations:
    """Return the evaluations that the calls form: calls on a thread without a training moment between them are one."""
    thread, position = rows["thread"][calls], rows["start_position"][calls]
    count = np.zeros(len(calls), np.int64)
    last_trained, next_trained = np.full(len(calls), INT64_MIN), np.full(len(calls), INT64_MAX)
    for number in [-1, *np.unique(thread).tolist()]:
        on_thread = slice(None) if number == -1 else thread == number
        _, moment, time = moments[:, moments[0] == number]
        index = np.searchsorted(moment, position[on_thread])
        count[on_thread] += index
        last_trained[on_thread] = np.maximum(last_trained[on_thread], np.append(INT64_MIN, time)[index])
        next_trained[on_thread] = np.minimum(next_trained[on_thread], np.append(time, INT64_MAX)[index])
    first = np.flatnonzero(begins_run(thread, count))
    last = np.append(first[1:], len(calls))[: len(first)] - 1
    start, end, complete = rows["start_ns"][calls[first]], rows["end_ns"][calls[last]], rows["has_end"][calls[last]]
    trained = last_trained[first], next_trained[first]
    return Evaluations(thread[first], start, end, position[first], complete, *trained, in_training_mode[first])


_MAX_ROWS = 8
"""Maximum number of rows per thread; ranges that partly overlap need a row each."""
_NO_TEXT = -1
_EVALUATION, _IN_TRAINING_MODE = -2, -3
_OWN_NAMES = {
    _NO_TEXT: range_name(slices.KINDS[slices.GARBAGE_COLLECTION].label, "gc"),
    _EVALUATION: range_name("evaluation", "evaluation"),
    _IN_TRAINING_MODE: range_name(WITHOUT_GRADIENTS, "evaluation"),
}
"""The names of slices that have no text in the ring."""


def add_ranges(
    timeline: Timeline, analysis: RingAnalysis, tracks: Sequence[Track], process: Process, evaluations: Evaluations
) -> tuple[Timeline, Slices]:
    """Return the timeline with the names and the tracks of ranges and garbage collections, and these slices."""
    events, clock, lookup = analysis.all_events, analysis.clock, analysis.lookup
    first, last = pair_by_value(events, *slot_format.RANGE_KINDS)
    is_complete, either = (first >= 0) & (last >= 0), np.where(first >= 0, first, last)
    range_position = np.where(first >= 0, analysis.positions_between(events.serial[either]), -1)
    start_ns = np.where(first >= 0, events.time_ns[first], analysis.extent[0])
    end_ns = np.where(last >= 0, events.time_ns[last], analysis.extent[1])
    collection, collection_start, collection_args = _collections(events)
    collection_position = analysis.positions_between(events.serial[collection])
    eval_start, eval_end = _evaluation_bounds(evaluations, events, np.stack([first, last])[:, is_complete], lookup)
    own_name = np.where(evaluations.in_training_mode, _IN_TRAINING_MODE, _EVALUATION)
    kind, thread, start, end, complete, position, text_id = stack_parts(
        (slices.RANGE, events.thread[either], start_ns, end_ns, is_complete, range_position, events.name[either]),
        (
            slices.GARBAGE_COLLECTION,
            events.thread[collection],
            collection_start,
            events.time_ns[collection],
            1,
            collection_position,
            _NO_TEXT,
        ),
        (slices.RANGE, evaluations.thread, eval_start, eval_end, evaluations.complete, evaluations.position, own_name),
    )
    if not len(kind):
        return replace(timeline, tracks=[*tracks]), Slices.empty()
    row, end = _rows(thread, start, np.maximum(end, start), complete > 0)
    keys, track = np.unique(np.stack([thread, row], axis=1), axis=0, return_inverse=True)
    new_tracks = []
    for number, nth in keys.tolist():
        name, tid = lookup.threads[number]
        new_tracks.append(Track(RANGES, name if nth == 0 else f"{name} ({nth + 1})", tid, process))
    texts, text = np.unique(text_id, return_inverse=True)
    collection_rows = len(first) + np.arange(len(collection))
    rows = Slices.of_kind(
        kind,
        clock.to_other(start),
        end=clock.to_other(end),
        name=len(timeline.names) + text,
        track=len(tracks) + track.reshape(-1),
        step=analysis.steps_before(position),
        complete=complete,
        args=slices.without_empty(
            {
                name: ArgColumn(collection_rows, values, slices.TRIGGERS if name == Arg.TRIGGER else None)
                for name, values in collection_args.items()
            }
        ),
    )
    names = [_OWN_NAMES.get(number) or range_name(*parse_range(lookup.texts[number])) for number in texts.tolist()]
    return replace(timeline, names=[*timeline.names, *names], tracks=[*tracks, *new_tracks]), rows


def _evaluation_bounds(
    evaluations: Evaluations, events: Events, edges: Int64Array, lookup: NameLookup
) -> tuple[Int64Array, Int64Array]:
    """Return the start and the end of each evaluation.

    It starts with the last `eval()` before its first call. It ends with the `train()` after its last call, or at the
    start of a range before that, because code between the two is unknown.
    """
    eval_start, eval_end = evaluations.start_ns.copy(), evaluations.end_ns.copy()
    if not len(eval_start):
        return eval_start, eval_end
    names = [parse_range(text).name for text in lookup.texts]
    is_eval, is_train = (
        np.array([*(name.startswith(prefix) for name in names), False], np.bool_)[events.name[edges[0]]]
        for prefix in (EVAL, TRAIN)
    )
    thread, (start, end) = events.thread[edges[0]], events.time_ns[edges]
    for number in np.unique(evaluations.thread).tolist():
        rows = np.flatnonzero(evaluations.thread == number)
        ranges = np.flatnonzero(thread == number)
        ranges = ranges[np.argsort(start[ranges], kind="stable")]
        eval_calls, starts = start[ranges[is_eval[ranges]]], start[ranges]
        # Index -1 is the last entry: no `eval()` before.
        last_eval = np.append(eval_calls, INT64_MIN)[np.searchsorted(eval_calls, eval_start[rows]) - 1]
        eval_start[rows] = np.where(last_eval > evaluations.last_trained_ns[rows], last_eval, eval_start[rows])
        ends = np.append(np.where(is_train[ranges], end[ranges], starts), eval_end.max())
        next_range = np.searchsorted(starts, eval_end[rows])
        is_before = np.append(starts, INT64_MAX)[next_range] < evaluations.next_trained_ns[rows]
        eval_end[rows] = np.where(is_before & evaluations.complete[rows], ends[next_range], eval_end[rows])
    return eval_start, eval_end


def _collections(events: Events) -> tuple[Int64Array, Int64Array, dict[str, Int64Array]]:
    """Return the event indexes of garbage collections, their start times, and their args; in the order of starts."""
    collections = np.flatnonzero(events.kind == Kind.COLLECTION)
    value = np.maximum(events.value[collections], 0)
    start = events.time_ns[collections] - (
        (value & slot_format.REQUESTED_BIT - 1) >> slot_format.COLLECTED_BITS + slot_format.GENERATION_BITS
    )
    order = np.lexsort((-events.time_ns[collections], start))
    generation, collected = (
        value[order] & slot_format.GENERATION_MASK,
        value[order] >> slot_format.GENERATION_BITS & slot_format.COLLECTED_MASK,
    )
    trigger = np.where(value[order] & slot_format.REQUESTED_BIT, 2, value[order] & slot_format.AUTOMATIC_BIT > 0)
    return (
        collections[order],
        start[order],
        {Arg.GENERATION: generation, Arg.COLLECTED: collected, Arg.TRIGGER: trigger},
    )


def _rows(thread: Int64Array, start: Int64Array, end: Int64Array, complete: BoolArray) -> tuple[Int64Array, Int64Array]:
    """Return the row of each range on its thread, and its end.

    A range that outlasts the range around it gets another row: another thread may end it, such as for a collective. A
    range whose end is lost ends with the range around it.
    """
    row, end = np.zeros(len(thread), np.int64), end.copy()
    unplaced = np.arange(len(thread))
    for number in range(_MAX_ROWS):
        until, _, _ = clip_and_nest(thread[unplaced], start[unplaced], end[unplaced], unplaced)
        moves = (until < end[unplaced]) & complete[unplaced] & (number + 1 < _MAX_ROWS)
        row[unplaced], end[unplaced[~moves]] = number, until[~moves]
        unplaced = unplaced[moves]
        if not len(unplaced):
            break
    return row, end
