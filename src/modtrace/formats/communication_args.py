"""How a written trace holds collectives: slices on rows of their own, and arrows from the modules that launched them.

The same in both formats: the slice's name is the operator, or `wait: ` and what is waited for; its args hold the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..ring.collective_text import CollectiveName, format_ranks, parse_ranks
from ..timeline import Collective, Collectives, Group
from .escape import EscapedOriginals, escaped, restore
from .limits import MAX_TIME_NS
from .slice_row import SliceRow

__all__ = [
    "CALLS_NAME",
    "LAUNCH_CATEGORY",
    "LAUNCH_NAME",
    "collective_args",
    "collectives_from_rows",
    "group_header",
    "groups_from_header",
    "is_collective",
    "slice_name",
]

LAUNCH_CATEGORY = "launch"
LAUNCH_NAME = "collective"
"""Category and name of the flow events in JSON, from the span that launched a collective to it."""

CALLS_NAME = "calls"
"""The name of the flow events in JSON between the ranks' calls of one collective; their category is the slices'."""

_WAIT_PREFIX = "wait"
_TEXTS = ("operator", "group")
_INTEGERS = ("counter", "bytes", "done_ns", "peer", "step")


def slice_name(collective: Collective) -> str:
    """Return what its slice is called (`all_reduce`, `wait: all_reduce`), escaped."""
    if not collective.is_wait:
        return escaped(collective.operator)
    return escaped(f"{_WAIT_PREFIX}: {collective.operator}" if collective.operator else _WAIT_PREFIX)


def collective_args(collective: Collective) -> dict[str, str | int | bool]:
    """Return its args, texts escaped.

    `done_ns` counts from the slice's begin; what is not known, or is as usual, is left out.
    """
    args: dict[str, str | int | bool] = {"operator": escaped(collective.operator), "group": escaped(collective.group)}
    if collective.peer is not None:
        args["peer"] = collective.peer
    if collective.counter is not None:
        args["counter"] = collective.counter
    args |= {"bytes": collective.nbytes, "step": collective.step}
    if collective.done_ns is not None:
        args["done_ns"] = collective.done_ns - collective.start_ns
    if collective.device:
        args["device"] = escaped(collective.device)
    if not collective.complete:
        args["complete"] = False
    return args


def is_collective(row: SliceRow) -> bool:
    """Tell whether a slice says what one of a collective or a wait does."""
    texts = [*(row.args.get(name) for name in _TEXTS), row.args.get("device", "")]
    numbers = [row.args.get(name, -1) for name in _INTEGERS]
    return all(isinstance(text, str) for text in (*texts, row.name)) and all(
        type(number) is int and abs(number) < MAX_TIME_NS for number in numbers
    )


def collectives_from_rows(
    rows: Iterable[SliceRow],
    groups: Sequence[Group],
    track_names: Sequence[str],
    escaped_originals: EscapedOriginals,
) -> Collectives:
    """Return the table that slices were written from.

    Args:
        rows: the slices.
        groups: the process groups.
        track_names: the names of the timeline's tracks.
        escaped_originals: what was escaped.

    Raises:
        ValueError: an arg is not as it is written, or missing.
    """
    names: dict[CollectiveName, int] = {}
    table: list[tuple[int | bool, ...]] = []
    for row in rows:
        if not is_collective(row):
            raise ValueError(f"the args of {row.name!r} are {row.args!r}")
        numbers = {name: row.args.get(name, -1) for name in _INTEGERS}
        operator, group = (restore(row.args[name], escaped_originals) for name in _TEXTS)
        name = -1
        device = restore(row.args.get("device", ""), escaped_originals)
        if operator or group:
            name = names.setdefault(CollectiveName(operator, group, numbers["peer"], device), len(names))
        done = row.start + numbers["done_ns"] if "done_ns" in row.args else -1
        is_wait = row.name == _WAIT_PREFIX or row.name.startswith(f"{_WAIT_PREFIX}: ")
        complete = bool(row.args.get("complete", True))
        numbered = (numbers["counter"], numbers["bytes"], row.track, numbers["step"], complete)
        table.append((row.start, row.end, done, name, is_wait, *numbered))
    columns = np.array(table, np.int64).reshape(-1, 10).T
    fields = ("start", "end", "done", "name", "is_wait", "counter", "nbytes", "track", "step", "complete")
    found = Collectives.of([*names], groups, track_names, **dict(zip(fields, columns, strict=True)))
    return found.take(np.lexsort((-found.end, found.start)))


def group_header(groups: Sequence[Group], escaped_originals: EscapedOriginals) -> list[dict[str, str]]:
    """Return the process groups as a trace's header has them."""
    return [
        {
            "name": escaped(group.name, escaped_originals),
            "ranks": format_ranks(group.ranks),
            "description": escaped(group.description, escaped_originals),
        }
        for group in groups
    ]


def groups_from_header(entries: Any, escaped_originals: EscapedOriginals) -> list[Group]:
    """Return the process groups of a header.

    Raises:
        ValueError: they are not as they are written.
    """
    groups = []
    for entry in entries:
        values = [entry[name] for name in ("name", "ranks", "description")]
        if not all(isinstance(value, str) for value in values):
            raise ValueError(f"a group is {entry!r}")
        name, ranks, description = values
        groups.append(
            Group(restore(name, escaped_originals), tuple(parse_ranks(ranks)), restore(description, escaped_originals))
        )
    return groups
