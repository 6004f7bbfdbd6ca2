"""Budget: what a program's modules take, in a small file that lives beside its code, and recordings held against it.

The file is JSON, with one module of a recording per line, so that a change of it can be read:

    {"format": "modtrace budget", "version": 1, "recordings": [
    {"environment": {"torch": "2.13.0"}, "steps": 29, "warm_up": 1, "independent": 28.3,
    "step": [time_ns, variance, freedom], "step_parts": [time_ns, …], "modules": [
    ["GPT.h.0", "Block", {"forward": [time_ns, variance, freedom, steps, calls, fewest_calls, most_calls]}],
    …

`time_ns` is the mean of the faster half of the steps, `variance` its relative variance as the steps tell it, `freedom`
the degrees of freedom of that; `step_parts` is the same mean of each third of the recording. Numbers have six digits.
"""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._errors import ModtraceError
from .._system.files import open_regular
from ..write.atomic_file import atomic_writer
from .compare import Recorded, compare_runs, measure_side
from .diff_result import Diff
from .run_times import ModuleRun, RunTimes
from .samples import SAMPLED_PHASES, Key
from .typical import Typical

__all__ = ["Budget"]

_FORMAT, _VERSION = "modtrace budget", 1
_MAX_BYTES = 1 << 28
# What any recording may have: least and most.
_TIME = (1.0, 2.0**63)
_VARIANCE = (0.0, 1e6)
_FREEDOM = (0.0, 2.0**53)


