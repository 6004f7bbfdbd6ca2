"""Chrome's JSON: `.json` and `.json.gz`, one event a line; the same events for a file of their own and for a merge."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import orjson

from .._errors import WriteError
from ..formats.escape import UNNAMED, escaped, escaped_name
from ..formats.header import make_header
from ..formats.limits import MAX_CHROME_NS
from ..formats.slice_args import PARTS_CATEGORY
from ..timeline import LargeTimeline, Timeline
from .atomic_file import atomic_writer
from .chrome_events import span_events
from .lanes import MARKS_ROW, Lanes
from .progress import show_progress
from .slices import chrome_slices, microseconds
from .step_parts import COUNTER_UNIT, PartCounter, part_counters

_EVENTS = 1 << 16
"""How many events are written at a time."""


def write_chrome(timeline: Timeline, path: str | os.PathLike[str], large: LargeTimeline | None = None) -> None:
    """Write Chrome's JSON, as chrome://tracing and Perfetto read it.

    Times are µs with three decimals since `baseTimeNanoseconds` (Unix ns), so that a reader gets every nanosecond.

    Args:
        timeline: what to write.
        path: where.
        large: whose `rest` the timeline is, and whose spans of modules are written with it.

    Raises:
        WriteError: the timeline is longer than eleven days, or the file cannot be written; an existing file is intact.
    """
    base = first_moment(timeline) if large is None else min(first_moment(large.rest), large.start_ns)
    _check_length(timeline, base)
    chrome = ChromeTimeline(
        timeline, Lanes.from_timeline(timeline, large), base, parts=part_counters(timeline, large), large=large
    )
    with atomic_writer(path) as file:
        file.write(b'{"baseTimeNanoseconds":%d,"otherData":' % base)
        file.write(orjson.dumps(chrome.header()))
        file.write(b',\n"traceEvents":[\n')
        separator = b""
        processes = b",\n".join(chrome.process_events())
        parts = itertools.chain([(0, processes)] if processes else [], chrome.events())
        spans = len(timeline.columns) if large is None else large.spans
        for block in show_progress(parts, f"writing {os.path.basename(path)}", spans):
            file.write(separator)
            file.write(block)
            separator = b",\n"
        file.write(b"\n]}\n")


def first_moment(timeline: Timeline) -> int:
    """Return the earliest time in a timeline, in Unix nanoseconds; 0 for an empty one."""
    slices = timeline.slices
    moments = [int(slices.start.min())] if len(slices) else []
    moments += [int(counter.time[0]) for counter in timeline.counters if len(counter.time)]
    return min(moments + [mark.time_ns for mark in timeline.marks], default=0)


def row_metadata_events(pid: int | str, tid: int, name: str, sort_index: int) -> Iterator[bytes]:
    """Yield the two events that name a row of a process and say where it is sorted to; `name` is escaped."""
    yield _metadata_event("thread_name", pid, tid, name=name)
    yield _metadata_event("thread_sort_index", pid, tid, sort_index=sort_index)


@dataclass
class ChromeTimeline:
    """A timeline as a JSON trace holds it: its texts escaped, its spans on rows, its times counted from a base.

    Attributes:
        timeline: what to write.
        lanes: where its spans are drawn.
        base: from which nanosecond on the times count.
        parts: what its steps were spent on.
        resolution_ns: spans whose starts are closer may get one start.
        large: whose `rest` the timeline is, and whose spans of modules are written with it.
    """

    timeline: Timeline
    lanes: Lanes
    base: int
    parts: Sequence[PartCounter]
    resolution_ns: int = 1
    large: LargeTimeline | None = None

    def __post_init__(self) -> None:
        self._names = [escaped_name(name) for name in self.timeline.names]

    def header(self) -> dict[str, object]:
        """Return what the trace says about the recording as a whole, see `formats.header`."""
        return make_header(self.timeline, self.lanes.pids, self.lanes.ids)

    def process_events(self) -> Iterator[bytes]:
        """Yield the processes' names and their order."""
        for index, (process, pid) in enumerate(self.lanes.pids.items()):
            yield _metadata_event("process_name", pid, 0, name=escaped(process.name) or UNNAMED)
            yield _metadata_event("process_sort_index", pid, 0, sort_index=index)

    def events(self) -> Iterator[tuple[int, bytes]]:
        """Yield everything else, some events with commas between them at a time, and how many spans they show."""
        slices = chrome_slices(self.timeline, self.lanes, self.base)
        for events in (self._row_events(), self._mark_events(), self._counter_events(), slices):
            while some := [*itertools.islice(events, _EVENTS)]:
                yield 0, b",\n".join(some)
        for piece, lanes in self.lanes.by_piece(self.timeline, self.large):
            yield from span_events(piece, lanes, self._names, self.base, self.resolution_ns)

    def _row_events(self) -> Iterator[bytes]:
        *indexes, of_marks = self.lanes.sort_indexes or (*range(len(self.lanes.lanes)), -1)
        if self.timeline.marks:
            yield from row_metadata_events(*self.lanes.marks, MARKS_ROW, of_marks)
        for index, lane in zip(indexes, self.lanes.lanes, strict=True):
            yield from row_metadata_events(lane.pid, lane.tid, lane.name, index)

    def _mark_events(self) -> Iterator[bytes]:
        pid, tid = self.lanes.marks
        for mark in self.timeline.marks:
            # On a row of its own: on a thread with spans it would lie between them, and readers have no name for the
            # row of what is global.
            event = {"ph": "i", "s": "t", "pid": pid, "tid": tid, "cat": mark.kind, "name": escaped(mark.text)}
            yield orjson.dumps(event)[:-1] + b',"ts":%s}' % microseconds(mark.time_ns - self.base)

    def _counter_events(self) -> Iterator[bytes]:
        for counter in self.timeline.counters:
            event = {"ph": "C", "pid": self.lanes.pids[counter.process], "name": escaped(counter.name)}
            head = orjson.dumps(event)[:-1] + b',"args":{' + orjson.dumps(escaped(counter.unit))
            for first in range(0, len(counter.time), _EVENTS):
                some = slice(first, first + _EVENTS)
                for time, value in zip(counter.time[some].tolist(), counter.value[some].tolist(), strict=True):
                    yield head + b':%d},"ts":%b}' % (value, microseconds(time - self.base))
        pid = next(iter(self.lanes.pids.values()), 0)
        for part in self.parts:
            event = {"ph": "C", "pid": pid, "cat": PARTS_CATEGORY, "name": escaped(part.name)}
            head = orjson.dumps(event)[:-1] + b',"args":{"%b":' % COUNTER_UNIT.encode()
            for time, ns in zip(part.time.tolist(), part.ns.tolist(), strict=True):
                yield head + b'%b},"ts":%b}' % (orjson.dumps(ns / 1e6), microseconds(time - self.base))


def _check_length(timeline: Timeline, base: int) -> None:
    ends = [int(timeline.slices.end.max(initial=base)), int(timeline.collective_details.done.max(initial=base))]
    ends += [mark.time_ns for mark in timeline.marks]
    ends += [int(counter.time.max(initial=base)) for counter in timeline.counters]
    if max(ends) - base >= MAX_CHROME_NS:
        days = (max(ends) - base) / 86_400e9
        raise WriteError(
            f"the timeline is {days:.1f} days long, and JSON holds 11.5 to the nanosecond; "
            "cut a window out of it, or save it as .pftrace"
        )


def _metadata_event(what: str, pid: int | str, tid: int, **args: object) -> bytes:
    return orjson.dumps({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args})
