"""How much an endless test does: little in each run, more with MODTRACE_TEST_EFFORT=full, which `scripts/test --full`
sets, and with MODTRACE_TEST_EFFORT=promised what the README promises, which takes hours.

The same variable picks the profile of hypothesis: 25 examples, 100 or 1,000.
"""

from __future__ import annotations

import os

import pytest

__all__ = ["EFFORT", "PROMISED", "PYTHON_IN_FULL", "scaled"]

EFFORT = os.environ.get("MODTRACE_TEST_EFFORT", "quick")
_EFFORTS = ("quick", "full", "promised")
if EFFORT not in _EFFORTS:
    raise ValueError(f"MODTRACE_TEST_EFFORT is {EFFORT!r}: set it to one of {', '.join(_EFFORTS)}")
PROMISED = EFFORT == "promised"


def scaled(quick: int, full: int, promised: int) -> int:
    """Return the one that `EFFORT` says."""
    return (quick, full, promised)[_EFFORTS.index(EFFORT)]


PYTHON_IN_FULL = pytest.mark.parametrize(
    "engine", ["native", pytest.param("python", marks=pytest.mark.full)], indirect=True
)
"""For a test that runs for both engines, and long, where what it is about is not in the engines."""
