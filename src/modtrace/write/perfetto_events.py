"""Spans as begin and end packets: the bytes that many share are made once by the package, the rest is spliced in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackEvent

from .._errors import WriteError
from .._typing import IndexArray, Int32Array, Int64Array
from ..formats.header import shown_arguments
from ..timeline import PHASES, Timeline
from ..timeline.nesting import nested
from .flows import arrows
from .lanes import BAND, Lanes
from .perfetto_descriptors import CALL_FIELDS, Numbering
from .protobuf_columns import Field, Table, constant, joined, length, varint

__all__ = ["CHUNK", "Events"]

CHUNK = 1 << 15
"""Spans whose packets are in memory at a time."""


ALONE, LINKED, LEAVES, ARRIVES = range(4)


def _tag(field: int, wire: int = 0) -> bytes:
    """Return what stands before a field: its number and how it is encoded (0: varint, 2: with a length)."""
    return varint(np.array([field << 3 | wire])).text.tobytes()


_PACKET = b"\x0a"  # Trace.packet
_TIMESTAMP = _tag(TracePacket.DESCRIPTOR.fields_by_name["timestamp"].number)
_EVENT = _tag(TracePacket.DESCRIPTOR.fields_by_name["track_event"].number, 2)
# The varint forms: `flow_ids` takes eight bytes for what is two or three.
_LEAVES = _tag(TrackEvent.DESCRIPTOR.fields_by_name["flow_ids_old"].number)
_ARRIVES = _tag(TrackEvent.DESCRIPTOR.fields_by_name["terminating_flow_ids_old"].number)
_FLOWS = Table([b"", b"", _LEAVES, _ARRIVES])
_CALL, _STEP, _LINK, _COMPLETE = (_tag(CALL_FIELDS[name]) for name in ("call", "step", "link", "complete"))
_END = TrackEvent(type=TrackEvent.TYPE_SLICE_END).SerializeToString()


class Events:
    """What the lanes of a timeline have in common when they are written."""

    def __init__(self, timeline: Timeline, lanes: Lanes, numbering: Numbering) -> None:
        self._columns = columns = timeline.columns
        self._names = timeline.names
        self._lanes = lanes
        flat = nested(columns).depth if np.any(columns.start == columns.end) else columns.depth
        self._depth = flat if flat.max(initial=0) < BAND else flat % BAND
        self._roles = np.where(columns.link >= 0, np.uint8(LINKED), np.uint8(ALONE))
        for leaves, arrives in arrows(columns):
            self._roles[leaves] = LEAVES
            self._roles[arrives] = ARRIVES
        described = _tag(numbering.extension, 2)
        self._begin = Table(
            [
                TrackEvent(
                    type=TrackEvent.TYPE_SLICE_BEGIN, category_iids=[1 + phase], name_iid=iid
                ).SerializeToString()
                for phase in range(len(PHASES))
                for iid in numbering.label.tolist()
            ]
        )
        colours = [TrackEvent(correlation_id=1 + fqn) for fqn in numbering.fqn.tolist()]
        self._colour = Table([event.SerializeToString() + described for event in colours])
        modules = zip(numbering.fqn.tolist(), numbering.module_class.tolist(), strict=True)
        self._module = Table([_module(fqn, module_class) for fqn, module_class in modules])
        self._annotations, self._annotation = _annotations(timeline, numbering)

    def of_lane(self, lane: int, sequence: int, rows: IndexArray) -> Iterator[tuple[int, bytes]]:
        """Yield how many spans have ended, and the packets; `rows` are the lane's spans, outermost first."""
        start = self._columns.start[rows]
        whose = _Lane(TracePacket(trusted_packet_sequence_id=sequence).SerializeToString(), int(start[0]))
        carried = np.empty(0, np.int64)
        for first in range(0, len(rows), CHUNK):
            last = min(first + CHUNK, len(rows))
            # A begin stands behind all earlier begins, and the ends of those of them that are no longer open.
            opened = np.arange(first, last)
            begin = 2 * opened - self._depth[rows[opened]]
            upto = 2 * last - int(self._depth[rows[last]]) if last < len(rows) else 2 * last
            open_ = np.concatenate([carried, opened])
            end = self._end_places(rows, start, open_)
            closed = end < upto
            carried = open_[~closed]
            begins, ends = begin - begin[0], end[closed] - begin[0]
            if upto - begin[0] != len(opened) + len(ends):
                raise self._overlap(lane)
            yield len(ends), self._packets(lane, whose, rows[opened], rows[open_[closed]], begins, ends)

    def _end_places(self, rows: IndexArray, start: Int64Array, spans: Int64Array) -> Int64Array:
        """Return where in the lane's sequence of begins and ends the ends of some spans stand."""
        end = self._columns.end[rows[spans]]
        empty = end == start[spans]
        inside = np.searchsorted(start, end, side="left")
        if np.any(empty):
            # An empty span ends behind all that begins in its instant, and others end before that.
            inside[empty] = np.searchsorted(start, end[empty], side="right")
        return 2 * inside - self._depth[rows[spans]] - 1

    def _packets(
        self, lane: int, whose: _Lane, opened: Int64Array, closed: Int64Array, begins: Int64Array, ends: Int64Array
    ) -> bytes:
        count = len(opened) + len(closed)
        time = np.full(count, -1, np.int64)
        time[begins] = self._columns.start[opened]
        time[ends] = self._columns.end[closed]
        delta = np.diff(time, prepend=whose.time)
        if np.any(delta < 0):
            raise self._overlap(lane)
        whose.time = int(time[-1])
        parts = [(begins, self._whole(whose, delta[begins], self._begin_event(opened)))]
        if len(closed):
            parts.append((ends, self._whole(whose, delta[ends], [constant(_END, len(closed))])))
        return joined(parts, count)

    def _whole(self, whose: _Lane, delta: Int64Array, event: list[Field]) -> list[Field]:
        packet = [varint(delta, _TIMESTAMP), varint(length(event), whose.numbered + _EVENT), *event]
        return [varint(length(packet), _PACKET), *packet]

    def _begin_event(self, rows: Int64Array) -> list[Field]:
        columns = self._columns
        count, name, roles = len(rows), columns.name[rows], self._roles[rows]
        link = varint(columns.link[rows])
        linked, incomplete = roles == LINKED, ~columns.complete[rows]
        call = [
            self._module.pick(name),
            varint(columns.call[rows], _CALL),
            varint(columns.step[rows], _STEP),
        ]
        if np.any(linked):
            call.append(varint(columns.link[rows], _LINK).where(linked))
        if np.any(incomplete):
            call.append(constant(_COMPLETE + b"\0", count).where(incomplete))
        annotations = [] if self._annotation is None else [self._annotation.pick(self._annotations[rows])]
        return [
            *annotations,
            self._begin.pick(columns.phase[rows].astype(np.int64) * len(self._names) + name),
            _FLOWS.pick(roles),
            link.where(roles >= LEAVES),
            self._colour.pick(name),
            varint(length(call)),
            *call,
        ]

    def _overlap(self, lane: int) -> WriteError:
        return WriteError(f"spans on {self._lanes.lanes[lane].name} overlap without one lying in the other")


