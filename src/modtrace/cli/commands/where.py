"""`modtrace where`: the modules that a live, hung or dead process is in."""

import contextlib
import sys
import time
from typing import TYPE_CHECKING

import click

from ..._tables import counted, printable
from ..options import TextFormat, echo, make_console, say, text_or_json_option

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...live.where import WhereResult

REFRESH_S = 1.0


@click.command("where")
@click.argument("rings", type=click.Path(), metavar="RING|DIR...", nargs=-1)
@click.option("--watch", is_flag=True, help="Refresh every second, until Ctrl-C.")
@click.option("--stacks", is_flag=True, help="Also print Python stacks of live processes, by py-spy or faulthandler.")
@click.option("--all", "show_all", is_flag=True, help="Do not shorten the lists of ranks and hangs.")
@click.option(
    "--flight-recorder",
    "dumps",
    type=click.Path(),
    metavar="DUMPS",
    multiple=True,
    help="Join dumps of torch's flight recorder: a folder, a pattern or a file whose name ends with the rank.",
)
@text_or_json_option
def where_command(
    rings: tuple[str, ...], dumps: tuple[str, ...], watch: bool, output_format: TextFormat, stacks: bool, show_all: bool
) -> None:
    """Show the modules that each process is in: phase, class, time so far, usual time, and the last step.

    RING is a file that a process records to (modtrace.record(ring=...), modtrace run --ring), DIR a folder of them,
    whose files end in .modtrace. The process may run, hang or be dead. Ranks in the same place share a line. For a
    folder, the newest ring of each rank is shown, without the rings of earlier runs (run.1.modtrace). The usual time
    of a module is the median of its calls in the last steps in the ring. Calls that last ten times as long, and longer
    than 5 seconds, are red.

    If ranks wait in a collective of torch.distributed, a sentence names the rank that has not called it; for a send or
    a receive, the peer. JSON is one object with the sentence, hangs, ranks and errors. With thousands of ranks,
    several processes read only the end of each ring.
    """
    if not rings and not dumps:
        raise click.UsageError("Missing argument 'RING...'.")
    if watch and (output_format == "json" or stacks):
        raise click.UsageError("--watch runs until Ctrl-C; leave out --format json and --stacks.")
    if output_format == "json" and stacks:
        raise click.UsageError("--format json has no Python stacks; leave out --stacks.")
    if watch:
        _watch(rings, dumps, show_all)
        return
    from ...live.where import NO_STACKS, python_stacks, where

    result = where(rings, flight_recorder=dumps)
    if output_format == "json":
        click.echo(result.to_json(), nl=False)
        for error in result.errors:
            say(error)
    else:
        make_console().print(_summary(result, show_all))
    if stacks:
        rank_stacks = [(state.label, python_stacks(state)) for state in result.ranks]
        for label, lines in rank_stacks:
            for line in [] if lines is None else ["", f"--- {label}", *lines]:
                echo(line)
        if any(lines is None for _, lines in rank_stacks):
            say(NO_STACKS)
    if result.errors:
        raise click.exceptions.Exit(1)


def _watch(rings: tuple[str, ...], dumps: tuple[str, ...], show_all: bool) -> None:
    from rich.live import Live

    from ..._pools import ParallelReader
    from ...live.where import read_job

    console = make_console()
    screen = Live(console=console, auto_refresh=False) if console.is_terminal else contextlib.nullcontext()
    with contextlib.suppress(KeyboardInterrupt), ParallelReader() as reader, screen as live:
        while True:
            table = _summary(read_job(reader, rings, dumps), show_all)
            if live is not None:
                live.update(table, refresh=True)
            else:  # for a file or a program: one table after another
                console.print(table)
                console.print()
                sys.stdout.flush()
            time.sleep(REFRESH_S)


def _summary(result: "WhereResult", show_all: bool) -> "RenderableType":
    from ...live.where_table import render

    table = render(result.groups, result.errors, result.hangs, show_all=show_all)
    if not result.older:
        return table
    from rich.console import Group

    older = counted(len(result.older), "ring")
    return Group(table, f"\n{older} of earlier runs not shown: name a file to see it ({printable(result.older[-1])})")
