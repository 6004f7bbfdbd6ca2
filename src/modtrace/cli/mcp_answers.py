"""The answers of the tools of `mcp_server`: their types, which clients see, and the limits on their size."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import GenericAlias
from typing import Any, NamedTuple

from mcp.types import CallToolResult, TextContent
from typing_extensions import NotRequired, TypedDict, get_type_hints

from .._tables import counted, cut_json, cut_to_width, printable
from ..compare import Change
from ..live.follow import ModuleRate
from ..timeline.summary import Finding, ModuleTimes, PartTimes, RangeTimes

MAX_BYTES = 4_000
"""Maximum number of bytes of an answer as JSON, unless `limit` asks for more rows."""
_MAX_TEXT = 300
_TEXT_LENGTHS = (_MAX_TEXT, 120, 40)
"""Maximum numbers of characters of a text as JSON, tried in order until a list has room for two rows."""
_MAX_ROWS = 40
"""Maximum number of rows that can fit into an answer."""
_MAX_PARTS = 8
"""Maximum number of parts of a step, or of threads, in a row."""


@dataclass
class Rows:
    """A list in an answer, which may be shortened."""

    noun: str  # the noun for a row
    rows: list[Any]  # the rows in the answer
    total: int  # number of rows before shortening


class RowKind(NamedTuple):
    """The kind of the rows of a list."""

    noun: str
    type: Any = str  # type of a row in the output schema
    row: Callable[[Any], Any] = str  # function that makes a row from a record

    def first(self, records: Sequence[Any], limit: int | None) -> Rows:
        """Return the first records as rows."""
        return Rows(self.noun, [self.row(record) for record in records[: limit or _MAX_ROWS]], len(records))


def _typed_dict(name: str, explained: str, types: Mapping[str, Any]) -> Any:
    """Return a TypedDict with the types by key."""
    make: Any = TypedDict  # type checkers do not know a type whose keys are data
    typed_dict = make(name, types)
    typed_dict.__doc__ = explained
    return typed_dict


def _fields_of(noun: str, name: str, explained: str, record: Any, fields: str = "", costs: str = "") -> RowKind:
    """Return the kind of rows with fields and properties of a record.

    `fields` has their names, separated by blanks; empty for all fields of the named tuple. The fields in `costs` are
    integers, and left out of a row if 0 or unknown.
    """
    types, optional = get_type_hints(record), costs.split()
    names = fields.split() or record._fields
    types |= {field: get_type_hints(vars(record)[field].fget)["return"] for field in {*names} - types.keys()}
    keys = dict.fromkeys(optional, NotRequired[int]) | {field: types[field] for field in names}

    def row(record: Any) -> dict[str, Any]:
        values = {key: getattr(record, key) for key in keys}
        return {key: value for key, value in values.items() if value or key not in optional}

    return RowKind(noun, _typed_dict(name, explained, keys), row)


def _answer(name: str, explained: str, **values: Any) -> Any:
    """Return the type of an answer, given for each value its type or the kind of its rows."""
    types = {key: GenericAlias(list, kind.type) if isinstance(kind, RowKind) else kind for key, kind in values.items()}
    return _typed_dict(name, explained, {"more": list[str], **types})


def _rows(noun: str, explained: str, types: Mapping[str, Any]) -> RowKind:
    """Return the kind of rows with values of the types."""
    return RowKind(noun, _typed_dict(f"{noun.capitalize()}Row", explained, types))


_WHERE = {"pid": int, "state": str, "step": int | None}
FILE = _rows("file", "One file that may be a recording.", {"path": str, "kind": str, "bytes": int})
STEP = _rows(
    "step",
    "One step, its longest parts, and the cause if it was slow.",
    {"step": int, "duration_ns": int, "whole": bool, "parts": dict[str, int], "cause": str | None},
)
THREAD = _rows(
    "thread",
    "A thread and its innermost call or range.",
    dict.fromkeys(("thread", "phase", "name", "module_class"), str)
    | {"seconds": float, "usual_seconds": float | None, "seems_hung": bool},
)
PLACE = _rows(
    "place",
    "Processes in the same place; the numbers come from the first one.",
    {"ranks": str, "processes": int, **_WHERE, "last_event_seconds": float, "threads": GenericAlias(list, THREAD.type)},
)
PROCESS = _rows(
    "process",
    "The work of a process in the last seconds, and the share of each part of its steps.",
    {"rank": int | None, **_WHERE, "steps_per_s": float | None, "parts": dict[str, float]},
)
LINE, NOTE, HANG, ERROR = map(RowKind, ("line", "note", "hang", "error"))
FINDING = _fields_of(
    "finding",
    "FindingRow",
    "A finding; `next` is a command that shows more, to be run in the served folder.",
    Finding,
)
MODULE = _fields_of(
    "module",
    "ModuleRow",
    "The costs of one module in all steps; costs that are 0 or not recorded are left out.",
    ModuleTimes,
    "fqn module_class calls total_ns self_ns forward_ns backward_ns step_p50_ns step_p95_ns",
    "recompute_ns flops_forward flops_backward retained_bytes peak_bytes gpu_self_ns",
)
PART = _fields_of("part", "PartRow", "One part of all steps.", PartTimes)
RANGE = _fields_of("range", "RangeRow", "All ranges of one name.", RangeTimes)
CHANGE = _fields_of(
    "change",
    "ChangeRow",
    "A module in one phase, or a part of the step, in base and new; per step.",
    Change,
    "fqn phase verdict base_ns new_ns difference_ns low_ns high_ns base_calls new_calls",
)
RATE = _fields_of(
    "module",
    "RateRow",
    "The current share of a module in the time that passes, from 0 to 1, as the mean over ranks.",
    ModuleRate,
    "fqn calls_per_s self_share total_share busiest_rank",
)

FilesAnswer = _answer("FilesAnswer", "The files that may be recordings, newest first.", files=FILE)
FindingsAnswer = _answer(
    "FindingsAnswer",
    "A description of the recording, its findings, and the parts of its steps.",
    recorded=LINE,
    findings=FINDING,
    looked_at=str,
    parts=PART,
    notes=NOTE,
)
ModulesAnswer = _answer(
    "ModulesAnswer",
    "The times of modules; `steps_ns` is the total duration of all whole steps.",
    steps=int,
    steps_ns=int,
    modules=MODULE,
    notes=NOTE,
)
StepsAnswer = _answer(
    "StepsAnswer", "The parts of all steps together, and the slowest steps.", parts=PART, steps=STEP, notes=NOTE
)
RangesAnswer = _answer(
    "RangesAnswer", "Ranges and garbage collections by name, the longest total first.", ranges=RANGE, notes=NOTE
)
CompareAnswer = _answer(
    "CompareAnswer",
    "Changes beyond the noise: findings, the step, its parts and modules.",
    findings=FINDING,
    sentence=str,
    step=CHANGE.type,
    parts=CHANGE,
    changes=CHANGE,
    notes=NOTE,
)
WhereAnswer = _answer(
    "WhereAnswer",
    "The ranks that wait for each other, and the modules that each process is in.",
    sentence=str,
    hangs=HANG,
    places=PLACE,
    errors=ERROR,
)
TopAnswer = _answer("TopAnswer", "Work of a job in the last seconds.", processes=PROCESS, modules=RATE, errors=ERROR)


def longest_parts(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the longest parts of a step, longest first."""
    return dict(sorted(parts.items(), key=lambda part: -part[1])[:_MAX_PARTS])


