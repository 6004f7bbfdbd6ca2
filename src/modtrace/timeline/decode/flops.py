"""FLOPs and bytes of spans: those of operators in their calls, and of calls alike where operators were not counted.

An operator belongs to the innermost call around it on its thread, or to the call of the autograd node around it. Two
calls are alike if they have the same name, are the n-th of it in outermost calls with the same inputs, and are both
recomputed or both not. A call that was not counted costs what the last counted one like it did.

In a node that builds no graph, what runs with gradients is a function, no module, that a checkpoint runs again.
"""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ..._typing import BoolArray, Int64Array
from ...ring import Kind
from ...ring.slot_format import WITH_GRADIENTS_BIT
from ..contents import BYTES_ACCESSED, FLOPS, RECOMPUTE_FLOPS, UNKNOWN_FLOPS
from ..slices import BACKWARD
from .analysis import RingAnalysis
from .attribution import create_graph_nodes
from .intervals import find_parents
from .spans import SpanRows, count_in_group, differs

_UNKNOWN = -1


class RingFlops(NamedTuple):
    """What spans cost.

    Attributes:
        of_span: args by index of the span: its FLOPs and the bytes of its operators, with those of spans of its phase
            inside it, or that they are unknown; without spans that have none.
        metadata: `steps` in which operators were counted, `outside`: FLOPs in these outside of modules, `unknown`: how
            many spans have unknown FLOPs, `without_formula`: operators that could not be counted, and `dtypes`: FLOPs
            counted by device and type of numbers (`cpu float32`).
    """

    of_span: dict[int, Mapping[str, str]]
    metadata: dict[str, object]


def find_flops(analysis: RingAnalysis, rows: SpanRows, track: Int64Array) -> RingFlops | None:
    """Return what spans cost; None if no operator was counted.

    Args:
        analysis: of the ring.
        rows: the spans.
        track: the track of each.
    """
    events, intervals, original = analysis.all_events, analysis.intervals, analysis.original
    index = np.flatnonzero(events.kind == Kind.OPERATOR)
    if not np.any(np.isin(events.kind, (Kind.COUNTING, Kind.INPUTS))) and not len(index):
        return None
    inner, (costs, is_known) = _innermost(analysis, index), _costs(analysis, index)
    in_node, of_interval = (inner >= 0) & intervals.is_node[inner], _with_nodes_inside(analysis)
    call = np.where(in_node, of_interval[inner], inner)
    rerun = in_node & (events.value[index] & WITH_GRADIENTS_BIT != 0)
    rerun &= ~np.isin(inner, list(create_graph_nodes(intervals, analysis.events)))
    costs = np.append(costs, [np.where(rerun, costs[0], 0)], axis=0)
    forward, backward = np.zeros((2, len(costs), len(intervals)), np.int64)
    in_forward, in_backward = np.flatnonzero(~in_node & (call >= 0)), np.flatnonzero(in_node & (call >= 0))
    for of_forward, of_backward, cost in zip(forward, backward, costs, strict=True):
        np.add.at(of_forward, call[in_forward], cost[in_forward])
        np.add.at(of_backward, original[call[in_backward]], cost[in_backward])
    alike, is_counted = _number_alike(analysis), _in_windows(analysis)
    is_counted[inner[~is_known & (inner >= 0)]] = False
    calls, nodes = np.flatnonzero(~intervals.is_node), np.flatnonzero(intervals.is_node & (of_interval >= 0))
    _copy_to_alike(forward, alike, calls, is_counted[calls])
    of_node = original[of_interval[nodes]]
    run_backward, missed = np.unique(of_node), np.unique(of_node[~is_counted[nodes]])
    _copy_to_alike(backward, alike, run_backward, np.isin(run_backward, missed, invert=True))
    is_backward = rows["phase"] == BACKWARD
    own = np.where(is_backward, backward[:, rows["interval"]], forward[:, rows["interval"]])
    # A call's backward can be several spans; the first has all.
    again = np.ones(len(is_backward), np.bool_)
    again[np.unique(np.where(is_backward, rows["interval"], _UNKNOWN), return_index=True)[1]] = False
    own[:, is_backward & again] = 0
    unknown = np.flatnonzero(own[0] == _UNKNOWN)
    parent = find_parents(track, rows["depth"])
    total = np.array([_with_inner(np.maximum(each, 0), rows["phase"], parent) for each in own])
    known = np.flatnonzero(total[0])
    each = list(map(tuple, total[:, known].T.tolist()))
    names = FLOPS, BYTES_ACCESSED, RECOMPUTE_FLOPS
    # Many cost the same.
    shared = {one: {name: str(cost) for name, cost in zip(names, one, strict=True) if cost} for one in set(each)}
    return RingFlops(
        dict(zip(known.tolist(), map(shared.__getitem__, each), strict=True))
        | {span: {FLOPS: UNKNOWN_FLOPS} for span in unknown.tolist()},
        {
            "steps": np.unique(analysis.steps_before(_positions(analysis, index))).tolist(),
            "outside": int(costs[0, call < 0].sum()),
            "unknown": len(unknown),
            **_by_operator(analysis, index),
        },
    )


