"""What a case is, and the list of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .notation import Trees, parse

__all__ = ["CASES", "Case", "Step", "by_hooks", "case"]

Step = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A small model, a step, and what must be told of it.

    Attributes:
        name: what it is called.
        family: the file it stands in.
        about: what it is about, one line.
        make: makes the model and returns the step.
        expected: the trees that must be told, worked out by hand.
        not_live: why trackers that tell open names cannot be asked; None where they can.
        wrong: which of ours are wrong, and why.
        renamed: how names begin here, and how they do for trackers that tell open names, which keep wrappers in them.
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
    """Return why what is built on hooks is wrong: the Python engine and the drop-in trackers."""
    return dict.fromkeys(("Python engine", "modtrace.ModuleTracker", "modtrace.ModTracker"), reason)


def case(
    expected: str,
    *,
    not_live: str | None = None,
    wrong: Mapping[str, str] | None = None,
    renamed: tuple[str, str] | None = None,
) -> Callable[[Callable[[], Step]], Callable[[], Step]]:
    """Make a function a case: its name is the case's, its docstring's first line says what it is about."""

    def add(make: Callable[[], Step]) -> Callable[[], Step]:
        name = make.__name__.replace("_", " ")
        assert name not in CASES, f"there are two cases named {name}"
        about = (make.__doc__ or "").strip().splitlines()[0]
        family = make.__module__.rpartition(".")[2]
        CASES[name] = Case(name, family, about, make, parse(expected), not_live, dict(wrong or {}), renamed)
        return make

    return add
