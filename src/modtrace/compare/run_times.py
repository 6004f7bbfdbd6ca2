"""RunTimes: what one recording says about each module, in a few numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from .._errors import ModtraceError
from .._typing import Int64Array
from ..timeline import Timeline
from .samples import Key, Samples, renamed_fqn, take_samples
from .typical import Typical, likeness, typical

__all__ = ["ENVIRONMENT", "ModuleRun", "RunTimes", "measure_run", "measure_samples", "renamed_run"]

ENVIRONMENT = (
    "modtrace",
    "engine",
    "torch",
    "python",
    "os",
    "cpu",
    "cpus",
    "gpu",
    "gpu_driver",
    "cuda",
    "hip",
    "libraries",
)
"""Which of a recording's metadata can explain a difference."""
_PARTS = 3
"""In how many parts a recording is cut, to see whether the machine drifts."""


class ModuleRun(NamedTuple):
    """A module in one phase of one recording.

    Attributes:
        time: what it typically takes in a step in which it is called.
        steps: how many steps these are.
        calls: the median of its spans in one.
        fewest_calls: the least, but for one step in twenty.
        most_calls: the most, but for one in twenty.
    """

    time: Typical
    steps: int
    calls: int
    fewest_calls: int
    most_calls: int


class RunTimes(NamedTuple):
    """One recording, measured.

    Attributes:
        modules: each module and phase.
        classes: of each module its class, in the order in which they were first called.
        step: what a whole step typically takes.
        step_parts: float[3], the same of each third of the recording; empty where there are too few steps.
        steps: how many steps were measured.
        warm_up: how many were left out at the beginning.
        independent: as how many independent steps they count.
        environment: what of its metadata can explain a difference, as texts.
    """

    modules: Mapping[Key, ModuleRun]
    classes: Mapping[str, str]
    step: Typical
    step_parts: tuple[float, ...]
    steps: int
    warm_up: int
    independent: float
    environment: Mapping[str, str]

    @property
    def drift(self) -> float | None:
        """By what part the last third of the steps is slower than the first; None where there are too few steps."""
        return self.step_parts[-1] / self.step_parts[0] - 1 if self.step_parts else None


def measure_run(timeline: Timeline) -> RunTimes:
    """Measure a recording.

    Raises:
        ModtraceError: no whole step is marked.
    """
    environment = {key: str(timeline.metadata[key]) for key in ENVIRONMENT if timeline.metadata.get(key)}
    return measure_samples(take_samples(timeline), environment)


def measure_samples(samples: Samples, environment: Mapping[str, str]) -> RunTimes:
    """Measure the samples of a recording.

    Args:
        samples: at least one step of them.
        environment: see `RunTimes`.
    """
    alike = likeness(samples.self_ns.values())
    count = len(samples.duration_ns)
    return RunTimes(
        modules={key: _measure(samples.self_ns[key], calls, alike) for key, calls in samples.calls.items()},
        classes=samples.classes,
        step=typical(samples.duration_ns, alike),
        step_parts=_part_times(samples.duration_ns),
        steps=count,
        warm_up=samples.warm_up,
        independent=count * (1 - alike) / (1 + alike),
        environment=environment,
    )


def renamed_run(run: RunTimes, renamed: Mapping[str, str]) -> RunTimes:
    """Return the recording with other names of modules.

    Args:
        run: the recording.
        renamed: names, also of modules that contain others, and what they are called instead.

    Raises:
        ModtraceError: two modules would have one name.
    """
    new_name = {fqn: renamed_fqn(fqn, renamed) for fqn in run.classes}
    if len(set(new_name.values())) < len(new_name):
        raise ModtraceError("two modules would have one name; map each to another one")
    return run._replace(
        modules={(new_name[fqn], phase): module for (fqn, phase), module in run.modules.items()},
        classes={new_name[fqn]: module_class for fqn, module_class in run.classes.items()},
    )


def _measure(self_ns: Int64Array, calls: Int64Array, alike: float) -> ModuleRun:
    in_steps = np.flatnonzero(calls)
    called = calls[in_steps]
    time = typical(self_ns[in_steps], alike)
    fewest = int(np.quantile(called, 0.05, method="lower"))
    most = int(np.quantile(called, 0.95, method="higher"))
    return ModuleRun(time, len(called), max(int(np.median(called)), 1), fewest, most)


def _part_times(duration_ns: Int64Array) -> tuple[float, ...]:
    if len(duration_ns) < 2 * _PARTS:
        return ()
    return tuple(typical(part).time_ns for part in np.array_split(duration_ns, _PARTS))
