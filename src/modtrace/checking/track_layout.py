"""The layout of events by track and flow, with begins paired with ends; and the rules for nesting and for flows."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .._arrays import AnyArray, BoolArray, Int32Array, Int64Array, split_by
from ..formats.chrome_values import find_open_begin
from ..formats.event_table import BEGIN, SLICE
from ..profiler.device_work import possible_ends
from ..timeline.nesting import nest_times

TrackKey = tuple[str | int, ...]
"""Identifies a track: (pid, tid) in a Chrome trace, (uuid,) in a Perfetto trace."""
FlowKey = tuple[object, ...]
"""Identifies a flow, equally at all its ends; its id comes first."""


class Fault(NamedTuple):
    """A broken rule that `check` found.

    Attributes:
        rule: name of the rule (`partial-overlap`).
        message: description of the fault, with the wrong values.
        event: position of the event in the file, from 0 (of the packet in a Perfetto trace); None for a fault of the
            whole file.
        of_profiler: whether torch.profiler wrote the event; modtrace does not change such events.
    """

    rule: str
    message: str
    event: int | None = None
    of_profiler: bool = False

    def __str__(self) -> str:
        position = "" if self.event is None else f"event {self.event}: "
        return f"{self.rule}: {position}{self.message}"


class FlowEnd(NamedTuple):
    """A moment at which a flow starts, passes through, or ends."""

    position: int  # position of its event in the file, from 0
    phase: str  # Chrome's letter: s, t or f
    track: TrackKey  # track of its event
    time_ns: int
    flow: FlowKey  # key of the flow


START, STEP, END = b"stf"
"""The phases of an end of a flow, as Chrome's letters."""
ONWARD = ord("o")
"""The phase of an end that starts its flow if it is the first in time; otherwise the flow passes through it."""


class FlowEnds:
    """The ends of all flows.

    Args:
        position: int64[n], position of the event in the file, from 0.
        time: int64[n], time in ns.
        track: int64[n], index of the track.
        flow: flow of the end: uint64[n] ids, or indices into `keys`.
        phase: uint8[n], `START`, `STEP`, `END` or `ONWARD`.
        binds_next: bool[n], whether the end belongs to the next slice of its track, or to the slice around it.
        keys: keys of flows, if ids are ambiguous.

    Attributes:
        order: the indices of all ends by flow, and by time within a flow.
    """

    def __init__(self, *columns: AnyArray, keys: Sequence[FlowKey] = ()) -> None:
        self.position, self.time, self.track, self._flow, self._phase, self.binds_next = columns
        self._keys = keys
        _, appearance, flow = np.unique(self._flow, return_index=True, return_inverse=True)
        # Flows are in the order of their first appearance in the file; ends of the same time stay in file order.
        flow_order = appearance[flow] if len(flow) else np.zeros(0, np.int64)
        self.order: Int64Array = np.lexsort((self.time, flow_order))
        self._first = np.flatnonzero(np.diff(flow_order[self.order], prepend=-1))
        onward = self.order[self._phase[self.order] == ONWARD]
        self._phase = self._phase.copy()
        self._phase[onward] = np.where(np.diff(flow[onward], prepend=-1) != 0, START, STEP)

    def __len__(self) -> int:
        return len(self.position)

    def irregular(self, tracks: list[TrackKey]) -> Iterator[list[FlowEnd]]:
        """Yield the ends of each flow that may break a rule, since it is not a start with one other end."""
        if not len(self):
            return
        is_start: BoolArray = self._phase[self.order] == START
        first, stop = self._first, np.append(self._first[1:], len(self.order))
        second = np.minimum(first + 1, len(self.order) - 1)
        is_regular = (stop - first == 2) & is_start[first] & ~is_start[second]
        for flow_first, flow_stop in zip(first[~is_regular].tolist(), stop[~is_regular].tolist(), strict=True):
            yield [self.end(row, tracks) for row in self.order[flow_first:flow_stop].tolist()]

    def end(self, row: int, tracks: list[TrackKey]) -> FlowEnd:
        """Return one end of a flow as a `FlowEnd`, with its track key, for messages."""
        flow, track = int(self._flow[row]), tracks[self.track[row]]
        key = self._keys[flow] if self._keys else (flow,)
        return FlowEnd(int(self.position[row]), chr(self._phase[row]), track, int(self.time[row]), key)


