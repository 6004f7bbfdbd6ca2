"""FLOPs and bytes of spans: those of operators in their calls, and of calls alike where operators were not counted.

An operator belongs to the innermost call around it on its thread, or to the call of the autograd node around it. Two
calls are alike if they have the same name, are the n-th of it in outermost calls with the same inputs, and are both
recomputed or both not. A call that was not counted costs what the last counted one like it did. In backward it costs so
much in each pass that runs its nodes, and passes are alike if they go through the same graph.

In a node that builds no graph, what runs with gradients is a function, no module, that a checkpoint runs again.
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
    """Costs of calls whose operators were counted: FLOPs, bytes and FLOPs that ran again, of the last call alike.

    The keys are what calls alike share: inputs, name, whether a checkpoint runs it again, and which one it is.
    """

    forward: dict[_Key, list[int]]  # by key
    backward: dict[_Key, list[int]]  # of one pass, by key with the number of the graph


class SpanCosts(NamedTuple):
    """The costs of spans."""

    # The FLOPs of spans and the bytes of their operators, with those of spans of its phase inside each, or that they
    # are unknown; without spans that have none.
    args: Args
    outside: int  # FLOPs counted outside of modules
    unknown: int  # how many spans have unknown FLOPs


def find_flops(
    analysis: RingAnalysis, rows: SpanRows, parent: Int64Array, counted: CountedCalls | None
) -> SpanCosts | None:
    """Return what spans cost, None if no operator was counted; of a part of a ring, `counted` is of all of it."""
    if not analysis.ring.has_flops:
        return None
    calls = _CallCosts(analysis)
    if counted is None:
        counted = CountedCalls({}, {})
        calls.note(counted)
    calls.copy(counted)
    self_costs = calls.of_rows(rows)
    is_unknown = self_costs[0] == UNKNOWN_FLOPS
    total = np.array([_with_inner(np.maximum(cost, 0), rows["phase"], parent) for cost in self_costs])
    total[0, is_unknown] = UNKNOWN_FLOPS
    shown = {
        Arg.FLOPS: total[0] != 0,
        Arg.BYTES_ACCESSED: (total[0] > 0) & (total[1] > 0),
        Arg.RECOMPUTE_FLOPS: total[2] > 0,
    }
    args = {
        name: ArgColumn(np.flatnonzero(has), cost[has]) for (name, has), cost in zip(shown.items(), total, strict=True)
    }
    return SpanCosts(without_empty(args), calls.outside, int(np.count_nonzero(is_unknown)))


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
    """Return from which to which serial number a ring says that operators were counted."""
    events = analysis.all_events
    index = np.flatnonzero(events.kind == Kind.COUNTING)
    edges = [*zip(events.serial[index].tolist(), (events.value[index] == 1).tolist(), strict=True)]
    if not edges or not edges[0][1]:  # its begin was overwritten
        edges = [(-1, True), *edges]
    ends = [serial for serial, _ in edges[1:]]
    return [(begin, end) for (begin, begins), end in zip(edges, [*ends, INT64_MAX], strict=True) if begins]


class _Costs(NamedTuple):
    """The costs of operators in calls, or in the backward of calls by pass; arrays of equal length."""

    cost: Int64Array  # int64[3, n]: FLOPs, bytes and FLOPs that ran again
    is_counted: BoolArray  # whether it is known; True for what has no cost
    position: Int64Array  # where it began
    alike: Int64Array  # a number that those alike share; -1 for those that are like none
    keys: list[_Key]  # what those share, by number

    def note(self, cost_of: dict[_Key, list[int]]) -> None:
        """Note what those cost of which operators were counted."""
        source = np.flatnonzero(self.is_counted & (self.alike >= 0))
        latest_first = source[np.argsort(self.position[source], kind="stable")][::-1]  # also among threads
        numbers, last = np.unique(self.alike[latest_first], return_index=True)
        costs = self.cost[:, latest_first[last]].T.tolist()
        cost_of |= zip(map(self.keys.__getitem__, numbers.tolist()), costs, strict=True)

    def copy(self, cost_of: Mapping[_Key, list[int]]) -> None:
        """Give those that were not counted what the last counted one like them has; -1 if there is none."""
        target, unknown = np.flatnonzero(~self.is_counted), [UNKNOWN_FLOPS] * len(self.cost)
        # The last is for those that are like none.
        costs = np.array([*(cost_of.get(key, unknown) for key in self.keys), unknown], np.int64)
        self.cost[:, target] = costs[self.alike[target]].T


class _CallCosts:
    """The costs of operators in each call, outside of its nodes and in those by pass; and `outside` of modules."""

    def __init__(self, analysis: RingAnalysis) -> None:
        events, intervals, original = analysis.all_events, analysis.intervals, analysis.forward_call
        self._passes = passes = _Passes(analysis)
        index = np.flatnonzero(events.kind == Kind.OPERATOR)
        inner, (costs, is_known) = _innermost(analysis, index), _costs(analysis, index)
        of_interval, pass_of = _with_nodes_inside(analysis, passes)
        in_node = (inner >= 0) & intervals.is_node[inner]
        call = np.where(in_node, of_interval[inner], inner)
        rerun = in_node & (events.value[index] & WITH_GRADIENTS_BIT != 0)
        rerun &= ~np.isin(inner, list(create_graph_nodes(intervals, analysis.events)))
        costs = np.append(costs, [np.where(rerun, costs[0], 0)], axis=0)
        self.outside = int(costs[0, call < 0].sum())
        is_counted = _in_windows(analysis)
        is_counted[inner[~is_known & (inner >= 0)]] = False
        alike, keys = _number_alike(analysis)

        in_forward = np.flatnonzero(~in_node & (call >= 0))
        of_calls = np.stack([sums_at(len(intervals), call[in_forward], cost[in_forward]) for cost in costs])
        self._forward = _Costs(of_calls, is_counted | intervals.is_node, intervals.start_position, alike, keys)

        nodes = np.flatnonzero(intervals.is_node & (of_interval >= 0))
        pair_of_node = self._pair(original[of_interval[nodes]], pass_of[nodes])
        self._pairs, first, pair = np.unique(pair_of_node, return_index=True, return_inverse=True)
        number = np.full(len(intervals), -1, np.int64)
        number[nodes] = pair
        in_backward = np.flatnonzero(in_node & (call >= 0))
        pair_of_operator = number[inner[in_backward]]
        of_pairs = np.stack([sums_at(len(self._pairs), pair_of_operator, cost[in_backward]) for cost in costs])
        all_counted = np.ones(len(self._pairs), np.bool_)
        all_counted[pair[~is_counted[nodes]]] = False
        pair_call, graph = alike[original[of_interval[nodes[first]]]], passes.graph[pass_of[nodes[first]]]
        pair_alike, has_key = np.full(len(pair_call), -1, np.int64), pair_call >= 0
        shared, pair_alike[has_key] = np.unique(np.stack([pair_call, graph])[:, has_key], axis=1, return_inverse=True)
        pair_keys = [(*keys[number], graph_number) for number, graph_number in shared.T.tolist()]
        self._backward = _Costs(of_pairs, all_counted, intervals.start_position[nodes[first]], pair_alike, pair_keys)

    def _pair(self, call: Int64Array, pass_of: Int64Array) -> Int64Array:
        return call * len(self._passes.graph) + pass_of + 1

    def note(self, counted: CountedCalls) -> None:
        """Note what calls cost of which operators were counted."""
        self._forward.note(counted.forward)
        self._backward.note(counted.backward)

    def copy(self, counted: CountedCalls) -> None:
        """Give calls that were not counted what the last counted one like them has; -1 if there is none."""
        self._forward.copy(counted.forward)
        self._backward.copy(counted.backward)

    def of_rows(self, rows: SpanRows) -> Int64Array:
        """Return what spans cost, without those inside them: FLOPs, bytes and FLOPs that ran again; -1: unknown."""
        costs: Int64Array = self._forward.cost[:, rows["interval"]]
        backward = np.flatnonzero(rows["phase"] == BACKWARD)
        costs[:, backward] = 0
        pass_of = self._passes.at(rows["thread"][backward], rows["start_position"][backward])
        # A call's backward can be several spans in a pass; the first has all.
        pairs, first = np.unique(self._pair(rows["interval"][backward], pass_of), return_index=True)
        _, place, number = np.intersect1d(pairs, self._pairs, assume_unique=True, return_indices=True)
        costs[:, backward[first[place]]] = self._backward.cost[:, number]
        return costs


class _Passes:
    """The backward passes, and what each goes through; `graph` is -1 if that is unknown, and at the end for none."""

    def __init__(self, analysis: RingAnalysis) -> None:
        thread, begin, end = analysis.passes
        start = np.where(begin >= 0, 2 * begin + 1, -1)
        until = np.where(end >= 0, 2 * end + 1, INT64_MAX)
        self._on_thread, self._anywhere = (
            _lookup(track, start, until) for track in (thread, np.zeros(len(thread), np.int64))
        )
        events = analysis.all_events
        index = np.flatnonzero(events.kind == Kind.PASS_GRAPH)
        self.graph = np.full(len(thread) + 1, -1, np.int64)
        position = analysis.positions_between(events.serial[index])
        self.graph[self.at(events.thread[index].astype(np.int64), position)] = events.value[index]
        self.graph[-1] = -1

    def at(self, thread: Int64Array, position: Int64Array) -> Int64Array:
        """Return the pass that runs on a thread at each position; where none does, as on a device's, the last begun."""
        on_thread = self._on_thread.on_threads(thread.astype(np.int64), position)
        return np.where(on_thread >= 0, on_thread, self._anywhere.on_thread(0, position))


