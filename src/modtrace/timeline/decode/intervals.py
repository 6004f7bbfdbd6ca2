"""Events → intervals: module calls and autograd nodes with start, end, thread and parent.

Module calls and autograd nodes are intervals on their thread's stack. If the order of the nodes is known, an engine
writes only "from now on the nodes of this call run". Each such segment becomes one node, so the events of both engines
give the same intervals. Calls are paired by name and key, nodes by nesting, segments with the next segment.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..._arrays import INT64_MAX, AnyArray, BoolArray, Int64Array, SignedIntArray, begins_run, is_any, order_in_groups
from ..._interrupts import cached_property
from ...ring import slot_format
from ...ring.slot_format import Events, Kind
from ..nesting import clip_and_nest, find_parents

_IntervalColumns = dict[str, AnyArray]
"""The columns of `Intervals` except depth and parent, and `end_unknown`: True if it ended at an unknown time.

A position is -1 if there is no such event.
"""


@dataclass(frozen=True)
class Intervals:
    """Calls and nodes in order of (thread, start position); arrays of equal length.

    A position orders all starts and ends of a recording: twice the index of its event, plus one; an even
    position is between two events.
    """

    thread: Int64Array  # index into the name table's threads
    start_position: Int64Array  # negative if the start was overwritten
    end_position: Int64Array  # beyond all events if the end never came
    start_ns: Int64Array  # monotonic clock
    end_ns: Int64Array  # monotonic clock
    is_node: BoolArray  # True for autograd nodes and segments of them, False for calls
    name: Int64Array  # number of the module's name; of the call for a Python-engine node; `NO_NAME` for other nodes
    call_key: Int64Array  # number of the call among the calls of that name; -1 for nodes of the native engine
    sequence: Int64Array  # a node's sequence number, or the thread's when a call entered; -1 if unknown
    exit_sequence: Int64Array  # the thread's sequence number when a call exited; -1 if unknown
    forward_thread: Int64Array  # torch's number of the thread that made a native node; -1 for other intervals
    backward_pass: Int64Array  # a node's torch graph task, or -2 minus modtrace's number of the pass; -1 for calls
    has_start: BoolArray  # False if the start was overwritten
    has_end: BoolArray  # False if the end never came
    depth: Int64Array  # number of intervals around it on its thread
    parent: Int64Array  # index of the interval around it; -1 if there is none

    def __len__(self) -> int:
        return len(self.thread)

    def call_path(self, call: int) -> Iterator[int]:
        """Yield a call and the calls around it, innermost first, up to the next node. Yield nothing for -1."""
        while call >= 0 and not self.is_node[call]:
            yield call
            call = int(self.parent[call])

    def sort_keys(self, group: Int64Array, position: Int64Array) -> Int64Array:
        """Return numbers that order positions by group, then by position; positions after all starts come last."""
        lowest = int(self.start_position.min(initial=0))
        stride = int(self.start_position.max(initial=0)) - lowest + 2
        keys: Int64Array = group * stride + np.minimum(position - lowest, stride - 1)
        return keys

    def open_at(self, thread: Int64Array, position: Int64Array) -> Int64Array:
        """Return the innermost interval open on each thread at each position; -1 if there is none."""
        if not len(self):
            return np.full(len(position), -1, np.int64)
        start_keys = self.sort_keys(self.thread, self.start_position)
        inner = np.searchsorted(start_keys, self.sort_keys(thread, position)) - 1
        inner = np.where((inner >= 0) & (self.thread[inner] == thread), inner, -1)
        # The last interval that started on the thread, or one around it, is still open.
        while len(rows := np.flatnonzero((inner >= 0) & (self.end_position[inner] < position))):
            inner[rows] = self.parent[inner[rows]]
        return inner

    @property
    def is_recompute(self) -> BoolArray:
        """True for calls that a checkpoint runs again."""
        recompute: BoolArray = ~self.is_node & (self.call_key & slot_format.RECOMPUTE_BIT != 0)
        return recompute

    @cached_property
    def in_backward(self) -> BoolArray:
        """True for calls that are recomputed, inside a node, or inside such a call."""
        is_inside: BoolArray = self.is_recompute.copy()
        for level in self.levels[1:]:
            calls = level[~self.is_node[level]]
            outer = self.parent[calls]
            is_inside[calls] |= self.is_node[outer] | is_inside[outer]
        return is_inside

    @cached_property
    def levels(self) -> list[Int64Array]:
        """The indexes of the intervals of each depth, outermost first, so parents come before their children."""
        return [np.flatnonzero(self.depth == depth) for depth in range(int(self.depth.max(initial=-1)) + 1)]


def build_intervals(events: Events) -> Intervals:
    """Pair the starts and ends in `events` and nest them."""
    parts = [_MISSING | part for part in (pair_calls(events), _pair_nodes(events), _pair_segments(events))]
    columns: _IntervalColumns = {
        field: np.concatenate([np.broadcast_to(part[field], len(part["thread"])) for part in parts])
        for field in parts[0]
    }
    _bound_by_own_thread(events, columns)
    last = 2 * len(events) + 2
    start_position, end_position = columns["start_position"], columns["end_position"]
    # In a damaged file an end can come before its start.
    has_start, has_end = start_position >= 0, end_position > start_position
    end_unknown = columns.pop("end_unknown")
    # Intervals that the ring cut off have only one end. The later such an interval ended, the earlier its start.
    end_position = np.where(has_end, end_position, 2 * last - start_position)
    start_position = np.where(has_start, start_position, -end_position)
    columns["start_position"], columns["end_position"] = start_position, end_position
    columns["start_ns"] = np.where(has_start, columns["start_ns"], events.time_ns.min(initial=INT64_MAX))
    columns["end_ns"] = np.where(has_end, columns["end_ns"], events.time_ns.max(initial=0))
    columns["has_start"], columns["has_end"] = has_start, has_end & ~end_unknown
    order = np.lexsort((start_position, columns["thread"]))
    columns = {field: column[order] for field, column in columns.items()}
    # A clock read by two threads can run back slightly if a pass ends on another thread.
    columns["end_ns"] = np.maximum(columns["end_ns"], columns["start_ns"])
    depth, parent = _nest(columns)
    return Intervals(**columns, depth=depth, parent=parent)


def _bound_by_own_thread(events: Events, columns: _IntervalColumns) -> None:
    """Clip ends that another thread wrote to the times of the two events around them on the interval's own thread.

    Within a thread, times follow positions. The clocks of two threads differ slightly, in a damaged file widely.
    """
    end_position, thread, end = columns["end_position"], columns["thread"], columns["end_ns"]
    # An even position is between two events of the interval's own thread.
    foreign = np.flatnonzero((end_position >= 0) & (end_position & 1 == 1))
    foreign = foreign[events.thread[end_position[foreign] >> 1] != thread[foreign]]
    for number in np.unique(thread[foreign]).tolist():
        rows = foreign[thread[foreign] == number]
        rows = rows[np.argsort(end_position[rows], kind="stable")]
        thread_events = np.flatnonzero(events.thread == number)
        time = np.concatenate([events.time_ns[thread_events[:1]], events.time_ns[thread_events], [INT64_MAX]])
        next_event = np.searchsorted(thread_events, end_position[rows] >> 1)
        end[rows] = np.maximum.accumulate(np.clip(end[rows], time[next_event], time[next_event + 1]))


def _nest(columns: _IntervalColumns) -> tuple[Int64Array, Int64Array]:
    """Return depth and parent of intervals in (thread, start) order, after clipping partial overlaps."""
    thread, start_position, end_position = columns["thread"], columns["start_position"], columns["end_position"]
    first = thread * (int(end_position.max(initial=0)) - int(start_position.min(initial=0)) + 1)
    over = np.searchsorted(np.sort(first + end_position, kind="stable"), first + start_position, "right")
    depth = np.arange(len(thread)) - over
    parent = find_parents(thread, depth)
    if np.all((parent < 0) | (end_position <= end_position[parent])):
        return depth, parent
    # An interval that outlives the one around it is clipped to it, and counts as having no end.
    until, parent, depth = clip_and_nest(thread, start_position, end_position, np.arange(len(thread)))
    clipped, end = until < end_position, columns["end_ns"].copy()
    for level in range(1, int(depth.max()) + 1):
        rows = np.flatnonzero(clipped & (depth == level))
        end[rows] = np.minimum(end[rows], end[parent[rows]])
    columns["end_position"], columns["has_end"] = until, columns["has_end"] & ~clipped
    columns["end_ns"] = np.maximum(end, columns["start_ns"])
    return depth, parent


def is_core_event(events: Events) -> BoolArray:
    """Return True for events of modules, nodes, steps and marks, False for counters and other kinds of slices."""
    other_kinds = (
        *slot_format.COMMUNICATION_KINDS,
        *slot_format.DEVICE_KINDS,
        *slot_format.RANGE_KINDS,
        *slot_format.FLOP_KINDS,
        *slot_format.MEMORY_KINDS,
        Kind.COLLECTION,
    )
    return ~is_any(events.kind, other_kinds)


_MISSING: dict[str, Any] = dict.fromkeys(("sequence", "exit_sequence", "forward_thread", "backward_pass"), -1)
"""Values of the fields that a kind of interval does not have."""
_MISSING["end_unknown"] = False


def _paired(events: Events, first: SignedIntArray, last: SignedIntArray, **columns: Any) -> dict[str, Any]:
    """Return the columns of event pairs, with position -1 for a missing event, and the other `columns`."""
    return {
        "thread": events.thread[np.where(first >= 0, first, last)].astype(np.int64),
        "start_position": np.where(first >= 0, 2 * first + 1, -1),
        "end_position": np.where(last >= 0, 2 * last + 1, -1),
        "start_ns": events.time_ns[first],
        "end_ns": events.time_ns[last],
    } | columns


def pair_calls(events: Events) -> dict[str, Any]:
    """Pair enters and exits by name and key."""
    is_enter = is_any(events.kind, slot_format.CALL_ENTER_KINDS)
    index = np.flatnonzero(is_enter | is_any(events.kind, slot_format.CALL_EXIT_KINDS))
    first, last = pair_by_key(index, is_enter[index], call_ids(events, index), slot_format.CALL_KEY_BITS)
    either = np.where(first >= 0, first, last)
    sequence = events.value & slot_format.SEQUENCE_MASK
    return _paired(
        events,
        first,
        last,
        is_node=False,
        name=events.name[either].astype(np.int64),
        call_key=call_ids(events, either) & slot_format.CALL_KEY_MASK,
        sequence=np.where(first >= 0, sequence[first], -1),
        exit_sequence=np.where(last >= 0, sequence[last], -1),
    )


def call_ids(events: Events, index: SignedIntArray) -> Int64Array:
    """Return one number per enter or exit event, which only the two events of one call share."""
    call_index = events.value[index] >> slot_format.SEQUENCE_BITS & slot_format.CALL_INDEX_MASK
    recompute = is_any(events.kind[index], (Kind.RECOMPUTE_ENTER, Kind.RECOMPUTE_EXIT))
    name = events.name[index].astype(np.int64)
    return name << slot_format.CALL_KEY_BITS | recompute.astype(np.int64) << slot_format.CALL_INDEX_BITS | call_index


def _pair_nodes(events: Events) -> dict[str, Any]:
    """Pair the native engine's node events by thread, sequence number, forward thread and graph task."""
    index = np.flatnonzero((events.kind == Kind.NODE_BEGIN) | (events.kind == Kind.NODE_END))
    name, value, thread = events.name[index], events.value[index], events.thread[index]
    order = np.lexsort((name, value, thread))
    key = np.empty(len(index), np.int64)
    key[order] = np.cumsum(begins_run(*(column[order] for column in (name, value, thread))))
    first, last = pair_by_key(index, events.kind[index] == Kind.NODE_BEGIN, key, nests=True)
    name = events.name[np.where(first >= 0, first, last)].astype(np.int64)
    return _paired(
        events,
        first,
        last,
        end_ns=_extended_to_next(events, last),
        is_node=True,
        name=slot_format.NO_NAME,
        call_key=-1,
        sequence=events.value[np.where(first >= 0, first, last)],
        forward_thread=name >> slot_format.FORWARD_THREAD_SHIFT,
        backward_pass=name & slot_format.GRAPH_TASK_MASK,
    )


