"""Two steps of a small checkpointed model, with every time worked out by hand."""

from __future__ import annotations

import numpy as np

from modtrace import Timeline
from modtrace.timeline import BACKWARD, FORWARD, RECOMPUTE, Mark, Name, Process, Slices, Track

__all__ = ["BLOCK", "FC", "MAIN", "MS", "NAMES", "NET", "training"]

MAIN = Process(1, 0)
NET, BLOCK, FC = range(3)
NAMES = (Name("Net", "Net", "Net"), Name("b: Block", "Net.b", "Block"), Name("fc: Block", "Net.b.fc", "Block"))
MS = 1_000_000


def training(marks: tuple[int, ...] = (100, 300)) -> Timeline:
    """Two steps of a checkpointed block, whose inner `fc` runs it again; all times in ms.

    step 0    forward  Net 10────────────40                      mark 100
                         b  15────────35
                           fc 20───30
              backward                    Net 50────────────90
                                            b   55───────85
                                             fc   60────80
                               recompute b          65─75
                               recompute fc           68─72
    step 1    forward  Net 110─120                               mark 300
    """
    rows = [
        (NET, FORWARD, 10, 40, -1, 0),
        (BLOCK, FORWARD, 15, 35, 0, 0),
        (FC, FORWARD, 20, 30, 1, 0),
        (NET, BACKWARD, 50, 90, -1, 0),
        (BLOCK, BACKWARD, 55, 85, 3, 0),
        (FC, BACKWARD, 60, 80, 4, 0),
        (BLOCK, RECOMPUTE, 65, 75, 5, 0),
        (FC, RECOMPUTE, 68, 72, 6, 0),
        (NET, FORWARD, 110, 120, -1, 1),
    ]
    name, phase, start, end, parent, step = zip(*rows, strict=True)
    columns = Slices.of(
        start=np.array(start) * MS,
        end=np.array(end) * MS,
        name=name,
        phase=phase,
        track=[int(p != FORWARD) for p in phase],
        depth=[0, 1, 2, 0, 1, 2, 3, 4, 0],
        parent=parent,
        call=step,
        step=step,
        link=[-1] * len(rows),
        complete=[True] * len(rows),
    )
    tracks = [Track(kind, "MainThread", 1, MAIN) for kind in ("forward", "backward")]
    moments = [Mark(mark * MS, "step", f"step {index}") for index, mark in enumerate(marks)]
    return Timeline(columns, NAMES, tracks, marks=moments, metadata={"engine": "native", "torch": "2.13.0"})
