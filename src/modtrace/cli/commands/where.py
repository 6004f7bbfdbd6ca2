"""`modtrace where`: the modules that a live, hung or dead process is in."""

from __future__ import annotations

import contextlib
import glob
import json
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from ..._errors import RingError
from ..output import echo, make_console

if TYPE_CHECKING:
    from ...where import RankState

__all__ = ["command"]

REFRESH_S = 1.0
_MAX_CONCURRENT_READS = 4
"""Each takes several times the file's size of memory."""


@click.command("where", short_help="Say which modules each process is in.")
@click.argument("rings", type=click.Path(), metavar="RING...", nargs=-1, required=True)
@click.option("--watch", is_flag=True, help="Look again every second, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array with an object per rank.")
@click.option("--stacks", is_flag=True, help="Print the Python stacks of running processes too, by py-spy.")
def command(rings: tuple[str, ...], watch: bool, as_json: bool, stacks: bool) -> None:
    """Say which modules each process is in: phase, class, for how long, how long it usually takes, and the last step.

    RING is a file that a process records to (modtrace.record(ring=...), modtrace run --ring). The process may run, hang
    or be dead. Of several ranks ('run-*.modtrace'), those that agree stand in one line. What a module usually takes is
    the median of its calls that the ring still holds; red is what takes ten times as long, and at least 5 seconds.

    Where ranks wait in a collective of torch.distributed, a sentence says which rank has not called it.
    """
    if watch and (as_json or stacks):
        raise click.UsageError("--watch goes on; leave out --json and --stacks.")
    if as_json and stacks:
        raise click.UsageError("--json has no Python stacks; leave out --stacks.")
    if watch:
        _watch(rings)
        return
    states, errors = _read_states(rings)
    if as_json:
        click.echo(json.dumps([state.to_json() for state in states], indent=2))
        for error in errors:
            echo(f"modtrace: {error}", err=True)
    else:
        from ...where import group_ranks
        from ...where.render import render

        make_console().print(render(group_ranks(states), errors))
    if stacks:
        _print_stacks(states)
    if errors:
        raise click.exceptions.Exit(1)


def _print_stacks(states: list[RankState]) -> None:
    from ...where import NO_PY_SPY, python_stacks

    for state in states:
        lines = python_stacks(state)
        if lines is None:
            echo(f"modtrace: {NO_PY_SPY}", err=True)
            return
        echo("")
        echo(f"--- {state.label}")
        for line in lines:
            echo(line)


def _read_states(rings: tuple[str, ...]) -> tuple[list[RankState], list[str]]:
    from concurrent.futures import ThreadPoolExecutor

    # Threads, because most of the work is NumPy's, which releases the GIL.
    with ThreadPoolExecutor(_MAX_CONCURRENT_READS) as threads:
        results = list(threads.map(_read_state_or_error, _expand(rings)))
    states = [result for result in results if not isinstance(result, str)]
    errors = [result for result in results if isinstance(result, str)]
    return states, errors


def _read_state_or_error(path: str) -> RankState | str:
    from ...where import read_rank_state

    try:
        return read_rank_state(path)
    except RingError as error:
        return str(error)


def _expand(rings: tuple[str, ...]) -> list[str]:
    """Return the files, each once; a pattern that the shell did not expand is expanded here."""
    files: dict[str, None] = {}
    for ring in rings:
        files.update(dict.fromkeys(sorted(glob.glob(ring)) or [ring]))
    return list(files)


def _watch(rings: tuple[str, ...]) -> None:
    from ...where import group_ranks
    from ...where.render import render

    console = make_console()
    tables = ((group_ranks(states), errors) for states, errors in _read_again_and_again(rings))
    with contextlib.suppress(KeyboardInterrupt):
        if not console.is_terminal:
            # One table after the other, as a file or a program wants them.
            for groups, errors in tables:
                console.print(render(groups, errors))
                console.print()
                sys.stdout.flush()
            return
        from rich.live import Live

        with Live(console=console, auto_refresh=False, screen=False) as live:
            for groups, errors in tables:
                live.update(render(groups, errors), refresh=True)


def _read_again_and_again(rings: tuple[str, ...]) -> Iterator[tuple[list[RankState], list[str]]]:
    while True:
        yield _read_states(rings)
        time.sleep(REFRESH_S)
