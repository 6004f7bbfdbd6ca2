"""The class of a case, and the list of all cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .notation import Trees, parse

__all__ = ["CASES", "Case", "Step", "by_hooks", "case"]

Step = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A small model, a step, and the trees that a tracker must report.

    Attributes:
        name: name of the case.
        family: file of the case.
        about: subject of the case, one line.
        make: function that makes the model and returns the step.
        expected: the trees that must be reported, worked out by hand.
        not_live: reason why trackers of open names cannot be asked; None if they can.
        wrong: our trackers that are wrong, with the reason of each.
        renamed: start of the names here and for trackers of open names, whose names keep wrappers.
    """

    name: str
    family: str
    about: str
    make: Callable[[], Step]
    expected: Trees
    not_live: str | None = None
    wrong: Mapping[str, str] = field(default_factory=dict)
    renamed: tuple[str, str] | None = None


CASES: dict[str, Case] = {}


def by_hooks(reason: str) -> dict[str, str]:
    """Return `reason` for each tracker that is built on hooks: the Python engine and the drop-in trackers."""
    return dict.fromkeys(("Python engine", "modtrace.ModuleTracker", "modtrace.ModTracker"), reason)


def case(
    expected: str,
    *,
    not_live: str | None = None,
    wrong: Mapping[str, str] | None = None,
    renamed: tuple[str, str] | None = None,
) -> Callable[[Callable[[], Step]], Callable[[], Step]]:
    """Make a function a case, named after the function and described by the first line of its docstring."""

    def add(make: Callable[[], Step]) -> Callable[[], Step]:
        name = make.__name__.replace("_", " ")
        assert name not in CASES, f"there are two cases named {name}"
        about = (make.__doc__ or "").strip().splitlines()[0]
        family = make.__module__.rpartition(".")[2]
        CASES[name] = Case(name, family, about, make, parse(expected), not_live, dict(wrong or {}), renamed)
        return make

    return add
