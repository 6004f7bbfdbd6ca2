"""Where a training script evaluates: calls of a model that trains, which are not for training."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..._typing import BoolArray, Int64Array
from ...ring import Kind
from ...ring.slot_format import SEQUENCE_MASK
from ..slices import BACKWARD, FORWARD
from .analysis import RingAnalysis
from .spans import SpanRows


class Evaluations(NamedTuple):
    """From when to when a thread evaluates; int64 arrays of equal length, the first three as in `Intervals`.

    Attributes:
        thread: index into the threads of the name table.
        start: monotonic nanoseconds, when the first call began.
        end: monotonic nanoseconds, when the last call ended.
        position: of the first call's enter.
        complete: bool, False if the last call did not end.
    """

    thread: Int64Array
    start: Int64Array
    end: Int64Array
    position: Int64Array
    complete: BoolArray


def find_evaluations(analysis: RingAnalysis, rows: SpanRows) -> Evaluations:
    """Return where each thread evaluates. Calls follow each other without a backward pass or a step's end in between.

    A call is an evaluation if it is in no other call, no backward came of it, other calls of its module had one (so
    a frozen teacher is none), and its module is in eval mode. If this model is also trained in eval mode, the call must
    have made no autograd node either. A call in training mode that made no node is one if fewer than half of the steps
    have such calls: a generator that runs under `no_grad` in each step belongs to the step.
    """
    roots = _roots(rows)
    if not len(roots) or not np.any(rows["phase"] == BACKWARD):
        none = np.zeros(0, np.int64)
        return Evaluations(none, none, none, none, np.zeros(0, np.bool_))
    start, end = rows["start_position"][roots], rows["end_position"][roots]
    events = analysis.events
    last = len(events) - 1
    enter, leave = np.clip((start - 1) // 2, 0, last), np.clip((end - 1) // 2, 0, last)
    in_eval_mode = events.kind[enter] == Kind.EVAL_ENTER
    made_none = (events.value[enter] ^ events.value[leave]) & SEQUENCE_MASK == 0
    step = analysis.steps_before(start)
    fqns = np.unique([name.fqn for name in analysis.lookup.names] or [""], return_inverse=True)[1]
    fqn, is_backward = fqns[rows["name"]], rows["phase"] == BACKWARD
    trains = np.isin(fqn[roots], fqn[is_backward])
    has_backward = np.isin(rows["link"][roots], rows["link"][is_backward]) & (rows["link"][roots] >= 0)
    trains_in_eval_mode = np.isin(fqn[roots], fqn[roots][has_backward & in_eval_mode])
    is_whole = rows["has_start"][roots]
    candidate = trains & ~has_backward & is_whole
    of_steps = candidate & ~in_eval_mode & made_none & rows["has_end"][roots]
    is_rare = 2 * len(np.unique(step[of_steps])) < len(np.unique(step[has_backward]))
    evaluates = candidate & in_eval_mode & (~trains_in_eval_mode | made_none) | of_steps & is_rare
    return _joined(rows, roots, evaluates, _moments_between(analysis, rows, roots[has_backward]))


def _roots(rows: SpanRows) -> Int64Array:
    """Return the forward calls that are in no other call and in no backward, in order of (thread, start)."""
    roots = np.flatnonzero((rows["phase"] == FORWARD) & ~rows["on_backward"] & (rows["depth"] == 0))
    return roots[np.lexsort((rows["start_position"][roots], rows["thread"][roots]))]


def _moments_between(
    analysis: RingAnalysis, rows: SpanRows, trained: Int64Array
) -> list[tuple[Int64Array, Int64Array]]:
    """Return (thread, position) of what ends an evaluation: calls for training, backward passes, and steps' ends.

    A step's end is one for all threads; its thread is -1.
    """
    passes = analysis.passes
    begun = passes.begin >= 0
    ends = 2 * analysis.step_ends.event + 1
    return [
        (rows["thread"][trained], rows["start_position"][trained]),
        (passes.thread[begun], 2 * passes.begin[begun] + 1),
        (np.full(len(ends), -1), ends),
    ]


def _joined(
    rows: SpanRows, roots: Int64Array, evaluates: BoolArray, between: list[tuple[Int64Array, Int64Array]]
) -> Evaluations:
    chosen = roots[evaluates]
    thread, position = rows["thread"][chosen], rows["start_position"][chosen]
    # How many of the other moments are before each call: those of one evaluation have as many.
    count = np.zeros(len(chosen), np.int64)
    other_thread, other = (np.concatenate([pair[column] for pair in between]) for column in (0, 1))
    for number in [-1, *np.unique(thread).tolist()]:
        own = slice(None) if number == -1 else thread == number
        count[own] += np.searchsorted(np.sort(other[other_thread == number]), position[own])
    first = np.flatnonzero((np.diff(thread, prepend=-1) != 0) | (np.diff(count, prepend=-1) != 0))
    last = np.append(first[1:], len(chosen))[: len(first)] - 1
    return Evaluations(
        thread[first],
        rows["start"][chosen[first]],
        rows["end"][chosen[last]],
        position[first],
        rows["has_end"][chosen[last]],
    )
