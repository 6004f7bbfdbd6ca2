"""What the tools of `mcp_server` answer: the types of answers, which clients are told, and how they are cut to fit."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from mcp.types import CallToolResult, TextContent
from typing_extensions import TypedDict

from .._tables import cut_json, cut_to_width
from .._terminal import counted, printable

MAX_BYTES = 4_000
"""How long an answer is at most as JSON, unless more rows are asked for by `limit`."""
_MAX_TEXT = 300
_SHORTER = (_MAX_TEXT, 120, 40)
"""How long texts are if with longer ones no list has two rows; as JSON."""
_FIT = 40
"""More rows never fit into an answer."""
_PARTS = 8
"""How many parts of a step, or threads, a row has."""


class FileRow(TypedDict):
    """One file that may be a recording."""

    path: str
    kind: str
    bytes: int


class _ModuleCosts(TypedDict, total=False):
    recompute_ns: int
    flops_forward: int
    flops_backward: int
    retained_bytes: int
    peak_bytes: int
    gpu_self_ns: int


class FindingRow(TypedDict):
    """Something that stands out; `next` is a command that shows more, in the served folder."""

    what: str
    where: str | None
    part: str | None
    ns_per_step: int
    share: float
    evidence: str
    next: str


class ModuleRow(_ModuleCosts):
    """What one module took in all steps; without what is 0 or was not recorded."""

    fqn: str
    module_class: str
    calls: int
    total_ns: int
    self_ns: int
    forward_ns: int
    backward_ns: int
    step_p50_ns: int
    step_p95_ns: int


class StepRow(TypedDict):
    """One step, its longest parts, and why it was slow if it was."""

    step: int
    duration_ns: int
    whole: bool
    parts: dict[str, int]
    cause: str | None


class PartRow(TypedDict):
    """One part of all steps."""

    part: str
    total_ns: int
    p50_ns: int
    p95_ns: int
    share: float


class RangeRow(TypedDict):
    """All ranges of one name."""

    range: str
    part: str
    calls: int
    total_ns: int
    p50_ns: int
    p95_ns: int


class ChangeRow(TypedDict):
    """A module in one phase, or a part of the step, before and after; per step."""

    fqn: str
    phase: str
    verdict: str
    base_ns: int
    new_ns: int
    difference_ns: int
    low_ns: int | None
    high_ns: int | None
    base_calls: float
    new_calls: float


class ThreadRow(TypedDict):
    """What a thread is in: its innermost call or range."""

    thread: str
    phase: str
    name: str
    module_class: str
    seconds: float
    usual_seconds: float | None
    seems_hung: bool


class PlaceRow(TypedDict):
    """Processes that are in the same place; numbers are of the first of them."""

    ranks: str
    processes: int
    pid: int
    state: str
    step: int | None
    last_event_seconds: float
    threads: list[ThreadRow]


class RateRow(TypedDict):
    """What a module takes now, as the mean over ranks; 1 is all of the time that passes."""

    fqn: str
    calls_per_s: float
    self_share: float
    total_share: float
    busiest_rank: int | None


class ProcessRow(TypedDict):
    """What a process did in the last seconds, and the share of each part of its steps."""

    rank: int | None
    pid: int
    state: str
    step: int | None
    steps_per_s: float | None
    parts: dict[str, float]


class _Answer(TypedDict):
    more: list[str]


class FilesAnswer(_Answer):
    """The files that may be recordings, newest first."""

    files: list[FileRow]


class FindingsAnswer(_Answer):
    """What was recorded, what stands out in it, and how its steps divide into parts."""

    recorded: list[str]
    findings: list[FindingRow]
    looked_at: str
    parts: list[PartRow]
    notes: list[str]


class ModulesAnswer(_Answer):
    """What modules took, `steps_ns` of all whole steps together."""

    steps: int
    steps_ns: int
    modules: list[ModuleRow]
    notes: list[str]


class StepsAnswer(_Answer):
    """The parts of all steps together, and the slowest steps."""

    parts: list[PartRow]
    steps: list[StepRow]
    notes: list[str]


class RangesAnswer(_Answer):
    """Ranges and garbage collections by name, the longest total first."""

    ranges: list[RangeRow]
    notes: list[str]


class CompareAnswer(_Answer):
    """What changed, beyond the noise: what changed most, the step, its parts and modules."""

    findings: list[FindingRow]
    sentence: str
    step: ChangeRow
    parts: list[ChangeRow]
    changes: list[ChangeRow]
    notes: list[str]


class WhereAnswer(_Answer):
    """Who waits for whom, and in which modules each process is."""

    sentence: str
    hangs: list[str]
    places: list[PlaceRow]
    errors: list[str]


class TopAnswer(_Answer):
    """What a job did in the last seconds."""

    processes: list[ProcessRow]
    modules: list[RateRow]
    errors: list[str]


@dataclass
class Rows:
    """A list of an answer, which may be shortened.

    Attributes:
        noun: what a row is.
        rows: those that are shown.
        total: how many there are.
    """

    noun: str
    rows: list[Any]
    total: int

    @classmethod
    def of(cls, noun: str, records: Sequence[Any], limit: int | None, row: Callable[[Any], Any] = str) -> "Rows":
        """Return the first records as rows, each made by `row`."""
        return cls(noun, [row(record) for record in records[: limit or _FIT]], len(records))


def fields_of_row(kind: type[Any]) -> Callable[[Any], dict[str, Any]]:
    """Return what makes a row of a kind: the attributes of a record that have the names of its keys."""

    def row(record: Any) -> dict[str, Any]:
        values = {name: getattr(record, name) for name in get_type_hints(kind)}
        return {name: value for name, value in values.items() if value or name not in kind.__optional_keys__}

    return row


def longest_parts(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a step that take most, the longest first."""
    return dict(sorted(parts.items(), key=lambda part: -part[1])[:_PARTS])


def thread_rows(threads: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what the first threads are in that are in anything, as `RankState.to_json` has them."""
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

    Args:
        limit: how many rows each list has.
        relative: makes paths in a text begin below the served folder.
        values: what it says; lists are `Rows`.
    """
    lists = [of for of in values.values() if isinstance(of, Rows)]
    for of in lists:
        of.rows = _data(of.rows, relative)
    asked = [list(of.rows) for of in lists]
    shorter = iter(_SHORTER)
    while True:
        more = [counted(of.total - len(of.rows), f"more {of.noun}") for of in lists if of.total > len(of.rows)]
        shown = {name: of.rows if isinstance(of, Rows) else _data(of, relative) for name, of in values.items()}
        text = json.dumps(shown | {"more": more})
        longest = max(lists, key=lambda of: len(json.dumps(of.rows)))
        if limit is not None or len(text) <= MAX_BYTES or not longest.rows:
            return CallToolResult(
                content=[TextContent(type="text", text=text)], structured_content=shown | {"more": more}
            )
        if len(longest.rows) < 2 and (characters := next(shorter, None)) is not None:
            for of, rows in zip(lists, asked, strict=True):
                of.rows = cut_json(rows, characters, _FIT)
            values = {
                name: of if isinstance(of, Rows) else cut_json(of, characters, _FIT) for name, of in values.items()
            }
        else:
            longest.rows.pop()


def _data(value: Any, relative: Callable[[str], str]) -> Any:
    """Return values with each text safe and short, and with numbers to six digits."""
    if isinstance(value, str):
        return printable_cut(relative(value))
    if isinstance(value, Mapping):
        return {_data(key, relative): _data(inner, relative) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_data(inner, relative) for inner in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
