"""`modtrace check`: find what is wrong with a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from ..._errors import TraceError
from ..output import echo, show_reading

if TYPE_CHECKING:
    from ...check import Violation

__all__ = ["command"]

MAX_LINES_PER_RULE = 20
OF_PROFILER = ", in what torch.profiler wrote"


@click.command("check", short_help="Find faults that viewers hide.")
@click.argument("traces", type=click.Path(), metavar="TRACE...", nargs=-1, required=True)
@click.option("--strict", is_flag=True, help="Exit with 1 for faults of torch.profiler's own events too.")
@click.pass_context
def command(context: click.Context, traces: tuple[str, ...], strict: bool) -> None:
    """Check each TRACE: Chrome JSON or Perfetto, plain or gzipped, from modtrace or from anything else.

    Of a report's .zip the trace inside is checked, of a ring file what `modtrace convert` makes of it. Prints what
    viewers drop, hide or draw wrongly, the first 20 faults of each rule, then a count by rule. Faults of events that
    torch.profiler wrote are told apart. Exits with 1 where there are others, or a file cannot be read.
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
        for line in _lines(violations):
            # What is said of the file as a whole begins with its name.
            echo(line if len(traces) == 1 and not line.startswith("not-a-trace") else f"{trace}: {line}")
        for (rule, of_profiler), count in _counts(violations).items():
            echo(f"{count:8,} {rule}{OF_PROFILER if of_profiler else ''}")
        if not violations:
            echo(f"{trace}: no faults")
        elif strict or not all(violation.of_profiler for violation in violations):
            is_good = False
    if not is_good:
        context.exit(1)


def _lines(violations: Sequence[Violation]) -> Iterator[str]:
    """Yield the first faults of each rule, and how many more there are."""
    shown: Counter[tuple[str, bool]] = Counter()
    for violation in violations:
        key = (violation.rule, violation.of_profiler)
        shown[key] += 1
        if shown[key] <= MAX_LINES_PER_RULE:
            yield f"{violation}{OF_PROFILER if violation.of_profiler else ''}"
    for (rule, of_profiler), count in shown.items():
        if count > MAX_LINES_PER_RULE:
            yield f"{rule}: and {count - MAX_LINES_PER_RULE:,} more{OF_PROFILER if of_profiler else ''}"


def _counts(violations: Sequence[Violation]) -> Counter[tuple[str, bool]]:
    return Counter((violation.rule, violation.of_profiler) for violation in violations)
