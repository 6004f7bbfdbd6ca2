"""Collapsed stacks, one per line with the time spent in it: for flamegraph.pl, speedscope, inferno and others."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from .._terminal import printable
from ..timeline import Timeline, Track
from ..timeline.summary import self_times
from .atomic_file import atomic_writer
from .frames import frames_of

__all__ = ["write_folded"]


def write_folded(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write the self time in ns of each stack of modules (`forward;GPT;h.0: Block;mlp: MLP 12345`).

    A stack begins with what its track is, forward, backward or a GPU, behind the process where there are several. Calls
    of all steps and threads add up.

    Args:
        timeline: what to write.
        path: a `.folded` file.

    Raises:
        WriteError: the file cannot be written; an existing file is intact.
    """
    columns = timeline.columns
    names, frame = frames_of(timeline)
    roots: dict[str, int] = {}
    root_of_track = np.array([roots.setdefault(root, len(roots)) for root in _roots(timeline.tracks)], np.int64)
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
    """Return what the stacks of each track begin with."""
    several = len({track.process for track in tracks}) > 1
    kinds = [track.kind if track.device is None else f"{track.kind} {track.device}" for track in tracks]
    return [f"{track.process.name};{kind}" if several else kind for track, kind in zip(tracks, kinds, strict=True)]
