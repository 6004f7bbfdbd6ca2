"""`modtrace check`: find what is wrong with a trace."""

from __future__ import annotations

from collections import Counter

import click

from ._output import echo, show_reading

__all__ = ["command"]


@click.command("check", short_help="Find faults that viewers hide.")
@click.argument("trace", type=click.Path())
@click.pass_context
def command(context: click.Context, trace: str) -> None:
    """Check TRACE: Chrome JSON or Perfetto, plain or gzipped, from modtrace or from anything else.

    Of a report's .zip the trace inside is checked, of a ring file what `modtrace convert` makes of it. Prints one line
    per fault that viewers drop, hide or draw wrongly, then a count by rule. Exits with 1 where there is any.
    """
    from ..check import check

    with show_reading(trace) as progress:
        violations = check(trace, progress=progress)
    for violation in violations:
        echo(violation)
    for rule, count in Counter(violation.rule for violation in violations).items():
        echo(f"{count:8,} {rule}")
    if violations:
        context.exit(1)
    echo(f"{trace}: no faults")
