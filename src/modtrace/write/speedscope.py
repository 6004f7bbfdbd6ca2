"""speedscope's own format: one profile per track, with the spans as they nest."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import orjson

from .._terminal import printable
from .._typing import IndexArray
from .._version import __version__
from ..timeline import Columns, Timeline
from .atomic_file import atomic_writer
from .frames import frames_of

__all__ = ["write_speedscope"]

_SCHEMA = "https://www.speedscope.app/file-format-schema.json"
_BATCH = 10_000
"""Events that are written at a time."""


def write_speedscope(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write a timeline for https://www.speedscope.app; times are ns from the first span.

    Args:
        timeline: what to write.
        path: a `.speedscope.json` file.

    Raises:
        WriteError: the file cannot be written; an existing file is intact.
    """
    columns = timeline.columns
    names, frame = frames_of(timeline)
    first = int(columns.start.min()) if len(columns) else 0
    head = {
        "$schema": _SCHEMA,
        "exporter": f"modtrace {__version__}",
        "shared": {"frames": [{"name": name} for name in names]},
    }
    with atomic_writer(path) as file:
        file.write(orjson.dumps(head)[:-1] + b',"profiles":[')
        for index, track in enumerate(timeline.tracks):
            rows = np.flatnonzero(columns.track == index)
            last = int(columns.end[rows].max()) if len(rows) else first
            profile = {
                "type": "evented",
                "name": printable(f"{track.process.name} · {track.name}"),
                "unit": "nanoseconds",
                "startValue": 0,
                "endValue": last - first,
            }
            file.write((b",\n" if index else b"") + orjson.dumps(profile)[:-1] + b',"events":[')
            separator = b""
            for batch in _batches(_events(columns, rows, frame[rows].tolist(), first)):
                file.write(separator + batch)
                separator = b",\n"
            file.write(b"]}")
        file.write(b"]}")


def _events(columns: Columns, rows: IndexArray, frames: list[int], first: int) -> Iterator[str]:
    """Yield the opening and the closing of each span of one track, in the order of time."""
    ends = (columns.end[rows] - first).tolist()
    depths = columns.depth[rows].tolist()
    stack: list[int] = []
    for index, start in enumerate((columns.start[rows] - first).tolist()):
        while stack and depths[stack[-1]] >= depths[index]:
            closed = stack.pop()
            yield f'{{"type":"C","frame":{frames[closed]},"at":{ends[closed]}}}'
        yield f'{{"type":"O","frame":{frames[index]},"at":{start}}}'
        stack.append(index)
    while stack:
        closed = stack.pop()
        yield f'{{"type":"C","frame":{frames[closed]},"at":{ends[closed]}}}'


def _batches(events: Iterator[str]) -> Iterator[bytes]:
    batch: list[str] = []
    for event in events:
        batch.append(event)
        if len(batch) == _BATCH:
            yield ",".join(batch).encode()
            batch.clear()
    if batch:
        yield ",".join(batch).encode()
