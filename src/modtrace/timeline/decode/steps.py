"""Where training steps end."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..._typing import Int64Array
from ...ring import Events, Kind

__all__ = ["StepEnds", "step_ends"]


class StepEnds(NamedTuple):
    """The ends of training steps, in their order; int64 arrays of equal length.

    Attributes:
        event: index of the event that ends it.
        number: of the step.
        with_passes: whether backward passes end them.
    """

    event: Int64Array
    number: Int64Array
    with_passes: bool = False


def step_ends(events: Events) -> StepEnds:
    """Return where training steps end.

    What the user marked counts. Where nothing was marked, a step ends with the last optimizer step that belongs to it;
    steps of several threads overlap, and are numbered as they end. Where no optimizer stepped, it ends with each
    backward pass that added gradients to leaf tensors; where none did, with each that returned theirs.
    """
    marked = np.flatnonzero(events.kind == Kind.STEP)
    if len(marked):
        return StepEnds(marked, events.value[marked])
    optimizer = np.flatnonzero(events.kind == Kind.OPTIMIZER_STEP)
    if len(optimizer):
        number, last = np.unique(events.value[optimizer][::-1], return_index=True)
        return StepEnds(np.sort(optimizer[::-1][last]), number)
    passes = np.flatnonzero(events.kind == Kind.GRADIENTS)
    passes = passes[events.name[passes] == events.name[passes].min(initial=1)]
    return StepEnds(passes, events.value[passes], len(passes) > 0)
