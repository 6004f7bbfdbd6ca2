"""The answers of the tools of `mcp_server`: their types, which clients are told, and how they are cut to fit."""

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
"""The most bytes of an answer as JSON, unless `limit` asks for more rows."""
_MAX_TEXT = 300
_SHORTER = (_MAX_TEXT, 120, 40)
"""The lengths of texts as JSON: the next one is taken if no list has room for two rows."""
_FIT = 40
"""More rows never fit into an answer."""
_PARTS = 8
"""The most parts of a step, or threads, in a row."""


@dataclass
class Rows:
    """A list of an answer, which may be shortened."""

    noun: str  # what a row is
    rows: list[Any]  # those that are shown
    total: int  # how many there are


class RowKind(NamedTuple):
    """The kind of the rows of a list."""

    noun: str
    type: Any = str  # of a row, as clients are told
    row: Callable[[Any], Any] = str  # makes one of a record

    def first(self, records: Sequence[Any], limit: int | None) -> Rows:
        """Return the first records as rows."""
        return Rows(self.noun, [self.row(record) for record in records[: limit or _FIT]], len(records))


def _named(name: str, explained: str, types: Mapping[str, Any]) -> Any:
    """Return a TypedDict of these types by key."""
    make: Any = TypedDict  # no checker knows a type whose keys are data
    named = make(name, types)
    named.__doc__ = explained
    return named


def _fields_of(noun: str, name: str, explained: str, record: Any, fields: str = "", costs: str = "") -> RowKind:
    """Return rows that have fields and properties of a record, of their types.

    `fields` names them, with blanks between; empty: all of the named tuple. Those of `costs` are whole numbers, left
    out of a row if they are 0 or not known.
    """
    types, left_out = get_type_hints(record), costs.split()
    wanted = fields.split() or record._fields
    types |= {field: get_type_hints(vars(record)[field].fget)["return"] for field in {*wanted} - types.keys()}
    keys = dict.fromkeys(left_out, NotRequired[int]) | {field: types[field] for field in wanted}

    def row(record: Any) -> dict[str, Any]:
        values = {key: getattr(record, key) for key in keys}
        return {key: value for key, value in values.items() if value or key not in left_out}

    return RowKind(noun, _named(name, explained, keys), row)


def _answer(name: str, explained: str, **values: Any) -> Any:
    """Return the type of an answer: of each value its type, or the kind of its rows."""
    types = {key: GenericAlias(list, kind.type) if isinstance(kind, RowKind) else kind for key, kind in values.items()}
    return _named(name, explained, {"more": list[str], **types})


def _rows(noun: str, explained: str, types: Mapping[str, Any]) -> RowKind:
    """Return rows that have values of these types."""
    return RowKind(noun, _named(f"{noun.capitalize()}Row", explained, types))


_WHERE = {"pid": int, "state": str, "step": int | None}
FILE = _rows("file", "One file that may be a recording.", {"path": str, "kind": str, "bytes": int})
STEP = _rows(
    "step",
    "One step, its longest parts, and why it was slow if it was.",
    {"step": int, "duration_ns": int, "whole": bool, "parts": dict[str, int], "cause": str | None},
)
THREAD = _rows(
    "thread",
    "What a thread is in: its innermost call or range.",
    dict.fromkeys(("thread", "phase", "name", "module_class"), str)
    | {"seconds": float, "usual_seconds": float | None, "seems_hung": bool},
)
PLACE = _rows(
    "place",
    "Processes that are in the same place; numbers are of the first of them.",
    {"ranks": str, "processes": int, **_WHERE, "last_event_seconds": float, "threads": GenericAlias(list, THREAD.type)},
)
PROCESS = _rows(
    "process",
    "What a process did in the last seconds, and the share of each part of its steps.",
    {"rank": int | None, **_WHERE, "steps_per_s": float | None, "parts": dict[str, float]},
)
LINE, NOTE, HANG, ERROR = map(RowKind, ("line", "note", "hang", "error"))
FINDING = _fields_of(
    "finding",
    "FindingRow",
    "Something that stands out; `next` is a command that shows more, in the served folder.",
    Finding,
)
MODULE = _fields_of(
    "module",
    "ModuleRow",
    "What one module took in all steps; without what is 0 or was not recorded.",
    ModuleTimes,
    "fqn module_class calls total_ns self_ns forward_ns backward_ns step_p50_ns step_p95_ns",
    "recompute_ns flops_forward flops_backward retained_bytes peak_bytes gpu_self_ns",
)
PART = _fields_of("part", "PartRow", "One part of all steps.", PartTimes)
RANGE = _fields_of("range", "RangeRow", "All ranges of one name.", RangeTimes)
CHANGE = _fields_of(
    "change",
    "ChangeRow",
    "A module in one phase, or a part of the step, before and after; per step.",
    Change,
    "fqn phase verdict base_ns new_ns difference_ns low_ns high_ns base_calls new_calls",
)
RATE = _fields_of(
    "module",
    "RateRow",
    "What a module takes now, as the mean over ranks; 1 is all of the time that passes.",
    ModuleRate,
    "fqn calls_per_s self_share total_share busiest_rank",
)

