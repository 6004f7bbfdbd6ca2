"""The scale of an endless test: small by default, larger with MODTRACE_TEST_EFFORT=full, which `scripts/test --full`
sets, and with MODTRACE_TEST_EFFORT=promised the scale that the README promises, which takes hours.

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
    """Return the argument named by `EFFORT`."""
    return (quick, full, promised)[_EFFORTS.index(EFFORT)]


PYTHON_IN_FULL = pytest.mark.parametrize(
    "engine", ["native", pytest.param("python", marks=pytest.mark.full)], indirect=True
)
"""The mark of a long test that runs for both engines, though its subject is not in the engines."""
