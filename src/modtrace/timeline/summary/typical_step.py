"""The step that stands for all of a recording, and the first ones, which do not count."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..._errors import ModtraceError
from ..._typing import Int64Array
from ..gpu_tracks import without_gpu
from .step_times import StepTimes, measure_steps

if TYPE_CHECKING:
    from ..timeline import Timeline

__all__ = ["find_typical_step", "warm_up_steps"]


def find_typical_step(timeline: Timeline) -> StepTimes:
    """Return the whole step behind the warm-up whose duration is nearest the median of these; the first of equals.

    Raises:
        ModtraceError: no whole step is marked.
    """
    whole = [step for step in measure_steps(without_gpu(timeline)) if step.whole]
    if not whole:
        raise ModtraceError("a recording without whole steps has no typical one; call rec.step() after each step")
    kept = whole[warm_up_steps(np.array([step.duration_ns for step in whole], np.int64)) :]
    durations = np.array([step.duration_ns for step in kept], np.int64)
    return kept[int(np.argmin(np.abs(durations - np.median(durations))))]


def warm_up_steps(duration_ns: Int64Array) -> int:
    """Return how many of the first steps are slower than all that is usual in the second half; at most a half.

    Args:
        duration_ns: int64[n], what each whole step took.
    """
    half = len(duration_ns) // 2
    usual = duration_ns[half:]
    median = np.median(usual)
    spread = np.median(np.abs(usual - median))
    limit = max(median + 6 * spread, 1.05 * median)
    slow = duration_ns[:half] > limit
    return int(np.argmin(slow)) if half and not slow.all() else half
