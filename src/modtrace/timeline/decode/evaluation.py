"""Where a training script evaluates: calls of a model that trains, which are not for training."""

from typing import NamedTuple

import numpy as np

from ..._typing import BoolArray, Int64Array
from ...ring import Kind
from ...ring.slot_format import SEQUENCE_MASK
from ..slices import BACKWARD, FORWARD
from .analysis import RingAnalysis
from .spans import SpanRows

_NEVER = np.iinfo(np.int64)


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


def find_evaluations(analysis: RingAnalysis, rows: SpanRows) -> Evaluations:
    """Return where each thread evaluates. Calls follow each other without a backward pass or a step's end in between.

    A call is an evaluation if it is in no other call, no backward came of it, other calls of its module had one, and
    its module is in eval mode. If this model is also trained in eval mode, the call must have made no autograd node
    either. Two more are one if fewer than half of the steps have such calls: of a module in training mode, if it made
    no node (a generator that runs under `no_grad` in each step belongs to the step), and of a module in eval mode that
    never trains, as an average of weights (a frozen teacher runs in each step).
    """
    roots = _roots(rows)
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
    evaluates = candidate & in_eval_mode & (~trains_in_eval_mode | made_none)
    unsure = candidate & ~in_eval_mode & made_none & rows["has_end"][roots]
    unsure |= ~trains & in_eval_mode & is_whole
    trained_steps = len(np.unique(step[has_backward]))
    for number in np.unique(fqn[roots][unsure]).tolist():
        own = unsure & (fqn[roots] == number)
        evaluates |= own & (2 * len(np.unique(step[own])) < trained_steps)
    return _joined(rows, roots[evaluates], _moments_between(analysis, rows, roots[has_backward]))


def _roots(rows: SpanRows) -> Int64Array:
    """Return the forward calls that are in no other call and in no backward, in order of (thread, start)."""
    roots = np.flatnonzero((rows["phase"] == FORWARD) & ~rows["on_backward"] & (rows["depth"] == 0))
    return roots[np.lexsort((rows["start_position"][roots], rows["thread"][roots]))]


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


def _joined(rows: SpanRows, chosen: Int64Array, between: Int64Array) -> Evaluations:
    """Return evaluations of the chosen calls: those that have as many of the other moments before them are one."""
    thread, position = rows["thread"][chosen], rows["start_position"][chosen]
    count = np.zeros(len(chosen), np.int64)
    after, before = np.full(len(chosen), _NEVER.min), np.full(len(chosen), _NEVER.max)
    for number in [-1, *np.unique(thread).tolist()]:
        own = slice(None) if number == -1 else thread == number
        _, other, time = between[:, between[0] == number]
        at = np.searchsorted(other, position[own])
        count[own] += at
        after[own] = np.maximum(after[own], np.append(_NEVER.min, time)[at])
        before[own] = np.minimum(before[own], np.append(time, _NEVER.max)[at])
    first = np.flatnonzero((np.diff(thread, prepend=-1) != 0) | (np.diff(count, prepend=-1) != 0))
    last = np.append(first[1:], len(chosen))[: len(first)] - 1
    start, end, complete = rows["start"][chosen[first]], rows["end"][chosen[last]], rows["has_end"][chosen[last]]
    return Evaluations(thread[first], start, end, position[first], complete, after[first], before[first])
