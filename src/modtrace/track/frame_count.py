"""How often a function is on this thread's Python stack."""

from __future__ import annotations

import sys
from types import CodeType, FrameType

__all__ = ["count_frames"]


def count_frames(code: CodeType) -> int:
    """Return how many frames of the calling thread run `code`."""
    count = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        count += frame.f_code is code
        frame = frame.f_back
    return count
