"""A JSON line per step, in a file of bounded length."""

import contextlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from .._errors import ModtraceError
from .follow import Look, RingFollower
from .windows import find_causes

_MAX_LINES = 100_000
_KEPT_FILES = 3
"""Of earlier runs."""
_SLOW_BY, _SLOW_NS = 1.25, 5_000_000
"""A step is asked for its cause if it takes so many times the median of the last ones, and 5 ms more."""


class StepsFile:
    """Writes `steps.jsonl`: rank, pid, step, end_ns (Unix), duration_ns, parts and cause of each step.

    Beyond its bound it keeps every second step, then every fourth, and so on. The file of an earlier run becomes
    `steps.1.jsonl`, or takes the next number; the last three are kept, as of rings.

    Args:
        path: the file; made with the first step.
        say: takes a line for the user.
        max_lines: its bound.
    """

    def __init__(self, path: Path, say: Callable[[str], None], max_lines: int = _MAX_LINES) -> None:
        self._path, self._say, self._max_lines = path, say, max_lines
        self._lines, self._stride = 0, 1

    def add_look(self, follower: RingFollower, look: Look) -> None:
        """Write the steps of a look."""
        steps = [step for step in look.steps if self._stride and step.number % self._stride == 0]
        if not steps:
            return
        causes: dict[int, str] = {}
        with contextlib.suppress(ModtraceError):
            usual = float(np.median([step.training_ns for step in follower.last_steps]))
            slow = [step.number for step in steps if step.training_ns > _SLOW_BY * usual + _SLOW_NS]
            causes = find_causes(follower, slow)
        try:
            if not self._lines:
                self._begin()
            with open(self._path, "a", encoding="utf-8") as file:
                for step in steps:
                    line = {
                        "rank": follower.rank,
                        "pid": follower.pid,
                        "step": step.number,
                        "end_ns": step.end_ns,
                        "duration_ns": step.end_ns - step.start_ns,
                        "parts": step.parts,
                        "cause": causes.get(step.number),
                    }
                    file.write(f"{json.dumps(line)}\n")
            self._lines += len(steps)
            if self._lines > self._max_lines:
                self._thin()
        except OSError as error:
            self._say(f"{self._path}: {error.strerror or error}; no further step is written")
            self._stride = 0

    def close(self) -> None:
        """Do nothing: each look leaves the file whole."""

    def _begin(self) -> None:
        os.makedirs(self._path.parent, exist_ok=True)
        stem, suffix = self._path.stem, self._path.suffix
        numbered = re.compile(rf"{re.escape(stem)}\.(\d{{1,9}}){re.escape(suffix)}")
        numbers = sorted(int(match[1]) for name in os.listdir(self._path.parent) if (match := numbered.fullmatch(name)))
        if self._path.exists():
            numbers.append(numbers[-1] + 1 if numbers else 1)
            self._path.rename(self._path.with_name(f"{stem}.{numbers[-1]}{suffix}"))
        for number in numbers[:-_KEPT_FILES]:
            self._path.with_name(f"{stem}.{number}{suffix}").unlink()

    def _thin(self) -> None:
        """Keep the steps of every second number."""
        self._stride *= 2
        new = self._path.with_suffix(".new")
        self._lines = 0
        with open(self._path, encoding="utf-8") as lines, open(new, "w", encoding="utf-8") as file:
            for line in lines:
                if json.loads(line)["step"] % self._stride == 0:
                    file.write(line)
                    self._lines += 1
        os.replace(new, self._path)
