"""The group of subcommands: found by file name, imported when asked for."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import click

from .._errors import ModtraceError
from .._version import __version__

__all__ = ["ScriptEnded", "group"]


class ScriptEnded(BaseException):
    """A user's script has raised; not an Exception, so that nothing on the way to `main` takes it for one of ours.

    Args:
        error: what it raised.
        traceback: from the script's own first frame on.
    """

    def __init__(self, error: BaseException, traceback: TracebackType | None) -> None:
        super().__init__()
        self.error = error
        self.traceback = traceback


class OneLine(click.ClickException):
    """An error of ours as the shell shows it."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Print `modtrace: …`, on one line whatever the message holds."""
        click.echo(f"modtrace: {' '.join(self.message.splitlines())}", file=file or sys.stderr)


class Commands(click.Group):
    """One subcommand per module of this package."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        """Return the modules' names."""
        return sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one."""
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = importlib.import_module(f"{__package__}.{cmd_name}").command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run one; an error of ours becomes a line."""
        try:
            return super().invoke(ctx)
        except ModtraceError as error:
            raise OneLine(str(error)) from error


@click.group("modtrace", cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def group() -> None:
    """Timelines of PyTorch modules: record them, look at them, find out where a run hangs."""
