"""What a written trace says about the recording as a whole; the same in both formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from .._errors import WriteError
from .._version import __version__
from ..timeline import Name, Timeline
from ..write.lanes import Lanes
from .escape import UNNAMED, Originals, shown

__all__ = ["FORMAT", "header", "shown_arguments", "shown_names", "shown_texts"]

FORMAT = 1
"""The version of the header and of what is in the events; a reader refuses others."""

RESERVED = frozenset({"fqn", "module_class", "call", "step", "complete", "link"})
"""What a span's args say of themselves; its own arguments cannot have these names."""


def header(timeline: Timeline, lanes: Lanes, originals: Originals) -> dict[str, Any]:
    """Describe all that is no event, as JSON values without hostile text; `originals` has what was replaced so far."""
    processes = list(lanes.pids)
    said = {
        "modtrace": {"format": FORMAT, "version": __version__},
        "stats": dict(timeline.stats),
        "metadata": _safe(dict(timeline.metadata), originals),
        "processes": [
            {"pid": process.pid, "rank": process.rank, "program": shown(process.program, originals), "here": pid}
            for process, pid in lanes.pids.items()
        ],
        "tracks": [
            {
                "kind": track.kind,
                "thread": shown(track.thread, originals),
                "tid": track.tid,
                "process": processes.index(track.process),
            }
            for track in timeline.tracks
        ],
        "counters": [
            {
                "name": shown(counter.name, originals),
                "unit": shown(counter.unit, originals),
                "process": processes.index(counter.process),
            }
            for counter in timeline.counters
        ],
        "lanes": [{"track": lane.track, "pid": lane.pid, "tid": lane.tid} for lane in lanes.lanes],
    }
    return {**said, "originals": originals}


def shown_names(timeline: Timeline, originals: Originals) -> list[Name]:
    """Return the names as a trace shows them; a slice always has one."""
    names = []
    for name in timeline.names:
        label, fqn, module_class = (shown(text, originals) for text in name)
        if not label:
            originals[UNNAMED] = ""
        names.append(Name(label or UNNAMED, fqn, module_class))
    return names


def shown_texts(timeline: Timeline, originals: Originals) -> None:
    """Note what the texts of marks and arguments are replaced by; they are written long after the header."""
    texts = {mark.text for mark in timeline.marks}
    texts.update(text for arguments in timeline.span_args.values() for pair in arguments.items() for text in pair)
    for text in texts:
        shown(text, originals)


def shown_arguments(arguments: Mapping[str, str]) -> dict[str, str]:
    """Return a span's own arguments as a trace shows them.

    Raises:
        WriteError: one has the name of a fixed field.
    """
    taken = RESERVED & arguments.keys()
    if taken:
        raise WriteError(f"a span's arguments cannot be called {', '.join(sorted(taken))}: args has these already")
    return {shown(key): shown(value) for key, value in arguments.items()}


def _safe(value: Any, originals: Originals) -> Any:
    """Return a JSON value with the hostile texts in it replaced.

    Raises:
        WriteError: it is no JSON value.
    """
    try:
        plain = orjson.loads(orjson.dumps(_shown(value, originals)))
    except orjson.JSONEncodeError as error:
        raise WriteError(f"the metadata of a timeline must be JSON values: {error}") from error
    return plain


def _shown(value: Any, originals: Originals) -> Any:
    if isinstance(value, str):
        return shown(value, originals)
    if isinstance(value, list | tuple):
        return [_shown(item, originals) for item in value]
    if isinstance(value, dict):
        return {_shown(key, originals): _shown(item, originals) for key, item in value.items()}
    return value
