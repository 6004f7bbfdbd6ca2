"""Values by number, as columns hold texts: each different one once, and which of them each is."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

import numpy as np

from .._typing import Int32Array

__all__ = ["number_distinct"]

T = TypeVar("T", bound=Hashable)


def number_distinct(values: Sequence[T]) -> tuple[list[T], Int32Array]:
    """Return the different values in the order in which they appear, and int32[n]: which of these each value is."""
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return list(numbers), np.array([numbers[value] for value in values], np.int32)
