"""The group of subcommands: found by file name, imported when used."""

from __future__ import annotations

import importlib
import io
import sys
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn

import click

from .._errors import ModtraceError
from .._version import __version__
from . import commands
from .options import did_you_mean
from .output import echo

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

    def show(self, file: IO[Any] | None = None) -> None:  # noqa: ARG002 (click's signature)
        """Print `modtrace: MESSAGE`, with line breaks in the message as spaces."""
        echo(f"modtrace: {' '.join(self.message.splitlines())}", err=True)


class CliUsageError(click.UsageError):
    """Wrong usage, in the style of all other errors, with a line on the right usage; exit code 2."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Print how the command is used, and `modtrace: MESSAGE`."""
        if self.ctx is not None:
            usage = " ".join(self.ctx.get_usage().split())
            echo(f"{usage}; help: {self.ctx.command_path} -h", err=True)
        CliError(self.format_message()).show(file)


class LazyGroup(click.Group):
    """One subcommand per module of `commands`, imported when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        """Return the names of the subcommands: those of the modules."""
        return sorted(path.stem for path in Path(commands.__path__[0]).glob("[!_]*.py"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a subcommand; None where there is none of that name."""
        if cmd_name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(f"{commands.__name__}.{cmd_name}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the subcommand; where there is none of that name, say which are similar."""
        name, known = args[0], self.list_commands(ctx)
        if name not in known and not ctx.resilient_parsing:
            hint = did_you_mean(name, known) or f" There are {', '.join(known)}."
            raise click.UsageError(f"There is no command {name!r}.{hint}", ctx)
        if name != "run":  # whose script prints to the same stream
            _print_all_characters()
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a subcommand; a `ModtraceError` becomes a `CliError`, wrong usage a `CliUsageError`."""
        try:
            return super().invoke(ctx)
        except ModtraceError as error:
            raise CliError(str(error)) from error
        except click.UsageError as error:
            _raise_in_our_style(error)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Parse the arguments before the subcommand; wrong usage becomes a `CliUsageError`."""
        try:
            return super().make_context(*args, **kwargs)
        except click.UsageError as error:
            _raise_in_our_style(error)


def _print_all_characters() -> None:
    """Print `?` for what the output cannot encode, as Windows' pipes cannot encode what trees are drawn with."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _raise_in_our_style(error: click.UsageError) -> NoReturn:
    if isinstance(error, CliUsageError | click.exceptions.NoArgsIsHelpError):
        raise error
    raise CliUsageError(_message_of(error), error.ctx) from error


def _message_of(error: click.UsageError) -> str:
    """Return what is wrong; of an unknown name with those that are like it, whatever click finds like it."""
    if error.ctx is None:
        return error.format_message()
    if isinstance(error, click.NoSuchOption):
        options = [name for parameter in error.ctx.command.get_params(error.ctx) for name in parameter.opts]
        return f"There is no option {error.option_name!r}.{did_you_mean(error.option_name, options)}"
    command_name = getattr(error, "command_name", None)  # of click 8.4's NoSuchCommand
    if command_name is not None and isinstance(error.ctx.command, click.Group):
        known = error.ctx.command.list_commands(error.ctx)
        return f"There is no command {command_name!r}.{did_you_mean(command_name, known)}"
    return error.format_message()


def _show_version(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    from .versions import engine_line, installed_torch

    echo(f"modtrace, version {__version__}")
    echo(f"torch {installed_torch() or 'is not installed: nothing can be recorded'}")
    echo(engine_line())
    context.exit()


@click.group(
    "modtrace",
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_show_version, help="Show versions."
)
def group() -> None:
    """Timelines of PyTorch modules: record them, look at them, find out where a run hangs.

    Completion of commands, options and files: eval "$(_MODTRACE_COMPLETE=bash_source modtrace)"; for zsh and fish
    zsh_source and fish_source.
    """
