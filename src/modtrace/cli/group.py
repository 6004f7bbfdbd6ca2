"""The group of subcommands, each imported on use: `modtrace NAME` is `NAME_command` of `commands/NAME.py`."""

import importlib
import io
import sys
from types import TracebackType
from typing import Any, NoReturn

import click

from .._errors import ModtraceError
from .._version import __version__
from .options import echo, say

_SECTIONS: dict[str, dict[str, str]] = {
    "Record": {
        "run": "Record an unchanged script.",
        "demo": "Record the training of a small GPT.",
    },
    "Look": {
        "view": "Open a trace in the browser.",
        "summary": "Print the times of modules and steps.",
        "convert": "Write a trace in another format.",
        "check": "Find faults that viewers hide.",
        "report": "Pack a trace for a bug report.",
    },
    "Compare": {
        "diff": "List modules that became slower or faster.",
        "merge": "Add module tracks to a torch.profiler trace.",
    },
    "Jobs": {
        "where": "Show which modules each process is in.",
        "top": "Show the current work of a running job.",
        "watch": "Save the steps around slow moments.",
        "ranks": "Put all ranks of a job on one timeline.",
    },
    "Agents": {
        "mcp": "Answer an agent's questions about recordings.",
    },
    "Maintenance": {
        "doctor": "Show installed versions and the engine that records.",
        "build": "Compile the native engine.",
    },
}
"""The commands by section, for `modtrace --help`, which lists them without importing them."""


class ScriptError(BaseException):
    """The exception of a user's script.

    Not an `Exception`, so that no code between the script and `main` handles it as an error of modtrace.
    """

    def __init__(self, error: BaseException, traceback: TracebackType | None) -> None:
        super().__init__()
        self.error = error  # the exception of the script
        self.traceback = traceback  # its traceback, starting at the script's first frame


class LazyGroup(click.Group):
    """The subcommands of `_SECTIONS`."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        """Return the names of the subcommands."""
        return [name for section in _SECTIONS.values() for name in section]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of subcommands, section by section."""
        width = max(len(name) for name in self.list_commands(ctx))
        for title, section in _SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, text in section.items()])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a subcommand; return None for an unknown name if a shell asks for completions."""
        names = self.list_commands(ctx)
        if cmd_name not in names:
            return None if ctx.resilient_parsing else ctx.fail(f"No such command {cmd_name!r}; try {', '.join(names)}.")
        # `?` replaces characters that the output cannot encode, except under `run`, whose script prints to this stream.
        if cmd_name != "run" and isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        module = importlib.import_module(f".commands.{cmd_name}", __package__)
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Run a subcommand and exit: with 1 and a line on stderr for a `ModtraceError`, with 2 for wrong usage."""
        status: object
        run: Any = super().main
        try:
            status = run(*args, **kwargs, standalone_mode=False)
        except ModtraceError as error:
            status = 1
            _say_error(str(error))
        except click.Abort:
            status = 1
            echo("Aborted!", err=True)
        except click.ClickException as error:
            status = error.exit_code
            if not isinstance(error, click.UsageError) or isinstance(error, click.exceptions.NoArgsIsHelpError):
                error.show()
            else:
                if error.ctx is not None:
                    usage = " ".join(error.ctx.get_usage().split())
                    echo(f"{usage}; help: {error.ctx.command_path} -h", err=True)
                _say_error(error.format_message())
        sys.exit(status if isinstance(status, int) else 0)


def _say_error(message: str) -> None:
    """Print an error as one line, with its line breaks replaced by spaces."""
    say(" ".join(message.splitlines()))


@click.group("modtrace", cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def group() -> None:
    """Timelines of PyTorch modules: record them, view them, find out where a run hangs.

    Completion of commands, options and files: eval "$(_MODTRACE_COMPLETE=bash_source modtrace)"; for zsh and fish use
    zsh_source and fish_source.
    """
