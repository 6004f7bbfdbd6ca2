"""The open calls of each stream of a device, given its last event that was read; for recordings with device times."""

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
"""Maximum delay with which the thread that reads device events writes one, on a busy machine."""


class StreamState(NamedTuple):
    """The state of a device's stream now, or when its events were read last."""

    device: int  # index of the device
    stream: int  # torch's id of the stream
    # The open calls with device times, outermost first; `since_ns` is the time when the device entered the call, or in
    # backward its current run of nodes.
    calls: tuple[OpenCall, ...]
    queued: int  # calls and runs of nodes that the host launched and that were not yet seen to start on the device
    unread: int  # number of events after the last one that was read
    dropped: int  # number of later events, of all streams, that were lost because no event was free
    read_ns: int | None  # monotonic ns of the last read or poll of an event of the stream; None if there was none
    is_known: bool  # False if its events are no longer read: the device may be anywhere after `calls`
    collective: str = ""  # operator of the collective that it runs or waits for (`all_reduce`); empty if there is none


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
        # (stream, number of the pending event) -> monotonic ns of the last poll
        pending = np.flatnonzero(self._events.kind == Kind.DEVICE_PENDING)
        columns = (self._events.name, self._events.value, self._events.time_ns)
        names, numbers, times = (column[pending].tolist() for column in columns)
        self._poll_ns = dict(zip(zip(names, numbers, strict=True), times, strict=True))
        self._names, self._texts = analysis.lookup.names, analysis.lookup.texts
        self._intervals, self._call = analysis.intervals, analysis.call_of_node
        self._row_by_start = _rows_by_position(self._intervals.start_position)
        self._row_by_end = _rows_by_position(self._intervals.end_position)
        # `queued.event` indexes `analysis.events`, not `all_events`.
        module_events = analysis.events
        call_events = queued.event[(queued.event >= 0) & (queued.collective < 0)]
        call_events = call_events[np.isin(module_events.kind[call_events], (*CALL_ENTER_KINDS, *CALL_EXIT_KINDS))]
        self._timed_names = set(module_events.name[call_events].tolist())

    def state_of(self, key: int) -> StreamState:
        """Return the state of a stream, given its key among the queued events."""
        queued, events = self._queued, self._events
        rows = np.flatnonzero(queued.stream == key)
        read_rows = np.flatnonzero(queued.reached[rows] >= 0)
        if len(read_rows):
            last_row = rows[read_rows[-1]]
            unread = rows[read_rows[-1] + 1 :]
            read_ns = int(events.time_ns[queued.reached[last_row]])
            reached_ns = self._reached_ns(key, rows)
            # A collective's row has the event of the module before it: the module's own time takes precedence.
            is_module = queued.collective[rows] < 0
            event_ns = dict(zip(queued.event[rows].tolist(), reached_ns.tolist(), strict=True))
            event_ns |= dict(zip(queued.event[rows[is_module]].tolist(), reached_ns[is_module].tolist(), strict=True))
            calls = tuple(self._calls_after(int(queued.event[last_row]), event_ns))
            dropped = int(np.count_nonzero(queued.dropped > queued.slot[last_row]))
        else:
            unread, read_ns, calls, dropped = rows, None, (), len(queued.dropped)
        is_known = dropped == 0
        if len(unread):
            polled_ns = self._poll_ns.get((key, int(events.value[queued.slot[unread[0]]])))
            is_known = bool(len(read_rows)) and self._may_still_be_read(int(unread[0]), read_ns, polled_ns)
            read_ns = max((ns for ns in (read_ns, polled_ns) if ns is not None), default=None)
        return StreamState(
            device=key >> STREAM_NUMBER_BITS,
            stream=self._ids.get(key, key & STREAM_NUMBER_MASK),
            calls=calls,
            queued=self._count_starts(queued.event[unread[queued.collective[unread] < 0]]),
            unread=len(unread),
            dropped=dropped,
            read_ns=read_ns,
            is_known=is_known,
            collective=self._collective_after(int(rows[read_rows[-1]]), unread) if len(read_rows) else "",
        )

    def _collective_after(self, last_row: int, unread: Int64Array) -> str:
        """Return the operator of the stream's collective after the last event that was read; empty if there is none.

        An asynchronous collective has no end event in this stream, because the backend's stream runs it.
        """
        event = int(self._queued.collective[last_row])
        next_events = self._queued.collective[unread[:1]]
        if event < 0 or not len(next_events) or next_events[0] < 0:
            return ""
        kind, next_kind = self._events.kind[event], self._events.kind[next_events[0]]
        is_start = kind in (Kind.COLLECTIVE_ENTER, Kind.WAIT_ENTER) and next_kind == kind + 1
        return parse_collective(self._texts[self._events.name[event]]).operator if is_start else ""

    def _reached_ns(self, key: int, rows: Int64Array) -> Int64Array:
        """Return the monotonic ns at which the device passed each of a stream's events; -1 if it was not read."""
        reached = self._queued.reached[rows]
        read_ns = np.where(reached >= 0, self._events.time_ns[reached], -1)
        clock = self._clocks.get(key >> STREAM_NUMBER_BITS)
        if clock is None:
            return read_ns
        # An event cannot be passed before it was recorded, or after it was read; the clock may be wrong by its bound.
        recorded_ns = self._events.time_ns[self._queued.slot[rows]]
        return np.minimum(np.maximum(clock.to_other(self._events.value[reached]), recorded_ns), read_ns)

    def _may_still_be_read(self, first_unread: int, read_ns: int | None, polled_ns: int | None) -> bool:
        """Return whether the first unread event may still be read: its next poll is not overdue."""
        if self._now_ns is None:
            return False
        first_ns = max(int(self._events.time_ns[self._queued.slot[first_unread]]), read_ns or 0)
        due_ns = first_ns + (DEVICE_PENDING_NS if polled_ns is None else 2 * (polled_ns - first_ns))
        return self._now_ns <= due_ns + _GRACE_NS

    def _calls_after(self, event: int, event_ns: Mapping[int, int]) -> Iterator[OpenCall]:
        """Yield the calls with device times that are open after an event of the host, outermost first.

        The device is in the same calls after it has passed the event. `event` is an index into the module events, -1 if
        it was lost; `event_ns` maps events to the time when the device passed them, negative if unread.
        """
        reached_ns = event_ns[event]
        innermost = self._row_by_start.get(event, -1)
        if innermost < 0 and event in self._row_by_end:
            innermost = int(self._intervals.parent[self._row_by_end[event]])
        for row, phase in reversed(list(self._enclosing_calls(innermost))):
            name = self._names[self._intervals.name[row]]
            start_ns = event_ns.get(int(self._intervals.start_position[row]) >> 1, -1)
            since_ns = reached_ns if phase == "backward" or start_ns < 0 else start_ns
            yield OpenCall(name.fqn, phase, since_ns, name.module_class)

    def _count_starts(self, events: Int64Array) -> int:
        """Return the number of events that start a call, or a run of nodes of a call."""
        return sum(
            row is not None and (not self._intervals.is_node[row] or bool(self._call[row] >= 0))
            for row in (self._row_by_start.get(event) for event in events.tolist())
        )

    def _enclosing_calls(self, row: int) -> Iterator[tuple[int, str]]:
        """Yield (row, phase) of an interval and the calls around it, innermost first, if they have device times."""
        intervals = self._intervals
        while row >= 0:
            if intervals.is_node[row]:
                for inner in intervals.call_path(int(self._call[row])):
                    if int(intervals.name[inner]) in self._timed_names:
                        yield inner, "backward"
            elif int(intervals.name[row]) in self._timed_names:
                yield row, "recompute" if intervals.is_recompute[row] else "forward"
            row = int(intervals.parent[row])


def _rows_by_position(position: Int64Array) -> dict[int, int]:
    """Return event index -> row of the outermost interval that starts or ends at the event.

    Odd positions are at an event with index `position >> 1`; see `Intervals`.
    """
    at_event: BoolArray = (position >= 0) & (position & 1 == 1)
    rows = np.flatnonzero(at_event)[::-1]
    return dict(zip((position[rows] >> 1).tolist(), rows.tolist(), strict=True))
