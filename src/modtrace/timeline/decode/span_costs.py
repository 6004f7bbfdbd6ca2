"""FLOPs and bytes of spans: summed over their operators, or copied from a similar call if these were not counted.

An operator belongs to the innermost call around it on its thread, or to the call of the autograd node around it. Two
calls are similar if they have the same name, are the n-th call of that name in outermost calls with the same inputs,
and are both recomputed or both not. A call that was not counted gets the cost of the last counted similar call. Its
backward gets a cost in each pass that runs its nodes; passes are similar if they go through the same graph.

In a node that builds no graph, operators that run with gradients belong to a function, not a module, that a checkpoint
runs again.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..._arrays import INT64_MAX, BoolArray, Int64Array, begins_run, count_in_run, sums_at
from ...ring import Kind, Record
from ...ring.slot_format import WITH_GRADIENTS_BIT
from ..nesting import InnermostLookup, clip_and_nest
from ..slices import BACKWARD, BACKWARD_PASS, UNKNOWN_FLOPS, Arg, ArgColumn, Args, Slices, without_empty
from .analysis import RingAnalysis
from .attribution import create_graph_nodes
from .spans import SpanRows

_Key = tuple[int, ...]


class CountedCalls(NamedTuple):
    """Costs of calls whose operators were counted: FLOPs, bytes and recomputed FLOPs of the last similar call.

    Similar calls share a key: inputs, name, whether a checkpoint runs the call again, and its index.
    """

    forward: dict[_Key, list[int]]  # costs by key
    backward: dict[_Key, list[int]]  # costs in one pass, by key and number of the graph


class SpanCosts(NamedTuple):
    """The costs of spans."""

    # FLOPs and bytes of spans, including inner spans of the same phase; `UNKNOWN_FLOPS` if unknown. Spans without any
    # are left out.
    args: Args
    outside: int  # FLOPs counted outside modules
    unknown: int  # number of spans with unknown FLOPs


def find_flops(
    analysis: RingAnalysis, rows: SpanRows, parent: Int64Array, counted: CountedCalls | None
) -> SpanCosts | None:
    """Return the costs of spans, None if no operator was counted; for a part, `counted` is of the whole ring."""
    if not analysis.ring.has_flops:
        return None
    calls = _CallCosts(analysis)
    if counted is None:
        counted = CountedCalls({}, {})
        calls.note(counted)
    calls.copy(counted)
    self_costs = calls.of_rows(rows)
    is_unknown = self_costs[0] == UNKNOWN_FLOPS
    total = np.array([_add_inner(np.maximum(cost, 0), rows["phase"], parent) for cost in self_costs])
    total[0, is_unknown] = UNKNOWN_FLOPS
    has_arg = {
        Arg.FLOPS: total[0] != 0,
        Arg.BYTES_ACCESSED: (total[0] > 0) & (total[1] > 0),
        Arg.RECOMPUTE_FLOPS: total[2] > 0,
    }
    args = {
        arg: ArgColumn(np.flatnonzero(has), cost[has]) for (arg, has), cost in zip(has_arg.items(), total, strict=True)
    }
    return SpanCosts(without_empty(args), calls.outside, int(np.count_nonzero(is_unknown)))


def note_counted(analysis: RingAnalysis, counted: CountedCalls) -> int:
    """Add the costs of counted calls in a part of a ring to `counted`; return the FLOPs outside modules."""
    costs = _CallCosts(analysis)
    costs.note(counted)
    return costs.outside


def describe_counted(analysis: RingAnalysis, outside: int, unknown: int) -> dict[str, object]:
    """Return the metadata of a ring with FLOPs.

    The keys are `steps`, the steps in which operators were counted, `outside`, the FLOPs outside modules in these,
    `unknown`, the number of spans with unknown FLOPs, `without_formula`, the operators that could not be counted, and
    `dtypes`, the FLOPs by device and number type (`cpu float32`).
    """
    index = np.flatnonzero(analysis.all_events.kind == Kind.OPERATOR)
    position = analysis.positions_between(analysis.all_events.serial[index])
    calls, dtypes, without = Counter(_operators(analysis, index).tolist()), Counter[str](), set[str]()
    for number, operator in _operator_records(analysis).items():
        if number in calls:
            without |= {operator["name"]} if operator["flops"] < 0 else set()
            dtypes[f"{operator['device']} {operator['dtype']}"] += calls[number] * max(operator["flops"], 0)
    return {
        "steps": np.unique(analysis.steps_before(position)).tolist(),
        "outside": outside,
        "unknown": unknown,
        "without_formula": sorted(without),
        "dtypes": dict(dtypes.most_common()),
    }


def counted_serials(analysis: RingAnalysis) -> list[tuple[int, int]]:
    """Return the (start, end) serial numbers between which operators were counted."""
    events = analysis.all_events
    index = np.flatnonzero(events.kind == Kind.COUNTING)
    edges = [*zip(events.serial[index].tolist(), (events.value[index] == 1).tolist(), strict=True)]
    if not edges or not edges[0][1]:  # the start was overwritten
        edges = [(-1, True), *edges]
    ends = [serial for serial, _ in edges[1:]]
    return [(start, end) for (start, is_start), end in zip(edges, [*ends, INT64_MAX], strict=True) if is_start]


class _Costs(NamedTuple):
    """The costs of operators per call, or per backward of a call in a pass; arrays of equal length."""

    cost: Int64Array  # int64[3, n]: FLOPs, bytes and recomputed FLOPs
    is_counted: BoolArray  # whether the cost is known; True for nodes, which have no cost
    position: Int64Array  # position of the start
    key: Int64Array  # index into `keys`, equal for similar calls; -1 if unknown
    keys: list[_Key]

    def note(self, cost_by_key: dict[_Key, list[int]]) -> None:
        """Add the costs of counted calls to `cost_by_key`; the last similar call counts."""
        source = np.flatnonzero(self.is_counted & (self.key >= 0))
        latest_first = source[np.argsort(self.position[source], kind="stable")][::-1]  # also among threads
        numbers, first = np.unique(self.key[latest_first], return_index=True)
        costs = self.cost[:, latest_first[first]].T.tolist()
        cost_by_key |= zip(map(self.keys.__getitem__, numbers.tolist()), costs, strict=True)

    def copy(self, cost_by_key: Mapping[_Key, list[int]]) -> None:
        """Give each call that was not counted the cost of the last similar counted call; -1 if there is none."""
        target, unknown = np.flatnonzero(~self.is_counted), [UNKNOWN_FLOPS] * len(self.cost)
        # The last entry is for calls without a key.
        costs = np.array([*(cost_by_key.get(key, unknown) for key in self.keys), unknown], np.int64)
        self.cost[:, target] = costs[self.key[target]].T


class _CallCosts:
    """The costs of operators per call, forward and per backward pass; `outside` are the FLOPs outside modules."""

    def __init__(self, analysis: RingAnalysis) -> None:
        events, intervals, original = analysis.all_events, analysis.intervals, analysis.forward_call
        self._passes = passes = _Passes(analysis)
        index = np.flatnonzero(events.kind == Kind.OPERATOR)
        inner, (costs, is_known) = _find_innermost(analysis, index), _costs(analysis, index)
        node_call, node_pass = _with_nodes_inside(analysis, passes)
        in_node, call = inner >= 0, inner.copy()  # without intervals, all operators are outside
        in_node[in_node] = intervals.is_node[inner[in_node]]
        call[in_node] = node_call[inner[in_node]]
        rerun = in_node & (events.value[index] & WITH_GRADIENTS_BIT != 0)
        rerun &= ~np.isin(inner, list(create_graph_nodes(intervals, analysis.events)))
        costs = np.append(costs, [np.where(rerun, costs[0], 0)], axis=0)
        self.outside = int(costs[0, call < 0].sum())
        is_counted = _is_counted(analysis)
        is_counted[inner[~is_known & (inner >= 0)]] = False
        call_key, keys = _number_similar(analysis)

        in_forward = np.flatnonzero(~in_node & (call >= 0))
        call_costs = np.stack([sums_at(len(intervals), call[in_forward], cost[in_forward]) for cost in costs])
        self._forward = _Costs(call_costs, is_counted | intervals.is_node, intervals.start_position, call_key, keys)

        nodes = np.flatnonzero(intervals.is_node & (node_call >= 0))
        pair_ids = self._pair(original[node_call[nodes]], node_pass[nodes])
        self._pairs, first, node_pair = np.unique(pair_ids, return_index=True, return_inverse=True)
        pair = np.full(len(intervals), -1, np.int64)
        pair[nodes] = node_pair
        in_backward = np.flatnonzero(in_node & (call >= 0))
        operator_pair = pair[inner[in_backward]]
        pair_costs = np.stack([sums_at(len(self._pairs), operator_pair, cost[in_backward]) for cost in costs])
        all_counted = np.ones(len(self._pairs), np.bool_)
        all_counted[node_pair[~is_counted[nodes]]] = False
        pair_call, graph = call_key[original[node_call[nodes[first]]]], passes.graph[node_pass[nodes[first]]]
        pair_key, has_key = np.full(len(pair_call), -1, np.int64), pair_call >= 0
        shared, pair_key[has_key] = np.unique(np.stack([pair_call, graph])[:, has_key], axis=1, return_inverse=True)
        pair_keys = [(*keys[number], graph_number) for number, graph_number in shared.T.tolist()]
        self._backward = _Costs(pair_costs, all_counted, intervals.start_position[nodes[first]], pair_key, pair_keys)

    def _pair(self, call: Int64Array, pass_index: Int64Array) -> Int64Array:
        return call * len(self._passes.graph) + pass_index + 1

    def note(self, counted: CountedCalls) -> None:
        """Add the costs of counted calls to `counted`."""
        self._forward.note(counted.forward)
        self._backward.note(counted.backward)

    def copy(self, counted: CountedCalls) -> None:
        """Give each call that was not counted the cost of the last similar counted call; -1 if there is none."""
        self._forward.copy(counted.forward)
        self._backward.copy(counted.backward)

    def of_rows(self, rows: SpanRows) -> Int64Array:
        """Return the costs of spans without their inner spans: FLOPs, bytes and recomputed FLOPs; -1 if unknown."""
        costs: Int64Array = self._forward.cost[:, rows["interval"]]
        backward = np.flatnonzero(rows["phase"] == BACKWARD)
        costs[:, backward] = 0
        pass_index = self._passes.at(rows["thread"][backward], rows["start_position"][backward])
        # A call's backward can be several spans in a pass; the first span gets the whole cost.
        pairs, first = np.unique(self._pair(rows["interval"][backward], pass_index), return_index=True)
        _, span_pair, cost_pair = np.intersect1d(pairs, self._pairs, assume_unique=True, return_indices=True)
        costs[:, backward[first[span_pair]]] = self._backward.cost[:, cost_pair]
        return costs


class _Passes:
    """The backward passes; `graph` is the number of each graph, -1 if unknown; its last entry, -1, is for no pass."""

    def __init__(self, analysis: RingAnalysis) -> None:
        thread, start, end = analysis.passes
        start = np.where(start >= 0, 2 * start + 1, -1)
        end = np.where(end >= 0, 2 * end + 1, INT64_MAX)
        self._on_thread, self._anywhere = (
            _lookup(track, start, end) for track in (thread, np.zeros(len(thread), np.int64))
        )
        events = analysis.all_events
        index = np.flatnonzero(events.kind == Kind.PASS_GRAPH)
        self.graph = np.full(len(thread) + 1, -1, np.int64)
        position = analysis.positions_between(events.serial[index])
        self.graph[self.at(events.thread[index].astype(np.int64), position)] = events.value[index]
        self.graph[-1] = -1

    def at(self, thread: Int64Array, position: Int64Array) -> Int64Array:
        """Return the pass on each thread at a position, or if none runs there (device threads), the last started."""
        on_thread = self._on_thread.on_threads(thread.astype(np.int64), position)
        return np.where(on_thread >= 0, on_thread, self._anywhere.on_thread(0, position))


def _lookup(track: Int64Array, start: Int64Array, end: Int64Array) -> InnermostLookup:
    until, parent, _ = clip_and_nest(track, start, end, np.arange(len(track)))
    passes = Slices.of_kind(BACKWARD_PASS, start, end=until, track=track)
    return InnermostLookup(track, replace(passes, parent=parent))


def _with_nodes_inside(analysis: RingAnalysis, passes: _Passes) -> tuple[Int64Array, Int64Array]:
    """Return the call and the pass of each node; a node without a call gets the values of the node around it.

    A function that a checkpoint runs again makes such nodes; a reentrant checkpoint runs them in its own node.
    """
    intervals = analysis.intervals
    call: Int64Array = analysis.call_of_node.copy()
    pass_index = passes.at(intervals.thread, intervals.start_position)
    for level in intervals.levels[1:]:
        nodes = level[intervals.is_node[level] & (call[level] < 0)]
        for column in (call, pass_index):
            column[nodes] = column[intervals.parent[nodes]]
    return call, pass_index


def _costs(analysis: RingAnalysis, index: Int64Array) -> tuple[Int64Array, BoolArray]:
    """Return FLOPs and bytes of operators, int64[2, n] (0: no formula), and whether the name table has them."""
    numbers, inverse = np.unique(_operators(analysis, index), return_inverse=True)
    record_by_number = _operator_records(analysis)
    records = [record_by_number.get(number) for number in numbers.tolist()]
    costs = [(record["flops"], record["bytes"]) if record and record["flops"] >= 0 else (0, 0) for record in records]
    has_record = np.array([record is not None for record in records], np.bool_)
    return np.array(costs, np.int64).reshape(-1, 2)[inverse].T, has_record[inverse]


def _operators(analysis: RingAnalysis, index: Int64Array) -> Int64Array:
    """Return the operator numbers of the events."""
    number: Int64Array = analysis.all_events.value[index] & ~WITH_GRADIENTS_BIT
    return number


def _operator_records(analysis: RingAnalysis) -> dict[int, Record]:
    """Return the records of operators in the name table, by number."""
    return {record["number"]: record for record in analysis.snapshot.records if record["kind"] == "operator"}


def _find_innermost(analysis: RingAnalysis, index: Int64Array) -> Int64Array:
    """Return the innermost interval around each event on its thread; -1 if there is none."""
    thread = analysis.all_events.thread[index].astype(np.int64)
    return analysis.intervals.open_at(thread, analysis.positions_between(analysis.all_events.serial[index]))


def _is_counted(analysis: RingAnalysis) -> BoolArray:
    """Return True for intervals in which operators were counted from start to end."""
    intervals = analysis.intervals
    start, end = analysis.positions_between(np.array(counted_serials(analysis.ring)).T)
    window = np.searchsorted(start, intervals.start_position, side="right") - 1
    in_window: BoolArray = intervals.has_start & intervals.has_end & (window >= 0)
    in_window &= intervals.end_position < end[window]
    return in_window


def _number_similar(analysis: RingAnalysis) -> tuple[Int64Array, list[_Key]]:
    """Return the index of each interval's key, equal for similar calls, -1 if the inputs are unknown; and the keys."""
    events, intervals, original = analysis.all_events, analysis.intervals, analysis.forward_call
    index = np.flatnonzero(events.kind == Kind.INPUTS)
    call = _find_innermost(analysis, index)
    inputs = np.full(len(intervals), -1, np.int64)
    inputs[call[call >= 0]] = events.value[index[call >= 0]]
    outermost = np.where(inputs >= 0, np.arange(len(intervals)), -1)
    for level in intervals.levels[1:]:
        inner = level[outermost[level] < 0]
        outermost[inner] = outermost[intervals.parent[inner]]
    outermost = np.where(intervals.is_recompute, outermost[original], outermost)
    calls = np.flatnonzero(~intervals.is_node & (outermost >= 0))
    root, name, is_rerun = outermost[calls], intervals.name[calls], intervals.is_recompute[calls]
    order = np.lexsort((intervals.start_position[calls], is_rerun, name, root))
    nth = np.empty(len(calls), np.int64)
    nth[order] = count_in_run(*(column[order] for column in (root, name, is_rerun)))
    key_index = np.full(len(intervals), -1, np.int64)
    key = (inputs[root], name, is_rerun, nth)
    order = np.lexsort(key)
    in_order = [column[order] for column in key]
    is_first = begins_run(*in_order)
    key_index[calls[order]] = np.cumsum(is_first) - 1
    return key_index, [*zip(*(column[is_first].tolist() for column in in_order), strict=True)]


def _add_inner(cost: Int64Array, phase: Int64Array, parent: Int64Array) -> Int64Array:
    """Return the cost of each span plus the costs of the spans of its phase inside it."""
    total: Int64Array = cost.copy()
    span = np.flatnonzero((cost > 0) & (parent >= 0))
    outer = parent[span]
    while len(span):
        same_phase = phase[span] == phase[outer]
        span, outer = span[same_phase], outer[same_phase]
        np.add.at(total, outer, cost[span])
        outer = parent[outer]
        span, outer = span[outer >= 0], outer[outer >= 0]
    return total
