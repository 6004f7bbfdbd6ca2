"""Collect events by track and flow, pair begins with ends, and sort: what the rules on nesting and flows look at."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .._numbering import split_by
from .._typing import AnyArray, BoolArray, Int32Array, Int64Array
from ..formats.chrome_values import find_ended
from ..formats.event_table import BEGIN, SLICE

TrackKey = tuple[str | int, ...]
"""Identifies a track: (pid, tid) in a Chrome trace, (uuid,) in a Perfetto trace."""
FlowKey = tuple[object, ...]
"""Identifies a flow, the same for all its ends; its id comes first."""


class Fault(NamedTuple):
    """One fault that `check` found: where a file breaks a rule.

    Attributes:
        rule: the rule's name (`partial-overlap`).
        message: what is wrong, with the values that are.
        event: position of the event in the file, from 0 (of the packet in a Perfetto trace); None if the file as a
            whole is concerned.
        of_profiler: whether it is a fault of torch.profiler, in an event of its own; modtrace keeps these as they are.
    """

    rule: str
    message: str
    event: int | None = None
    of_profiler: bool = False

    def __str__(self) -> str:
        where = "" if self.event is None else f"event {self.event}: "
        return f"{self.rule}: {where}{self.message}"


class FlowEnd(NamedTuple):
    """Where a flow starts, passes through, or ends."""

    position: int  # of its event in the file, from 0
    phase: str  # Chrome's letter: s, t or f
    track: TrackKey  # the track it lies on
    time: int  # ns
    flow: FlowKey  # the flow it belongs to


START, STEP, END = b"stf"
"""What an end of a flow does, by Chrome's letters."""
ONWARD = ord("o")
"""It starts its flow where it is the flow's first in time, else the flow passes through it."""


class FlowEnds:
    """The ends of all flows.

    Args:
        position: int64[n], of each one's event in the file, from 0.
        time: int64[n], ns.
        track: int64[n], index of the track it lies on.
        flow: the flow it belongs to: uint64[n] ids, or indices into `keys`.
        phase: uint8[n], `START`, `STEP`, `END` or `ONWARD`.
        binds_next: bool[n], whether it belongs to the next slice that begins, else to the one around it.
        keys: what identifies a flow, where an id alone does not.

    Attributes:
        order: the indexes of all ends by flow, and in each by time.
    """

    def __init__(self, *columns: AnyArray, keys: Sequence[FlowKey] = ()) -> None:
        self.position, self.time, self.track, self._flow, self._phase, self.binds_next = columns
        self._keys = keys
        _, appearance, flow = np.unique(self._flow, return_index=True, return_inverse=True)
        # Flows in the order in which they appear in the file; ends of the same time stay in file order.
        by_flow = appearance[flow] if len(flow) else np.zeros(0, np.int64)
        self.order: Int64Array = np.lexsort((self.time, by_flow))
        self._first = np.flatnonzero(np.diff(by_flow[self.order], prepend=-1))
        onward = self.order[self._phase[self.order] == ONWARD]
        self._phase = self._phase.copy()
        self._phase[onward] = np.where(np.diff(flow[onward], prepend=-1) != 0, START, STEP)

    def __len__(self) -> int:
        return len(self.position)

    def irregular(self, tracks: list[TrackKey]) -> Iterator[list[FlowEnd]]:
        """Yield the ends of flows that may break a rule: all but flows with a start and one other end."""
        if not len(self):
            return
        is_start: BoolArray = self._phase[self.order] == START
        first, last = self._first, np.append(self._first[1:], len(self.order))
        second = np.minimum(first + 1, len(self.order) - 1)
        regular = (last - first == 2) & is_start[first] & ~is_start[second]
        for begin, end in zip(first[~regular].tolist(), last[~regular].tolist(), strict=True):
            yield [self._end(row, tracks) for row in self.order[begin:end].tolist()]

    def ends(self, rows: Int64Array, tracks: list[TrackKey]) -> Iterator[FlowEnd]:
        """Yield some ends by their indexes."""
        for row in rows.tolist():
            yield self._end(row, tracks)

    def _end(self, row: int, tracks: list[TrackKey]) -> FlowEnd:
        flow, where = int(self._flow[row]), tracks[self.track[row]]
        key = self._keys[flow] if self._keys else (flow,)
        return FlowEnd(int(self.position[row]), chr(self._phase[row]), where, int(self.time[row]), key)


