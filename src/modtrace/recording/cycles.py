"""Which steps a recording records: all, or those that a schedule of torch.profiler names, a file for each cycle."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from torch.profiler import ProfilerAction

from .._errors import RecordingError
from .._rank import insert_before_suffixes

__all__ = ["Action", "Cycles", "Schedule"]

Schedule = Callable[[int], ProfilerAction]
"""Number of a step, from 0 → what to do in it; as `torch.profiler.schedule` makes them."""


class Action(Enum):
    """What to do in a step."""

    WAIT = auto()
    PREPARE = auto()
    """Make what events go into: that takes time."""
    RECORD = auto()


class Cycles:
    """Goes through a schedule, step by step.

    Args:
        schedule: None records all steps, in one cycle that has no number.

    Attributes:
        action: what to do in the step that runs.

    Raises:
        RecordingError: the schedule is none.
    """

    def __init__(self, schedule: Schedule | None) -> None:
        if schedule is not None and not callable(schedule):
            raise RecordingError(f"schedule is {schedule!r}; give it as torch.profiler.schedule(wait=…, …) makes it")
        self._schedule = schedule
        self._number = 0
        self._torch_action = self._at(0)
        self.action = _ACTIONS[self._torch_action]

    def path(self, path: str) -> str:
        """Return the path of the cycle that runs or comes next: `a.json` → `a.cycle0.json`."""
        return path if self._schedule is None else insert_before_suffixes(path, f"cycle{self._number}")

    def next(self, step: int) -> bool:
        """Go on to the step of this number; return whether the cycle ended with the one before."""
        last, self._torch_action = self._torch_action, self._at(step)
        self.action = _ACTIONS[self._torch_action]
        return last is ProfilerAction.RECORD_AND_SAVE or (
            last is ProfilerAction.RECORD and self.action is not Action.RECORD
        )

    def begin_next(self) -> None:
        """Give the cycle that comes next its number."""
        self._number += 1

    def _at(self, step: int) -> ProfilerAction:
        action = ProfilerAction.RECORD if self._schedule is None else self._schedule(step)
        if action not in _ACTIONS:
            raise RecordingError(f"schedule({step}) is {action!r}; it must be a torch.profiler.ProfilerAction")
        return action


_ACTIONS = {
    ProfilerAction.NONE: Action.WAIT,
    ProfilerAction.WARMUP: Action.PREPARE,
    ProfilerAction.RECORD: Action.RECORD,
    ProfilerAction.RECORD_AND_SAVE: Action.RECORD,
}