def find_key(keys: Int64Array, targets: Int64Array) -> Int64Array:
    """Return the index of the first key equal to each target; -1 if there is none."""
    if not len(keys):
        return np.full(len(targets), -1, np.int64)
    order = np.argsort(keys, kind="stable")
    index = order[np.minimum(np.searchsorted(keys[order], targets), len(keys) - 1)]
    return np.where(keys[index] == targets, index, -1)


def pair_by_key(
    index: SignedIntArray, is_start: BoolArray, key: Int64Array, shift: int = 0, *, nests: bool = False
) -> tuple[Int64Array, Int64Array]:
    """Return the start event and the end event of each interval, -1 if missing; events of one key pair by nesting.

    Args:
        index: the start and end events, ascending.
        is_start: True for the start events.
        key: the key of the interval of each event. An event lost under one key does not affect other keys.
        shift: the argument of `order_in_groups`, which sorts the keys.
        nests: whether an interval can contain another one with the same key. If not, an end right after an end of its
            key is left out: an end whose writing was interrupted is written again.
    """
    order = order_in_groups(key, shift)
    is_end, is_paired = ~is_start[order], is_start.copy()
    if not nests and np.any(repeats := is_end & np.append(False, is_end[:-1] & (np.diff(key[order]) == 0))):
        is_paired[order[repeats]] = True
        order = order[~repeats]
    sign = np.where(is_start[order], 1, -1)
    total, is_first = np.cumsum(sign), np.diff(key[order], prepend=-1) != 0
    total_before_key = (total - sign)[is_first][np.cumsum(is_first) - 1]
    depth = total - total_before_key - is_start[order]
    if depth.any():
        nested = np.lexsort((order, depth, key[order]))
        order, depth = order[nested], depth[nested]
    first, second = order[:-1], order[1:]
    is_pair = is_start[first] & ~is_start[second] & (key[first] == key[second]) & (depth[:-1] == depth[1:])
    end_of = np.full(len(index), -1, np.int64)
    end_of[first[is_pair]] = index[second[is_pair]]
    is_paired[second[is_pair]] = True
    unpaired = index[~is_paired].astype(np.int64)
    return (
        np.concatenate([index[is_start].astype(np.int64), np.full(len(unpaired), -1, np.int64)]),
        np.concatenate([end_of[is_start], unpaired]),
    )


