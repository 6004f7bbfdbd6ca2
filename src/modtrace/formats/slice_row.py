"""A slice of what is no span, as the readers of all formats find it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["SliceRow"]


class SliceRow(NamedTuple):
    """A slice of a collective, a wait or a backward pass, as it was read.

    Attributes:
        track: index of its track.
        start: Unix nanoseconds.
        end: Unix nanoseconds.
        name: of the slice.
        args: its args.
    """

    track: int
    start: int
    end: int
    name: str
    args: Mapping[str, Any]
