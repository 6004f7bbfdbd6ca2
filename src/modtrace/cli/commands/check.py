"""`modtrace check`: find what is wrong with a trace."""

from __future__ import annotations

from collections import Counter

import click

from ..._errors import TraceError
from ..output import echo, show_reading

__all__ = ["command"]


@click.command("check", short_help="Find faults that viewers hide.")
@click.argument("traces", type=click.Path(), metavar="TRACE...", nargs=-1, required=True)
@click.pass_context
def command(context: click.Context, traces: tuple[str, ...]) -> None:
    """Check each TRACE: Chrome JSON or Perfetto, plain or gzipped, from modtrace or from anything else.

    Of a report's .zip the trace inside is checked, of a ring file what `modtrace convert` makes of it. Prints one line
    per fault that viewers drop, hide or draw wrongly, then a count by rule. Exits with 1 where there is any, or a file
    cannot be read.
    """
    from ...check import check

    is_good = True
    for trace in traces:
        try:
            with show_reading(trace) as progress:
                violations = check(trace, progress=progress)
        except TraceError as error:
            echo(f"modtrace: {error}", err=True)
            is_good = False
            continue
        for violation in violations:
            echo(violation if len(traces) == 1 else f"{trace}: {violation}")
        for rule, count in Counter(violation.rule for violation in violations).items():
            echo(f"{count:8,} {rule}")
        if violations:
            is_good = False
        else:
            echo(f"{trace}: no faults")
    if not is_good:
        context.exit(1)
