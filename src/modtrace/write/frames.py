"""What a flame graph calls spans: the same name for all calls of a module in the same place, so that they add up."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._terminal import printable
from .._typing import Int64Array
from ..timeline import PHASES, RECOMPUTE, Timeline

__all__ = ["Frames", "frames_of"]


class Frames(NamedTuple):
    """The frames of a flame graph.

    Attributes:
        names: each different one.
        frame: int64[spans], index into `names`.
    """

    names: list[str]
    frame: Int64Array


def frames_of(timeline: Timeline) -> Frames:
    """Return the frame of each span: its label (`h.0: Block`), of a recompute with the phase behind it."""
    columns = timeline.columns
    is_recompute = columns.phase == RECOMPUTE
    used, frame = np.unique(columns.name.astype(np.int64) * 2 + is_recompute, return_inverse=True)
    names = [
        printable(timeline.names[key // 2].label) + (f" ({PHASES[RECOMPUTE]})" if key % 2 else "")
        for key in used.tolist()
    ]
    return Frames(names, frame.reshape(-1).astype(np.int64))
