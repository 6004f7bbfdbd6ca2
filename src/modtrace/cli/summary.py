"""`modtrace summary`: a table of the time that each module took."""

from __future__ import annotations

from typing import Literal

import click

from ._output import make_console, show_status

__all__ = ["command"]


@click.command("summary", short_help="Print the time that each module took.")
@click.argument("trace", type=click.Path())
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["table", "markdown", "csv", "json"]),
    default="table",
    show_default=True,
    help="Times are ms in table and markdown, ns in csv and json.",
)
@click.option(
    "--sort",
    type=click.Choice(["self", "gpu", "forward", "backward", "recompute", "calls", "name"]),
    help="[default: gpu where there is GPU time, else self]",
)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Show the first N modules only.")
def command(
    trace: str,
    output_format: Literal["table", "markdown", "csv", "json"],
    sort: str | None,
    limit: int | None,
) -> None:
    """Print calls, forward, backward, recompute and self time of each module in TRACE.

    TRACE is any file that modtrace reads; a merged trace has GPU times and kernels too.
    """
    from ..profiler import read_merged_summary
    from ..read import load, trace_path

    with show_status(f"reading {trace}"), trace_path(trace) as path:
        summary = read_merged_summary(path) or load(path).summary()
    if summary.gpu is None and sort == "gpu":
        raise click.UsageError(f"{trace} has no GPU times; 'modtrace merge' adds them.")
    summary = summary.sort_by(sort, limit)
    if output_format == "table":
        make_console().print(summary)
    else:
        render = {"markdown": summary.to_markdown, "csv": summary.to_csv, "json": summary.to_json}[output_format]
        click.echo(render(), nl=False)
