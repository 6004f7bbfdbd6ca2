"""How much an endless test does: little, or with MODTRACE_TEST_EFFORT=full what the README promises."""

from __future__ import annotations

import os

__all__ = ["effort"]


def effort(quick: int, full: int) -> int:
    """Return one of the two."""
    return full if os.environ.get("MODTRACE_TEST_EFFORT") == "full" else quick
