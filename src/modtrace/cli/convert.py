"""`modtrace convert`: from any file that modtrace reads to any that it writes."""

from __future__ import annotations

import math

import click

__all__ = ["command"]


class Interval(click.ParamType):
    """`A:B`, where a missing end is open."""

    def __init__(self, number: type[int] | type[float]) -> None:
        self._number = number
        self.name = "A:B"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float | None, float | None]:
        """Return both ends, None where one is missing."""
        start, colon, end = value.partition(":")
        try:
            if not colon:
                raise ValueError
            ends = tuple(self._number(text) if text else None for text in (start, end))
            if any(bound is not None and not math.isfinite(bound) for bound in ends):
                raise ValueError
        except ValueError:
            self.fail(f"{value!r} is not A:B, two numbers of which one may be missing", param, ctx)
        return ends[0], ends[1]
