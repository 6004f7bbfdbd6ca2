"""What a flame graph calls spans: the same name for all calls of a module in the same place, so that they add up."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._terminal import printable
from .._typing import Int64Array
from ..timeline import BACKWARD, FORWARD, PHASES, Timeline

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
    """Return the frame of each span: its label (`h.0: Block`), inside backward of a call with its phase behind it."""
    columns = timeline.columns
    on_backward = np.array([track.kind == "backward" for track in timeline.tracks], np.bool_)
    phase = np.where((columns.phase == FORWARD) & ~on_backward[columns.track], BACKWARD, columns.phase)
    used, frame = np.unique(columns.name.astype(np.int64) * len(PHASES) + phase, return_inverse=True)
    names = []
    for key in used.tolist():
        name, of_phase = divmod(key, len(PHASES))
        names.append(printable(timeline.names[name].label) + (f" ({PHASES[of_phase]})" if of_phase != BACKWARD else ""))
    return Frames(names, frame.reshape(-1).astype(np.int64))
