"""`modtrace check`: find what is wrong with a trace."""

from __future__ import annotations

from collections import Counter

import click

__all__ = ["command"]


@click.command("check")
@click.argument("trace")
@click.pass_context
def command(context: click.Context, trace: str) -> None:
    """Check TRACE: Chrome JSON or Perfetto, plain or gzipped, from modtrace or from anything else.

    Of a report's .zip the trace inside is checked, of a ring file what `modtrace convert` makes of it. Prints one line
    per fault that viewers drop, hide or draw wrongly, then a count by rule. Exits with 1 where there is any.
    """
    from ..check import check

    violations = check(trace)
    for violation in violations:
        click.echo(violation)
    for rule, count in Counter(violation.rule for violation in violations).items():
        click.echo(f"{count:8,} {rule}")
    if violations:
        context.exit(1)
    click.echo(f"{trace}: no faults")