NEVER_NS = 2**63 - 1
"""The end of a slice whose end never came."""


class SliceEvents(NamedTuple):
    """The events of slices as a reader finds them, in file order; columns of equal length, as a trace has millions."""

    track: AnyArray  # int[n], index of its track
    phase: AnyArray  # uint8[n], X, B or E
    time: AnyArray  # int64[n], ns
    duration: AnyArray  # int64[n], of X, ns
    position: AnyArray  # int64[n], in the file
    name: AnyArray  # int32[n], in the layout's `names`; of an E that closes whatever is open 0

    def take(self, rows: AnyArray) -> SliceEvents:
        """Return some rows, in order; without a copy if these are all."""
        return self if len(rows) == len(self.track) else SliceEvents(*(column[rows] for column in self))


@dataclass(frozen=True, slots=True)
class ArrangedSlices:
    """The slices of one track, by start; of several with the same start the longest first."""

    start: Int64Array  # int64[n], ns
    end: Int64Array  # int64[n], ns; `NEVER_NS` where the end never came
    position: Int64Array  # int64[n], of the event that begins it, in the file
    name: Int32Array  # int32[n], in the layout's `names`
    is_paired: bool  # whether all of them are pairs of B and E


class TrackLayout:
    """All events of a trace, by what they are: begins are paired with ends, slices and flow ends are sorted.

    Args:
        names: of slices, with their indexes.
        tracks: keys of tracks, by index.
        events: of slices.
        flows: the ends of flows.
        work: kernels, memcpys and memsets, int64[5, n]: index of the track, start, end, position and name of each.
        stop: when the profiler stopped, ns; None: nothing says it.

    Attributes:
        slices: the slices of each track.
        unended: begins that nothing closes; viewers draw them to the end of the trace.
        unbegun: ends that close nothing; viewers ignore them.
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
        self.unended, self.unbegun = list[Fault](), list[Fault]()
        rows_of = {int(events.track[rows[0]]): rows for rows in split_by(events.track, np.arange(len(events.track)))}
        none = np.zeros(0, np.int64)
        self.slices = {key: self._arranged(events.take(rows_of.get(index, none))) for index, key in enumerate(tracks)}

    def _arranged(self, events: SliceEvents) -> ArrangedSlices:
        """Return the slices of one track."""
        whole = events.phase == SLICE
        begins, end_time = self._pair(events.take(halves := np.flatnonzero(~whole)))
        half, time = halves[begins], events.time[whole]
        start = np.append(time, events.time[half])
        end = np.append(time + np.minimum(events.duration[whole], NEVER_NS - 1 - time), end_time)
        position, name = (np.append(of[whole], of[half]) for of in (events.position, events.name))
        order = np.lexsort((position, -end, start))
        return ArrangedSlices(start[order], end[order], position[order], name[order], not whole.any())

    def _pair(self, events: SliceEvents) -> tuple[Int64Array, Int64Array]:
        """Pair B with E as viewers do: an E closes the innermost open B (of its name, if it has one) and all inside.

        Returns:
            The rows of each B that is a slice, and when it ends.
        """
        # Not as lists: of millions of numbers they would take five times as much memory.
        name_of, position_of, phase_of = events.name.data, events.position.data, events.phase.data
        begins, ends = array("q"), array("q")  # the rows of each pair's halves; -1 if it never ends
        stack: list[int] = []
        for index in np.argsort(events.time, kind="stable").tolist():
            if phase_of[index] == BEGIN:
                stack.append(index)
                continue
            name = name_of[index]
            if stack and (not name or name_of[stack[-1]] == name):  # as of nearly all
                begins.append(stack.pop())
                ends.append(index)
                continue
            if (match := find_ended(stack, name_of, name)) < 0:
                subject = f"{self.names[name]!r} ends" if name else "an end"
                message = f"{subject} where nothing of that name is open"
                self.unbegun.append(Fault("end-without-begin", message, position_of[index]))
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
        end_time = np.append(np.minimum(events.time, NEVER_NS - 1), NEVER_NS)
        return np.array(begins, np.int64), end_time[np.array(ends, np.int64)]

    def _add_unended(self, name: int, position: int) -> None:
        self.unended.append(Fault("begin-without-end", f"{self.names[name]!r} is never ended", position))
