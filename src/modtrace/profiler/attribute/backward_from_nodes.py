"""The backward spans of a merged trace: cut to the times at which the profiler saw the autograd nodes run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..._typing import BoolArray, Int64Array
from ...timeline import BACKWARD, Columns, Process, Timeline, Track
from ...timeline.columns import join_columns, sort_by_start
from ...timeline.decode.path_spans import LabelledInterval, clip_and_nest, spans_from_intervals
from ...timeline.ranges import union_of
from ..trace.event_columns import ProfilerEvents
from .autograd_nodes import Nodes, find_nodes
from .call_lookup import CallIndex, InnermostLookup, runs_module_code, threads_of

__all__ = ["attribute_nodes", "cut_to_nodes"]


def attribute_nodes(timeline: Timeline, events: ProfilerEvents, threads: Int64Array) -> Nodes:
    """Find the call of each autograd node of the trace.

    By its sequence number; where the trace does not hold what made it, by the recorded backward span around its
    middle. A node without a number (AccumulateGrad) belongs to the call of the node before it, whose gradient it takes.

    Args:
        timeline: the recording, in the trace's time.
        events: the trace's.
        threads: the OS thread of each of the trace's tracks, -1 for tracks of other processes and devices.
    """
    columns = timeline.columns
    thread = threads_of(columns, (track.tid for track in timeline.tracks))
    track = columns.track.astype(np.int64)
    running = InnermostLookup(thread, track, columns.start, columns.end, columns.parent, runs_module_code(columns))
    nodes = find_nodes(events, running, threads)
    unknown = np.flatnonzero((nodes.call < 0) & (nodes.rows.value >= 0) & ~nodes.numbered)
    if len(unknown):
        behind = InnermostLookup(thread, track, columns.start, columns.end, columns.parent, columns.phase == BACKWARD)
        middle = (nodes.start[unknown] + nodes.end[unknown]) // 2
        nodes.call[unknown] = behind.on_threads(threads[nodes.track[unknown]], middle)
    before: dict[tuple[int, int], int] = {}
    for index in np.flatnonzero(nodes.rows.value < 0).tolist():
        nodes.call[index] = -2
    for index, (track_, parent, call) in enumerate(
        zip(nodes.track.tolist(), nodes.parent.tolist(), nodes.call.tolist(), strict=True)
    ):
        if call == -2:
            nodes.call[index] = call = before.get((track_, parent), -1)
        before[track_, parent] = call
    return nodes


def cut_to_nodes(
    timeline: Timeline, nodes: Nodes, threads: Int64Array, names: dict[int, str], process: Process
) -> Timeline:
    """Replace the backward spans by ones that begin and end with the nodes of their call.

    What was recorded where the trace has no nodes stays; a call inside backward moves by no more than it takes to lie
    within the node that it runs in.

    Args:
        timeline: the recording, in the trace's time.
        nodes: with their calls.
        threads: the OS thread of each of the trace's tracks.
        names: names of OS threads that the recording may not know.
        process: whose threads these are.
    """
    if not len(nodes):
        return timeline
    builder = _Builder(timeline, nodes, threads, names, process)
    return builder.build()


class _Builder:
    def __init__(
        self, timeline: Timeline, nodes: Nodes, threads: Int64Array, names: dict[int, str], process: Process
    ) -> None:
        self.timeline = timeline
        self.nodes = nodes
        self.threads = threads
        self.names = names
        self.process = process
        self.calls = CallIndex(timeline)
        self.tracks = list(timeline.tracks)
        self.backward_tracks = {t.tid: i for i, t in enumerate(self.tracks) if t.kind == "backward"}
        self.children: dict[int, list[int]] = {}
        for index, parent in enumerate(nodes.parent.tolist()):
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
                rows += [(s.start, s.end, int(s.key), backward_track, s.depth) for s in spans]  # type: ignore[call-overload]
        if not rows:
            return self.timeline
        start, end, call, track, rank = np.array(rows, np.int64).T
        kept, kept_start, kept_end = self._kept(start, end, track)
        made = Columns.of(
            start=start,
            end=end,
            name=columns.name[call],
            phase=np.full(len(rows), BACKWARD),
            track=track,
            depth=rank,
            parent=np.full(len(rows), -1),
            call=columns.call[call],
            step=columns.step[call],
            link=self._links(call),
            complete=np.ones(len(rows), np.bool_),
        )
        # A call whose backward the recording did not see gets its link now.
        link = columns.link.copy()
        link[call] = made.link
        old = replace(columns, link=link).take(kept)
        old = replace(old, start=kept_start, end=kept_end)
        joined = join_columns([old, made])  # parents are found anew below
        behind = self._on_backward(joined)
        late = np.where(behind & (joined.phase != BACKWARD), 1 << 20, 0) + joined.depth
        new_end, parent, depth = clip_and_nest(
            joined.track.astype(np.int64), joined.start, joined.end, late.astype(np.int64)
        )
        whole = np.flatnonzero(~behind | (new_end > joined.start) | (joined.start == joined.end))
        position = np.full(len(joined) + 1, -1, np.int64)
        position[whole] = np.arange(len(whole))
        joined = replace(joined, end=new_end, parent=position[parent], depth=depth.astype(np.int32)).take(whole)
        origin = np.concatenate([kept, np.full(len(rows), -1, np.int64)])[whole]
        ordered, new_index = sort_by_start(joined)
        span_args = self.timeline.span_args
        arguments = (
            {
                index: span_args[origin_row]
                for index, origin_row in sorted(zip(new_index.tolist(), origin.tolist(), strict=False))
                if origin_row in span_args
            }
            if span_args
            else {}
        )
        return replace(self.timeline, columns=ordered, tracks=tuple(self.tracks), span_args=arguments)

    def _track(self, tid: int) -> int:
        track = self.backward_tracks.get(tid)
        if track is None:
            thread = next((t.thread for t in self.tracks if t.tid == tid), self.names.get(tid, f"thread {tid}"))
            track = self.backward_tracks[tid] = len(self.tracks)
            self.tracks.append(Track("backward", thread, tid, self.process))
        return track

    def _links(self, call: Int64Array) -> Int64Array:
        link = self.timeline.columns.link[call]
        new = np.unique(call[link < 0])
        first = int(self.timeline.columns.link.max(initial=-1)) + 1
        return np.where(link >= 0, link, first + np.searchsorted(new, call))

    def _pieces(self, nodes: list[int], around: tuple[int, ...]) -> Iterator[LabelledInterval]:
        """Yield nodes as pieces; one inside which others run is its beginning, those, and its end."""
        for index in nodes:
            call = int(self.nodes.call[index])
            path = around + _beyond(around, self.calls.path(call)) if call >= 0 else around
            start, end = int(self.nodes.start[index]), int(self.nodes.end[index])
            inner = self.children.get(index)
            if not inner:
                yield LabelledInterval(start, end, path)
                continue
            yield LabelledInterval(start, int(self.nodes.start[inner[0]]), path)
            yield from self._pieces(inner, path)
            yield LabelledInterval(min(end, int(self.nodes.end[inner[-1]])), end, path)

    def _kept(self, start: Int64Array, end: Int64Array, track: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return the recorded spans that stay, with the times they have then."""
        columns = self.timeline.columns
        keep = np.ones(len(columns), np.bool_)
        new_start, new_end = columns.start.copy(), columns.end.copy()
        for track_index in np.unique(track).tolist():
            old = np.flatnonzero((columns.track == track_index) & (columns.phase == BACKWARD))
            begins, ends = union_of(start[track == track_index], end[track == track_index])
            run = np.searchsorted(begins, columns.end[old], side="left") - 1
            keep[old] = (run < 0) | (ends[np.maximum(run, 0)] <= columns.start[old])
        calls = np.flatnonzero(self._on_backward(columns) & (columns.phase != BACKWARD))
        if len(calls):
            new_start[calls], new_end[calls] = self._within_nodes(calls)
        kept = np.flatnonzero(keep)
        return kept, new_start[kept], new_end[kept]

    def _on_backward(self, columns: Columns) -> BoolArray:
        """Which spans lie on the backward track of their thread."""
        is_backward = np.array([track.kind == "backward" for track in self.tracks], np.bool_)
        return np.asarray(is_backward[columns.track], np.bool_)

    def _within_nodes(self, spans: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Clip calls inside backward to the node that they ran in, between the nodes that ran inside it."""
        columns, nodes = self.timeline.columns, self.nodes
        tids = np.array([track.tid for track in self.timeline.tracks], np.int64)
        trace_track = {int(tid): index for index, tid in enumerate(self.threads.tolist()) if tid >= 0}
        begin, finish = columns.start[spans].copy(), columns.end[spans].copy()
        middle = (begin + finish) // 2
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
            begin[position], finish[position] = max(int(begin[position]), low), min(int(finish[position]), high)
        return begin, np.maximum(begin, finish)


def _beyond(around: tuple[int, ...], path: tuple[int, ...]) -> tuple[int, ...]:
    """Return what of `path` is not in `around` already."""
    known = set(around)
    return tuple(key for key in path if key not in known)
