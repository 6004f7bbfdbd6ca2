"""What the rows of a summary stand for: modules, or classes of modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from ..._typing import Int64Array
from ..contents import Name

__all__ = ["GroupBy", "Groups", "group_modules", "outer_modules"]

GroupBy = Literal["module", "class"]


class Groups(NamedTuple):
    """The groups of a timeline's modules, each of which gets a row.

    Attributes:
        fqns: of each group the fully qualified name of its module; empty where a group is a class.
        classes: of each group the class of its modules.
        of_name: int64[names], for each name of the timeline its group.
        inner_name: int64[pairs], a name …
        outer_group: int64[pairs], … and a group that it counts to: its own and, once each, those of the modules that
            contain it by their fully qualified names.
    """

    fqns: list[str]
    classes: list[str]
    of_name: Int64Array
    inner_name: Int64Array
    outer_group: Int64Array

    def __len__(self) -> int:
        return len(self.classes)


def group_modules(names: Sequence[Name], by: GroupBy) -> Groups:
    """Return the groups of all modules, numbered in the order of `names`; names with one `fqn` are one module."""
    class_of: dict[str, str] = {}
    for name in names:
        class_of.setdefault(name.fqn, name.module_class)
    key_of = {fqn: fqn if by == "module" else module_class for fqn, module_class in class_of.items()}
    group_of = {key: group for group, key in enumerate(dict.fromkeys(key_of.values()))}
    outer = outer_modules(list(class_of))
    pairs = [
        (name, group)
        for name, (_, fqn, _) in enumerate(names)
        for group in dict.fromkeys(group_of[key_of[module]] for module in (fqn, *outer[fqn]))
    ]
    inner_name, outer_group = np.array(pairs, np.int64).reshape(-1, 2).T
    return Groups(
        fqns=list(group_of) if by == "module" else [""] * len(group_of),
        classes=[class_of[key] for key in group_of] if by == "module" else list(group_of),
        of_name=np.array([group_of[key_of[name.fqn]] for name in names], np.int64),
        inner_name=inner_name,
        outer_group=outer_group,
    )


def outer_modules(fqns: Sequence[str]) -> dict[str, list[str]]:
    """Return for each fully qualified name those of the others that contain it, the innermost first."""
    known = set(fqns)
    outer: dict[str, list[str]] = {}
    for fqn in fqns:
        parts = fqn.split(".")
        prefixes = (".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
        outer[fqn] = [prefix for prefix in prefixes if prefix in known]
    return outer
