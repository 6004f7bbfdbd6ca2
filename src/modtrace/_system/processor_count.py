"""How many processors there are for this process."""

from __future__ import annotations

import os

__all__ = ["processor_count"]


def processor_count() -> int:
    """Return how many processors this process may run on, or how many there are where the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
