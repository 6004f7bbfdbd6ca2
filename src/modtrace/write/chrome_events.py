"""Spans and arrows as the text of Chrome events, from columns to bytes without an object per span.

The text of a span is put together from four pieces. What many spans share is made once and looked up; what is different
in each (times, flow ids) is made for thousands of spans at once, as rows of digits of one width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import orjson

from .._typing import AnyArray, IndexArray, Int32Array, ObjectArray, UInt8Array
from ..formats.header import shown_arguments
from ..timeline import PHASES, Columns, Name, Timeline
from .decimal_columns import decimal, microseconds, width
from .flows import arrows
from .lanes import Lanes

__all__ = ["BIND", "blocks"]

CHUNK = 1 << 14
"""Spans whose text is in memory at a time: few enough that the processor's cache holds it."""

BIND = 1 << 32
"""Added to a `bind_id`: Perfetto numbers the flows that are events of their own from 0, in the same space."""

# How a span is part of an arrow. A flow event binds to the innermost slice that has begun by its time; where another
# slice begins on the lane in the same nanosecond, it would bind to that one. There the slices themselves carry the
# flow (`bind_id`), which is always exact but known to fewer readers.
ALONE, LINKED, LEAVES, ARRIVES, BINDS_OUT, BINDS_IN = range(6)

_NEXT = b"},\n"
# What stands around the number that joins a span to others, behind the last of its args.
_TOLD = {
    ALONE: (b"}", b""),
    LINKED: (b',"link":', b"}"),
    BINDS_OUT: (b'},"flow_out":true,"bind_id":', b""),
    BINDS_IN: (b'},"flow_in":true,"bind_id":', b""),
}

Segment = bytes | UInt8Array


def blocks(timeline: Timeline, lanes: Lanes, names: Sequence[Name], base: int) -> Iterator[tuple[int, bytes]]:
    """Yield the events of some thousand spans at a time: how many spans, and the text with commas between events.

    Args:
        timeline: whose spans.
        lanes: where they lie.
        names: the timeline's, as they are to be shown.
        base: Unix nanoseconds from which `ts` counts.
    """
    writer = _Writer(timeline, lanes, names, base)
    for first in range(0, len(timeline.columns), CHUNK):
        last = min(first + CHUNK, len(timeline.columns))
        yield last - first, writer.text(first, last)


class _Writer:
    def __init__(self, timeline: Timeline, lanes: Lanes, names: Sequence[Name], base: int) -> None:
        self._columns = timeline.columns
        self._lanes = lanes
        self._names = [tuple(orjson.dumps(text) for text in name) for name in names]
        self._base = base
        self._arguments = timeline.span_args
        self._with_arguments = np.fromiter(sorted(timeline.span_args), np.int64, len(timeline.span_args))
        self._roles = _roles(timeline, lanes)
        self._heads = functools.cache(self._head)

    def text(self, first: int, last: int) -> bytes:
        """Return the events of the spans from `first` to before `last`. Each piece ends where a comma may follow."""
        part = slice(first, last)
        columns = self._columns.take(part)  # type: ignore[arg-type]
        lane = self._lanes.of_span[part]
        key = columns.name.astype(np.int64) * len(self._lanes.lanes) + lane
        key = (key * len(PHASES) + columns.phase) * 2 + columns.complete
        pieces = np.empty((last - first, 4), object)
        pieces[:, 0] = _looked_up(key, self._heads)
        pieces[:, 1] = _looked_up(columns.call, lambda call: b'%d,"step":' % call)
        pieces[:, 2] = _looked_up(columns.step, lambda step: b"%d" % step)
        for row in self._with_arguments[slice(*np.searchsorted(self._with_arguments, (first, last)))].tolist():
            pieces[row - first, 2] += _arguments(self._arguments[row])
        pieces[:, 3] = _tails(columns, self._roles[part], lane, self._lanes, self._base)
        text = pieces.ravel().tolist()
        # Every event begins with the end of the one before it.
        text[0] = text[0].removeprefix(_NEXT)
        text.append(b"}")
        return b"".join(text)

    def _head(self, key: int) -> bytes:
        key, complete = divmod(key, 2)
        key, phase = divmod(key, len(PHASES))
        name, lane = divmod(key, len(self._lanes.lanes))
        where = self._lanes.lanes[lane]
        label, fqn, module_class = self._names[name]
        return (
            _NEXT
            + b'{"ph":"X","pid":%d,"tid":%d,"cat":"%s","name":%s,"args":{"fqn":%s,"module_class":%s,%s"call":'
            % (
                where.pid,
                where.tid,
                PHASES[phase].encode(),
                label,
                fqn,
                module_class,
                b"" if complete else b'"complete":false,',
            )
        )


