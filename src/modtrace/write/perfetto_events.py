"""Spans as begin and end packets: the bytes that many share are made once by the package, the rest is spliced in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackEvent

from .._errors import WriteError
from .._typing import IndexArray, Int32Array, Int64Array
from ..formats.limits import MAX_LEVELS_PER_ROW
from ..formats.span_args import CALL_FIELDS, escaped_span_args, module_args
from ..timeline import PHASES, Timeline
from ..timeline.nesting import nest_by_time
from .flows import CollectiveFlows, FlowRole, flow_roles
from .lanes import Lanes
from .perfetto_descriptors import InternTable
from .protobuf_columns import (
    LENGTH_DELIMITED,
    BytesColumn,
    ByteTable,
    field_tag,
    interleave,
    message_field_tag,
    record_lengths,
    repeat,
    track_event_packets,
    varint,
)

CHUNK = 1 << 15
"""Spans state packets are in memory at a time."""

# The varint forms: `flow_ids` takes eight bytes for what is two or three.
_FLOW_BEGIN = message_field_tag(TrackEvent, "flow_ids_old")
_FLOW_END = message_field_tag(TrackEvent, "terminating_flow_ids_old")
_FLOW_TAGS = ByteTable([b"", b"", _FLOW_BEGIN, _FLOW_END])  # by FlowRole
_CALL, _STEP, _LINK, _COMPLETE = (field_tag(CALL_FIELDS[name]) for name in ("call", "step", "link", "complete"))
_END = TrackEvent(type=TrackEvent.TYPE_SLICE_END).SerializeToString()


class SpanPackets:
    """The spans of a timeline as begin and end packets, lane by lane.

    Args:
        timeline: whose spans.
        lanes: its rows.
        interned: the numbers that stand for its texts.
        flows: of the collectives that some of the spans launched.
    """

    def __init__(self, timeline: Timeline, lanes: Lanes, interned: InternTable, flows: CollectiveFlows) -> None:
        self._columns = columns = timeline.columns
        self._names = timeline.names
        self._lanes = lanes
        depth = nest_by_time(columns).depth if np.any(columns.start == columns.end) else columns.depth
        self._depth = depth if depth.max(initial=0) < MAX_LEVELS_PER_ROW else depth % MAX_LEVELS_PER_ROW
        self._roles = flow_roles(columns)
        call_message = field_tag(interned.extension, LENGTH_DELIMITED)
        self._begin = ByteTable(
            [
                TrackEvent(
                    type=TrackEvent.TYPE_SLICE_BEGIN, category_iids=[1 + phase], name_iid=iid
                ).SerializeToString()
                for phase in range(len(PHASES))
                for iid in interned.label.tolist()
            ]
        )
        # Slices of one correlation id have one colour in Perfetto: a module's is the same wherever it runs.
        colours = [TrackEvent(correlation_id=1 + fqn) for fqn in interned.fqn.tolist()]
        self._colour = ByteTable([event.SerializeToString() + call_message for event in colours])
        modules = zip(interned.fqn.tolist(), interned.module_class.tolist(), strict=True)
        self._module = ByteTable([_module(fqn, module_class) for fqn, module_class in modules])
        self._args_index, self._args = _own_args(timeline, interned)
        self._launch_index, self._launches = _launches(flows, len(columns))

    def of_lane(self, lane: int, sequence: int, rows: IndexArray) -> Iterator[tuple[int, bytes]]:
        """Yield packets, some thousand at a time, and how many spans they end.

        Args:
            lane: which lane.
            sequence: the id of its packet sequence.
            rows: the lane's spans, by start and outermost first.

        Raises:
            WriteError: two of them overlap without one lying in the other.
        """
        start = self._columns.start[rows]
        sequence_field = TracePacket(trusted_packet_sequence_id=sequence).SerializeToString()
        last_time = int(start[0])
        still_open = np.empty(0, np.int64)
        for first in range(0, len(rows), CHUNK):
            last = min(first + CHUNK, len(rows))
            # A begin stands behind all earlier begins, and the ends of those of them that are no longer open.
            begun = np.arange(first, last)
            begin = 2 * begun - self._depth[rows[begun]]
            behind = 2 * last - int(self._depth[rows[last]]) if last < len(rows) else 2 * last
            open_ = np.concatenate([still_open, begun])
            end = self._end_positions(rows, start, open_)
            ends_here = end < behind
            ended, still_open = open_[ends_here], open_[~ends_here]
            begin, end = begin - begin[0], end[ends_here] - begin[0]
            count = len(begun) + len(ended)
            time = np.full(count, -1, np.int64)
            if behind - (2 * first - int(self._depth[rows[first]])) != count:
                raise self._overlap(lane)
            time[begin], time[end] = start[begun], self._columns.end[rows[ended]]
            delta = np.diff(time, prepend=last_time)
            if np.any(delta < 0):
                raise self._overlap(lane)
            last_time = int(time[-1])
            parts = [(begin, track_event_packets(delta[begin], sequence_field, self._begin_event(rows[begun])))]
            if len(ended):
                parts.append((end, track_event_packets(delta[end], sequence_field, [repeat(_END, len(ended))])))
            yield len(ended), interleave(parts, count)

    def _end_positions(self, rows: IndexArray, start: Int64Array, spans: Int64Array) -> Int64Array:
        """Return where in the lane's sequence of begins and ends the ends of some spans stand."""
        end = self._columns.end[rows[spans]]
        empty = end == start[spans]
        inside = np.searchsorted(start, end, side="left")
        if np.any(empty):
            # An empty span ends behind all that begins in its instant, and others end before that.
            inside[empty] = np.searchsorted(start, end[empty], side="right")
        return 2 * inside - self._depth[rows[spans]] - 1

    def _begin_event(self, rows: IndexArray) -> list[BytesColumn]:
        columns = self._columns
        count, name, roles = len(rows), columns.name[rows], self._roles[rows]
        link = varint(columns.link[rows])
        in_args, incomplete = roles == FlowRole.LINK_ARG, ~columns.complete[rows]
        call = [
            self._module.pick(name),
            varint(columns.call[rows], _CALL),
            varint(columns.step[rows], _STEP),
        ]
        if np.any(in_args):
            call.append(varint(columns.link[rows], _LINK).where(in_args))
        if np.any(incomplete):
            call.append(repeat(_COMPLETE + b"\0", count).where(incomplete))
        own_args = [] if self._args is None else [self._args.pick(self._args_index[rows])]
        return [
            *own_args,
            *([] if self._launches is None else [self._launches.pick(self._launch_index[rows])]),
            self._begin.pick(columns.phase[rows].astype(np.int64) * len(self._names) + name),
            _FLOW_TAGS.pick(roles),
            link.where(roles >= FlowRole.BEGIN),
            self._colour.pick(name),
            varint(record_lengths(call)),
            *call,
        ]

    def _overlap(self, lane: int) -> WriteError:
        return WriteError(f"spans on {self._lanes.lanes[lane].name} overlap without one lying in the other")


