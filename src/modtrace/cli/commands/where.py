"""`modtrace where`: the modules that a live, hung or dead process is in."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from ..output import echo, make_console

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...where import RankState, WhereResult

__all__ = ["where_command"]

REFRESH_S = 1.0


@click.command("where", short_help="Say which modules each process is in.")
@click.argument("rings", type=click.Path(), metavar="RING|DIR...", nargs=-1)
@click.option(
    "--flight-recorder",
    "dumps",
    type=click.Path(),
    metavar="DUMPS",
    multiple=True,
    help="Join dumps of torch's flight recorder: a folder, a pattern or a file whose name ends with the rank.",
)
@click.option("--watch", is_flag=True, help="Look again every second, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array with an object per rank.")
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="json: one object with the sentence, hangs, ranks and errors, as modtrace.where returns them.",
)
@click.option("--stacks", is_flag=True, help="Print Python stacks of running processes too: of py-spy or faulthandler.")
@click.option("--all", "whole", is_flag=True, help="Show all of thousands of ranks, and all that follows from a hang.")
def where_command(
    rings: tuple[str, ...],
    dumps: tuple[str, ...],
    watch: bool,
    as_json: bool,
    output_format: str,
    stacks: bool,
    whole: bool,
) -> None:
    """Say which modules each process is in: phase, class, for how long, how long it usually takes, and the last step.

    RING is a file that a process records to (modtrace.record(ring=...), modtrace run --ring), DIR a folder of them,
    which end in .modtrace. The process may run, hang or be dead. Of several ranks, those that agree stand in one line.
    What a module usually takes is the median of its calls in the last steps that the ring holds; red is what takes ten
    times as long, and at least 5 seconds.

    Where ranks wait in a collective of torch.distributed, a send or a receive, a sentence says which rank has not
    called it, or its other end. Of thousands of ranks only the end of each ring is read, by several processes.
    """
    if not rings and not dumps:
        raise click.UsageError("Missing argument 'RING...'.")
    if output_format == "json" and (watch or stacks or as_json):
        raise click.UsageError("--format json prints all once; leave out --watch, --stacks and --json.")
    if watch and (as_json or stacks):
        raise click.UsageError("--watch goes on; leave out --json and --stacks.")
    if as_json and stacks:
        raise click.UsageError("--json has no Python stacks; leave out --stacks.")
    if as_json and dumps:
        raise click.UsageError("--json is of rings; leave out --flight-recorder.")
    if watch:
        _watch(rings, dumps, whole)
        return
    from ...where import where

    result = where(rings, flight_recorder=dumps)
    if as_json or output_format == "json":
        ranks = [rank.to_json() for rank in result.ranks]
        click.echo(json.dumps(ranks if as_json else result.to_json(), indent=2))
        for error in result.errors:
            echo(f"modtrace: {error}", err=True)
    else:
        make_console().print(_summary(result, whole))
    if stacks:
        _print_stacks(result.ranks)
    if result.errors:
        raise click.exceptions.Exit(1)


def _print_stacks(states: list[RankState]) -> None:
    from ...where import NO_STACKS, python_stacks

    found = [(state.label, python_stacks(state)) for state in states]
    for label, lines in found:
        if lines is not None:
            echo("")
            echo(f"--- {label}")
            for line in lines:
                echo(line)
    if any(lines is None for _, lines in found):
        echo(f"modtrace: {NO_STACKS}", err=True)


def _watch(rings: tuple[str, ...], dumps: tuple[str, ...], whole: bool) -> None:
    console = make_console()
    with contextlib.suppress(KeyboardInterrupt):
        if not console.is_terminal:
            # One table after the other, as a file or a program wants them.
            for result in _read_again_and_again(rings, dumps):
                console.print(_summary(result, whole))
                console.print()
                sys.stdout.flush()
            return
        from rich.live import Live

        with Live(console=console, auto_refresh=False, screen=False) as live:
            for result in _read_again_and_again(rings, dumps):
                live.update(_summary(result, whole), refresh=True)


def _read_again_and_again(rings: tuple[str, ...], dumps: tuple[str, ...]) -> Iterator[WhereResult]:
    from ..._system.processes import ParallelReader
    from ...where import read_job

    with ParallelReader() as reader:
        while True:
            yield read_job(reader, rings, dumps)
            time.sleep(REFRESH_S)


def _summary(result: WhereResult, whole: bool) -> RenderableType:
    from ...where.render import render

    return render(result.groups, result.errors, result.hangs, whole=whole)
