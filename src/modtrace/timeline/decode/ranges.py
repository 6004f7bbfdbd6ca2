"""A ring's events of ranges and garbage collections → slices on tracks of their own."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..._typing import BoolArray, Int64Array
from ...ring import Kind
from ...ring.range_text import EVAL, TRAIN, parse_range
from ...ring.slot_format import COLLECTED_BITS, COLLECTED_MASK, GENERATION_BITS, GENERATION_MASK, RANGE_KINDS, Events
from ..args import ArgColumn
from ..contents import RANGES, Process, Track, range_name
from ..slices import COLLECTED, GARBAGE_COLLECTION, GENERATION, KINDS, RANGE, Slices
from ..timeline import Timeline
from .analysis import RingAnalysis
from .evaluation import Evaluations
from .intervals import pair_by_key
from .name_lookup import NameLookup
from .path_spans import clip_and_nest

_MAX_ROWS = 8
"""Per thread; ranges that overlap without one being in the other take a row each."""
_NEVER, _FOREVER = np.iinfo(np.int64).min, np.iinfo(np.int64).max
_NO_TEXT = -1
_EVALUATION = -2
_OWN_NAMES = {
    _NO_TEXT: range_name(KINDS[GARBAGE_COLLECTION].label, "gc"),
    _EVALUATION: range_name("evaluation", "evaluation"),
}
"""The names of what has no text in the ring."""


def add_ranges(
    timeline: Timeline, analysis: RingAnalysis, tracks: Sequence[Track], process: Process, evaluations: Evaluations
) -> tuple[Timeline, Slices]:
    """Return the timeline with the names and the tracks of ranges, and the ranges.

    Garbage collections are among them: a range can be around one.

    Args:
        timeline: what the ring holds of modules.
        analysis: of the ring.
        tracks: all other tracks.
        process: that was recorded.
        evaluations: where threads evaluate; each is a range.
    """
    timeline = replace(timeline, tracks=[*tracks])
    events, clock, lookup = analysis.all_events, analysis.clock, analysis.lookup
    index = np.flatnonzero(np.isin(events.kind, RANGE_KINDS))
    collection, collected_from, collection_args = _collections(events)
    count = len(evaluations.thread)
    if not len(index) and not len(collection) and not count:
        return timeline, Slices.empty()
    begin, end = pair_by_key(index, events.kind[index] == Kind.RANGE_BEGIN, events.value[index])
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
    position = 2 * np.searchsorted(analysis.events.serial, events.serial[known]) - 1
    position[: len(begin)][begin < 0] = -1
    row, end_ns = _rows(thread, start_ns, end_ns, complete)
    places, place = np.unique(np.stack([thread, row], axis=1), axis=0, return_inverse=True)
    added = []
    for number, nth in places.tolist():
        name, tid = lookup.threads[number]
        added.append(Track(RANGES, name if nth == 0 else f"{name} ({nth + 1})", tid, process))
    text_id = np.append(events.name[known].astype(np.int64), np.full(count, _EVALUATION))
    texts, text = np.unique(np.where(kind == RANGE, text_id, _NO_TEXT), return_inverse=True)
    slices = Slices.of_kind(
        kind,
        clock.to_other(start_ns),
        end=clock.to_other(end_ns),
        name=len(timeline.names) + text,
        track=len(timeline.tracks) + place.reshape(-1),
        step=analysis.steps_before(np.append(position, evaluations.position)),
        complete=complete,
        args={name: ArgColumn(np.arange(len(collection)) + len(begin), own) for name, own in collection_args.items()}
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

    Args:
        evaluations: from the first call of a model to the last one.
        events: of the ring.
        edges: int64[2, n], the indexes of the begins and ends of ranges.
        lookup: has their names.
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
        last_eval = np.append(evals, _NEVER)[np.searchsorted(evals, since[rows]) - 1]  # -1 takes the last one: none
        since[rows] = np.where(last_eval > evaluations.after[rows], last_eval, since[rows])
        ends = np.append(np.where(is_train[own], end[own], begin[own]), until.max())
        following = np.searchsorted(begin[own], until[rows])
        is_before = np.append(begin[own], _FOREVER)[following] < evaluations.before[rows]
        until[rows] = np.where(is_before & evaluations.complete[rows], ends[following], until[rows])
    return since, until


def _collections(events: Events) -> tuple[Int64Array, Int64Array, dict[str, Int64Array]]:
    """Return the positions of garbage collections, when each began, and its args; in the order of their begins."""
    collections = np.flatnonzero(events.kind == Kind.COLLECTION)
    value = events.value[collections]
    begin = events.time[collections] - np.maximum(value >> COLLECTED_BITS + GENERATION_BITS, 0)
    order = np.lexsort((-events.time[collections], begin))
    generation, collected = value[order] & GENERATION_MASK, value[order] >> GENERATION_BITS & COLLECTED_MASK
    return collections[order], begin[order], {GENERATION: generation, COLLECTED: collected}


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