def _module(fqn: int, module_class: int) -> bytes:
    fields = ((CALL_FIELDS["fqn"], fqn), (CALL_FIELDS["module_class"], module_class))
    return b"".join(varint(np.array([value]), field_tag(number)).text.tobytes() for number, value in fields)


def _launches(flows: CollectiveFlows, span_count: int) -> tuple[Int32Array, ByteTable | None]:
    """Return which flows to collectives each span begins, and all sets of them as bytes; None if there are none."""
    launches = flows.launches()
    if not launches:
        return np.empty(0, np.int32), None
    index = np.zeros(span_count, np.int32)
    index[[*launches]] = np.arange(1, len(launches) + 1)
    events = [TrackEvent(flow_ids_old=ids).SerializeToString() for ids in launches.values()]
    return index, ByteTable([b"", *events])


def _own_args(timeline: Timeline, interned: InternTable) -> tuple[Int32Array, ByteTable | None]:
    """Return which args of its own each span has, and all that occur as bytes; None where there are none."""
    of_modules = module_args(timeline)
    if not of_modules:
        return np.empty(0, np.int32), None
    index = np.zeros(len(timeline.columns), np.int32)
    known: dict[tuple[tuple[str, str], ...], int] = {(): 0}
    for row, span_args in of_modules.items():
        index[row] = known.setdefault(tuple(span_args.items()), len(known))
    return index, ByteTable([_annotations(dict(span_args), interned) for span_args in known])


def _annotations(span_args: Mapping[str, str], interned: InternTable) -> bytes:
    event = TrackEvent()
    for name, text in escaped_span_args(span_args).items():
        event.debug_annotations.add(name_iid=interned.annotations[name], string_value_iid=interned.texts[text])
    serialized: bytes = event.SerializeToString()
    return serialized
