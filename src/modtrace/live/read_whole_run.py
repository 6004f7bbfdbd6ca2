"""Reads the watcher's file on a whole run, and formats it as text."""

import fnmatch
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from .._files import open_regular
from .._tables import COUNT, LONG_MS, MODULE, TEXT, Column, Table, counted, ms_text
from ..ring import Record, read_ring_records, whole_run_path

_MAX_BYTES = 64 << 20
TIME_FIELDS = ("count", "total_ns", "min_ns", "p50_ns", "p95_ns", "p99_ns", "max_ns")
"""Names of the fields of each distribution in the file."""
_SHOWN_MODULES = 10


def read_whole_run(ring: str | os.PathLike[str], records: Iterable[Record] | None = None) -> Mapping[str, Any] | None:
    """Return a watcher's values for the run in a ring; None without a file, or if it is from another run."""
    path = whole_run_path(os.fspath(ring))
    try:
        with open_regular(path) as file:
            values = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not _is_whole_run(values):
        return None
    ring_records = read_ring_records(ring) if records is None else records
    start_ns = next((record["monotonic"] for record in ring_records if record["kind"] == "anchor"), 0)
    return values if values["begin"] == start_ns else None


def _is_whole_run(values: Any) -> bool:
    if not isinstance(values, dict) or not _has_numbers(values, ("pid", "begin", "steps", "spans", "missed_events")):
        return False
    parts, modules = values.get("parts"), values.get("modules")
    if not isinstance(parts, dict) or not isinstance(modules, list) or type(values.get("seconds")) is not float:
        return False
    are_times = all(_has_numbers(times, TIME_FIELDS) for times in (values.get("step"), *parts.values(), *modules))
    return are_times and all(isinstance(row.get(f), str) for row in modules for f in ("fqn", "module_class", "phase"))


def _has_numbers(values: Any, fields: Iterable[str]) -> bool:
    return isinstance(values, dict) and all(type(values.get(field)) is int for field in fields)


def whole_run_text(values: Mapping[str, Any], only: str | None = None, limit: int | None = None) -> str:
    """Return a sentence on the steps, and a table of the parts and of the slowest modules, by default ten."""
    step = values["step"]
    line = f"whole run: {counted(values['spans'], 'span')}"
    if values["steps"]:
        p50, p95, p99, slowest = (ms_text(step[field]) for field in ("p50_ns", "p95_ns", "p99_ns", "max_ns"))
        line = f"whole run: {counted(values['steps'], 'step')}, step p50 {p50}, p95 {p95}, p99 {p99}, slowest {slowest}"
    line = f"{line}; {_duration_text(values['seconds'])}"
    if values["missed_events"]:
        line += f"; {values['missed_events']:,} events were overwritten before the watcher read them"
    matching = [row for row in values["modules"] if only is None or fnmatch.fnmatchcase(row["fqn"], only)]
    by_time = sorted(matching, key=lambda row: -row["total_ns"])
    top_modules = by_time[: _SHOWN_MODULES if limit is None else limit]
    parts = sorted(values["parts"].items(), key=lambda item: -item[1]["total_ns"])
    rows = [{**times, "fqn": part, "phase": "part"} for part, times in parts] + top_modules
    notes = [f"{len(by_time) - len(top_modules):,} more rows of modules"] if by_time[len(top_modules) :] else []
    return str(Table(_COLUMNS, rows, sentences=[line], notes=notes).to("text"))


_COLUMNS = (
    Column("name", "fqn", MODULE),
    Column("of", "phase", TEXT),
    Column("count", "count", COUNT),
    *(Column(field.removesuffix("_ns"), field, LONG_MS) for field in TIME_FIELDS[1:]),
)


def _duration_text(seconds: float) -> str:
    minutes, remaining_s = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {remaining_s} s"