NEVER_NS = 2**63 - 1
"""The end of a slice without an end event."""


class SliceEvents(NamedTuple):
    """The events of slices in file order; columns of equal length, as a trace has millions of them."""

    track: AnyArray  # int[n], index of the track
    phase: AnyArray  # uint8[n], X, B or E
    time_ns: AnyArray  # int64[n]
    duration_ns: AnyArray  # int64[n], duration of an X
    position: AnyArray  # int64[n], position in the file
    name: AnyArray  # int32[n], index into the layout's `names`; 0 for an E without a name

    def take(self, rows: AnyArray) -> SliceEvents:
        """Return the rows `rows`, which are in order; itself, not a copy, if these are all rows."""
        return self if len(rows) == len(self.track) else SliceEvents(*(column[rows] for column in self))


@dataclass(frozen=True, slots=True)
class ArrangedSlices:
    """The slices of one track by start, longer slices first if starts are equal."""

    start_ns: Int64Array  # int64[n]
    end_ns: Int64Array  # int64[n]; `NEVER_NS` without an end event
    position: Int64Array  # int64[n], position of the slice's first event in the file
    name: Int32Array  # int32[n], index into the layout's `names`
    is_paired: bool  # whether all slices are pairs of B and E


class TrackLayout:
    """All events of a trace by kind: begins are paired with ends, slices and flow ends are sorted.

    Args:
        names: names of slices, by index.
        tracks: keys of tracks, by index.
        events: events of slices.
        flows: the ends of flows.
        work: kernels, memcpys and memsets as int64[5, n]: index of the track, start, end, position, name.
        stop: time in ns at which the profiler stopped; None if unknown.

    Attributes:
        slices: the slices of each track.
        begins_without_end: faults for B events that no E closes; viewers draw them to the end of the trace.
        ends_without_begin: faults for E events that close no B; viewers ignore them.
    """

    def __init__(
        self,
        names: Sequence[str],
        tracks: Sequence[TrackKey],
        events: SliceEvents,
        flows: FlowEnds,
        work: Int64Array | None = None,
        stop: int | None = None,
    ) -> None:
        self.names, self.flows, self.work, self.stop = names, flows, work, stop
        self.begins_without_end, self.ends_without_begin = list[Fault](), list[Fault]()
        rows_of = {int(events.track[rows[0]]): rows for rows in split_by(events.track, np.arange(len(events.track)))}
        no_rows = np.zeros(0, np.int64)
        self.slices = {key: self._arranged(events.take(rows_of.get(i, no_rows))) for i, key in enumerate(tracks)}

    def _arranged(self, events: SliceEvents) -> ArrangedSlices:
        """Return the slices of one track."""
        is_slice = events.phase == SLICE
        begins, end_time = self._pair(events.take(halves := np.flatnonzero(~is_slice)))
        begin_rows, time = halves[begins], events.time_ns[is_slice]
        start = np.append(time, events.time_ns[begin_rows])
        end = np.append(time + np.minimum(events.duration_ns[is_slice], NEVER_NS - 1 - time), end_time)
        position, name = (np.append(column[is_slice], column[begin_rows]) for column in (events.position, events.name))
        order = np.lexsort((position, -end, start))
        return ArrangedSlices(start[order], end[order], position[order], name[order], not is_slice.any())

    def _pair(self, events: SliceEvents) -> tuple[Int64Array, Int64Array]:
        """Pair B with E as viewers do: an E closes the innermost open B (of its name, if it has one) and all inside.

        Returns:
            The row of each B, and its end time.
        """
        # Lists of millions of numbers would need five times the memory of these views.
        name_of, position_of, phase_of = events.name.data, events.position.data, events.phase.data
        begins, ends = array("q"), array("q")  # rows of the B and the E of each pair; -1 without an E
        stack: list[int] = []
        for index in np.argsort(events.time_ns, kind="stable").tolist():
            if phase_of[index] == BEGIN:
                stack.append(index)
                continue
            name = name_of[index]
            if stack and (not name or name_of[stack[-1]] == name):  # the usual case
                begins.append(stack.pop())
                ends.append(index)
                continue
            if (match := find_open_begin(stack, name_of, name)) < 0:
                message = f"{self.names[name]!r} ends, but" if name else "an end, but"
                self.ends_without_begin.append(
                    Fault("end-without-begin", f"{message} no such slice is open", position_of[index])
                )
                continue
            for begin in reversed(stack[match + 1 :]):
                self._add_unended(name_of[begin], position_of[begin])
            for begin in stack[match:]:
                begins.append(begin)
                ends.append(index)
            del stack[match:]
        for begin in stack:
            self._add_unended(name_of[begin], position_of[begin])
            begins.append(begin)
            ends.append(-1)
        end_time = np.append(np.minimum(events.time_ns, NEVER_NS - 1), NEVER_NS)
        return np.array(begins, np.int64), end_time[np.array(ends, np.int64)]

    def _add_unended(self, name: int, position: int) -> None:
        self.begins_without_end.append(Fault("begin-without-end", f"{self.names[name]!r} is never ended", position))


