"""`modtrace summary`: what each module took."""

from __future__ import annotations

from typing import Literal

import click

__all__ = ["command"]


@click.command("summary")
@click.argument("trace")
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "markdown", "csv", "json"]),
    default="table",
    show_default=True,
    help="Times are ms in table and markdown, ns in csv and json.",
)
@click.option(
    "--sort",
    type=click.Choice(["self", "forward", "backward", "recompute", "calls", "name"]),
    default="self",
    show_default=True,
)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Show the first N modules only.")
def command(
    trace: str,
    form: Literal["table", "markdown", "csv", "json"],
    sort: str,
    limit: int | None,
) -> None:
    """Print calls, forward, backward, recompute and self time of each module in TRACE.

    TRACE is a ring file or anything that modtrace saved.
    """
    from ..read import load

    summary = load(trace).summary().top(sort, limit)
    if form == "table":
        from rich.console import Console

        Console().print(summary)
    else:
        write = {"markdown": summary.to_markdown, "csv": summary.to_csv, "json": summary.to_json}[form]
        click.echo(write(), nl=False)
