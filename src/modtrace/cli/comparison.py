"""What the commands that compare recordings share: their options, and how they show what was found."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

import click

from .options import TableFormat
from .output import echo, make_console
from .selection import no_such_module

if TYPE_CHECKING:
    from ..compare import Diff

__all__ = ["fail_above_option", "map_option", "show_comparison"]

LIMIT = 30


def _part(_context: click.Context, _parameter: click.Parameter, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        part = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        part = -1.0
    if not 0 <= part < float("inf"):
        raise click.BadParameter(f"{text!r} is no share, such as 5% or 0.05.")
    if part >= 1 and not text.endswith("%"):
        raise click.BadParameter(f"{text!r} would be {part:.0%}; write {text}% or {part / 100:g}.")
    return part


def _name_map(_context: click.Context, _parameter: click.Parameter, pairs: tuple[str, ...]) -> dict[str, str]:
    names = [pair.partition("=") for pair in pairs]
    for old, sign, new in names:
        if not (old and sign and new):
            raise click.BadParameter(f"{old + sign + new!r} is not OLD=NEW.")
    return {old: new for old, _, new in names}


map_option = click.option(
    "--map",
    "name_map",
    metavar="OLD=NEW",
    multiple=True,
    callback=_name_map,
    help="A module before and what it is called after; what it contains follows. Repeatable.",
)
fail_above_option = click.option(
    "--fail-above",
    metavar="SHARE",
    callback=_part,
    help="Exit with 1 where the step or a module is slower by more, with its whole interval: 5% or 0.05. With --only, "
    "modules alone count.",
)


def show_comparison(
    whole: Diff,
    compared: str,
    output_format: TableFormat,
    output: str | None,
    only: str | None,
    fail_above: float | None,
) -> None:
    """Print a comparison and write it; exit with 1 where something is too slow.

    Args:
        whole: the comparison.
        compared: what was compared, for messages.
        output_format: of what is printed.
        output: the file to write; None: none.
        only: the pattern of the modules to look at; None: all.
        fail_above: by what part something may be slower; None: by any.

    Raises:
        ModtraceError: no module matches, or the file cannot be written.
    """
    found = whole
    if only is not None:
        found = whole.only(only)
        if not found.changes:
            raise no_such_module(compared, only, whole.changes[0].fqn if whole.changes else "")
    if output_format == "table":
        make_console().print(found.to_text(LIMIT), soft_wrap=True)
    else:
        render = {"markdown": found.to_markdown, "csv": found.to_csv, "json": found.to_json}[output_format]
        click.echo(render(), nl=False)
    if output is not None:
        found.save(output)
        echo(f"the comparison is in {output}", err=True)
    above = [] if fail_above is None else found.above(fail_above)
    for change in above:
        what = f"{change.fqn} {change.phase}" if change.fqn else "the step"
        by = f"{change.ratio:.1%}" if math.isfinite(change.ratio) else f"{change.difference_ns / 1e6:.3f} ms"
        echo(f"modtrace: {what} is slower by {by}, more than {fail_above:.1%}", err=True)
    if above:
        sys.exit(1)
