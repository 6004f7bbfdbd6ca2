"""What the commands print: text of unknown origin is made safe for the terminal here, and progress is shown."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from .._terminal import is_terminal, printable

if TYPE_CHECKING:
    from click._termui_impl import ProgressBar
    from rich.console import Console

_UNFOLDED_WIDTH = 10_000


def echo(line: object, *, err: bool = False) -> None:
    """Print one line, with anything in it that a terminal would obey as an escape."""
    click.echo(printable(str(line)), err=err)


def say(line: object) -> None:
    """Print one line on stderr, where what a command is asked for is not."""
    echo(f"modtrace: {line}", err=True)


def make_console(*, stderr: bool = False) -> "Console":
    """Return a console that takes no markup from texts, and folds nothing where a program or a file reads it."""
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


def show_progress(what: str, total: int) -> "ProgressBar[int]":
    """Show on a terminal how much has been done, while the block runs, which calls `update` for it."""
    hidden = not total or not is_terminal(sys.stderr)
    return click.progressbar(length=total, label=printable(what), hidden=hidden, file=sys.stderr)


def show_reading(path: str) -> "ProgressBar[int]":
    """Show on a terminal how much of a file has been read; see `show_progress`."""
    return show_progress(os.path.basename(path), os.path.getsize(path) if os.path.isfile(path) else 0)
