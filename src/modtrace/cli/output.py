"""What the commands print: text of unknown origin is made safe for the terminal here, and progress is shown."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import click

from .._terminal import is_terminal, printable

if TYPE_CHECKING:
    from rich.console import Console

    from ..formats.trace_file import Progress

_UNFOLDED_WIDTH = 10_000


def echo(line: object, *, err: bool = False) -> None:
    """Print one line, with anything in it that a terminal would obey as an escape."""
    click.echo(printable(str(line)), err=err)


def say(line: object) -> None:
    """Print one line on stderr; what a command was asked for is on stdout."""
    echo(f"modtrace: {line}", err=True)


def make_console(*, stderr: bool = False) -> "Console":
    """Return a console that takes no markup from texts, and folds no lines for a program or a file."""
    from rich.console import Console

    console = Console(stderr=stderr, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _UNFOLDED_WIDTH
    return console


@contextmanager
def show_status(text: str) -> Iterator[None]:
    """Show on a terminal what is being done, while the block runs."""
    if not is_terminal(sys.stderr):
        yield
        return
    from rich.text import Text

    with make_console(stderr=True).status(Text(printable(text))):
        yield


def show_count(what: str, total: int) -> AbstractContextManager[Callable[[int], object] | None]:
    """Show on a terminal how many things have been done, while the block runs; yield None if there is no terminal."""
    return _bar(what, total, "MofNCompleteColumn")


def show_reading(path: str) -> "AbstractContextManager[Progress | None]":
    """Show on a terminal how much of a file has been read, while the block runs; None if there is no terminal."""
    return _bar(os.path.basename(path), os.path.getsize(path) if os.path.isfile(path) else 0, "DownloadColumn")


@contextmanager
def _bar(what: str, total: int, column: str) -> Iterator[Callable[[int], None] | None]:
    if not is_terminal(sys.stderr) or not total:
        yield None
        return
    from rich import progress

    count = getattr(progress, column)()
    columns = (progress.TextColumn("{task.description}", markup=False), progress.BarColumn(), count)
    with progress.Progress(
        *columns, progress.TimeRemainingColumn(), console=make_console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task(printable(what), total=total)
        yield lambda done: bar.update(task, advance=done)
