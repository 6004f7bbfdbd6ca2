"""Options shared by commands, each with one name and one meaning, and the output of results and progress."""

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from .._errors import ModtraceError
from .._tables import is_terminal, printable
from ..record_options import StepRange as StepRange

if TYPE_CHECKING:
    from rich.console import Console

    from ..formats.trace_file import Progress
    from ..timeline import Timeline


_UNFOLDED_WIDTH = 10_000


def echo(line: object, *, err: bool = False) -> None:
    """Print one line, with terminal escapes made printable."""
    click.echo(printable(str(line)), err=err)


def say(line: object) -> None:
    """Print one line on stderr; results of commands go to stdout."""
    echo(f"modtrace: {line}", err=True)


def make_console(*, stderr: bool = False) -> "Console":
    """Return a console that ignores markup in texts, and folds lines only on a terminal."""
    from rich.console import Console

    console = Console(stderr=stderr, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _UNFOLDED_WIDTH
    return console


@contextmanager
def show_status(text: str) -> Iterator[None]:
    """Show a status text on a terminal while the block runs."""
    if not is_terminal(sys.stderr):
        yield
        return
    from rich.text import Text

    with make_console(stderr=True).status(Text(printable(text))):
        yield


def show_count(label: str, total: int) -> AbstractContextManager[Callable[[int], object] | None]:
    """Show a progress count on a terminal while the block runs; yield None if there is no terminal."""
    return _bar(label, total, "MofNCompleteColumn")


def show_reading(path: str) -> "AbstractContextManager[Progress | None]":
    """Show the progress of reading a file on a terminal while the block runs; yield None if there is no terminal."""
    return _bar(os.path.basename(path), os.path.getsize(path) if os.path.isfile(path) else 0, "DownloadColumn")


@contextmanager
def _bar(label: str, total: int, column: str) -> Iterator[Callable[[int], None] | None]:
    if not is_terminal(sys.stderr) or not total:
        yield None
        return
    from rich import progress

    count = getattr(progress, column)()
    columns = (progress.TextColumn("{task.description}", markup=False), progress.BarColumn(), count)
    with progress.Progress(
        *columns, progress.TimeRemainingColumn(), console=make_console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task(printable(label), total=total)
        yield lambda amount: bar.update(task, advance=amount)


TableFormat = Literal["table", "markdown", "csv", "json"]
FORMS: dict[TableFormat, Literal["text", "md", "csv", "json"]] = {
    "table": "text",
    "markdown": "md",
    "csv": "csv",
    "json": "json",
}
"""The form of `Table.to` for each format of the command line."""
TextFormat = Literal["text", "json"]

Number = TypeVar("Number", int, float)


def interval(parse_number: Callable[[str], Number]) -> Callable[[str], tuple[Number | None, Number | None]]:
    """Return a parser of `A:B`; a missing bound is None. Negative integers count from the end."""

    def parse(text: str) -> tuple[Number | None, Number | None]:
        start, colon, end = text.partition(":")
        try:
            bounds = [parse_number(bound) if bound else None for bound in (start, end)]
        except ValueError:
            colon = ""
        if not colon or any(bound is not None and not math.isfinite(bound) for bound in bounds):
            raise click.BadParameter(f"{text!r} is not A:B, two numbers, one of which may be missing.")
        first, last = bounds
        if first is not None and last is not None and last < first:
            from_both_ends = isinstance(first, int) and (first < 0) != (last < 0)
            if not from_both_ends:
                raise click.BadParameter(f"{text!r} ends before it starts.")
        return first, last

    return parse


def value_option(
    names: str, kind: Any, metavar: str | None, explained: str, default: object = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return an option with one value, whose help shows the default; `kind` is its type or its parser."""
    return click.option(
        *names.split(), type=kind, metavar=metavar, default=default, show_default=default is not None, help=explained
    )


def _format_option(formats: list[str], explained: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return value_option("--format output_format", click.Choice(formats), None, explained, formats[0])


format_option = _format_option(
    ["table", "markdown", "csv", "json"], "Module times are in ms in table and markdown, in ns in csv and json."
)
text_or_json_option = _format_option(["text", "json"], "Text or JSON.")
only_option = value_option("--only", str, "PATTERN", "Only modules whose full name matches, such as 'GPT.blocks.*'.")
max_depth_option = value_option(
    "--max-depth", click.IntRange(1), "N", "Only N levels of modules; the last level includes the time of those below."
)
steps_option = value_option(
    "--steps", interval(int), "A:B", "Only steps A to B, excluding B; 0 is the first, -1 the last."
)
step_by_option = value_option(
    "--step-by",
    str,
    "WHAT",
    "The kind of step: optimizer, call (an outermost call, or generate of transformers), 'range NAME', or a class. "
    "Default: optimizer, or call if nothing is trained.",
)


def require_spans(timeline: "Timeline", full_timeline: "Timeline", path: str, *, is_selection: bool) -> None:
    """Check that there are spans to show or write; a recording without any is accepted if no option selected a part.

    Raises ModtraceError, which describes the file, if the options left no span, or the file names no module.
    """
    if len(timeline.columns):
        return
    if len(full_timeline.columns):
        columns, example = full_timeline.columns, full_timeline.names[full_timeline.columns.name[0]].fqn
        first, last = int(columns.step.min()), int(columns.step.max())
        length = (int(columns.end.max()) - int(columns.start[0])) / 1e6
        content = f"{len(columns)} spans in steps {first} to {last}, over {length:.3f} ms, of modules such as {example}"
        raise ModtraceError(f"nothing is left of {path}: it holds {content}")
    if notes := full_timeline.metadata.get("notes"):
        raise ModtraceError(f"{path} holds no module: {notes[0]}")
    if is_selection:
        raise ModtraceError(f"nothing is left of {path}: it holds no spans")


def no_such_module(path: str, pattern: str, example: str, hint: str = "") -> ModtraceError:
    """Return the error for a pattern that matches no module."""
    hint_of_example = f"; there is {example}, for one" if example else ""
    return ModtraceError(f"nothing is left of {path}: no module is called {pattern}{hint_of_example}{hint}")