def _lookup(track: Int64Array, start: Int64Array, end: Int64Array) -> InnermostLookup:
    until, parent, _ = clip_and_nest(track, start, end, np.arange(len(track)))
    passes = Slices.of_kind(BACKWARD_PASS, start, end=until, track=track)
    return InnermostLookup(track, replace(passes, parent=parent))


def _with_nodes_inside(analysis: RingAnalysis, passes: _Passes) -> tuple[Int64Array, Int64Array]:
    """Return the call and the pass of each node; one of no call that runs inside another node has that one's.

    A function that a checkpoint runs again makes such nodes, and the reentrant kind runs them in its own node.
    """
    intervals = analysis.intervals
    call: Int64Array = analysis.call_of_node.copy()
    pass_of = passes.at(intervals.thread, intervals.start_position)
    for level in intervals.levels[1:]:
        nodes = level[intervals.is_node[level] & (call[level] < 0)]
        for column in (call, pass_of):
            column[nodes] = column[intervals.parent[nodes]]
    return call, pass_of


def _costs(analysis: RingAnalysis, index: Int64Array) -> tuple[Int64Array, BoolArray]:
    """Return FLOPs and bytes of operators, int64[2, n] (0: no formula), and whether the process noted them."""
    numbers, place = np.unique(_operators(analysis, index), return_inverse=True)
    records = _operator_records(analysis)
    noted = [records.get(number) for number in numbers.tolist()]
    costs = [(record["flops"], record["bytes"]) if record and record["flops"] >= 0 else (0, 0) for record in noted]
    is_noted = np.array([record is not None for record in noted], np.bool_)
    return np.array(costs, np.int64).reshape(-1, 2)[place].T, is_noted[place]