def pair_by_value(events: Events, start: Kind, end: Kind) -> tuple[Int64Array, Int64Array]:
    """Return the start and end events of the two kinds, paired by their values; -1 for a missing one."""
    index = np.flatnonzero(is_any(events.kind, (start, end)))
    return pair_by_key(index, events.kind[index] == start, events.value[index])


def _extended_to_next(events: Events, last: Int64Array) -> Int64Array:
    """Return the ends of nodes, given their last events: the start of the next node of the graph task on the thread.

    Until then the engine checks, sums and accumulates the gradients of the node. If any other event follows, the node
    ends with its last event. After the last node of a graph task, only the accumulation is known. While another thread
    runs nodes of the task, the gap to the next node may be a wait for that thread, so it does not count.
    """
    if not len(last):
        return events.time_ns[last]
    no_work = (Kind.GRAPH_BUILT, Kind.STEP, Kind.OPTIMIZER_STEP, Kind.MARK, Kind.SHAPES, Kind.GRADIENTS)
    index = np.flatnonzero(~is_any(events.kind, no_work))
    index = index[np.lexsort((index, events.thread[index]))]
    accumulated = events.kind[index] == Kind.ACCUMULATE_END
    # For each event the last one before it on its thread that accumulates nothing; if it ends a node, extend that node.
    previous = np.maximum.accumulate(np.where(accumulated, -1, np.arange(len(index))))
    previous[~accumulated] = np.roll(previous, 1)[~accumulated]
    extends = accumulated | (events.kind[index] == Kind.NODE_BEGIN)
    source, target = index[extends], index[np.maximum(previous[extends], 0)]
    fits = (
        (previous[extends] >= 0)
        & (events.kind[target] == Kind.NODE_END)
        & (events.thread[target] == events.thread[source])
        & (events.name[target] & slot_format.GRAPH_TASK_MASK == events.name[source] & slot_format.GRAPH_TASK_MASK)
    )
    is_node_start = events.kind[source] == Kind.NODE_BEGIN
    fits[is_node_start] &= ~_runs_elsewhere(events, target[is_node_start], source[is_node_start])
    end: Int64Array = events.time_ns.copy()
    np.maximum.at(end, target[fits], events.time_ns[source[fits]])
    return end[last]


