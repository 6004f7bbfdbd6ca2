"""JSON that someone changed: every place in a document, and copies with one place changed."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["Path", "change", "changes", "places"]

Path = tuple[Any, ...]
"""The keys and indices that lead to a value."""

ODD: list[Any] = [None, True, -1, 0, 7, 1.5, 2**63, 2**64 - 1, 1e300, "", "x", [], {}, [[]], {"a": 1}, [None]]


def places(value: Any, path: Path = ()) -> Iterator[Path]:
    """The path to everything in a JSON value."""
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*path, key))


def change(document: Any, path: Path, *value: Any) -> Any:
    """A copy with another value at a path; without a value, with nothing there."""
    whole = copy.deepcopy(document)
    around: Any = whole
    for key in path[:-1]:
        around = around[key]
    if value:
        around[path[-1]] = value[0]
    else:
        del around[path[-1]]
    return whole


def changes(document: Any, count: int, paths: Sequence[Path] | None = None) -> Iterator[Any]:
    """Copies with one thing changed, the same ones in every run."""
    chance = random.Random(0)
    paths = paths or list(places(document))
    for _ in range(count):
        yield change(document, chance.choice(paths), *chance.choice([[], *([odd] for odd in ODD)]))