def _operators(analysis: RingAnalysis, index: Int64Array) -> Int64Array:
    """Return the numbers of the operators that events are of."""
    number: Int64Array = analysis.all_events.value[index] & ~WITH_GRADIENTS_BIT
    return number


def _operator_records(analysis: RingAnalysis) -> dict[int, Record]:
    """Return what the name table says of operators, by their numbers."""
    return {record["number"]: record for record in analysis.snapshot.records if record["kind"] == "operator"}


def _innermost(analysis: RingAnalysis, index: Int64Array) -> Int64Array:
    """Return the innermost interval in which each event is on its thread, or -1."""
    thread = analysis.all_events.thread[index].astype(np.int64)
    return analysis.intervals.open_at(thread, analysis.positions_between(analysis.all_events.serial[index]))


def _in_windows(analysis: RingAnalysis) -> BoolArray:
    """Return for each interval whether operators were counted from its start to its end."""
    intervals = analysis.intervals
    begin, end = analysis.positions_between(np.array(counted_serials(analysis.ring)).T)
    window = np.searchsorted(begin, intervals.start_position, side="right") - 1
    is_whole: BoolArray = intervals.has_start & intervals.has_end & (window >= 0)
    is_whole &= intervals.end_position < end[window]
    return is_whole


def _number_alike(analysis: RingAnalysis) -> tuple[Int64Array, list[_Key]]:
    """Return for each call a number that calls alike share, -1 if its inputs are not known; and what they share."""
    events, intervals, original = analysis.all_events, analysis.intervals, analysis.forward_call
    index = np.flatnonzero(events.kind == Kind.INPUTS)
    entered = _innermost(analysis, index)
    inputs = np.full(len(intervals), -1, np.int64)
    inputs[entered[entered >= 0]] = events.value[index[entered >= 0]]
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
    alike = np.full(len(intervals), -1, np.int64)
    key = (inputs[root], name, is_rerun, nth)
    order = np.lexsort(key)
    in_order = [column[order] for column in key]
    is_first = begins_run(*in_order)
    alike[calls[order]] = np.cumsum(is_first) - 1
    return alike, [*zip(*(column[is_first].tolist() for column in in_order), strict=True)]


def _with_inner(cost: Int64Array, phase: Int64Array, parent: Int64Array) -> Int64Array:
    """Add to each span what the spans of its phase inside it cost."""
    total: Int64Array = cost.copy()
    span = np.flatnonzero((cost > 0) & (parent >= 0))
    outer = parent[span]
    while len(span):
        same = phase[span] == phase[outer]
        span, outer = span[same], outer[same]
        np.add.at(total, outer, cost[span])
        outer = parent[outer]
        span, outer = span[outer >= 0], outer[outer >= 0]
    return total
