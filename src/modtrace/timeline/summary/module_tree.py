"""The rows of a summary as the tree of their fully qualified names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .groups import outer_modules
from .module_times import ModuleTimes

__all__ = ["TreeRow", "fold_below", "in_tree_order"]

_COUNTED = frozenset(ModuleTimes._fields[ModuleTimes._fields.index("kernel_ns") :]) | {"kernels"}
_SELF_FIELDS = tuple(field for field in ModuleTimes._fields if field.endswith("_self_ns") or field in _COUNTED)


class TreeRow(NamedTuple):
    """A row at its place in the tree.

    Attributes:
        row: the row.
        path: its name below the row around it (`h.0`).
        branch: the lines of the tree in front of it (`│  ├─ `).
    """

    row: ModuleTimes
    path: str
    branch: str


def in_tree_order(rows: Sequence[ModuleTimes]) -> list[TreeRow]:
    """Return each row behind the one that contains it by name; siblings keep the order they have in `rows`."""
    outer = outer_modules([row.fqn for row in rows])
    inner: dict[str | None, list[ModuleTimes]] = {}
    for row in rows:
        inner.setdefault(next(iter(outer[row.fqn]), None), []).append(row)
    ordered: list[TreeRow] = []
    stack = [(row, "", "", "") for row in reversed(inner.get(None, []))]
    while stack:
        row, around, branch, below = stack.pop()
        ordered.append(TreeRow(row, row.fqn[len(around) + 1 if around else 0 :], branch))
        children = inner.get(row.fqn, [])
        for index in range(len(children) - 1, -1, -1):
            turn, straight = ("└─ ", "   ") if index == len(children) - 1 else ("├─ ", "│  ")
            stack.append((children[index], row.fqn, below + turn, below + straight))
    return ordered


def fold_below(rows: Sequence[ModuleTimes], depth: int) -> list[ModuleTimes]:
    """Return the rows on the first `depth` levels; the self times of those below are added to the row around them."""
    outer = outer_modules([row.fqn for row in rows])
    kept = {row.fqn: row for row in rows if len(outer[row.fqn]) < depth}
    for row in rows:
        if row.fqn not in kept:
            around = kept[outer[row.fqn][-depth]]
            sums = {field: getattr(around, field) + getattr(row, field) for field in _SELF_FIELDS}
            kept[around.fqn] = around._replace(**sums)
    return list(kept.values())
