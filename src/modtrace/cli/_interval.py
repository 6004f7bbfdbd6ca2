"""Options that take a range: `A:B`, either of which may be missing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import click

__all__ = ["interval"]

Number = TypeVar("Number", int, float)


def interval(parse_number: Callable[[str], Number]) -> Callable[[str], tuple[Number | None, Number | None]]:
    """Return a parser of `A:B`; a missing bound is None."""

    def parse(text: str) -> tuple[Number | None, Number | None]:
        start, colon, end = text.partition(":")
        try:
            bounds = [parse_number(bound) if bound else None for bound in (start, end)]
        except ValueError:
            colon = ""
        if not colon or any(bound is not None and not math.isfinite(bound) for bound in bounds):
            raise click.BadParameter(f"{text!r} is not A:B, two numbers of which one may be missing.")
        first, last = bounds
        if first is not None and last is not None and last < first:
            raise click.BadParameter(f"{text!r} ends before it starts.")
        return first, last

    return parse
