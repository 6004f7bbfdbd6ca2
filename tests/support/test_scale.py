"""How much an endless test does: little in each run, or with MODTRACE_TEST_EFFORT=full what the README promises.

The same variable picks the hypothesis profile: `ci`, the same few examples in every run, or `full`, many new ones.
"""

from __future__ import annotations

import os

__all__ = ["FULL_EFFORT", "scaled"]

FULL_EFFORT = os.environ.get("MODTRACE_TEST_EFFORT") == "full"


def scaled(quick: int, full: int) -> int:
    """Return one of the two."""
    return full if FULL_EFFORT else quick
