"""Our slices as the JSON text of Chrome events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import orjson

from ..._typing import Int64Array
from ...formats.escape import UNNAMED, shown
from ...timeline import PHASES, Timeline
from ...write.flows import arrows
from ..attribute.gpu_work import StreamSpans
from ..attribute.module_times import NO_MODULE
from .double_safe_nesting import seat
from .trace_rows import Row

__all__ = ["DEEPEST", "device_events", "row_events", "timeline_events"]

DEEPEST = 512
"""Levels of a row that the trace processor keeps; it drops what lies deeper without a word."""

_BLOCK = 1 << 12


def row_events(rows: Sequence[Row]) -> Iterator[bytes]:
    """Yield names and places of rows."""
    for row in rows:
        for what, args in (
            ("thread_name", {"name": shown(row.name)}),
            ("thread_sort_index", {"sort_index": row.order}),
        ):
            yield orjson.dumps({"ph": "M", "name": what, "pid": row.pid, "tid": row.tid, "args": args})


def timeline_events(timeline: Timeline, rows: Sequence[Row], marks: Row, step: int) -> Iterator[bytes]:
    """Yield slices, arrows from forward to backward, marks and counters, several events with commas at a time.

    Args:
        timeline: in ns from the trace's base.
        rows: of each track.
        marks: that of steps and marks; named here, where there are any.
        step: as of `seat.step_of`.
    """
    columns = timeline.columns
    start, length = seat(
        columns.track.astype(np.int64), columns.start, columns.end, columns.parent, columns.depth, step
    )
    labels = [orjson.dumps(shown(name.label) or UNNAMED) for name in timeline.names]
    said = [
        orjson.dumps({"fqn": shown(name.fqn), "module_class": shown(name.module_class)})[:-1] for name in timeline.names
    ]
    places = [b'"pid":%b,"tid":%d' % (orjson.dumps(row.pid), row.tid) for row in rows]
    phases = [phase.encode() for phase in PHASES]
    for first in range(0, len(columns), _BLOCK):
        part = slice(first, first + _BLOCK)
        texts = [
            b'{"ph":"X","cat":"%b","name":%b,%b,"ts":%b,"dur":%b,"args":%b,"call":%d,"step":%d%b}}'
            % (
                phases[phase],
                labels[name],
                places[track],
                _microseconds(begin),
                _microseconds(duration),
                said[name],
                call,
                number,
                b"" if complete else b',"incomplete":true',
            )
            for phase, name, track, begin, duration, call, number, complete, depth in zip(
                columns.phase[part].tolist(),
                columns.name[part].tolist(),
                columns.track[part].tolist(),
                start[part].tolist(),
                length[part].tolist(),
                columns.call[part].tolist(),
                columns.step[part].tolist(),
                columns.complete[part].tolist(),
                columns.depth[part].tolist(),
                strict=True,
            )
            if depth < DEEPEST
        ]
        if texts:
            yield b",\n".join(texts)
    yield from _arrows(timeline, places, start)
    yield from _moments(timeline, marks)


def device_events(timeline: Timeline, slices: StreamSpans, rows: dict[int, Row], step: int) -> Iterator[bytes]:
    """Yield the slices above the streams, several events with commas at a time."""
    start, length = seat(slices.track, slices.start, slices.end, slices.parent, slices.depth, step)
    columns = timeline.columns
    texts: list[bytes] = []
    fields = zip(
        slices.track.tolist(), start.tolist(), length.tolist(), slices.span.tolist(), slices.work.tolist(), strict=True
    )
    for track, begin, duration, span, work in fields:
        row = rows[track]
        event: dict[str, Any] = {"ph": "X", "cat": "gpu", "name": NO_MODULE, "pid": row.pid, "tid": row.tid}
        args: dict[str, Any] = {"gpu_work": work}
        if span >= 0:
            name = timeline.names[columns.name[span]]
            event |= {"cat": PHASES[columns.phase[span]], "name": shown(name.label) or UNNAMED}
            args = {
                "fqn": shown(name.fqn),
                "module_class": shown(name.module_class),
                "call": int(columns.call[span]),
                "step": int(columns.step[span]),
            } | args
        event["args"] = args
        times = b',"ts":%b,"dur":%b}' % (_microseconds(begin), _microseconds(duration))
        texts.append(orjson.dumps(event)[:-1] + times)
        if len(texts) == _BLOCK:
            yield b",\n".join(texts)
            texts.clear()
    if texts:
        yield b",\n".join(texts)


def _arrows(timeline: Timeline, places: Sequence[bytes], start: Int64Array) -> Iterator[bytes]:
    columns = timeline.columns
    identity = 0
    for leaves, arrives in arrows(columns):
        seen = (columns.depth[leaves] < DEEPEST) & (columns.depth[arrives] < DEEPEST)
        texts: list[bytes] = []
        for leave, arrive in zip(leaves[seen].tolist(), arrives[seen].tolist(), strict=True):
            for at, phase, more in ((leave, b"s", b""), (arrive, b"f", b',"bp":"e"')):
                texts.append(
                    b'{"ph":"%b","cat":"modtrace","name":"backward","id":%d,%b,"ts":%b%b}'
                    % (phase, identity, places[columns.track[at]], _microseconds(int(start[at])), more)
                )
            identity += 1
        if texts:
            yield b",\n".join(texts)


def _moments(timeline: Timeline, row: Row) -> Iterator[bytes]:
    pid = orjson.dumps(row.pid)
    # Of a sync mark the profiler has a slice of its own.
    marks = [mark for mark in timeline.marks if mark.kind != "sync"]
    if marks:
        yield from row_events([row])
    for mark in marks:
        yield b'{"ph":"i","s":"t","cat":%b,"name":%b,"pid":%b,"tid":%d,"ts":%b}' % (
            orjson.dumps(mark.kind),
            orjson.dumps(shown(mark.text)),
            pid,
            row.tid,
            _microseconds(mark.time_ns),
        )
    for counter in timeline.counters:
        name, unit = orjson.dumps(shown(counter.name)), orjson.dumps(shown(counter.unit))
        for time, value in zip(counter.time.tolist(), counter.value.tolist(), strict=True):
            yield b'{"ph":"C","name":%b,"pid":%b,"ts":%b,"args":{%b:%d}}' % (
                name,
                pid,
                _microseconds(time),
                unit,
                value,
            )


def _microseconds(nanoseconds: int) -> bytes:
    return b"%d.%03d" % divmod(nanoseconds, 1000)
