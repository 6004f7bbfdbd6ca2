"""`modtrace where`: the modules that a live, hung or dead process is in."""

from __future__ import annotations

import glob
import json
from typing import TYPE_CHECKING

import click

from .._errors import RingError

if TYPE_CHECKING:
    from ..where import RankState

__all__ = ["command"]

REFRESH_S = 1.0
_TOGETHER = 4
"""Files read at a time; each takes some times its size of memory."""


@click.command("where")
@click.argument("rings", metavar="RING...", nargs=-1, required=True)
@click.option("--watch", is_flag=True, help="Look again every second, until interrupted.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array with an object per rank.")
def command(rings: tuple[str, ...], watch: bool, as_json: bool) -> None:
    """Say which modules each process is in: phase, for how long, and the last step.

    RING is a file that a process records to (modtrace.record(ring=...), modtrace run --ring). The process may run, hang
    or be dead. Of several ranks ('run-*.modtrace'), those that agree stand in one line.
    """
    if watch and as_json:
        raise click.UsageError("--watch is for people and --json for programs; give one of them.")
    if watch:
        _watch(rings)
        return
    states, errors = _look(rings)
    if as_json:
        click.echo(json.dumps([state.to_json() for state in states], indent=2))
        for error in errors:
            click.echo(f"modtrace: {error}", err=True)
    else:
        from rich.console import Console

        from ..where import group_ranks
        from ..where.render import render

        console = Console(highlight=False)
        if not console.is_terminal:
            # Nothing is folded where a program or a file reads it.
            console.width = 10_000
        console.print(render(group_ranks(states), errors))
    if errors:
        raise click.exceptions.Exit(1)


def _look(rings: tuple[str, ...]) -> tuple[list[RankState], list[str]]:
    from concurrent.futures import ThreadPoolExecutor

    # Most of the work is NumPy's, and goes on beside that of other threads.
    with ThreadPoolExecutor(_TOGETHER) as threads:
        found = list(threads.map(_look_at, _files(rings)))
    return [state for state in found if not isinstance(state, str)], [
        error for error in found if isinstance(error, str)
    ]


def _look_at(path: str) -> RankState | str:
    from ..where import read_rank_state

    try:
        return read_rank_state(path)
    except RingError as error:
        return str(error)


def _files(rings: tuple[str, ...]) -> list[str]:
    """Return the files that are meant, each once; a pattern that the shell has left alone is taken as one here."""
    found: dict[str, None] = {}
    for ring in rings:
        found.update(dict.fromkeys(sorted(glob.glob(ring)) or [ring]))
    return list(found)


def _watch(rings: tuple[str, ...]) -> None:
    import time

    from rich.console import Console
    from rich.live import Live

    from ..where import group_ranks
    from ..where.render import render

    with Live(console=Console(highlight=False), auto_refresh=False, screen=False) as live:
        try:
            while True:
                states, errors = _look(rings)
                live.update(render(group_ranks(states), errors), refresh=True)
                time.sleep(REFRESH_S)
        except KeyboardInterrupt:
            pass
