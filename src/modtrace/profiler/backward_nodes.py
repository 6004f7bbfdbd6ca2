"""Autograd nodes of a trace: the calls that made them, and backward spans cut to the times of the nodes."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from .._arrays import BoolArray, Int64Array
from ..timeline import BACKWARD, Process, Slices, Timeline, Track
from ..timeline.join import with_modules
from ..timeline.nesting import InnermostLookup, LabelledInterval, clip_and_nest, spans_from_intervals, union_of
from ..timeline.slices import join_columns, sort_by_start
from .event_collector import EventColumns, ProfilerEvents
from .recorded_part import CallIndex, innermost_spans, runs_module_code


def find_calls_of_nodes(timeline: Timeline, events: ProfilerEvents) -> "Nodes":
    """Find the call of each autograd node of the trace.

    The sequence number of a node identifies its call; if the trace lacks the number's operation, the recorded backward
    span around the node's middle does. A node without a number (AccumulateGrad) belongs to the call of the node before.
    """
    columns = timeline.columns
    nodes = _find_nodes(events, innermost_spans(timeline, runs_module_code(columns)))
    unknown = np.flatnonzero((nodes.call < 0) & (nodes.rows.sequence >= 0) & ~nodes.has_op)
    if len(unknown):
        recorded = innermost_spans(timeline, columns.phase == BACKWARD)
        middle = (nodes.start[unknown] + nodes.end[unknown]) // 2
        nodes.call[unknown] = recorded.on_threads(events.threads[nodes.track[unknown]], middle)
    last_call: dict[tuple[int, int], int] = {}
    nodes.call[nodes.rows.sequence < 0] = -2
    for index, (track, parent, call) in enumerate(
        zip(nodes.track.tolist(), nodes.parent.tolist(), nodes.call.tolist(), strict=True)
    ):
        if call == -2:
            nodes.call[index] = call = last_call.get((track, parent), -1)
        last_call[track, parent] = call
    return nodes


def cut_to_nodes(timeline: Timeline, nodes: "Nodes", events: ProfilerEvents, process: Process) -> Timeline:
    """Replace the backward spans by spans that start and end with the nodes of their call.

    The recorded spans stay if the trace has no nodes at their time. A call inside backward is only clipped to the node
    that runs it.
    """
    return _NodeCuts(timeline, nodes, events, process).build() if len(nodes) else timeline


@dataclass
class _NodeCuts:
    """The backward spans of a timeline, cut to the nodes of a trace."""

    timeline: Timeline
    nodes: "Nodes"
    events: ProfilerEvents
    process: Process

    def __post_init__(self) -> None:
        self.threads = self.events.threads
        self.calls = CallIndex(self.timeline)
        self.tracks = list(self.timeline.tracks)
        self.backward_tracks = {t.tid: i for i, t in enumerate(self.tracks) if t.kind == "backward"}
        self.rows = [*zip(*(c.tolist() for c in (self.nodes.call, self.nodes.start, self.nodes.end)), strict=True)]
        self.children: dict[int, list[int]] = {}
        for index, parent in enumerate(self.nodes.parent.tolist()):
            self.children.setdefault(parent, []).append(index)

    def build(self) -> Timeline:
        columns = self.timeline.columns
        rows: list[tuple[int, int, int, int, int]] = []
        for trace_track in np.unique(self.nodes.track).tolist():
            tid = int(self.threads[trace_track])
            top = [index for index in self.children.get(-1, []) if self.nodes.track[index] == trace_track]
            spans = spans_from_intervals(self._pieces(top, ())) if tid >= 0 else []
            if spans:
                backward_track = self._track(tid)
                rows += [(s.start_ns, s.end_ns, int(s.key), backward_track, s.depth) for s in spans]  # type: ignore[call-overload]
        if not rows:
            return self.timeline
        start, end, call, track, rank = np.array(rows, np.int64).T
        old_rows, old_start, old_end = self._old_spans(start, end, track)
        new = Slices.of(
            start=start,
            end=end,
            name=columns.name[call],
            phase=np.full(len(rows), BACKWARD),
            track=track,
            depth=rank,
            call=columns.call[call],
            step=columns.step[call],
            link=self._links(call),
        )
        # A call gets its link here if the recording has no backward span of it.
        link = columns.link.copy()
        link[call] = new.link
        old = replace(columns, link=link).take(old_rows)
        old = replace(old, start=old_start, end=old_end)
        joined = join_columns([old, new])  # `clip_and_nest` finds the parents
        in_backward = self._is_on_backward(joined)
        priority = np.where(in_backward & (joined.phase != BACKWARD), 1 << 20, 0) + joined.depth
        new_end, parent, depth = clip_and_nest(
            joined.track.astype(np.int64), joined.start, joined.end, priority.astype(np.int64)
        )
        rows_left = np.flatnonzero(~in_backward | (new_end > joined.start) | (joined.start == joined.end))
        position = np.full(len(joined) + 1, -1, np.int64)
        position[rows_left] = np.arange(len(rows_left))
        joined = replace(joined, end=new_end, parent=position[parent], depth=depth.astype(np.int32)).take(rows_left)
        return with_modules(replace(self.timeline, tracks=tuple(self.tracks)), sort_by_start(joined))

    def _track(self, tid: int) -> int:
        track = self.backward_tracks.get(tid)
        if track is None:
            thread = next((t.thread for t in self.tracks if t.tid == tid), self._name(tid))
            track = self.backward_tracks[tid] = len(self.tracks)
            self.tracks.append(Track("backward", thread, tid, self.process))
        return track

    def _name(self, tid: int) -> str:
        key = self.events.tracks[int(np.flatnonzero(self.threads == tid)[0])]
        return self.events.thread_names.get(key) or f"thread {tid}"

    def _links(self, call: Int64Array) -> Int64Array:
        link = self.timeline.columns.link[call]
        new_calls = np.unique(call[link < 0])
        first_link = int(self.timeline.columns.link.max(initial=-1)) + 1
        return np.where(link >= 0, link, first_link + np.searchsorted(new_calls, call))

    def _pieces(self, nodes: list[int], outer: tuple[int, ...]) -> Iterator[LabelledInterval]:
        """Yield the intervals of nodes; a node around inner nodes is split into its start, these nodes, and its end."""
        for index in nodes:
            call, start, end = self.rows[index]
            path = outer + tuple(key for key in self.calls.path(call) if key not in outer) if call >= 0 else outer
            inner = self.children.get(index)
            if not inner:
                yield LabelledInterval(start, end, path)
                continue
            yield LabelledInterval(start, self.rows[inner[0]][1], path)
            yield from self._pieces(inner, path)
            yield LabelledInterval(min(end, self.rows[inner[-1]][2]), end, path)

    def _old_spans(self, start: Int64Array, end: Int64Array, track: Int64Array) -> tuple[Int64Array, ...]:
        """Return the rows of the recorded spans that stay, and their new starts and ends."""
        columns = self.timeline.columns
        stays = np.ones(len(columns), np.bool_)
        new_start, new_end = columns.start.copy(), columns.end.copy()
        for track_index in np.unique(track).tolist():
            old = np.flatnonzero((columns.track == track_index) & (columns.phase == BACKWARD))
            starts, ends = union_of(start[track == track_index], end[track == track_index])
            run = np.searchsorted(starts, columns.end[old], side="left") - 1
            stays[old] = (run < 0) | (ends[np.maximum(run, 0)] <= columns.start[old])
        calls = np.flatnonzero(self._is_on_backward(columns) & (columns.phase != BACKWARD))
        if len(calls):
            new_start[calls], new_end[calls] = self._clip_to_nodes(calls)
        rows = np.flatnonzero(stays)
        return rows, new_start[rows], new_end[rows]

    def _is_on_backward(self, columns: Slices) -> BoolArray:
        """Return a mask of the spans on the backward track of their thread."""
        is_backward = np.array([track.kind == "backward" for track in self.tracks], np.bool_)
        return np.asarray(is_backward[columns.track], np.bool_)

    def _clip_to_nodes(self, spans: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Clip calls inside backward to their node, to the gap between its inner nodes."""
        columns, nodes = self.timeline.columns, self.nodes
        tids = np.array([track.tid for track in self.timeline.tracks], np.int64)
        trace_track = {int(tid): index for index, tid in enumerate(self.threads.tolist()) if tid >= 0}
        start, end = columns.start[spans].copy(), columns.end[spans].copy()
        middle = (start + end) // 2
        track = np.array([trace_track.get(int(tid), -1) for tid in tids[columns.track[spans]].tolist()], np.int64)
        node = nodes.innermost.on_threads(track, middle)
        for position, index in enumerate(node.tolist()):
            if index < 0:
                continue
            low, high = int(nodes.start[index]), int(nodes.end[index])
            for inner in self.children.get(index, []):
                if nodes.end[inner] <= middle[position]:
                    low = max(low, int(nodes.end[inner]))
                else:
                    high = min(high, int(nodes.start[inner]))
                    break
            start[position], end[position] = max(int(start[position]), low), min(int(end[position]), high)
        return start, np.maximum(start, end)


