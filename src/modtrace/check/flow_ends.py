"""Collect the ends of flows in columns, as a trace has millions, and find the flows that are not of two ends."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from .._typing import BoolArray, Int64Array
from .model import FlowEnd, FlowKey, TrackKey

__all__ = ["END", "ONWARD", "START", "STEP", "FlowEnds"]

START, STEP, END = b"stf"
"""What an end of a flow does, by Chrome's letters."""
ONWARD = ord("o")
"""It starts its flow where it is the flow's first in time, else the flow passes through it."""


@dataclass(slots=True)
class FlowEnds:
    """The ends of all flows; columns of equal length.

    Attributes:
        position: of each one's event in the file, from 0.
        time: ns.
        track: index of the track it lies on.
        flow: the flow it belongs to: an id, or an index into `keys`.
        phase: `START`, `STEP`, `END` or `ONWARD`; no longer the last once `arrange` was called.
        binds_next: 1 where it belongs to the next slice that begins, 0 for the one around it.
        keys: what identifies a flow, where an id alone does not, and its index.
    """

    position: array[int] = field(default_factory=lambda: array("q"))
    time: array[int] = field(default_factory=lambda: array("q"))
    track: array[int] = field(default_factory=lambda: array("l"))
    flow: array[int] = field(default_factory=lambda: array("Q"))
    phase: bytearray = field(default_factory=bytearray)
    binds_next: bytearray = field(default_factory=bytearray)
    keys: dict[FlowKey, int] = field(default_factory=dict)
    _order: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))
    _first: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self.position)

    def add(self, position: int, phase: int, track: int, time: int, flow: int, *, binds_next: bool = False) -> None:
        """Add the start, a step or the end of a flow; time in ns."""
        self.position.append(position)
        self.time.append(time)
        self.track.append(track)
        self.flow.append(flow)
        self.phase.append(phase)
        self.binds_next.append(binds_next)

    def index_of(self, key: FlowKey) -> int:
        """Return the index of a flow that no id alone identifies."""
        return self.keys.setdefault(key, len(self.keys))

    def arrange(self) -> None:
        """Order the ends by flow, and in each by time, once all were added."""
        if not len(self):
            return
        _, appearance, flow = np.unique(np.frombuffer(self.flow, np.uint64), return_index=True, return_inverse=True)
        # Flows in the order in which they appear in the file; ends of the same time stay in file order.
        order = np.lexsort((np.frombuffer(self.time, np.int64), appearance[flow]))
        self._order = order
        self._first = np.flatnonzero(np.diff(appearance[flow][order], prepend=-1))
        phase = np.frombuffer(self.phase, np.uint8)
        is_onward = phase[order] == ONWARD
        if is_onward.any():
            onward = order[is_onward]
            of_flow = flow[onward]
            phase[onward] = np.where(np.diff(of_flow, prepend=-1) != 0, START, STEP)

    def ordered(self) -> Int64Array:
        """Return the indexes of all ends by flow, and in each by time."""
        return self._order

    def irregular(self, tracks: list[TrackKey]) -> Iterator[list[FlowEnd]]:
        """Yield the ends of all flows except those of two ends, a start and something else: these break no rule.

        Args:
            tracks: keys by index.
        """
        if not len(self):
            return
        is_start: BoolArray = np.frombuffer(self.phase, np.uint8)[self._order] == START
        first, last = self._first, np.append(self._first[1:], len(self._order))
        second = np.minimum(first + 1, len(self._order) - 1)
        regular = (last - first == 2) & is_start[first] & ~is_start[second]
        texts = list(self.keys)
        for begin, end in zip(first[~regular].tolist(), last[~regular].tolist(), strict=True):
            yield [self._end(row, tracks, texts) for row in self._order[begin:end].tolist()]

    def ends(self, rows: Int64Array, tracks: list[TrackKey]) -> Iterator[FlowEnd]:
        """Yield some ends by their indexes."""
        texts = list(self.keys)
        for row in rows.tolist():
            yield self._end(row, tracks, texts)

    def _end(self, row: int, tracks: list[TrackKey], texts: list[FlowKey]) -> FlowEnd:
        flow = self.flow[row]
        return FlowEnd(
            self.position[row],
            chr(self.phase[row]),
            tracks[self.track[row]],
            self.time[row],
            texts[flow] if texts else (flow,),
        )
