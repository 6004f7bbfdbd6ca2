"""The header of a trace: all that is known about a recording but its events; the same JSON object in both formats.

JSON has it under `otherData`, a Perfetto trace in its metadata, and a merged trace in JSON under `modtrace.header`:

    modtrace           {"format": 1, "version": "0.1.0"}
    stats              counts by name, as in `Timeline.stats`
    metadata           about the recording as a whole, JSON values
    processes          [{"pid", "rank", "program", "trace_pid"}]; the trace has `trace_pid` where `pid` was taken
    tracks             [{"kind", "thread", "tid", "process"}]; `process` is an index into `processes`
    counters           [{"name", "unit", "process"}]
    begin_ns           of some steps of a recording: when the first began
    groups             [{"name", "ranks", "description"}]: of torch.distributed, where there are any
    lanes              [{"track", "pid", "tid"}]: where the spans of a track are drawn, by its ids in the trace
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from reprlib import repr as shortened
from typing import Any

import orjson

from .._errors import TraceError, WriteError
from .._version import __version__
from ..timeline import Process, Stats, Timeline
from ..timeline.contents import TRACK_KINDS
from .escape import escaped, escaped_json, restore
from .slice_args import group_header, groups_from_header

FORMAT_VERSION = 1
"""The version of the header and of what is in the events; a reader refuses others."""

EDITED_FILE_ERRORS = (ArithmeticError, AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError)
"""What reading events raises where someone has edited them since modtrace wrote them."""

WHAT_TO_DO = (
    "another program has changed or cut it; load the file as modtrace saved it, or the ring file of the recording"
)


def make_header(
    timeline: Timeline, trace_pids: Mapping[Process, int | str], lanes: Iterable[tuple[int, int | str, int]]
) -> dict[str, Any]:
    """Return the header of a timeline's trace.

    Args:
        timeline: what is written.
        trace_pids: the pid of each process in the trace.
        lanes: of each lane the index of its track, and pid and tid in the trace.

    Raises:
        WriteError: the timeline's metadata are not JSON values.
    """
    processes = list(trace_pids)
    header = {
        "modtrace": {"format": FORMAT_VERSION, "version": __version__},
        "stats": dict(timeline.stats),
        "metadata": _json_metadata(dict(timeline.metadata)),
        "processes": [
            {**process._asdict(), "program": escaped(process.program), "trace_pid": trace_pid}
            for process, trace_pid in trace_pids.items()
        ],
        "tracks": [
            {key: value for key, value in track._asdict().items() if value is not None}
            | {"thread": escaped(track.thread), "process": processes.index(track.process)}
            for track in timeline.tracks
        ],
        "counters": [
            {"name": escaped(one.name), "unit": escaped(one.unit), "process": processes.index(one.process)}
            for one in timeline.counters
        ],
        "lanes": [{"track": track, "pid": pid, "tid": tid} for track, pid, tid in lanes],
    }
    if timeline.begin_ns is not None:
        header["begin_ns"] = timeline.begin_ns
    if timeline.collective_details.groups:
        header["groups"] = group_header(timeline.collective_details.groups)
    return header


def checked_header(path: str | os.PathLike[str], header: Any, *, merged: bool = False) -> dict[str, Any]:
    """Return a header that was read from a trace, with all that `make_header` puts into it; its texts are restored.

    Args:
        path: the trace, for errors.
        header: what stands where the header should be.
        merged: whether the trace is a merged one, where a pid may be text, as the profiler wrote it.

    Raises:
        TraceError: modtrace did not write it, wrote it in another version of the format, or it was edited since.
    """
    written = header.get("modtrace") if isinstance(header, dict) else None
    if not isinstance(written, dict):
        problem = "it is a trace, but modtrace did not write it, so it holds no timeline; modtrace reads what it wrote"
        raise TraceError(path, f"{problem} itself, and the JSON of torch.profiler")
    if written.get("format") != FORMAT_VERSION:
        raise TraceError(
            path,
            f"it was saved by modtrace {written.get('version')} in format {written.get('format')}, "
            f"and this version reads format {FORMAT_VERSION}",
        )
    for fault in _faults(header, merged):
        raise TraceError(path, f"its header is not as modtrace writes it: {fault}; {WHAT_TO_DO}")
    restored: dict[str, Any] = restore(header)
    return restored


def is_int64(value: object) -> bool:
    """Tell whether a value is an integer of 64 bits with a sign."""
    return type(value) is int and -(2**63) <= value < 2**63


def is_tid(value: object) -> bool:
    """Tell whether a value fits where ids of threads have 32 bits, with or without a sign; some systems' are longer."""
    return type(value) is int and -(2**31) <= value < 2**32


def _json_metadata(metadata: dict[str, object]) -> Any:
    try:
        return orjson.loads(orjson.dumps(escaped_json(metadata)))
    except orjson.JSONEncodeError as error:
        raise WriteError(f"the metadata of a timeline must be JSON values: {error}") from error


def _is_int64_or_none(value: object) -> bool:
    return value is None or is_int64(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


# Per list of the header what each of its entries holds; if that is the name of a list, it is an index into it.
_LISTS: Mapping[str, Mapping[str, Callable[[object], bool] | str]] = {
    "processes": {"pid": is_int64, "rank": _is_int64_or_none, "program": _is_text, "trace_pid": is_int64},
    "tracks": {"kind": lambda kind: kind in TRACK_KINDS, "thread": _is_text, "tid": is_int64, "process": "processes"},
    "counters": {"name": _is_text, "unit": _is_text, "process": "processes"},
    "lanes": {"track": "tracks", "pid": is_int64, "tid": is_int64},
}
_PIDS = frozenset({"trace_pid", "pid"})


def _faults(header: dict[str, Any], merged: bool) -> Iterator[str]:
    for name, container in {"stats": dict, "metadata": dict, **dict.fromkeys(_LISTS, list)}.items():
        if not isinstance(header.get(name), container):
            yield _describe_value(name, header)
            return
    for name, kinds in _LISTS.items():
        for index, entry in enumerate(header[name]):
            yield from _entry_faults(f"{name}[{index}]", entry, kinds, header, merged)
    if not _is_int64_or_none(header.get("begin_ns")):
        yield _describe_value("begin_ns", header)
    try:
        groups_from_header(header.get("groups", []))
    except EDITED_FILE_ERRORS:
        yield _describe_value("groups", header)
    known = {field.name for field in fields(Stats)}
    for name, value in header["stats"].items():
        if name not in known or not is_int64(value):
            yield f"stats.{name} is {shortened(value)}"


def _entry_faults(
    path: str, entry: object, kinds: Mapping[str, Callable[[object], bool] | str], header: dict[str, Any], merged: bool
) -> Iterator[str]:
    if not isinstance(entry, dict):
        yield f"{path} is {shortened(entry)}"
        return
    for name in ("device", "stream"):  # only written of a GPU's track
        if not _is_int64_or_none(entry.get(name)):
            yield f"{path}.{_describe_value(name, entry)}"
    for name, kind in kinds.items():
        value = entry.get(name)
        fits = kind(value) if callable(kind) else type(value) is int and 0 <= value < len(header[kind])
        if merged and name in _PIDS:
            fits = fits or isinstance(value, str)
        if name not in entry or not fits:
            yield f"{path}.{_describe_value(name, entry)}"


def _describe_value(name: str, entries: dict[str, Any]) -> str:
    return f"{name} is {shortened(entries[name])}" if name in entries else f"{name} is missing"
