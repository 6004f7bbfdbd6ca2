"""Collectives in a written trace: events in JSON, packets in a Perfetto trace, and their arrows from modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import orjson
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackEvent

from .._typing import Int32Array, SignedIntArray
from ..formats.communication_args import LAUNCH_CATEGORY, LAUNCH_NAME, collective_args, slice_name
from ..formats.limits import MAX_LINK
from ..timeline import Collective, Timeline, launching_spans
from ..timeline.contents import COMMUNICATION
from .columns.protobuf_columns import ByteTable
from .lanes import Lanes
from .perfetto_descriptors import sequence_start, serialize

__all__ = ["LaunchFlows", "chrome_communication", "microseconds", "perfetto_communication"]

_PACKETS_PER_PART = 4096


def chrome_communication(timeline: Timeline, lanes: Lanes, base: int) -> Iterator[bytes]:
    """Yield collectives and waits, and the flows to collectives, as events in JSON.

    Args:
        timeline: what is written.
        lanes: its rows.
        base: nanoseconds from which `ts` counts.
    """
    rows = _rows_of_tracks(lanes)
    launched_by = launching_spans(timeline).tolist()
    for index, collective in enumerate(timeline.collectives):
        row = lanes.lanes[rows[int(timeline.collectives.track[index])]]
        where = {"pid": row.pid, "tid": row.tid}
        ts = microseconds(collective.start_ns - base)
        name = slice_name(collective)
        event = {"ph": "X", **where, "cat": COMMUNICATION, "name": name, "args": collective_args(collective)}
        yield orjson.dumps(event)[:-1] + b',"ts":%b,"dur":%b}' % (ts, microseconds(collective.duration_ns))
        span = launched_by[index]
        if span >= 0 and not collective.is_wait:
            launcher = lanes.lanes[int(lanes.of_span[span])]
            flow = {"cat": LAUNCH_CATEGORY, "name": LAUNCH_NAME, "id": index}
            begin = {"ph": "s", "pid": launcher.pid, "tid": launcher.tid, **flow}
            for flow_event in (begin, {"ph": "f", "bp": "e", **where, **flow}):
                yield orjson.dumps(flow_event)[:-1] + b',"ts":%b}' % ts


def perfetto_communication(timeline: Timeline, lane: int, track: int, lanes: Lanes, sequence: int) -> Iterator[bytes]:
    """Yield the packets of the collectives and waits of one lane.

    Args:
        timeline: what is written.
        lane: which lane.
        track: its uuid.
        lanes: all lanes.
        sequence: the id of its packet sequence.
    """
    table = timeline.collectives
    chosen = np.flatnonzero(table.track == lanes.lanes[lane].track)
    if not len(chosen) or lanes.lanes[lane].first_level:
        return
    time = int(table.start[chosen[0]])
    launched_by = launching_spans(timeline)
    yield serialize(sequence_start(sequence, track, time))
    packets: list[TracePacket] = []
    open_ends: list[int] = []

    def add(moment: int) -> TracePacket:
        nonlocal time
        packets.append(TracePacket(trusted_packet_sequence_id=sequence, timestamp=moment - time))
        time = moment
        return packets[-1]

    for index in chosen.tolist():
        collective = table[index]
        while open_ends and open_ends[-1] <= collective.start_ns:
            add(open_ends.pop()).track_event.type = TrackEvent.TYPE_SLICE_END
        # A slice that is cut off cannot outlast what is around it.
        open_ends.append(min([collective.end_ns, *open_ends[-1:]]))
        flows = [] if collective.is_wait or launched_by[index] < 0 else [MAX_LINK + index]
        _fill_begin(add(collective.start_ns).track_event, collective, flows)
        if len(packets) >= _PACKETS_PER_PART:
            yield serialize(*packets)
            packets.clear()
    while open_ends:
        add(open_ends.pop()).track_event.type = TrackEvent.TYPE_SLICE_END
    yield serialize(*packets)


class LaunchFlows:
    """The flows that spans begin, to the collectives that they launched.

    Attributes:
        table: the bytes of each different set of flows; the first is none.
    """

    def __init__(self, timeline: Timeline) -> None:
        launched_by = np.where(timeline.collectives.is_wait, -1, launching_spans(timeline))
        flows: dict[int, list[int]] = {}
        for index in np.flatnonzero(launched_by >= 0).tolist():
            flows.setdefault(int(launched_by[index]), []).append(MAX_LINK + index)
        self._index = np.zeros(len(timeline.columns) if flows else 0, np.int32)
        self._index[[*flows]] = np.arange(1, len(flows) + 1)
        events = [TrackEvent(flow_ids_old=ids).SerializeToString() for ids in flows.values()]
        self.table = ByteTable([b"", *events]) if flows else None

    def index(self, rows: SignedIntArray) -> Int32Array:
        """Return which set of `table` some spans have."""
        chosen: Int32Array = self._index[rows]
        return chosen


def _rows_of_tracks(lanes: Lanes) -> Mapping[int, int]:
    return {lane.track: index for index, lane in enumerate(lanes.lanes) if not lane.first_level}


def _fill_begin(event: TrackEvent, collective: Collective, flows: list[int]) -> None:
    event.type = TrackEvent.TYPE_SLICE_BEGIN
    event.name = slice_name(collective)
    event.categories.append(COMMUNICATION)
    event.terminating_flow_ids_old.extend(flows)
    for name, value in collective_args(collective).items():
        annotation = event.debug_annotations.add(name=name)
        if isinstance(value, bool):
            annotation.bool_value = value
        elif isinstance(value, int):
            annotation.int_value = value
        else:
            annotation.string_value = value


def microseconds(nanoseconds: int) -> bytes:
    """Return a time or a duration as JSON has it: µs with three decimals."""
    return b"%b%d.%03d" % (b"-" if nanoseconds < 0 else b"", *divmod(abs(nanoseconds), 1000))
