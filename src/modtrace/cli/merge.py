"""`modtrace merge`: add a recording to a trace of torch.profiler."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ..profiler.trace.trace_file import Progress

__all__ = ["command"]


@click.command("merge")
@click.argument("profile")
@click.argument("recording", required=False)
@click.option("-o", "--output", required=True, metavar="OUT", help=".json, .json.gz or .pftrace.")
@click.option(
    "--attribute/--no-attribute",
    default=True,
    help="Without: no GPU tracks, and backward as recorded, in the time that copying takes.",
)
def command(profile: str, recording: str | None, output: str, attribute: bool) -> None:
    """Write PROFILE, a trace of torch.profiler, with RECORDING's module tracks in it; PROFILE itself is not changed.

    RECORDING is any file that modtrace reads. Without it the module tracks are made from what PROFILE
    knows of modules.
    """
    from ..merging import merge

    with _progress(profile) as progress:
        merged = merge(profile, recording, output, attribute=attribute, progress=progress)
    click.echo(str(merged), err=True)


@contextmanager
def _progress(path: str) -> Iterator[Progress | None]:
    """Show on a terminal how much of the file has been read."""
    if not sys.stderr.isatty() or not os.path.isfile(path):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(os.path.basename(path), total=os.path.getsize(path))
        yield lambda count: bar.update(task, advance=count)