def _runs_elsewhere(events: Events, gap_start: Int64Array, gap_end: Int64Array) -> BoolArray:
    """Return True for gaps between nodes of a thread in which another thread runs a node of their graph task."""
    task = events.name.astype(np.int64) & slot_format.GRAPH_TASK_MASK
    task_and_thread = task * (int(events.thread.max()) + 1 if len(events) else 1) + events.thread
    anywhere, on_thread = (_count_running(events, group, gap_start, gap_end) for group in (task, task_and_thread))
    return np.asarray(anywhere > on_thread, np.bool_)


def _count_running(events: Events, group: Int64Array, gap_start: Int64Array, gap_end: Int64Array) -> Int64Array:
    """Return the number of nodes that overlap each gap, in the gap's group."""
    first = group * len(events)
    sort_key = first + np.arange(len(events))
    starts = np.sort(sort_key[events.kind == Kind.NODE_BEGIN])
    ends = np.sort(sort_key[events.kind == Kind.NODE_END])
    started = np.searchsorted(starts, sort_key[gap_end], "left") - np.searchsorted(starts, first[gap_end], "left")
    finished = np.searchsorted(ends, sort_key[gap_start], "right") - np.searchsorted(ends, first[gap_start], "left")
    return np.asarray(started - finished, np.int64)


