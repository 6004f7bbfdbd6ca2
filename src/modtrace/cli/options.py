"""Options that several commands have, each with one name and one meaning."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

import click

TableFormat = Literal["table", "markdown", "csv", "json"]
TextFormat = Literal["text", "json"]

Number = TypeVar("Number", int, float)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a sentence, after a space, with the names that are like one; empty if none is."""
    bare = {candidate.lstrip("-"): candidate for candidate in known}
    similar = difflib.get_close_matches(name.lstrip("-"), bare)
    return f" Did you mean {' or '.join(bare[match] for match in similar)}?" if similar else ""


def interval(parse_number: Callable[[str], Number]) -> Callable[[str], tuple[Number | None, Number | None]]:
    """Return a parser of `A:B`; a missing bound is None. Negative whole numbers count from the end."""

    def parse(text: str) -> tuple[Number | None, Number | None]:
        start, colon, end = text.partition(":")
        try:
            bounds = [parse_number(bound) if bound else None for bound in (start, end)]
        except ValueError:
            colon = ""
        if not colon or any(bound is not None and not math.isfinite(bound) for bound in bounds):
            raise click.BadParameter(f"{text!r} is not A:B, two numbers of which one may be missing.")
        first, last = bounds
        numbers_steps: object = parse_number
        from_both_ends = numbers_steps is int and first is not None and last is not None and (first < 0) != (last < 0)
        if first is not None and last is not None and last < first and not from_both_ends:
            raise click.BadParameter(f"{text!r} ends before it starts.")
        return first, last

    return parse


class LazyChoice(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.3 only
    """A choice whose values are looked up when they are needed, as their module is slow to import.

    Args:
        values: returns them.
    """

    name = "choice"

    def __init__(self, values: Callable[[], Sequence[str]]) -> None:
        self._values = values

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the value if it is one of them."""
        known = self._values()
        try:
            return click.Choice(known).convert(value, param, ctx)
        except click.BadParameter as error:
            self.fail(f"{error.message}{did_you_mean(str(value), known)}", param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        """Return the values that begin with what was typed."""
        return click.Choice(self._values()).shell_complete(ctx, param, incomplete)


format_option = click.option(
    "--format",
    "output_format",
    type=click.Choice(["table", "markdown", "csv", "json"]),
    default="table",
    show_default=True,
    help="Times are ms in table and markdown, ns in csv and json.",
)
text_or_json_option = click.option(
    "--format",
    "output_format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Text or JSON.",
)
only_option = click.option(
    "--only",
    metavar="PATTERN",
    help="Take modules whose full name matches, as in 'GPT.blocks.*'.",
)
max_depth_option = click.option(
    "--max-depth",
    type=click.IntRange(1),
    metavar="N",
    help="Take N levels of modules; the time of those below counts to the last.",
)
steps_option = click.option(
    "--steps", metavar="A:B", type=interval(int), help="Take steps A to B, without B; 0 is the first, -1 the last."
)
step_by_option = click.option(
    "--step-by",
    metavar="WHAT",
    help="What a step is: optimizer, call (an outermost call, or a generate), 'range NAME', or a class of modules; "
    "else optimizer, or call where nothing is trained.",
)
