"""Chrome's JSON: `.json` and `.json.gz`, one event a line, for a file of its own or for a merge.

Spans and their flows go from columns to bytes without an object per span. The text of a span consists of four pieces.
Texts that many spans share are made once and looked up. Texts that differ (times, flow ids) are made for thousands of
spans at once, as rows of digits of one width.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import orjson

from .._arrays import AnyArray, IndexArray, Int32Array, Int64Array, ObjectArray, UInt8Array, UInt32Array, number_values
from .._errors import WriteError
from .._files import atomic_writer
from ..formats.chrome_values import microseconds_text
from ..formats.limits import BIND_ID_OFFSET, MAX_CHROME_NS, UNNAMED, escaped, escaped_name
from ..formats.own_table import Checksum, json_table
from ..formats.slice_args import (
    CALLS_NAME,
    FLOW_CATEGORY,
    FLOW_NAME,
    LAUNCH_CATEGORY,
    LAUNCH_NAME,
    PARTS_CATEGORY,
    SharedTexts,
    extra_arg_texts,
    slice_texts,
)
from ..formats.table_bytes import TableWriter, make_header
from ..timeline import PHASES, Pieces, Slices, Timeline
from ..timeline.contents import COMMUNICATION
from ..timeline.slices import Arg, distinct_args
from .lanes import MARKS_ROW, Lane, Lanes
from .slices import CollectiveFlows, FlowRole, flow_roles
from .written_parts import COUNTER_UNIT, PartCounter, WrittenPart, written_parts

_CHUNK = 1 << 14
"""Number of spans whose text is in memory at a time: it fits the CPU's cache."""

_NEXT = b"},\n"
# The texts before and after a span's link, which follows its last arg.
_LINK_TEXT = {
    FlowRole.NO_LINK: (b"}", b""),
    FlowRole.LINK_ARG: (b',"link":', b"}"),
    FlowRole.BIND_OUT: (b'},"flow_out":true,"bind_id":', b""),
    FlowRole.BIND_IN: (b'},"flow_in":true,"bind_id":', b""),
}
_FLOW_BEGIN, _FLOW_END = b'"s"', b'"f","bp":"e"'


