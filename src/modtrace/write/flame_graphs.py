"""Flame graphs: collapsed stacks for flamegraph.pl, inferno and others, and speedscope's own format.

Both call a span the same for all calls of a module in the same place, so that they add up.
"""

import itertools
import os
from collections.abc import Iterator, Sequence

import numpy as np
import orjson

from .._arrays import IndexArray, Int64Array, Numbering
from .._files import atomic_writer
from .._tables import printable
from .._version import __version__
from ..timeline import BACKWARD, FORWARD, PHASES, Timeline, Track
from ..timeline.nesting import self_times
from ..timeline.select import modules_only
from ..timeline.slices import Slices

_SCHEMA = "https://www.speedscope.app/file-format-schema.json"
_BATCH = 10_000
"""The number of events that are written at a time."""


def write_folded(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write the self time in ns of each stack of modules (`forward;GPT;h.0: Block;mlp: MLP 12345`).

    A stack begins with what its track is, forward, backward or a GPU, after the process if there are several. Calls of
    all steps and threads add up. Raises WriteError if the file cannot be written; an existing file is intact.
    """
    columns = timeline.columns
    names, frame = _frames_of(timeline)
    roots = Numbering[str]()
    root_of_track = np.array([roots[root] for root in _roots(timeline.tracks)], np.int64)
    stacks = [printable(root) for root in roots]
    # Level by level: a stack is known by the stack around it and its own frame.
    stack = np.zeros(len(columns), np.int64)
    for depth in range(int(columns.depth.max(initial=-1)) + 1):
        level = np.flatnonzero(columns.depth == depth)
        around = root_of_track[columns.track[level]] if depth == 0 else stack[columns.parent[level]]
        keys, index = np.unique(around * len(names) + frame[level], return_inverse=True)
        stack[level] = len(stacks) + index.reshape(-1)
        stacks += [f"{stacks[key // len(names)]};{names[key % len(names)].replace(';', ',')}" for key in keys.tolist()]
    total = np.zeros(len(stacks), np.int64)
    np.add.at(total, stack, self_times(columns))
    with atomic_writer(path) as file:
        for text, time in zip(stacks, total.tolist(), strict=True):
            if time > 0:
                file.write(f"{text} {time}\n".encode())


def _roots(tracks: Sequence[Track]) -> list[str]:
    """Return the first frame of the stacks of each track."""
    several = len({track.process for track in tracks}) > 1
    kinds = [track.kind if track.device is None else f"{track.kind} {track.device}" for track in tracks]
    return [f"{track.process.name};{kind}" if several else kind for track, kind in zip(tracks, kinds, strict=True)]


def write_speedscope(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write a timeline for https://www.speedscope.app; times are ns from the first span.

    Raises WriteError if the file cannot be written; an existing file is intact.
    """
    timeline = modules_only(timeline)
    columns = timeline.columns
    names, frame = _frames_of(timeline)
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
            events = _events(columns, rows, frame[rows].tolist(), first)
            while batch := ",".join(itertools.islice(events, _BATCH)):
                file.write(separator + batch.encode())
                separator = b",\n"
            file.write(b"]}")
        file.write(b"]}")


def _events(columns: Slices, rows: IndexArray, frames: list[int], first: int) -> Iterator[str]:
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


def _frames_of(timeline: Timeline) -> tuple[list[str], Int64Array]:
    """Return the names of all frames, and int64[spans], the frame of each span by its index.

    A frame is called by the label of its span (`h.0: Block`); a call inside backward has its phase after that
    (`h.0: Block (recompute)`).
    """
    columns = timeline.columns
    # Here BACKWARD means a name without a phase: what an ordinary span of its track has.
    on_backward = np.array([track.kind == "backward" for track in timeline.tracks], np.bool_)
    phase = np.where((columns.phase == FORWARD) & ~on_backward[columns.track], BACKWARD, columns.phase)
    used, frame = np.unique(columns.name.astype(np.int64) * len(PHASES) + phase, return_inverse=True)
    names = []
    for key in used.tolist():
        name, of_phase = divmod(key, len(PHASES))
        names.append(printable(timeline.names[name].label) + (f" ({PHASES[of_phase]})" if of_phase != BACKWARD else ""))
    return names, frame.reshape(-1).astype(np.int64)
