"""Where training steps end."""

from __future__ import annotations

import numpy as np

from ..._typing import Int64Array
from ...ring import Events, Kind

__all__ = ["step_ends"]


def step_ends(events: Events) -> Int64Array:
    """Return the index of the event that ends each training step; its value is the step's number.

    What the user marked counts. Where nothing was marked, a step ends with the last optimizer step that belongs to it.
    """
    marked = np.flatnonzero(events.kind == Kind.STEP)
    if len(marked):
        return marked
    optimizer = np.flatnonzero(events.kind == Kind.OPTIMIZER_STEP)
    number = events.value[optimizer]
    return optimizer[np.append(number[1:] != number[:-1], True)] if len(optimizer) else optimizer