def _span_texts(timeline: Timeline, lanes: Lanes, base: int, resolution_ns: int) -> Iterator[tuple[int, bytes]]:
    """Yield the number of spans in each block of up to `_CHUNK` module spans, and their events with commas between.

    `ts` counts from the nanosecond `base`; a reader of the file may not distinguish starts closer than `resolution_ns`.
    """
    columns, names = timeline.columns, [escaped_name(name) for name in timeline.names]
    rows_with_args, args_of, distinct = distinct_args(columns.args)
    arg_texts = _as_objects([b"," + orjson.dumps(extra_arg_texts(args))[1:-1] if args else b"" for args in distinct])
    roles = _chrome_roles(timeline, lanes, resolution_ns)

    @functools.cache
    def head(key: int) -> bytes:
        key, complete = divmod(key, 2)
        key, phase = divmod(key, len(PHASES))
        (label, fqn, module_class), lane = names[key // len(lanes.lanes)], lanes.lanes[key % len(lanes.lanes)]
        args = {"fqn": fqn, "module_class": module_class} | ({} if complete else {"complete": False})
        return _event_head(lane, PHASES[phase], label, args) + b',"call":'

    for first in range(0, len(columns), _CHUNK):
        part = columns.take(slice(first, first + _CHUNK))
        lane = lanes.lane_by_track[part.track]
        # The start of an event as one number, which `head` splits again.
        key = part.name.astype(np.int64) * len(lanes.lanes) + lane
        pieces = np.empty((len(part), 4), object)
        pieces[:, 0] = _format_unique((key * len(PHASES) + part.phase) * 2 + part.complete, head)
        pieces[:, 1] = _format_unique(part.call, lambda call: b'%d,"step":' % call)
        pieces[:, 2] = _format_unique(part.step, lambda step: b"%d" % step)
        args = slice(*np.searchsorted(rows_with_args, (first, first + _CHUNK)))
        pieces[rows_with_args[args] - first, 2] += arg_texts[args_of[args]]
        pieces[:, 3] = _event_suffixes(part, roles[first : first + _CHUNK], lane, lanes, base)
        yield len(part), _joined(pieces)


def _event_head(lane: Lane, category: str, label: str, args: Mapping[str, object]) -> bytes:
    """Return the start of an event, up to the last of `args`."""
    event = {"ph": "X", "pid": lane.pid, "tid": lane.tid, "cat": category, "name": label, "args": args}
    return _NEXT + orjson.dumps(event)[:-2]


def _joined(pieces: ObjectArray) -> bytes:
    """Return the events with commas between them; each event's text starts with the end of the previous event."""
    text = pieces.ravel().tolist()
    text[0] = text[0].removeprefix(_NEXT)
    return b"".join([*text, b"}"])


def _chrome_roles(timeline: Timeline, lanes: Lanes, resolution_ns: int) -> UInt8Array:
    """Return uint8[n], the `FlowRole` of each span.

    A flow event binds to the innermost slice of its row that has started by its time. If two slices start at one time,
    that would be the inner slice, so the slices themselves carry the flow (`bind_id`): always exact, but fewer readers
    know it.
    """
    columns = timeline.columns
    roles = flow_roles(columns)
    crowded = columns.start == columns.end  # at one time a flow event comes before an empty span
    for rows in lanes.rows_by_lane(timeline.columns):
        for first in range(0, len(rows), _CHUNK):
            part = rows[first : first + _CHUNK + 1]
            start = columns.start[part]
            crowded[part[:-1][start[1:] - start[:-1] < resolution_ns]] = True
    starts, ends = _rows_by_link(columns, roles, FlowRole.BEGIN), _rows_by_link(columns, roles, FlowRole.END)
    binds = crowded[starts] | crowded[ends]
    roles[starts[binds]] = FlowRole.BIND_OUT
    roles[ends[binds]] = FlowRole.BIND_IN
    return roles


def _rows_by_link(columns: Slices, roles: UInt8Array, role: FlowRole) -> IndexArray:
    """Return the rows of the spans of one role in order of their links; each link occurs once."""
    rows = np.flatnonzero(roles == role)
    return rows[np.argsort(columns.link[rows])]


def _format_unique(values: AnyArray, form: Callable[[int], bytes]) -> ObjectArray:
    """Return `form(value)` for each value, called once per distinct value."""
    distinct, index = number_values(values)
    return _as_objects([form(value) for value in distinct.tolist()])[index]


def _event_suffixes(columns: Slices, roles: UInt8Array, lane: Int32Array, lanes: Lanes, base: int) -> ObjectArray:
    """Return the ends of the texts of spans: times, links, and the event of a flow that starts or ends there."""
    start, duration = columns.start - base, columns.end - columns.start
    is_negative = start < 0
    start = np.abs(start)
    link = columns.link + np.where(roles >= FlowRole.BIND_OUT, BIND_ID_OFFSET, 0)
    start_digits, duration_digits, link_digits = (digit_count(n) for n in (start // 1000, duration // 1000, link))
    start_width, duration_width = int(start_digits.max()), int(duration_digits.max())
    ts, dur = format_microseconds(start, start_width), format_microseconds(duration, duration_width)
    has_flow_event = (roles == FlowRole.BEGIN) | (roles == FlowRole.END)
    out = np.empty(len(roles), object)
    for rows in _groups(
        roles,
        is_negative,
        np.where(has_flow_event, lane, 0),  # only a flow event names the lane again
        np.where(roles == FlowRole.NO_LINK, 0, link_digits),
        start_digits,
        duration_digits,
    ):
        row = rows[0]
        role = FlowRole(roles[row])
        ts_key = b',"ts":-' if is_negative[row] else b',"ts":'
        ts_text = ts[rows, start_width - start_digits[row] :]
        dur_text = dur[rows, duration_width - duration_digits[row] :]
        link_text = format_decimal(link[rows], int(link_digits[row])) if role != FlowRole.NO_LINK else b""
        if has_flow_event[row]:
            flow = _flow_head(role, lanes, int(lane[row]))
            out[rows] = _join_columns(
                b"}" + ts_key, ts_text, b',"dur":', dur_text, _NEXT + flow, link_text, ts_key, ts_text
            )
        else:
            link_prefix, link_suffix = _LINK_TEXT[role]
            out[rows] = _join_columns(link_prefix, link_text, link_suffix + ts_key, ts_text, b',"dur":', dur_text)
    return out


def _flow_head(role: FlowRole, lanes: Lanes, lane: int) -> bytes:
    """Return the start of a flow event, up to the value of `id`."""
    phase = _FLOW_BEGIN if role is FlowRole.BEGIN else _FLOW_END
    fields = orjson.dumps(lanes.lanes[lane].pid), lanes.lanes[lane].tid, FLOW_CATEGORY.encode(), FLOW_NAME.encode()
    return b'{"ph":%b,"pid":%b,"tid":%d,"cat":"%b","name":"%b","id":' % (phase, *fields)


def _groups(*keys: AnyArray) -> list[IndexArray]:
    """Return groups of rows; the rows of a group have equal keys."""
    key = np.zeros(len(keys[0]), np.int64)
    for values in keys:
        key = key * (int(values.max(initial=0)) + 1) + values
    return [np.flatnonzero(key == value) for value in np.flatnonzero(np.bincount(key))]


def _join_columns(*columns: bytes | UInt8Array) -> list[bytes]:
    """Return the rows of the columns, concatenated row by row; bytes are repeated in every row."""
    count = next(len(column) for column in columns if not isinstance(column, bytes))
    arrays = [
        np.broadcast_to(np.frombuffer(column, np.uint8), (count, len(column))) if isinstance(column, bytes) else column
        for column in columns
    ]
    text = np.ascontiguousarray(np.concatenate(arrays, axis=1))
    rows: list[bytes] = text.view(f"S{text.shape[1]}").ravel().tolist()
    return rows


def _as_objects(texts: Sequence[bytes]) -> ObjectArray:
    objects = np.empty(len(texts), object)
    objects[:] = texts
    return objects


def _other_slices(timeline: Timeline, lanes: Lanes, base: int) -> Iterator[bytes]:
    """Yield the slices of all kinds except modules, and the flows of collectives, in blocks of `_CHUNK` slices."""
    flows = CollectiveFlows(timeline)
    for first in range(len(timeline.columns), len(timeline.slices), _CHUNK):
        rows = np.arange(first, min(first + _CHUNK, len(timeline.slices)))
        part, texts = timeline.slices.take(rows), slice_texts(timeline, rows)
        lane = lanes.lane_by_track[part.track]
        head = functools.partial(_shared_head, texts.shared, lanes.lanes)
        pieces = np.empty((len(rows), 3), object)
        pieces[:, 0] = _format_unique(texts.key * len(lanes.lanes) + lane, head)
        pieces[:, 1] = b""
        for name, column in texts.numbers.items():
            text = b',"%b":' % name.encode() + b"%d"
            pieces[column.rows, 1] += _as_objects([text % value for value in column.values.tolist()])
        no_links = np.zeros(len(rows), np.uint8)
        pieces[:, 2] = _event_suffixes(part, no_links, lane, lanes, base)
        for index, events in _flow_events(timeline, lanes, flows, rows, base):
            pieces[index, 2] += events
        yield _joined(pieces)


def _shared_head(shared: Sequence[SharedTexts], lanes: Sequence[Lane], key: int) -> bytes:
    texts, lane = shared[key // len(lanes)], lanes[key % len(lanes)]
    return _event_head(lane, texts.category, texts.label, texts.args)


def _flow_events(
    timeline: Timeline, lanes: Lanes, flows: CollectiveFlows, rows: Int64Array, base: int
) -> Iterator[tuple[int, bytes]]:
    """Yield (index in `rows`, flow events) for each slice with flow events; the events follow the slice's text."""
    slices = timeline.slices
    for index in np.flatnonzero(flows.has_flow(rows)).tolist():
        row = int(rows[index])
        number = row - flows.first_row
        lane = lanes.lanes[lanes.lane_by_track[slices.track[row]]]
        lane_ids, ts = {"pid": lane.pid, "tid": lane.tid}, microseconds_text(int(slices.start[row]) - base)
        events: list[dict[str, object]] = []
        if flows.flow[number] >= 0:
            phase = "s" if flows.is_first[number] else "f" if flows.is_last[number] else "t"
            flow = {"cat": COMMUNICATION, "name": CALLS_NAME, "id": int(flows.flow[number]), "bp": "e"}
            events.append({"ph": phase, **lane_ids, **flow})
        span = int(flows.launched_by[number])
        if span >= 0:
            launcher = lanes.lanes[lanes.lane_by_track[slices.track[span]]]
            flow = {"cat": LAUNCH_CATEGORY, "name": LAUNCH_NAME, "id": number}
            events.append({"ph": "s", "pid": launcher.pid, "tid": launcher.tid, **flow})
            events.append({"ph": "f", "bp": "e", **lane_ids, **flow})
        yield index, b"".join(_NEXT + orjson.dumps(event)[:-1] + b',"ts":%b' % ts for event in events)


_POWERS = 10 ** np.arange(1, 19, dtype=np.int64)


def _table(count: int, form: str) -> UInt32Array:
    return np.frombuffer("".join(form % number for number in range(count)).encode(), "<u4")


# Four characters in a 32-bit word, so that a number needs only a few look-ups.
_FOUR_DIGITS = _table(10_000, "%04d")
_FRACTION = _table(1_000, ".%03d")


def digit_count(numbers: Int64Array) -> Int64Array:
    """Return the number of decimal digits of each non-negative number."""
    return np.searchsorted(_POWERS, numbers, side="right") + 1


def format_decimal(numbers: Int64Array, digits: int) -> UInt8Array:
    """Return uint8[n, digits], the last `digits` digits of each non-negative number."""
    groups = -(-digits // 4)
    out = np.empty((len(numbers), groups), "<u4")
    _fill_groups(out, numbers, groups)
    return out.view(np.uint8)[:, 4 * groups - digits :]


def format_microseconds(nanoseconds: Int64Array, digits: int) -> UInt8Array:
    """Return uint8[n, digits + 4], non-negative microseconds with leading zeros, a point and three decimals."""
    groups = -(-digits // 4)
    out = np.empty((len(nanoseconds), groups + 1), "<u4")
    microseconds = nanoseconds // 1000
    out[:, groups] = _FRACTION[nanoseconds - microseconds * 1000]
    _fill_groups(out, microseconds, groups)
    return out.view(np.uint8)[:, 4 * groups - digits :]


def _fill_groups(out: UInt32Array, numbers: Int64Array, groups: int) -> None:
    """Write the last `groups` groups of four digits of each number."""
    for group in range(groups - 1, -1, -1):
        higher_digits = numbers // 10_000
        out[:, group] = _FOUR_DIGITS[numbers - higher_digits * 10_000]
        numbers = higher_digits


_EVENTS_PER_BLOCK = 1 << 16
"""Number of events that are written at a time."""


def write_chrome(timeline: Timeline | Pieces, path: str | os.PathLike[str]) -> None:
    """Write Chrome's JSON for chrome://tracing and Perfetto.

    Times are µs with three decimals since `baseTimeNanoseconds` (Unix ns), so that readers get exact nanoseconds.
    Raises WriteError if the timeline is longer than eleven days, or the file cannot be written; an existing file is
    intact.
    """
    table, document = TableWriter(), _Document()
    with atomic_writer(path) as sink:
        file = Checksum(sink.write)
        for block in written_parts(timeline, path, table, document.blocks):
            file.write(block)
        sink.write(json_table(table.finish(), file.value, b"}\n"))


class _Document:
    """A document that is written part by part. The stats and metadata come before the events of a single part.

    {"baseTimeNanoseconds": …, "otherData": {"modtrace": …},
     "traceEvents": [rows and spans of a part …, rows and spans of the next part, marks, counters, other slices …],
     "otherData": {"modtrace": …, "stats": …, "metadata": …}
    """

    def __init__(self) -> None:
        self._lanes: Lanes | None = None
        self._base, self._separator = 0, b""

    def blocks(self, part: WrittenPart) -> Iterator[tuple[int, bytes]]:
        """Yield the text of a part in blocks: the number of spans in a block, and its bytes."""
        timeline, step_parts, first_ns = part
        earlier, is_last = self._lanes, step_parts is not None
        lanes = self._lanes = Lanes.from_timeline(timeline, earlier)
        if earlier is None:
            self._base = first_ns
            header = make_header(timeline)
            other_data = header if is_last else {"modtrace": header["modtrace"]}
            yield 0, b'{"baseTimeNanoseconds":%d,"otherData":%b' % (self._base, orjson.dumps(other_data))
            yield 0, b',\n"traceEvents":[\n'
        _check_length(timeline, self._base)
        chrome = ChromeTimeline(timeline, lanes, self._base, step_parts or [], earlier=earlier)
        processes = b",\n".join(chrome.process_events())
        for size, block in itertools.chain([(0, processes)] if processes else [], chrome.events()):
            yield 0, self._separator
            yield size, block
            self._separator = b",\n"
        if is_last:
            yield 0, b"\n]"
            if earlier is not None:
                yield 0, b',\n"otherData":' + orjson.dumps(make_header(timeline))


def row_metadata_events(pid: int | str, tid: int, name: str, sort_index: int) -> Iterator[bytes]:
    """Yield the two events that define the name (escaped) and the sort index of a process's row."""
    yield _metadata_event("thread_name", pid, tid, name=name)
    yield _metadata_event("thread_sort_index", pid, tid, sort_index=sort_index)


@dataclass
class ChromeTimeline:
    """The events of a timeline in a JSON trace, with escaped texts, rows for spans, and times from a base."""

    timeline: Timeline
    lanes: Lanes  # the rows of its spans
    base: int  # Unix ns at which times are 0
    parts: Sequence[PartCounter]  # the counters of the parts of its steps
    resolution_ns: int = 1  # minimum difference of starts that a reader can distinguish
    earlier: Lanes | None = None  # the lanes of the parts before

    def process_events(self) -> Iterator[bytes]:
        """Yield the events for the names and the order of the processes."""
        for index, (process, pid) in enumerate(self.lanes.pids.items()):
            if self.earlier is None or process not in self.earlier.pids:
                yield _metadata_event("process_name", pid, 0, name=escaped(process.name) or UNNAMED)
                yield _metadata_event("process_sort_index", pid, 0, sort_index=index)

    def events(self) -> Iterator[tuple[int, bytes]]:
        """Yield all other events in blocks: the number of module spans in a block, and its comma-separated events."""
        for events in (self._row_events(), self._mark_events(), self._counter_events()):
            while block := [*itertools.islice(events, _EVENTS_PER_BLOCK)]:
                yield 0, b",\n".join(block)
        yield from ((0, block) for block in _other_slices(self.timeline, self.lanes, self.base))
        yield from _span_texts(self.timeline, self.lanes, self.base, self.resolution_ns)

    def _row_events(self) -> Iterator[bytes]:
        *indexes, marks_index = self.lanes.sort_indexes
        if self.timeline.marks:
            yield from row_metadata_events(*self.lanes.marks, MARKS_ROW, marks_index)
        first = 0 if self.earlier is None else len(self.earlier.lanes)
        for index, lane in zip(indexes[first:], self.lanes.lanes[first:], strict=True):
            yield from row_metadata_events(lane.pid, lane.tid, lane.name, index)

    def _mark_events(self) -> Iterator[bytes]:
        pid, tid = self.lanes.marks
        for mark in self.timeline.marks:
            # Marks have a row of their own: on a thread's row they would be between spans, and readers do not name the
            # row of global events.
            event = {"ph": "i", "s": "t", "pid": pid, "tid": tid, "cat": mark.kind, "name": escaped(mark.text)}
            yield orjson.dumps(event)[:-1] + b',"ts":%s}' % microseconds_text(mark.time_ns - self.base)

    def _counter_events(self) -> Iterator[bytes]:
        for counter in self.timeline.counters:
            event = {"ph": "C", "pid": self.lanes.pids[counter.process], "name": escaped(counter.name)}
            head = orjson.dumps(event)[:-1] + b',"args":{' + orjson.dumps(escaped(counter.unit))
            for first in range(0, len(counter.time), _EVENTS_PER_BLOCK):
                part = slice(first, first + _EVENTS_PER_BLOCK)
                for time, value in zip(counter.time[part].tolist(), counter.value[part].tolist(), strict=True):
                    yield head + b':%d},"ts":%b}' % (value, microseconds_text(time - self.base))
        pid = next(iter(self.lanes.pids.values()), 0)
        for step_part in self.parts:
            event = {"ph": "C", "pid": pid, "cat": PARTS_CATEGORY, "name": escaped(step_part.name)}
            head = orjson.dumps(event)[:-1] + b',"args":{"%b":' % COUNTER_UNIT.encode()
            for time, ns in zip(step_part.time_ns.tolist(), step_part.ns.tolist(), strict=True):
                yield head + b'%b},"ts":%b}' % (orjson.dumps(ns / 1e6), microseconds_text(time - self.base))


def _check_length(timeline: Timeline, base: int) -> None:
    slices = timeline.slices
    ends = [int(slices.end.max(initial=base)), int(slices.arg(Arg.DONE).values.max(initial=base))]
    ends += [mark.time_ns for mark in timeline.marks]
    ends += [int(counter.time.max(initial=base)) for counter in timeline.counters]
    if max(ends) - base >= MAX_CHROME_NS:
        days = (max(ends) - base) / 86_400e9
        raise WriteError(
            f"the timeline is {days:.1f} days long, and JSON holds 11.5 to the nanosecond; "
            "cut a window out of it, or save it as .pftrace"
        )


def _metadata_event(kind: str, pid: int | str, tid: int, **args: object) -> bytes:
    return orjson.dumps({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args})