MAX_DRAWN_DEPTH = 512
"""Maximum depth of slices that viewers draw."""


def partial_overlap(layout: TrackLayout) -> Iterator[Fault]:
    """Find slices that start inside another slice and end after it; viewers drop them or draw them wrongly."""
    for track, slices in layout.slices.items():
        if slices.is_paired:
            continue  # pairs of B and E always nest
        if _depths(slices).max(initial=0) <= MAX_DRAWN_DEPTH:  # `nest_times` makes a pass per level
            has_extent = (slices.end_ns != NEVER_NS) & (slices.end_ns > slices.start_ns)
            start, end = slices.start_ns[has_extent], slices.end_ns[has_extent]
            _, parent = nest_times(start, end, np.zeros(len(start), np.int32))
            if not np.any(end > end[parent], where=parent >= 0):
                continue  # each slice ends within its parent
        ends, names = slices.end_ns.tolist(), layout.names
        stack: list[int] = []
        for index, start in enumerate(slices.start_ns.tolist()):
            end = ends[index]
            if end == NEVER_NS:
                continue  # it is in `begins_without_end`, and its true end is unknown
            while stack and ends[stack[-1]] <= start:
                stack.pop()
            if stack and ends[stack[-1]] < end:
                outer = stack[-1]
                message = (
                    f"{names[slices.name[index]]!r} begins in {names[slices.name[outer]]!r}"
                    f" (event {slices.position[outer]})"
                    f" on {_track_text(track)} and ends {end - ends[outer]} ns after it"
                )
                yield Fault("partial-overlap", message, int(slices.position[index]))
            else:
                stack.append(index)


def device_overlap(layout: TrackLayout) -> Iterator[Fault]:
    """Find work with a wrong end: it lasts beyond the end of the next work on its stream, or beyond the profiler."""
    if layout.work is None:
        return
    names, tracks = layout.names, list(layout.slices)
    track, start, end, position, name = layout.work
    possible_end = possible_ends(track, start, end, layout.stop)
    for row in np.flatnonzero(possible_end != end).tolist():
        is_stop = possible_end[row] == layout.stop
        moment = "the profiler stopped" if is_stop else "the next one on it began, which ends before it"
        message = (
            f"{names[name[row]]!r} on {_track_text(tracks[track[row]])} lasts {end[row] - start[row]} ns, "
            f"{end[row] - possible_end[row]} of them after {moment}: no device does so; `merge` counts it until then"
        )
        yield Fault("device-overlap", message, int(position[row]))