def _with_nodes_inside(analysis: RingAnalysis) -> Int64Array:
    """Return `RingAnalysis.call` where a node of no call that runs inside another node has that one's.

    A function that a checkpoint runs again makes such nodes, and the reentrant kind runs them in its own node.
    """
    intervals = analysis.intervals
    call: Int64Array = analysis.call.copy()
    for depth in range(1, int(intervals.depth.max(initial=0)) + 1):
        inside = np.flatnonzero((intervals.depth == depth) & intervals.is_node & (call < 0))
        call[inside] = call[intervals.parent[inside]]
    return call


def _costs(analysis: RingAnalysis, index: Int64Array) -> tuple[Int64Array, BoolArray]:
    """Return FLOPs and bytes of operators, int64[2, n] (0: no formula), and whether the process noted them."""
    costs = {
        record["number"]: (record["flops"], record["bytes"]) if record["flops"] >= 0 else (0, 0)
        for record in analysis.snapshot.records
        if record["kind"] == "operator"
    }
    number, of_number = np.unique(_operators(analysis, index), return_inverse=True)
    each = np.array([costs.get(one, (0, 0)) for one in number.tolist()], np.int64).reshape(-1, 2)
    return each[of_number].T, np.array([one in costs for one in number.tolist()], np.bool_)[of_number]


def _operators(analysis: RingAnalysis, index: Int64Array) -> Int64Array:
    number: Int64Array = analysis.all_events.value[index] & ~WITH_GRADIENTS_BIT
    return number


def _by_operator(analysis: RingAnalysis, index: Int64Array) -> dict[str, object]:
    ran = Counter(_operators(analysis, index).tolist())
    dtypes = Counter[str]()
    without: set[str] = set()
    for record in analysis.snapshot.records:
        if record["kind"] == "operator" and record["number"] in ran:
            if record["flops"] < 0:
                without.add(record["name"])
            dtypes[f"{record['device']} {record['dtype']}"] += ran[record["number"]] * max(record["flops"], 0)
    return {"without_formula": sorted(without), "dtypes": dict(dtypes.most_common())}


def _positions(analysis: RingAnalysis, index: Int64Array) -> Int64Array:
    """Return the positions, as of `Intervals`, of events that are of no module, by their index among all events."""
    return 2 * np.searchsorted(analysis.events.serial, analysis.all_events.serial[index])