def _roles(timeline: Timeline, lanes: Lanes) -> UInt8Array:
    columns = timeline.columns
    roles: UInt8Array = np.where(columns.link >= 0, np.uint8(LINKED), np.uint8(ALONE))
    crowded = columns.start == columns.end  # at one time a flow event comes before an empty span
    for rows in lanes.rows(timeline):
        for first in range(0, len(rows), CHUNK):
            part = rows[first : first + CHUNK + 1]
            start = columns.start[part]
            crowded[part[:-1][start[1:] == start[:-1]]] = True
    for leaves, arrives in arrows(columns):
        binds = crowded[leaves] | crowded[arrives]
        roles[leaves] = np.where(binds, BINDS_OUT, LEAVES)
        roles[arrives] = np.where(binds, BINDS_IN, ARRIVES)
    return roles


def _looked_up(values: AnyArray, make: Callable[[int], bytes]) -> ObjectArray:
    """Return `make(value)` for each value, made once per different one."""
    low, high = int(values.min()), int(values.max())
    if high - low < 4 * len(values):
        places = values - low
        different = np.flatnonzero(np.bincount(places))
        table = np.empty(high - low + 1, object)
        table[different] = [make(low + place) for place in different.tolist()]
    else:
        found, places = np.unique(values, return_inverse=True)
        table = np.array([make(value) for value in found.tolist()], object)
    made: ObjectArray = table[places]
    return made


def _tails(columns: Columns, roles: UInt8Array, lane: Int32Array, lanes: Lanes, base: int) -> ObjectArray:
    """Return what ends the spans: their times, what joins them to others, and the ends of their arrows as events."""
    start, duration = columns.start - base, columns.end - columns.start
    ts, dur = microseconds(start), microseconds(duration)
    number = columns.link + np.where(roles >= BINDS_OUT, BIND, 0)
    apart = (roles == LEAVES) | (roles == ARRIVES)
    out = np.empty(len(roles), object)
    for rows in _groups(
        roles,
        np.where(apart, lane, 0),  # only events of their own say again where they are
        np.where(roles == ALONE, 0, width(number)),
        width(start // 1000),
        width(duration // 1000),
    ):
        row = rows[0]
        role = int(roles[row])
        ts_digits = ts[rows, 12 - int(width(start[row : row + 1] // 1000)[0]) :]
        dur_digits = dur[rows, 12 - int(width(duration[row : row + 1] // 1000)[0]) :]
        digits = decimal(number[rows], int(width(number[row : row + 1])[0])) if role != ALONE else b""
        if role in (LEAVES, ARRIVES):
            where = lanes.lanes[lane[row]]
            kind = b'"s"' if role == LEAVES else b'"f","bp":"e"'
            event = b'{"ph":%s,"pid":%d,"tid":%d,"cat":"call","name":"backward","id":' % (kind, where.pid, where.tid)
            out[rows] = _rows(
                b'},"ts":', ts_digits, b',"dur":', dur_digits, _NEXT + event, digits, b',"ts":', ts_digits
            )
        else:
            before, behind = _TOLD[role]
            out[rows] = _rows(before, digits, behind + b',"ts":', ts_digits, b',"dur":', dur_digits)
    return out


def _groups(*keys: AnyArray) -> list[IndexArray]:
    """Return the rows that agree in all keys, group by group."""
    key = np.zeros(len(keys[0]), np.int64)
    for values in keys:
        key = key * (int(values.max(initial=0)) + 1) + values
    return [np.flatnonzero(key == value) for value in np.flatnonzero(np.bincount(key))]


def _rows(*segments: Segment) -> list[bytes]:
    """Return the rows of the segments side by side; bytes are the same in every row."""
    count = next(len(segment) for segment in segments if not isinstance(segment, bytes))
    columns = [
        np.broadcast_to(np.frombuffer(segment, np.uint8), (count, len(segment)))
        if isinstance(segment, bytes)
        else segment
        for segment in segments
    ]
    text = np.ascontiguousarray(np.concatenate(columns, axis=1))
    rows: list[bytes] = text.view(f"S{text.shape[1]}").ravel().tolist()
    return rows


def _arguments(arguments: Mapping[str, str]) -> bytes:
    texts = shown_arguments(arguments)
    return b"," + orjson.dumps(texts)[1:-1] if texts else b""
