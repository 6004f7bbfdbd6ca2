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
_FOREVER = np.iinfo(np.int64).max
_Key = tuple[int, int, int, int]


class CountedCalls(NamedTuple):
    """What calls of which operators were counted cost: FLOPs, bytes and FLOPs that ran again, of the last one alike.

    The keys are what calls alike share: inputs, name, whether a checkpoint runs it again, and which one it is.

    Attributes:
        forward: by key.
        backward: by key.
    """

    forward: dict[_Key, list[int]]
    backward: dict[_Key, list[int]]


class SpanCosts(NamedTuple):
    """What spans cost.

    Attributes:
        of_span: args by index of the span: its FLOPs and the bytes of its operators, with those of spans of its phase
            inside it, or that they are unknown; without spans that have none.
        outside: FLOPs counted outside of modules.
        unknown: how many spans have unknown FLOPs.
    """

    of_span: dict[int, Mapping[str, str]]
    outside: int
    unknown: int


def find_flops(
    analysis: RingAnalysis, rows: SpanRows, track: Int64Array, counted: CountedCalls | None
) -> SpanCosts | None:
    """Return what spans cost; None if no operator was counted.

    Args:
        analysis: of the ring, or of a part of it.
        rows: the spans.
        track: the track of each.
        counted: what calls of the ring cost, if this is a part of it.
    """
    if not analysis.ring.has_flops:
        return None
    calls = _CallCosts(analysis)
    if counted is None:
        counted = CountedCalls({}, {})
        calls.note(counted)
    calls.copy(counted)
    is_backward = rows["phase"] == BACKWARD
    own = np.where(is_backward, calls.backward[:, rows["interval"]], calls.forward[:, rows["interval"]])
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
    return SpanCosts(
        dict(zip(known.tolist(), map(shared.__getitem__, each), strict=True))
        | {span: {FLOPS: UNKNOWN_FLOPS} for span in unknown.tolist()},
        calls.outside,
        len(unknown),
    )


def note_counted(analysis: RingAnalysis, counted: CountedCalls) -> int:
    """Note what calls in a part of a ring cost of which operators were counted; return FLOPs outside of modules."""
    costs = _CallCosts(analysis)
    costs.note(counted)
    return costs.outside


def describe_counted(analysis: RingAnalysis, outside: int, unknown: int) -> dict[str, object]:
    """Return the metadata of a ring with FLOPs.

    These are `steps` in which operators were counted, `outside`: FLOPs in these outside of modules, `unknown`: how many
    spans have unknown FLOPs, `without_formula`: operators that could not be counted, and `dtypes`: FLOPs counted by
    device and type of numbers (`cpu float32`).
    """
    index = np.flatnonzero(analysis.all_events.kind == Kind.OPERATOR)
    return {
        "steps": np.unique(analysis.steps_before(_positions(analysis, index))).tolist(),
        "outside": outside,
        "unknown": unknown,
        **_by_operator(analysis, index),
    }


def counted_serials(analysis: RingAnalysis) -> list[tuple[int, int]]:
    """Return from which to which serial number a ring says that operators were counted."""
    events = analysis.all_events
    index = np.flatnonzero(events.kind == Kind.COUNTING)
    edges = [*zip(events.serial[index].tolist(), (events.value[index] == 1).tolist(), strict=True)]
    if not edges or not edges[0][1]:  # its begin was overwritten
        edges = [(-1, True), *edges]
    ends = [serial for serial, _ in edges[1:]]
    return [(at, end) for (at, begins), end in zip(edges, [*ends, _FOREVER], strict=True) if begins]