def _innermost(analysis: RingAnalysis, index: Int64Array) -> Int64Array:
    """Return the innermost interval in which each event is on its thread, or -1."""
    intervals, position = analysis.intervals, _positions(analysis, index)
    if not len(intervals):
        return np.full(len(index), -1, np.int64)
    thread = analysis.all_events.thread[index].astype(np.int64)
    lowest = int(intervals.start_position.min())
    stride = max(int(intervals.start_position.max()), int(position.max(initial=0))) - lowest + 1
    begun = intervals.thread * stride + intervals.start_position - lowest
    inner = np.searchsorted(begun, thread * stride + position - lowest) - 1
    inner = np.where((inner >= 0) & (intervals.thread[inner] == thread), inner, -1)
    while len(ended := np.flatnonzero((inner >= 0) & (intervals.end_position[inner] < position))):
        inner[ended] = intervals.parent[inner[ended]]
    return inner


def _in_windows(analysis: RingAnalysis) -> BoolArray:
    """Return for each interval whether operators were counted from its start to its end."""
    events, intervals = analysis.all_events, analysis.intervals
    index = np.flatnonzero(events.kind == Kind.COUNTING)
    position, begins = _positions(analysis, index), events.value[index] == 1
    if not len(begins) or not begins[0]:  # its begin was overwritten
        position, begins = np.append(0, position), np.append(True, begins)
    last = np.searchsorted(position, intervals.start_position, side="right") - 1
    end = np.append(position, np.iinfo(np.int64).max)[last + 1]
    whole: BoolArray = intervals.has_start & intervals.has_end & (last >= 0) & begins[last]
    return whole & (intervals.end_position < end)


def _number_alike(analysis: RingAnalysis) -> Int64Array:
    """Return for each call a number that calls alike share; -1 for nodes, and where the inputs are not known."""
    events, intervals, original = analysis.all_events, analysis.intervals, analysis.original
    index = np.flatnonzero(events.kind == Kind.INPUTS)
    entered = _innermost(analysis, index)
    inputs = np.full(len(intervals), -1, np.int64)
    inputs[entered[entered >= 0]] = events.value[index[entered >= 0]]
    outermost = np.where(inputs >= 0, np.arange(len(intervals)), -1)
    for depth in range(1, int(intervals.depth.max(initial=0)) + 1):
        level = np.flatnonzero((intervals.depth == depth) & (outermost < 0))
        outermost[level] = outermost[intervals.parent[level]]
    outermost = np.where(intervals.is_recompute, outermost[original], outermost)
    calls = np.flatnonzero(~intervals.is_node & (outermost >= 0))
    around, name, again = outermost[calls], intervals.name[calls], intervals.is_recompute[calls]
    order = np.lexsort((intervals.start_position[calls], again, name, around))
    nth = np.empty(len(calls), np.int64)
    nth[order] = count_in_group([column[order] for column in (around, name, again)])
    alike = np.full(len(intervals), -1, np.int64)
    key = (inputs[around], name, again, nth)
    order = np.lexsort(key)
    alike[calls[order]] = np.cumsum(differs([column[order] for column in key]))
    return alike


def _copy_to_alike(costs: Int64Array, alike: Int64Array, calls: Int64Array, is_counted: BoolArray) -> None:
    """Give calls that were not counted what the last counted one like them has; -1 if there is none.

    Args:
        costs: int64[2, n] of the intervals; changed in place.
        alike: a number that calls alike share, or -1.
        calls: which intervals.
        is_counted: whether each of these was counted.
    """
    source, target = calls[is_counted & (alike[calls] >= 0)], calls[~is_counted]
    # The last is for those that are like none.
    known = np.full((len(costs), int(alike.max(initial=-1)) + 2), _UNKNOWN, np.int64)
    known[:, alike[source]] = costs[:, source]
    costs[:, target] = known[:, alike[target]]


def _with_inner(own: Int64Array, phase: Int64Array, parent: Int64Array) -> Int64Array:
    """Add to each span what the spans of its phase inside it cost."""
    total: Int64Array = own.copy()
    span = np.flatnonzero((own > 0) & (parent >= 0))
    outer = parent[span]
    while len(span):
        same = phase[span] == phase[outer]
        span, outer = span[same], outer[same]
        np.add.at(total, outer, own[span])
        outer = parent[outer]
        span, outer = span[outer >= 0], outer[outer >= 0]
    return total