def thread_rows(threads: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the first threads with an open call, given the values of `RankState.to_dict`."""
    inside = [thread for thread in threads if thread["stack"]][:_MAX_PARTS]
    return [
        {
            "thread": thread["thread"],
            "phase": call["phase"],
            "name": call.get("name", call["fqn"]),
            "module_class": call["class"],
            "seconds": call["seconds"],
            "usual_seconds": call["usual_seconds"],
            "seems_hung": thread["seems_hung"],
        }
        for thread in inside
        for call in thread["stack"][-1:]
    ]


def printable_cut(text: str) -> str:
    """Return a text made printable and cut to `_MAX_TEXT`: a name at its start, a sentence at its end."""
    text = printable(text)
    if " " in text and len(text) > _MAX_TEXT:
        return f"{text[: _MAX_TEXT - 1]}…"
    return cut_to_width(text, _MAX_TEXT)


def make_answer(limit: int | None, relative: Callable[[str], str], values: Mapping[str, Any]) -> CallToolResult:
    """Return an answer, with lists shortened to fit into `MAX_BYTES` unless there is a `limit`.

    Lists are `Rows`; `relative` makes paths in a text relative to the served folder.
    """
    lists = {name: value for name, value in values.items() if isinstance(value, Rows)}
    full_lists = {name: _data(rows.rows, relative) for name, rows in lists.items()}
    scalars = {name: _data(value, relative) for name, value in values.items() if name not in lists}
    short_lists, lengths = {name: [*rows] for name, rows in full_lists.items()}, iter(_TEXT_LENGTHS)
    while True:
        left_out = [(rows.total - len(short_lists[name]), f"more {rows.noun}") for name, rows in lists.items()]
        omissions = [counted(count, noun) for count, noun in left_out if count]
        answer = {name: short_lists.get(name, scalars.get(name)) for name in values} | {"more": omissions}
        text, longest = json.dumps(answer), max(short_lists.values(), key=lambda rows: len(json.dumps(rows)))
        if limit is not None or len(text) <= MAX_BYTES or not longest:
            return CallToolResult(content=[TextContent(type="text", text=text)], structured_content=answer)
        if len(longest) < 2 and (length := next(lengths, None)) is not None:
            short_lists, scalars = (cut_json(data, length, _MAX_ROWS) for data in (full_lists, scalars))
        else:
            longest.pop()


def _data(value: Any, relative: Callable[[str], str]) -> Any:
    """Return values with texts made printable and short, and floats rounded to six digits."""
    if isinstance(value, str):
        return printable_cut(relative(value))
    if isinstance(value, Mapping):
        return {_data(key, relative): _data(inner, relative) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_data(inner, relative) for inner in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
