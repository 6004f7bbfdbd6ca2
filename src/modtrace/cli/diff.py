"""`modtrace diff`: what changed between two recordings, and whether that is too much."""

from __future__ import annotations

import sys

import click

from ._options import TableFormat, format_option, modules_option
from ._output import echo, make_console, show_status
from ._selection import no_such_module

__all__ = ["command"]

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


@click.command("diff", short_help="Say which modules became slower or faster.")
@click.argument("base", type=click.Path())
@click.argument("new", type=click.Path())
@format_option
@click.option(
    "-o",
    "--output",
    type=click.Path(),
    help="Write the comparison: .html shows a typical step of each side, coloured by what changed, .pftrace the same "
    "for Perfetto; .md, .csv and .json are tables.",
)
@modules_option
@click.option(
    "--map",
    "name_map",
    metavar="OLD=NEW",
    multiple=True,
    callback=_name_map,
    help="A module of BASE and what it is called in NEW; what it contains follows. Repeatable.",
)
@click.option(
    "--fail-above",
    metavar="SHARE",
    callback=_part,
    help="Exit with 1 where the step or a module is slower by more, with its whole interval: 5% or 0.05.",
)
def command(
    base: str,
    new: str,
    output_format: TableFormat,
    output: str | None,
    modules: str | None,
    name_map: dict[str, str],
    fail_above: float | None,
) -> None:
    """Compare NEW with BASE, two files that modtrace reads, by the self times of modules in each step.

    A verdict holds beside all the others with 95 %: it is corrected for the number of modules. Several recordings a
    side, taken in turns, tell more than one; `modtrace.diff` takes them.
    """
    from ..compare import diff, suffix_of

    if output is not None:
        suffix_of(output)
    with show_status(f"comparing {base} and {new}"):
        found = whole = diff(base, new, map=name_map)
    if modules is not None:
        found = whole.matching(modules)
        if not found.changes:
            raise no_such_module(f"{base} and {new}", modules, whole.changes[0].fqn if whole.changes else "")
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
        echo(f"modtrace: {what} is slower by {change.ratio:.1%}, more than {fail_above:.1%}", err=True)
    if above:
        sys.exit(1)