@dataclass(frozen=True, slots=True)
class Budget:
    """What the modules of a program take, to hold later recordings against.

    Of each recording that it was made of it has a time for each module and phase, how sure that is, and calls per step.

    Examples:
        >>> modtrace.Budget.of(["base0.pftrace", "base1.pftrace"]).save("budget.json")
        >>> too_slow = modtrace.Budget.load("budget.json").check("new.pftrace").above(0.05)
    """

    _runs: Sequence[RunTimes]

    @classmethod
    def of(cls, recordings: Recorded | Sequence[Recorded]) -> Budget:
        """Make a budget of a timeline, any file that `load` takes, or several of one program: best 5 or more.

        Raises:
            ModtraceError: a recording has no whole steps, or a file cannot be read.
        """
        return cls([run for run, _ in measure_side(recordings)])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Budget:
        """Read a budget.

        Raises:
            ModtraceError: the file cannot be read, or is no budget that this version reads.
        """
        name = os.fspath(path)
        try:
            if os.path.getsize(name) > _MAX_BYTES:
                raise ModtraceError(f"{name}: too large for a budget; 'modtrace budget save' makes one")
            with open_regular(name) as file:
                values = json.load(file)
            return cls(_runs_from(values))
        except OSError as error:
            raise ModtraceError(f"{name}: cannot be read: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModtraceError(f"{name}: no budget; 'modtrace budget save' makes one ({error})") from error

    @property
    def recordings(self) -> int:
        """How many recordings it was made of."""
        return len(self._runs)

    @property
    def steps(self) -> int:
        """How many steps were measured."""
        return sum(run.steps for run in self._runs)

    @property
    def modules(self) -> list[str]:
        """The fully qualified names of the modules, in the order in which they were first called."""
        return list(dict.fromkeys(fqn for run in self._runs for fqn in run.classes))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the budget as JSON, a few kilobytes per recording; the same bytes for the same recordings.

        Raises:
            WriteError: the file cannot be written; an existing file is intact.
        """
        with atomic_writer(path) as file:
            file.write(self.to_json().encode())

    def check(self, new: Recorded | Sequence[Recorded], *, map: Mapping[str, str] | None = None) -> Diff:  # noqa: A002
        """Compare recordings with the budget, as `modtrace.diff` does; `Diff.above(0.05)` says what is too slow.

        Args:
            new: a timeline, any file that `load` takes, or several of one program.
            map: names of modules in the budget and what they are called in the recordings.

        Raises:
            ModtraceError: a recording has no whole steps, or a file cannot be read.
        """
        return compare_runs(self._runs, [run for run, _ in measure_side(new)], map or {})

    def to_json(self) -> str:
        """Return what `save` writes."""
        runs = ",\n".join(_run_to_json(run) for run in self._runs)
        return f'{{"format": "{_FORMAT}", "version": {_VERSION}, "recordings": [\n{runs}\n]}}\n'


def _run_to_json(run: RunTimes) -> str:
    phases: dict[str, dict[str, list[float]]] = {fqn: {} for fqn in run.classes}
    for (fqn, phase), module in run.modules.items():
        phases[fqn][phase] = [*map(_digits, module.time), *module[1:]]
    modules = ",\n".join(json.dumps([fqn, module_class, phases[fqn]]) for fqn, module_class in run.classes.items())
    head = {
        "environment": dict(run.environment),
        "steps": run.steps,
        "warm_up": run.warm_up,
        "independent": _digits(run.independent),
    }
    step = {"step": [*map(_digits, run.step)], "step_parts": [*map(_digits, run.step_parts)]}
    return f'{json.dumps(head)[:-1]},\n{json.dumps(step)[1:-1]}, "modules": [\n{modules}]}}'


def _digits(number: float) -> float:
    """Return a number with six digits: a budget is read by people too."""
    return float(f"{number:.6g}")


def _runs_from(values: Any) -> list[RunTimes]:
    if values["format"] != _FORMAT:
        raise ValueError("its format is another one")
    version = values["version"]
    if version != _VERSION or isinstance(version, bool):
        raise ValueError(f"its version is {_shown(version)}, this modtrace reads {_VERSION}")
    runs = [_run_from(run) for run in values["recordings"]]
    if not runs:
        raise ValueError("it holds no recording")
    return runs


def _run_from(values: Mapping[str, Any]) -> RunTimes:
    steps = _count("steps", values["steps"], 1)
    modules: dict[Key, ModuleRun] = {}
    classes: dict[str, str] = {}
    for fqn, module_class, phases in values["modules"]:
        if _text("modules", fqn) in classes:
            raise ValueError(f"modules: {fqn} is there twice")
        classes[fqn] = _text(fqn, module_class)
        for phase, numbers in phases.items():
            if phase not in SAMPLED_PHASES:
                raise ValueError(f"{fqn}: there is no phase {phase!r}")
            modules[fqn, phase] = _module_run(f"{fqn} {phase}", numbers, steps)
    return RunTimes(
        modules=modules,
        classes=classes,
        step=_typical("step", values["step"]),
        step_parts=tuple(_number("step_parts", part, *_TIME) for part in values["step_parts"]),
        steps=steps,
        warm_up=_count("warm_up", values["warm_up"], 0),
        independent=_number("independent", values["independent"], *_FREEDOM),
        environment={
            _text("environment", key): _text("environment", text) for key, text in values["environment"].items()
        },
    )


def _module_run(field: str, numbers: Sequence[Any], run_steps: int) -> ModuleRun:
    steps, calls, fewest, most = (
        _count(f"{field} {name}", number, 0)
        for name, number in zip(("steps", "calls", "fewest_calls", "most_calls"), numbers[3:], strict=True)
    )
    if min(steps, calls, fewest, most) < 1:
        raise ValueError(f"{field} was never called")
    if steps > run_steps:
        raise ValueError(f"{field} steps: {steps} are more than the recording has, {run_steps}")
    if fewest > most:
        raise ValueError(f"{field} fewest_calls: {fewest} are more than the most, {most}")
    return ModuleRun(_typical(field, numbers[:3]), steps, calls, fewest, most)


def _typical(field: str, values: Sequence[Any]) -> Typical:
    time_ns, variance, freedom = values
    return Typical(
        _number(f"{field} time_ns", time_ns, *_TIME),
        _number(f"{field} variance", variance, *_VARIANCE),
        _number(f"{field} freedom", freedom, *_FREEDOM),
    )


def _number(field: str, value: object, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
        raise ValueError(f"{field}: {_shown(value)} is no number of at least {least:g}")
    if value > most:
        raise ValueError(f"{field}: {_shown(value)} is no number of at most {most:g}")
    return float(value)


def _count(field: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 53:
        raise ValueError(f"{field}: {_shown(value)} is no count")
    return value


def _text(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{field}: {_shown(value)} is no text")
    return value


def _shown(value: object) -> str:
    return reprlib.repr(value)
