"""Renames that the structure suggests: modules that vanished, and others that appeared in their places."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .run_times import RunTimes
from .samples import is_inside, renamed_fqn

__all__ = ["suggest_renames"]

_Shape = tuple[object, ...]


class _Modules:
    """The modules of a recording as a tree by their names.

    Args:
        run: the recording.
        unmatched: which of them the other side does not have.
    """

    def __init__(self, run: RunTimes, unmatched: Collection[str]) -> None:
        self._calls: dict[str, dict[str, int]] = {}
        for (fqn, phase), module in run.modules.items():
            self._calls.setdefault(fqn, {})[phase] = module.calls
        self._classes = run.classes
        self._children: dict[str, list[str]] = {}
        for fqn in run.classes:
            self._children.setdefault(self.parent(fqn), []).append(fqn)
        self.outermost = [fqn for fqn in run.classes if fqn in unmatched and self.parent(fqn) not in unmatched]

    def parent(self, fqn: str) -> str:
        """Return the innermost module that contains one; empty for a root."""
        while fqn:
            fqn = fqn.rpartition(".")[0]
            if fqn in self._classes:
                return fqn
        return ""

    def shape(self, fqn: str) -> _Shape:
        """Return class and calls per step of a module and of all in it, in the order in which they are called."""
        # A model's class is its name: where that changed, what it contains must be the same.
        module_class = self._classes[fqn] if "." in fqn else ""
        children = self._children.get(fqn, [])
        return (module_class, tuple(sorted(self._calls.get(fqn, {}).items())), *map(self.shape, children))


def suggest_renames(base: RunTimes, new: RunTimes) -> dict[str, str]:
    """Return names before and what they may be called after: same class, place, children and calls per step.

    Where several modules of one shape vanished from one place, as many must have appeared there; they are paired in the
    order in which they are called. Names that pairs have in common are listed once: `{"Net.h": "Net.layers"}`.

    Args:
        base: a recording before.
        new: one after.
    """
    before = _Modules(base, base.classes.keys() - new.classes.keys())
    after = _Modules(new, new.classes.keys() - base.classes.keys())
    vanished, appeared = (_by_place(side) for side in (before, after))
    pairs: dict[str, str] = {}
    stayed = base.classes.keys() & new.classes.keys()
    for place, old in vanished.items():
        found = appeared.get(place, [])
        if len(old) == len(found) and (place[1][0] or place[1][2:]):
            pairs.update(_shortest(*pair, stayed) for pair in zip(old, found, strict=True))
    return {old: to for old, to in pairs.items() if _matches(base, new, {old: to}) > len(stayed)}


def _matches(base: RunTimes, new: RunTimes, renamed: Mapping[str, str]) -> int:
    """Return how many modules have the same name on both sides once they are renamed."""
    return len({renamed_fqn(fqn, renamed) for fqn in base.classes} & new.classes.keys())


def _by_place(side: _Modules) -> Mapping[tuple[str, _Shape], list[str]]:
    places: dict[tuple[str, _Shape], list[str]] = {}
    for fqn in side.outermost:
        places.setdefault((side.parent(fqn), side.shape(fqn)), []).append(fqn)
    return places


def _shortest(old: str, new: str, stayed: Collection[str]) -> tuple[str, str]:
    """Return both without the parts at their ends in which they agree, as far as all inside has moved."""
    while True:
        (old_outer, _, old_end), (new_outer, _, new_end) = old.rpartition("."), new.rpartition(".")
        if not (old_outer and new_outer) or old_end != new_end or any(is_inside(fqn, old_outer) for fqn in stayed):
            return old, new
        old, new = old_outer, new_outer