class _Lane:
    """Where the writing of a lane has got to."""

    def __init__(self, numbered: bytes, time: int) -> None:
        self.numbered = numbered
        self.time = time


def _module(fqn: int, module_class: int) -> bytes:
    fields = ((CALL_FIELDS["fqn"], fqn), (CALL_FIELDS["module_class"], module_class))
    return b"".join(_tag(field) + varint(np.array([number])).text.tobytes() for field, number in fields)


def _annotations(timeline: Timeline, numbering: Numbering) -> tuple[Int32Array, Table | None]:
    """Return which arguments each span has, and what these are as bytes."""
    if not timeline.span_args:
        return np.empty(0, np.int32), None
    which = np.zeros(len(timeline.columns), np.int32)
    known: dict[tuple[tuple[str, str], ...], int] = {(): 0}
    for row, arguments in timeline.span_args.items():
        which[row] = known.setdefault(tuple(arguments.items()), len(known))
    return which, Table([_debug(dict(arguments), numbering) for arguments in known])


def _debug(arguments: Mapping[str, str], numbering: Numbering) -> bytes:
    event = TrackEvent()
    for name, text in shown_arguments(arguments).items():
        event.debug_annotations.add(name_iid=numbering.annotations[name], string_value_iid=numbering.texts[text])
    serialized: bytes = event.SerializeToString()
    return serialized
