"""Flame graphs: collapsed stacks for flamegraph.pl, inferno and others, and speedscope's own format.

In both, all calls of a module in the same place have the same name, so that they add up.
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
"""Number of events that are written at a time."""


def write_folded(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write the self time in ns of each stack of modules (`forward;GPT;h.0: Block;mlp: MLP 12345`).

    A stack starts with the process, if there are several, and the kind of its track: forward, backward or a GPU. Calls
    of all steps and threads add up. Raises WriteError if the file cannot be written; an existing file is intact.
    """
    columns = timeline.columns
    names, frame = _name_frames(timeline)
    roots = Numbering[str]()
    root_of_track = np.array([roots[root] for root in _roots(timeline.tracks)], np.int64)
    stacks = [printable(root) for root in roots]
    # Level by level: the outer stack and the frame of a span identify its stack.
    stack = np.zeros(len(columns), np.int64)
    for depth in range(int(columns.depth.max(initial=-1)) + 1):
        level = np.flatnonzero(columns.depth == depth)
        outer_stack = root_of_track[columns.track[level]] if depth == 0 else stack[columns.parent[level]]
        keys, index = np.unique(outer_stack * len(names) + frame[level], return_inverse=True)
        stack[level] = len(stacks) + index.reshape(-1)
        stacks += [f"{stacks[key // len(names)]};{names[key % len(names)].replace(';', ',')}" for key in keys.tolist()]
    total = np.zeros(len(stacks), np.int64)
    np.add.at(total, stack, self_times(columns))
    with atomic_writer(path) as file:
        for text, time in zip(stacks, total.tolist(), strict=True):
            if time > 0:
                file.write(f"{text} {time}\n".encode())


def _roots(tracks: Sequence[Track]) -> list[str]:
    """Return the first frames of the stacks of each track."""
    multiprocess = len({track.process for track in tracks}) > 1
    kinds = [track.kind if track.device is None else f"{track.kind} {track.device}" for track in tracks]
    return [f"{track.process.name};{kind}" if multiprocess else kind for track, kind in zip(tracks, kinds, strict=True)]


def write_speedscope(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write a timeline for https://www.speedscope.app; times are ns from the first span.

    Raises WriteError if the file cannot be written; an existing file is intact.
    """
    timeline = modules_only(timeline)
    columns = timeline.columns
    names, frame = _name_frames(timeline)
    first_ns = int(columns.start.min()) if len(columns) else 0
    head = {
        "$schema": _SCHEMA,
        "exporter": f"modtrace {__version__}",
        "shared": {"frames": [{"name": name} for name in names]},
    }
    with atomic_writer(path) as file:
        file.write(orjson.dumps(head)[:-1] + b',"profiles":[')
        for index, track in enumerate(timeline.tracks):
            rows = np.flatnonzero(columns.track == index)
            last_ns = int(columns.end[rows].max()) if len(rows) else first_ns
            profile = {
                "type": "evented",
                "name": printable(f"{track.process.name} · {track.name}"),
                "unit": "nanoseconds",
                "startValue": 0,
                "endValue": last_ns - first_ns,
            }
            file.write((b",\n" if index else b"") + orjson.dumps(profile)[:-1] + b',"events":[')
            separator = b""
            events = _events(columns, rows, frame[rows].tolist(), first_ns)
            while batch := ",".join(itertools.islice(events, _BATCH)):
                file.write(separator + batch.encode())
                separator = b",\n"
            file.write(b"]}")
        file.write(b"]}")


def _events(columns: Slices, rows: IndexArray, frames: list[int], first_ns: int) -> Iterator[str]:
    """Yield the open and the close event of each span of one track, in time order."""
    ends = (columns.end[rows] - first_ns).tolist()
    depths = columns.depth[rows].tolist()
    stack: list[int] = []
    for index, start in enumerate((columns.start[rows] - first_ns).tolist()):
        while stack and depths[stack[-1]] >= depths[index]:
            span = stack.pop()
            yield f'{{"type":"C","frame":{frames[span]},"at":{ends[span]}}}'
        yield f'{{"type":"O","frame":{frames[index]},"at":{start}}}'
        stack.append(index)
    while stack:
        span = stack.pop()
        yield f'{{"type":"C","frame":{frames[span]},"at":{ends[span]}}}'


def _name_frames(timeline: Timeline) -> tuple[list[str], Int64Array]:
    """Return the names of all frames, and int64[spans], the index of each span's frame.

    The name of a frame is the label of its span (`h.0: Block`), followed by the phase for a call inside backward
    (`h.0: Block (recompute)`).
    """
    columns = timeline.columns
    # Here BACKWARD means a name without a phase, as an ordinary span of its track has.
    on_backward = np.array([track.kind == "backward" for track in timeline.tracks], np.bool_)
    span_phase = np.where((columns.phase == FORWARD) & ~on_backward[columns.track], BACKWARD, columns.phase)
    keys, frame = np.unique(columns.name.astype(np.int64) * len(PHASES) + span_phase, return_inverse=True)
    names = []
    for key in keys.tolist():
        name, phase = divmod(key, len(PHASES))
        names.append(printable(timeline.names[name].label) + (f" ({PHASES[phase]})" if phase != BACKWARD else ""))
    return names, frame.reshape(-1).astype(np.int64)
