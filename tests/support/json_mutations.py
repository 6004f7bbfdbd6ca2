"""Mutations of JSON documents: the path to everything in one, and copies with one thing changed."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["Path", "all_paths", "mutated", "mutations"]

Path = tuple[Any, ...]
"""The keys and indices that lead to a value."""

ODD: list[Any] = [None, True, -1, 0, 7, 1.5, 2**63, 2**64 - 1, 1e300, "", "x", [], {}, [[]], {"a": 1}, [None]]


def all_paths(value: Any, path: Path = ()) -> Iterator[Path]:
    """The path to everything in a JSON value."""
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from all_paths(item, (*path, key))


def mutated(document: Any, path: Path, *value: Any) -> Any:
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


def mutations(document: Any, count: int, paths: Sequence[Path] | None = None) -> Iterator[Any]:
    """Copies with one thing changed, the same ones in every run."""
    chance = random.Random(0)
    paths = paths or list(all_paths(document))
    for _ in range(count):
        yield mutated(document, chance.choice(paths), *chance.choice([[], *([odd] for odd in ODD)]))
