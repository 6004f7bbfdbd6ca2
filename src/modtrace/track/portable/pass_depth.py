"""How many backward passes a thread is inside of.

The engine calls nobody when a pass ends by an exception. The Python stack tells whether a new pass runs inside of the
one before it or follows one that failed.
"""

from __future__ import annotations

import torch

from ..frame_count import count_frames

__all__ = ["backward_nesting_depth"]

_RUN_BACKWARD_CODE = torch.autograd.graph._engine_run_backward.__code__


def backward_nesting_depth() -> int:
    """Return how many passes this thread has called and not returned from; 0 on the engine's own threads."""
    return count_frames(_RUN_BACKWARD_CODE)