_MAX_BACKWARD_DEPTH = 4
"""Maximum depth of backward passes through graphs of backward passes."""


class Nodes:
    """The `evaluate_function` slices of a trace, in start order of each thread.

    Attributes:
        track: int64[n], index into `ProfilerEvents.tracks`.
        start: int64[n], start in ns from the base.
        end: int64[n], end in ns from the base.
        parent: int64[n], the node inside which the node ran, or -1.
        call: int64[n], index of the innermost span that made the node, or -1.
        has_op: bool[n], whether the trace has the forward operation that made the node.
    """

    def __init__(self, rows: EventColumns) -> None:
        order = np.lexsort((-rows.duration_ns, rows.start_ns, rows.track))
        self.rows = rows.take(order)
        self.track, self.start, self.end = self.rows.track, self.rows.start_ns, self.rows.end_ns
        self.parent = _parents(self.track, self.start, self.end)
        self.call = np.full(len(rows), -1, np.int64)
        self.has_op = np.zeros(len(rows), np.bool_)

    def __len__(self) -> int:
        return len(self.start)

    @property
    def innermost(self) -> InnermostLookup:
        """The lookup of the node that ran on a track at a moment."""
        nodes = Slices.of(start=self.start, end=self.end, track=self.track, parent=self.parent)
        return InnermostLookup(self.track, nodes)