def too_deep(layout: TrackLayout) -> Iterator[Fault]:
    """Find the first slice of each track that is deeper than viewers draw."""
    for track, slices in layout.slices.items():
        if len(slices.start_ns) <= MAX_DRAWN_DEPTH:
            continue
        depth = _depths(slices)
        first = int(np.argmax(depth > MAX_DRAWN_DEPTH))
        if depth[first] > MAX_DRAWN_DEPTH:
            name = layout.names[slices.name[first]]
            message = f"{name!r} has depth {depth[first]} on {_track_text(track)}; viewers draw {MAX_DRAWN_DEPTH}"
            yield Fault("too-deep", message, int(slices.position[first]))


def _depths(slices: ArrangedSlices) -> Int64Array:
    """Return the depth of each slice: the number of slices around it by their times, plus one."""
    is_empty = slices.start_ns == slices.end_ns
    ended_count = np.searchsorted(np.sort(slices.end_ns[~is_empty]), slices.start_ns, side="right")
    depth: Int64Array = np.cumsum(~is_empty) - ended_count + is_empty
    return depth


def flow_without_end(layout: TrackLayout) -> Iterator[Fault]:
    """Find flows that start and never end."""
    for ends in layout.flows.irregular(list(layout.slices)):
        from_start = list(itertools.dropwhile(lambda end: end.phase != "s", ends))
        if from_start and all(end.phase == "s" for end in from_start):
            message = f"{_flow_text(from_start[0])} starts and never ends"
            yield Fault("flow-without-end", message, from_start[0].position)


def flow_without_start(layout: TrackLayout) -> Iterator[Fault]:
    """Find ends of flows without an earlier start."""
    for ends in layout.flows.irregular(list(layout.slices)):
        for end in itertools.takewhile(lambda end: end.phase != "s", ends):
            yield Fault("flow-without-start", f"{_flow_text(end)} ends and has not started", end.position)


def duplicate_flow(layout: TrackLayout) -> Iterator[Fault]:
    """Find second starts of a flow: flows cannot fork, and viewers do not draw the second start."""
    for ends in layout.flows.irregular(list(layout.slices)):
        starts = [end for end in ends if end.phase == "s"]
        for restart in starts[1:]:
            message = f"{_flow_text(restart)} has already started at event {starts[0].position}"
            yield Fault("duplicate-flow", message, restart.position)


def flow_outside_slice(layout: TrackLayout) -> Iterator[Fault]:
    """Find ends of flows outside all slices."""
    flows, tracks = layout.flows, list(layout.slices)
    if not len(flows):
        return
    is_unbound = np.zeros(len(flows), np.bool_)
    for rows in split_by(flows.track, np.arange(len(flows))):
        slices, times = layout.slices[tracks[flows.track[rows[0]]]], flows.time[rows]
        if not len(slices.start_ns):
            is_unbound[rows] = True
            continue
        start_count = np.searchsorted(slices.start_ns, times, side="right")
        # A slice is open if the latest end of all slices started by then is not before the time.
        latest_end = np.maximum.accumulate(slices.end_ns)
        is_inside = (start_count > 0) & (latest_end[np.maximum(start_count, 1) - 1] >= times)
        is_unbound[rows] = ~np.where(flows.binds_next[rows], slices.start_ns[-1] >= times, is_inside)
    for row in flows.order[is_unbound[flows.order]].tolist():
        end = flows.end(row, tracks)
        message = f"the {end.phase} of {_flow_text(end)} touches no slice on {_track_text(end.track)}"
        yield Fault("flow-outside-slice", message, end.position)


def _flow_text(end: FlowEnd) -> str:
    return f"flow {end.flow[0]!r}"


def _track_text(track: TrackKey) -> str:
    return "track " + "/".join(map(str, track))


STRUCTURE_RULES: tuple[Callable[[TrackLayout], Iterator[Fault]], ...] = (
    partial_overlap,
    device_overlap,
    too_deep,
    flow_without_end,
    flow_without_start,
    duplicate_flow,
    flow_outside_slice,
)
