"""Chrome's JSON: `.json` and `.json.gz`, one event a line."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator

import orjson

from .._errors import WriteError
from ..formats.escape import UNNAMED, Originals, shown
from ..formats.header import header, shown_names, shown_texts
from ..timeline import Timeline
from .atomic_file import replacing
from .chrome_events import blocks
from .decimal_columns import LONGEST
from .lanes import MARKS, Lanes
from .progress import with_progress

__all__ = ["chrome_events", "write_chrome"]

ABOVE = -1
"""Where the row of steps and marks is sorted to: before that of the first thread."""


def write_chrome(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write Chrome's JSON, as chrome://tracing and Perfetto read it.

    Times are µs with three decimals since `baseTimeNanoseconds` (Unix ns), so that a reader gets every nanosecond.

    Raises:
        WriteError: the timeline is longer than eleven days, or the file cannot be written; an existing file is intact.
    """
    base = first_moment(timeline)
    layout = Layout(timeline)
    with replacing(path) as file:
        file.write(b'{"baseTimeNanoseconds":%d,"otherData":' % base)
        file.write(orjson.dumps(header(timeline, layout.lanes, layout.originals)))
        file.write(b',\n"traceEvents":[\n')
        before = b""
        what = f"writing {os.path.basename(path)}"
        for block in with_progress(_events(timeline, layout, base), what, len(timeline.columns)):
            file.write(before)
            file.write(block)
            before = b",\n"
        file.write(b"\n]}\n")


def chrome_events(timeline: Timeline, base: int, taken: Collection[int] = ()) -> Iterator[bytes]:
    """Yield a timeline's events as JSON texts, each one or more events with commas between them.

    Args:
        timeline: what to write.
        base: Unix nanoseconds from which `ts` counts, no later than `first_moment(timeline)`.
        taken: numbers that the trace already uses as pid or tid, which these events shall not share.
    """
    return (text for _, text in _events(timeline, Layout(timeline, taken), base))


def first_moment(timeline: Timeline) -> int:
    """Return the earliest time in a timeline, in Unix nanoseconds; 0 for an empty one."""
    starts = [timeline.columns.start[:1], *(counter.time[:1] for counter in timeline.counters)]
    moments = [int(start[0]) for start in starts if len(start)]
    return min(moments + [mark.time_ns for mark in timeline.marks], default=0)


class Layout:
    """Where the events go and what they are called."""

    def __init__(self, timeline: Timeline, taken: Collection[int] = ()) -> None:
        self.originals: Originals = {}
        self.names = shown_names(timeline, self.originals)
        shown_texts(timeline, self.originals)
        self.lanes = Lanes.of(timeline, self.originals, taken)


def _events(timeline: Timeline, layout: Layout, base: int) -> Iterator[tuple[int, bytes]]:
    """Yield how many spans, and their text."""
    _check_length(timeline, base)
    for events in (_metadata(timeline, layout), _marks(timeline, layout, base), _counters(timeline, layout, base)):
        text = b",\n".join(events)
        if text:
            yield 0, text
    yield from blocks(timeline, layout.lanes, layout.names, base)


def _check_length(timeline: Timeline, base: int) -> None:
    ends = [int(timeline.columns.end.max(initial=base)), *(mark.time_ns for mark in timeline.marks)]
    ends += [int(counter.time.max(initial=base)) for counter in timeline.counters]
    if max(ends) - base >= LONGEST:
        days = (max(ends) - base) / 86_400e9
        raise WriteError(
            f"the timeline is {days:.1f} days long, and JSON holds 11.5 to the nanosecond; "
            "cut a window out of it, or save it as .pftrace"
        )


def _metadata(timeline: Timeline, layout: Layout) -> Iterator[bytes]:
    def event(what: str, pid: int, tid: int, **said: object) -> bytes:
        return orjson.dumps({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": said})

    for index, (process, pid) in enumerate(layout.lanes.pids.items()):
        yield event("process_name", pid, 0, name=shown(process.name) or UNNAMED)
        yield event("process_sort_index", pid, 0, sort_index=index)
    if timeline.marks:
        yield event("thread_name", *layout.lanes.marks, name=MARKS)
        yield event("thread_sort_index", *layout.lanes.marks, sort_index=ABOVE)
    for index, lane in enumerate(layout.lanes.lanes):
        yield event("thread_name", lane.pid, lane.tid, name=lane.name)
        yield event("thread_sort_index", lane.pid, lane.tid, sort_index=index)


def _marks(timeline: Timeline, layout: Layout, base: int) -> Iterator[bytes]:
    pid, tid = layout.lanes.marks
    for mark in timeline.marks:
        # On a row of its own: on a thread with spans it would lie between them, and readers have no name for the row
        # of what is global.
        event = {"ph": "i", "s": "t", "pid": pid, "tid": tid, "cat": mark.kind, "name": shown(mark.text)}
        yield orjson.dumps(event)[:-1] + b',"ts":%s}' % _microseconds(mark.time_ns - base)


def _counters(timeline: Timeline, layout: Layout, base: int) -> Iterator[bytes]:
    for counter in timeline.counters:
        event = {"ph": "C", "pid": layout.lanes.pids[counter.process], "name": shown(counter.name)}
        head = orjson.dumps(event)[:-1] + b',"args":{' + orjson.dumps(shown(counter.unit))
        for time, value in zip(counter.time.tolist(), counter.value.tolist(), strict=True):
            yield head + b':%d},"ts":%b}' % (value, _microseconds(time - base))


def _microseconds(nanoseconds: int) -> bytes:
    return b"%d.%03d" % divmod(nanoseconds, 1000)
