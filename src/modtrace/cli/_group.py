"""The group of subcommands: found by file name, imported when used."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import click

from .._errors import ModtraceError
from .._version import __version__

__all__ = ["ScriptError", "group"]


class ScriptError(BaseException):
    """A user's script has raised.

    Not an Exception, so that nothing between the script and `main` handles it as an error of ours.

    Attributes:
        error: what the script raised.
        traceback: its traceback, from the script's own first frame on.
    """

    def __init__(self, error: BaseException, traceback: TracebackType | None) -> None:
        super().__init__()
        self.error = error
        self.traceback = traceback


class CliError(click.ClickException):
    """One of our errors, as the command line shows it: one line on stderr, exit code 1."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Print `modtrace: MESSAGE`, with line breaks in the message as spaces."""
        click.echo(f"modtrace: {' '.join(self.message.splitlines())}", file=file or sys.stderr)


class LazyGroup(click.Group):
    """One subcommand per module of this package, imported when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        """Return the names of the subcommands: those of the modules."""
        return sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a subcommand; None where there is none of that name."""
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = importlib.import_module(f"{__package__}.{cmd_name}").command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run a subcommand; a `ModtraceError` becomes a `CliError`."""
        try:
            return super().invoke(ctx)
        except ModtraceError as error:
            raise CliError(str(error)) from error


@click.group("modtrace", cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def group() -> None:
    """Timelines of PyTorch modules: record them, look at them, find out where a run hangs."""
