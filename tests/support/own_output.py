"""Standard output for what a job prints itself: the gloo of torch 2.8 prints to it too."""

from __future__ import annotations

import os
import sys

__all__ = ["keep_own_output"]


def keep_own_output() -> None:
    """Send to standard error from now on what libraries print by themselves to standard output."""
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
