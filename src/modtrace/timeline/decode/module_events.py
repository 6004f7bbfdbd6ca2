"""Which events are of modules and nodes."""

from __future__ import annotations

import numpy as np

from ..._typing import BoolArray
from ...ring import Events
from ...ring.slot_format import COMMUNICATION_KINDS, DEVICE_KINDS

__all__ = ["is_of_modules", "module_events"]


def module_events(events: Events) -> Events:
    """Return the events that spans are made of: those of torch.distributed and of devices are found beside them."""
    return events.take(is_of_modules(events))


def is_of_modules(events: Events) -> BoolArray:
    """Tell which these are."""
    chosen: BoolArray = ~np.isin(events.kind, (*COMMUNICATION_KINDS, *DEVICE_KINDS))
    return chosen
