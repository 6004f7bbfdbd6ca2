"""The calls that each stream of a device is in, by its last event that was read; for recordings with device times."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from .._arrays import BoolArray, Int64Array
from ..ring import Kind
from ..ring.event_text import parse_collective
from ..ring.slot_format import (
    CALL_ENTER_KINDS,
    CALL_EXIT_KINDS,
    DEVICE_PENDING_NS,
    STREAM_NUMBER_BITS,
    STREAM_NUMBER_MASK,
)
from ..timeline import OpenCall, RingAnalysis

_GRACE_NS = 1_000_000_000
"""How late the thread that reads events may write one, on a busy machine."""


class StreamState(NamedTuple):
    """The calls that a stream of a device is in, or was when its events were read last."""

    device: int  # index of the device
    stream: int  # torch's id of the stream
    # The chosen calls that it is in, outermost first; `since_ns`: when the device entered the call, or in backward its
    # current run of nodes.
    calls: tuple[OpenCall, ...]
    queued: int  # calls and runs of nodes that were launched by the host, and not yet seen to start on the device
    unread: int  # events after the last one that was read
    dropped: int  # later events of all streams that are lost because no event was free
    read_ns: int | None  # when an event of the stream was last read or polled, monotonic; None if none was
    is_known: bool  # False if its events are no longer read: the device may be anywhere after `calls`
    # The operator of the collective that it runs or waits for (`all_reduce`); empty if it is in none.
    collective: str = ""


def stream_states(analysis: RingAnalysis, now_ns: int, *, is_running: bool) -> tuple[StreamState, ...]:
    """Return the state of each stream that had events, by device and stream."""
    queued = analysis.queued
    if not len(queued.slot):
        return ()
    states = _StreamStates(analysis, now_ns if is_running else None)
    unsorted = [states.state_of(key) for key in np.unique(queued.stream).tolist()]
    return tuple(sorted(unsorted, key=lambda state: (state.device, state.stream)))


class _StreamStates:
    """Finds the state of each stream of a ring."""

    def __init__(self, analysis: RingAnalysis, now_ns: int | None) -> None:
        self._events = analysis.all_events
        queued = self._queued = analysis.queued
        self._now_ns = now_ns  # None if events are no longer read
        self._clocks, self._ids = analysis.device_clocks, analysis.stream_ids
        # When the device was last polled, monotonic ns; keyed by (stream, number of the pending event).
        pending = np.flatnonzero(self._events.kind == Kind.DEVICE_PENDING)
        columns = (self._events.name, self._events.value, self._events.time)
        names, numbers, times = (column[pending].tolist() for column in columns)
        self._polled = dict(zip(zip(names, numbers, strict=True), times, strict=True))
        self._names, self._texts = analysis.lookup.names, analysis.lookup.texts
        self._intervals, self._call = analysis.intervals, analysis.call_of_node
        self._row_by_start = _by_position(self._intervals.start_position)
        self._row_by_end = _by_position(self._intervals.end_position)
        # `queued.event` indexes `analysis.events`, not `all_events`.
        of_modules = analysis.events
        of_calls = queued.event[(queued.event >= 0) & (queued.collective < 0)]
        of_calls = of_calls[np.isin(of_modules.kind[of_calls], (*CALL_ENTER_KINDS, *CALL_EXIT_KINDS))]
        self._chosen = set(of_modules.name[of_calls].tolist())

    def state_of(self, key: int) -> StreamState:
        """Return the state of a stream, given its key among the queued events."""
        queued, events = self._queued, self._events
        rows = np.flatnonzero(queued.stream == key)
        done = np.flatnonzero(queued.reached[rows] >= 0)
        if len(done):
            last = rows[done[-1]]
            unread = rows[done[-1] + 1 :]
            read_ns = int(events.time[queued.reached[last]])
            reached_ns = self._reached_ns(key, rows)
            # A collective's row has the event of the module before it: the module's own time wins.
            of_modules = queued.collective[rows] < 0
            event_ns = dict(zip(queued.event[rows].tolist(), reached_ns.tolist(), strict=True))
            event_ns |= dict(zip(queued.event[rows[of_modules]].tolist(), reached_ns[of_modules].tolist(), strict=True))
            calls = tuple(self._calls_after(int(queued.event[last]), event_ns))
            dropped = int(np.count_nonzero(queued.dropped > queued.slot[last]))
        else:
            unread, read_ns, calls, dropped = rows, None, (), len(queued.dropped)
        is_known = dropped == 0
        if len(unread):
            polled_ns = self._polled.get((key, int(events.value[queued.slot[unread[0]]])))
            is_known = bool(len(done)) and self._may_still_be_read(int(unread[0]), read_ns, polled_ns)
            read_ns = max((ns for ns in (read_ns, polled_ns) if ns is not None), default=None)
        return StreamState(
            device=key >> STREAM_NUMBER_BITS,
            stream=self._ids.get(key, key & STREAM_NUMBER_MASK),
            calls=calls,
            queued=self._count_begun(queued.event[unread[queued.collective[unread] < 0]]),
            unread=len(unread),
            dropped=dropped,
            read_ns=read_ns,
            is_known=is_known,
            collective=self._collective_after(int(rows[done[-1]]), unread) if len(done) else "",
        )

    def _collective_after(self, last: int, unread: Int64Array) -> str:
        """Return the operator of the collective that the stream is in after the last event that was read.

        An asynchronous collective has no end event here: the backend's stream runs it.
        """
        event = int(self._queued.collective[last])
        next_ones = self._queued.collective[unread[:1]]
        if event < 0 or not len(next_ones) or next_ones[0] < 0:
            return ""
        kind, following_kind = self._events.kind[event], self._events.kind[next_ones[0]]
        is_begin = kind in (Kind.COLLECTIVE_ENTER, Kind.WAIT_ENTER) and following_kind == kind + 1
        return parse_collective(self._texts[self._events.name[event]]).operator if is_begin else ""

    def _reached_ns(self, key: int, rows: Int64Array) -> Int64Array:
        """Return when the device passed each of a stream's events, monotonic; -1 if that was not read."""
        reached = self._queued.reached[rows]
        read_ns = np.where(reached >= 0, self._events.time[reached], -1)
        clock = self._clocks.get(key >> STREAM_NUMBER_BITS)
        if clock is None:
            return read_ns
        # Not before it was recorded, nor after it was read: the clock may be wrong by its bound.
        recorded_ns = self._events.time[self._queued.slot[rows]]
        return np.minimum(np.maximum(clock.to_other(self._events.value[reached]), recorded_ns), read_ns)

    def _may_still_be_read(self, first_unread: int, read_ns: int | None, polled_ns: int | None) -> bool:
        """Return whether the first unread event may still be read: the reader's next report on it is not overdue."""
        if self._now_ns is None:
            return False
        first_ns = max(int(self._events.time[self._queued.slot[first_unread]]), read_ns or 0)
        due_ns = first_ns + (DEVICE_PENDING_NS if polled_ns is None else 2 * (polled_ns - first_ns))
        return self._now_ns <= due_ns + _GRACE_NS

    def _calls_after(self, event: int, event_ns: Mapping[int, int]) -> Iterator[OpenCall]:
        """Yield the chosen calls that are open after an event of the host, outermost first.

        The device is in the same calls after it has passed the event. An event is an index among those of modules, -1
        if it is lost; `event_ns` says when the device passed each, negative if that was not read.
        """
        reached_ns = event_ns[event]
        innermost = self._row_by_start.get(event, -1)
        if innermost < 0 and event in self._row_by_end:
            innermost = int(self._intervals.parent[self._row_by_end[event]])
        for row, phase in reversed(list(self._around(innermost))):
            name = self._names[self._intervals.name[row]]
            begun_ns = event_ns.get(int(self._intervals.start_position[row]) >> 1, -1)
            since_ns = reached_ns if phase == "backward" or begun_ns < 0 else begun_ns
            yield OpenCall(name.fqn, phase, since_ns, name.module_class)

    def _count_begun(self, events: Int64Array) -> int:
        """Return how many of the events begin a call, or a run of nodes of one."""
        return sum(
            row is not None and (not self._intervals.is_node[row] or bool(self._call[row] >= 0))
            for row in (self._row_by_start.get(event) for event in events.tolist())
        )

    def _around(self, row: int) -> Iterator[tuple[int, str]]:
        """Yield the chosen calls around an interval and with it, innermost first, and the phase of each."""
        intervals = self._intervals
        while row >= 0:
            if intervals.is_node[row]:
                for inner in intervals.call_path(int(self._call[row])):
                    if int(intervals.name[inner]) in self._chosen:
                        yield inner, "backward"
            elif int(intervals.name[row]) in self._chosen:
                yield row, "recompute" if intervals.is_recompute[row] else "forward"
            row = int(intervals.parent[row])


def _by_position(position: Int64Array) -> dict[int, int]:
    """Map the index of each event to the outermost interval that begins or ends at it.

    Odd positions are at an event, whose index is `position >> 1`; see `Intervals`.
    """
    at_event: BoolArray = (position >= 0) & (position & 1 == 1)
    rows = np.flatnonzero(at_event)[::-1]
    return dict(zip((position[rows] >> 1).tolist(), rows.tolist(), strict=True))