def _pair_segments(events: Events) -> dict[str, Any]:
    """Return one node per segment, from one "from now on the nodes of this call run" event to the next."""
    index = np.flatnonzero((events.kind == Kind.CALL_BACKWARD) | (events.kind == Kind.SEGMENT_BEGIN))
    thread = events.thread[index].astype(np.int64)
    pass_id = segment_pass(events)[index]
    order = np.lexsort((index, thread, pass_id))
    index, thread, pass_id = index[order], thread[order], pass_id[order]
    has_next = np.zeros(len(index), np.bool_)
    has_next[:-1] = (np.diff(pass_id) == 0) & (np.diff(thread) == 0)
    pass_end = np.flatnonzero(events.kind == Kind.BACKWARD_OVER)
    last_event = np.append(pass_end, -1)[find_key(events.value[pass_end] & ~slot_format.ABANDONED_BIT, pass_id)]
    pass_ended = last_event >= 0
    next_event = np.roll(index, -1)
    end_position = np.where(has_next, 2 * next_event, np.where(pass_ended, 2 * last_event + 1, -1))
    end = np.where(has_next, events.time_ns[next_event], events.time_ns[last_event])
    has_sequence = events.kind[index] == Kind.SEGMENT_BEGIN
    name, value = events.name[index].astype(np.int64), events.value[index]
    # In a damaged file the end of a pass can come before its segments.
    end_unknown = (
        pass_ended & ~has_next & (last_event > index) & (events.value[last_event] & slot_format.ABANDONED_BIT != 0)
    )
    for segment in np.flatnonzero(end_unknown):
        # The pass failed at an unknown time, after the last event of this thread before the failure was seen.
        last_known = np.flatnonzero(events.thread[: last_event[segment]] == thread[segment])[-1]
        end_position[segment], end[segment] = 2 * last_known + 2, events.time_ns[last_known]
    return {
        "end_unknown": end_unknown,
        "thread": thread,
        "start_position": 2 * index + 1,
        "end_position": end_position,
        "start_ns": events.time_ns[index],
        "end_ns": end,
        "is_node": True,
        "name": np.where(has_sequence, slot_format.NO_NAME, name),
        "call_key": np.where(has_sequence, -1, value & slot_format.CALL_KEY_MASK),
        "sequence": np.where(has_sequence, value & slot_format.SEQUENCE_MASK, -1),
        "forward_thread": np.where(has_sequence, name >> slot_format.FORWARD_THREAD_SHIFT, -1),
        # modtrace numbers passes and torch numbers graph tasks: below -1 they cannot be confused.
        "backward_pass": np.where(has_sequence, -2 - pass_id, pass_id),
    }


def segment_pass(events: Events) -> Int64Array:
    """Return the graph task or pass of each event that starts a segment, numbered as in `BACKWARD_OVER`."""
    return np.asarray(
        events.value
        >> np.where(events.kind == Kind.SEGMENT_BEGIN, slot_format.SEQUENCE_BITS, slot_format.CALL_KEY_BITS),
        np.int64,
    )