class _CallCosts:
    """What the operators in each interval cost.

    Args:
        analysis: of the ring, or of a part of it.

    Attributes:
        forward: int64[3, n]: of the intervals, FLOPs, bytes and FLOPs that ran again, outside of their nodes.
        backward: the same of their nodes.
        outside: FLOPs counted outside of modules.
    """

    def __init__(self, analysis: RingAnalysis) -> None:
        events, intervals, original = analysis.all_events, analysis.intervals, analysis.original
        index = np.flatnonzero(events.kind == Kind.OPERATOR)
        inner, (costs, is_known) = _innermost(analysis, index), _costs(analysis, index)
        in_node, of_interval = (inner >= 0) & intervals.is_node[inner], _with_nodes_inside(analysis)
        call = np.where(in_node, of_interval[inner], inner)
        rerun = in_node & (events.value[index] & WITH_GRADIENTS_BIT != 0)
        rerun &= ~np.isin(inner, list(create_graph_nodes(intervals, analysis.events)))
        costs = np.append(costs, [np.where(rerun, costs[0], 0)], axis=0)
        self.outside = int(costs[0, call < 0].sum())
        self.forward, self.backward = np.zeros((2, len(costs), len(intervals)), np.int64)
        in_forward, in_backward = np.flatnonzero(~in_node & (call >= 0)), np.flatnonzero(in_node & (call >= 0))
        for of_forward, of_backward, cost in zip(self.forward, self.backward, costs, strict=True):
            np.add.at(of_forward, call[in_forward], cost[in_forward])
            np.add.at(of_backward, original[call[in_backward]], cost[in_backward])
        is_counted = _in_windows(analysis)
        is_counted[inner[~is_known & (inner >= 0)]] = False
        self._alike, self._keys = _number_alike(analysis)
        self._position = intervals.start_position
        calls, nodes = np.flatnonzero(~intervals.is_node), np.flatnonzero(intervals.is_node & (of_interval >= 0))
        of_node = original[of_interval[nodes]]
        run_backward, missed = np.unique(of_node), np.unique(of_node[~is_counted[nodes]])
        self._calls = (calls, is_counted[calls]), (run_backward, np.isin(run_backward, missed, invert=True))

    def note(self, counted: CountedCalls) -> None:
        """Note what calls cost of which operators were counted."""
        for costs, (calls, is_counted), cost_of in zip(
            (self.forward, self.backward), self._calls, counted, strict=True
        ):
            source = calls[is_counted & (self._alike[calls] >= 0)]
            source = source[np.argsort(self._position[source], kind="stable")]  # also among threads
            numbers, last = np.unique(self._alike[source][::-1], return_index=True)
            each = costs[:, source[::-1][last]].T.tolist()
            cost_of |= zip(map(self._keys.__getitem__, numbers.tolist()), each, strict=True)

    def copy(self, counted: CountedCalls) -> None:
        """Give calls that were not counted what the last counted one like them has; -1 if there is none."""
        for costs, (calls, is_counted), cost_of in zip(
            (self.forward, self.backward), self._calls, counted, strict=True
        ):
            target, none = calls[~is_counted], [_UNKNOWN] * len(costs)
            # The last is for those that are like none.
            known = np.array([*(cost_of.get(key, none) for key in self._keys), none], np.int64)
            costs[:, target] = known[self._alike[target]].T


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
    intervals = analysis.intervals
    begin, end = 2 * np.searchsorted(analysis.events.serial, np.array(counted_serials(analysis.ring)).T)
    at = np.searchsorted(begin, intervals.start_position, side="right") - 1
    whole: BoolArray = intervals.has_start & intervals.has_end & (at >= 0)
    whole &= intervals.end_position < end[at]
    return whole


def _number_alike(analysis: RingAnalysis) -> tuple[Int64Array, list[_Key]]:
    """Return for each call a number that calls alike share; -1 for nodes, and where the inputs are not known.

    Also return what those share, by number.
    """
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
    in_order = [column[order] for column in key]
    is_first = differs(in_order)
    alike[calls[order]] = np.cumsum(is_first) - 1
    return alike, [*zip(*(column[is_first].tolist() for column in in_order), strict=True)]


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