FilesAnswer = _answer("FilesAnswer", "The files that may be recordings, newest first.", files=FILE)
FindingsAnswer = _answer(
    "FindingsAnswer",
    "What was recorded, what stands out in it, and how its steps divide into parts.",
    recorded=LINE,
    findings=FINDING,
    looked_at=str,
    parts=PART,
    notes=NOTE,
)
ModulesAnswer = _answer(
    "ModulesAnswer",
    "What modules took, `steps_ns` of all whole steps together.",
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
    "What changed, beyond the noise: what changed most, the step, its parts and modules.",
    findings=FINDING,
    sentence=str,
    step=CHANGE.type,
    parts=CHANGE,
    changes=CHANGE,
    notes=NOTE,
)
WhereAnswer = _answer(
    "WhereAnswer",
    "Who waits for whom, and in which modules each process is.",
    sentence=str,
    hangs=HANG,
    places=PLACE,
    errors=ERROR,
)
TopAnswer = _answer("TopAnswer", "What a job did in the last seconds.", processes=PROCESS, modules=RATE, errors=ERROR)


def longest_parts(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a step that take most, the longest first."""
    return dict(sorted(parts.items(), key=lambda part: -part[1])[:_PARTS])


def thread_rows(threads: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the first threads that are in a call, from the values of `RankState.to_dict`."""
    inside = [thread for thread in threads if thread["stack"]][:_PARTS]
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
    """Return a text short and printable; a name is cut at its beginning, a sentence at its end."""
    text = printable(text)
    if " " in text and len(text) > _MAX_TEXT:
        return f"{text[: _MAX_TEXT - 1]}…"
    return cut_to_width(text, _MAX_TEXT)


def make_answer(limit: int | None, relative: Callable[[str], str], values: Mapping[str, Any]) -> CallToolResult:
    """Return an answer, with lists so short that it fits if no `limit` asks for more.

    Lists are `Rows`; `relative` makes paths in a text begin below the served folder.
    """
    lists = {name: value for name, value in values.items() if isinstance(value, Rows)}
    whole = {name: _data(rows.rows, relative) for name, rows in lists.items()}
    others = {name: _data(value, relative) for name, value in values.items() if name not in lists}
    shown, shorter = {name: [*rows] for name, rows in whole.items()}, iter(_SHORTER)
    while True:
        left_out = [(rows.total - len(shown[name]), f"more {rows.noun}") for name, rows in lists.items()]
        more = [counted(count, noun) for count, noun in left_out if count]
        answer = {name: shown.get(name, others.get(name)) for name in values} | {"more": more}
        text, longest = json.dumps(answer), max(shown.values(), key=lambda rows: len(json.dumps(rows)))
        if limit is not None or len(text) <= MAX_BYTES or not longest:
            return CallToolResult(content=[TextContent(type="text", text=text)], structured_content=answer)
        if len(longest) < 2 and (characters := next(shorter, None)) is not None:
            shown, others = (cut_json(data, characters, _FIT) for data in (whole, others))
        else:
            longest.pop()


def _data(value: Any, relative: Callable[[str], str]) -> Any:
    """Return values with each text safe and short, and with numbers to six digits."""
    if isinstance(value, str):
        return printable_cut(relative(value))
    if isinstance(value, Mapping):
        return {_data(key, relative): _data(inner, relative) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_data(inner, relative) for inner in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
