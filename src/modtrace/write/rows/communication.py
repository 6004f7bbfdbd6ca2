"""Collectives in a written trace: slices on rows of their own, and their arrows from modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import orjson
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent

from ..._typing import Int32Array, Int64Array, SignedIntArray
from ...formats.communication_args import CALLS_NAME, LAUNCH_CATEGORY, LAUNCH_NAME, collective_args, slice_name
from ...formats.limits import MAX_LINK
from ...timeline import Collective, Timeline, launching_spans
from ...timeline.contents import COMMUNICATION
from ..columns.protobuf_columns import ByteTable
from ..flows import call_flows
from ..lanes import Lane, Lanes
from .slices import RowSlice, chrome_slice, microseconds

__all__ = ["CommunicationFlows", "LaunchFlows", "chrome_communication", "communication_slices"]


def chrome_communication(timeline: Timeline, lanes: Lanes, base: int) -> Iterator[bytes]:
    """Yield collectives and waits, and the flows to collectives, as events in JSON.

    Args:
        timeline: what is written.
        lanes: its rows.
        base: nanoseconds from which `ts` counts.
    """
    rows = lanes.by_track()
    launched_by = launching_spans(timeline).tolist()
    flows = call_flows(timeline)
    for index, collective in enumerate(timeline.collectives):
        row = lanes.lanes[rows[int(timeline.collectives.track[index])]]
        where = {"pid": row.pid, "tid": row.tid}
        ts = microseconds(collective.start_ns - base)
        yield chrome_slice(_slice(collective), row.pid, row.tid, base)
        if flows.flow[index] >= 0:
            phase = "s" if flows.is_first[index] else "f" if flows.is_last[index] else "t"
            between = {"cat": COMMUNICATION, "name": CALLS_NAME, "id": int(flows.flow[index]), "bp": "e"}
            yield orjson.dumps({"ph": phase, **where, **between})[:-1] + b',"ts":%b}' % ts
        span = launched_by[index]
        if span >= 0 and not collective.is_wait:
            launcher = lanes.lanes[int(lanes.of_span[span])]
            flow = {"cat": LAUNCH_CATEGORY, "name": LAUNCH_NAME, "id": index}
            begin = {"ph": "s", "pid": launcher.pid, "tid": launcher.tid, **flow}
            for event in (begin, {"ph": "f", "bp": "e", **where, **flow}):
                yield orjson.dumps(event)[:-1] + b',"ts":%b}' % ts


def communication_slices(timeline: Timeline, flows: CommunicationFlows, lane: Lane) -> list[RowSlice]:
    """Return the slices of the collectives and waits of one lane.

    Args:
        timeline: what is written.
        flows: the timeline's.
        lane: which.
    """
    table = timeline.collectives
    chosen = [] if lane.first_level else np.flatnonzero(table.track == lane.track).tolist()
    return [_slice(table[index], *flows.of_row(index)) for index in chosen]


class CommunicationFlows:
    """The flows of collectives in a Perfetto trace: from the spans that launched them, and between ranks.

    Args:
        timeline: what is written.

    Attributes:
        launched_by: int64, per row of `Timeline.collectives` the span that launched it; -1 for none, and for waits.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.launched_by = np.where(timeline.collectives.is_wait, -1, launching_spans(timeline))
        self._calls = call_flows(timeline)
        self._first_call = MAX_LINK + len(timeline.collectives)

    def of_row(self, index: int) -> tuple[list[int], list[int]]:
        """Return the ids of the flows that go on from a row of `Timeline.collectives`, and of those that end there."""
        going_on: list[int] = []
        ending = [MAX_LINK + index] if self.launched_by[index] >= 0 else []
        if self._calls.flow[index] >= 0:
            (ending if self._calls.is_last[index] else going_on).append(self._first_call + int(self._calls.flow[index]))
        return going_on, ending


class LaunchFlows:
    """The flows that spans begin, to the collectives that they launched.

    Args:
        launched_by: see `CommunicationFlows`.
        span_count: how many spans the timeline has.

    Attributes:
        table: the bytes of each different set of flows; the first is none.
    """

    def __init__(self, launched_by: Int64Array, span_count: int) -> None:
        flows: dict[int, list[int]] = {}
        for index in np.flatnonzero(launched_by >= 0).tolist():
            flows.setdefault(int(launched_by[index]), []).append(MAX_LINK + index)
        self._index = np.zeros(span_count if flows else 0, np.int32)
        self._index[[*flows]] = np.arange(1, len(flows) + 1)
        events = [TrackEvent(flow_ids_old=ids).SerializeToString() for ids in flows.values()]
        self.table = ByteTable([b"", *events]) if flows else None

    def index(self, rows: SignedIntArray) -> Int32Array:
        """Return which set of `table` some spans have."""
        chosen: Int32Array = self._index[rows]
        return chosen


def _slice(collective: Collective, going_on: Sequence[int] = (), ending: Sequence[int] = ()) -> RowSlice:
    times = (collective.start_ns, collective.end_ns)
    return RowSlice(*times, slice_name(collective), COMMUNICATION, collective_args(collective), going_on, ending)