def _find_nodes(events: ProfilerEvents, running: InnermostLookup) -> Nodes:
    """Find the nodes, and for each the call that made it; `running` finds forward and recompute spans.

    The last operation with the node's sequence number started in this call, as the number increases with each node.
    """
    threads = events.threads
    # Each process has its own numbering of sequences, threads and arrows.
    nodes = Nodes(events.nodes.take(np.flatnonzero(threads[events.nodes.track] != -1)))
    if not len(nodes) or not len(events.ops):
        return nodes
    track_by_thread = _forward_tracks(events, nodes)
    op = _making_ops(events.ops, nodes.rows, track_by_thread)
    rows = np.flatnonzero(op >= 0)
    nodes.has_op[rows] = True
    ops = events.ops.take(op[rows])
    nodes.call[rows] = running.on_threads(threads[ops.track], ops.start_ns)
    outer_node = nodes.innermost.on_threads(ops.track, ops.start_ns)
    # An operation inside a node, but outside all calls, made its nodes for the call of that node.
    inherits = (nodes.call[rows] < 0) & (outer_node >= 0)
    for _ in range(_MAX_BACKWARD_DEPTH):
        nodes.call[rows[inherits]] = nodes.call[outer_node[inherits]]
    return nodes


def _parents(track: Int64Array, start: Int64Array, end: Int64Array) -> Int64Array:
    _, parent, _ = clip_and_nest(track, start, end, np.arange(len(start)))
    # Two nodes of the same extent are a duplicate, not parent and child.
    while (is_duplicate := (parent >= 0) & (start == start[parent]) & (end == end[parent])).any():
        parent[is_duplicate] = parent[parent[is_duplicate]]
    return parent


def _forward_tracks(events: ProfilerEvents, nodes: Nodes) -> dict[int, int]:
    """Return the track of each forward thread, by autograd's id of the thread.

    The profiler draws arrows from forward operations to nodes, and the majority of them decides. Without arrows the
    thread with most of the sequence numbers counts, unless two threads have equally many.
    """
    votes: dict[int, Counter[int]] = {}
    flows, threads = events.flows, events.threads
    node = nodes.innermost.on_threads(flows.track, flows.start_ns)
    ids = np.where(node >= 0, nodes.rows.forward_thread[node], -1)
    for thread_id, track in zip(ids.tolist(), flows.start_track.tolist(), strict=True):
        if thread_id >= 0:
            votes.setdefault(thread_id, Counter())[track] += 1
    for thread_id in np.unique(nodes.rows.forward_thread[nodes.rows.sequence >= 0]).tolist():
        if thread_id in votes:
            continue
        numbers = np.unique(nodes.rows.sequence[(nodes.rows.forward_thread == thread_id) & (nodes.rows.sequence >= 0)])
        for track in np.unique(events.ops.track[threads[events.ops.track] != -1]).tolist():
            shared = int(np.isin(numbers, events.ops.sequence[events.ops.track == track]).sum())
            if shared:
                votes.setdefault(thread_id, Counter())[track] = shared
        best = votes.get(thread_id, Counter()).most_common(2)
        if len(best) == 2 and best[0][1] == best[1][1]:
            del votes[thread_id]
    return {thread_id: counter.most_common(1)[0][0] for thread_id, counter in votes.items()}


def _making_ops(ops: EventColumns, nodes: EventColumns, track_by_thread: dict[int, int]) -> Int64Array:
    """Return the operation of each node, or -1: the last with its number before it on its forward thread."""
    order = np.lexsort((ops.start_ns, ops.sequence, ops.track))
    op_key = _key(ops.track[order], ops.sequence[order])
    track = np.array([track_by_thread.get(thread_id, -1) for thread_id in nodes.forward_thread.tolist()], np.int64)
    node_key = _key(track, nodes.sequence)
    first = np.searchsorted(op_key, node_key, side="left")
    candidate = np.searchsorted(op_key, node_key, side="right") - 1
    start = ops.start_ns[order]
    while (late := (candidate >= first) & (start[candidate] >= nodes.start_ns)).any():
        candidate[late] -= 1
    has_op = (candidate >= first) & (track >= 0) & (nodes.sequence >= 0)
    return np.where(has_op, order[np.maximum(candidate, 0)], -1)


def _key(track: Int64Array, number: Int64Array) -> Int64Array:
    """Return track and sequence number packed into one number, as a search key."""
    return (track << 44) | (number & (1 << 44) - 1)
