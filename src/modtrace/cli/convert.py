"""`modtrace convert`: write any trace that modtrace reads in any format that it writes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import click

__all__ = ["command"]

Number = TypeVar("Number", int, float)


def _interval(parse_number: Callable[[str], Number]) -> Callable[[str], tuple[Number | None, Number | None]]:
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


@click.command("convert")
@click.argument("source", metavar="IN")
@click.argument("target", metavar="OUT")
@click.option(
    "--window",
    metavar="START:END",
    type=_interval(float),
    help="Keep what lies between two times, in ms from the first span.",
)
@click.option("--steps", metavar="A:B", type=_interval(int), help="Keep steps A to B, without B; the first is 0.")
@click.option("--modules", metavar="PATTERN", help="Keep modules whose full name matches, as in GPT.blocks.*.")
@click.option("--max-depth", type=click.IntRange(1), metavar="N", help="Keep N levels of modules.")
def command(
    source: str,
    target: str,
    window: tuple[float | None, float | None] | None,
    steps: tuple[int | None, int | None] | None,
    modules: str | None,
    max_depth: int | None,
) -> None:
    """Convert IN, a ring file or anything that modtrace saved, to OUT, whose suffix picks the format.

    The options cut the timeline before it is written: first to steps, then to a window, then to modules.
    """
    from ..read import load
    from ..write import check_writable

    check_writable(target)
    timeline = load(source)
    if steps is not None:
        timeline = timeline.steps(*steps)
    if window is not None and len(timeline.columns):
        first = int(timeline.columns.start[0])
        timeline = timeline.window(*(None if ms is None else first + round(ms * 1e6) for ms in window))
    if modules is not None or max_depth is not None:
        timeline = timeline.modules(modules, max_depth)
    timeline.save(target)
    click.echo(f"{len(timeline.columns)} spans are in {target}", err=True)
