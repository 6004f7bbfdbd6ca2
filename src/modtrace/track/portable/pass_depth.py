"""How many backward passes a thread is inside of.

The engine calls nobody when a pass ends by an exception. The Python stack tells whether a new pass runs inside of the
one before it or follows one that failed.
"""

from __future__ import annotations

import sys
from types import FrameType

import torch

__all__ = ["backward_nesting_depth"]

_RUN_BACKWARD_CODE = torch.autograd.graph._engine_run_backward.__code__


def backward_nesting_depth() -> int:
    """Return how many passes this thread has called and not returned from; 0 on the engine's own threads."""
    count = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        count += frame.f_code is _RUN_BACKWARD_CODE
        frame = frame.f_back
    return count
