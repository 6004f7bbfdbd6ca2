"""A timeline without what is not meant to be in a report: every field is chosen, none is passed on unseen."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..timeline import CounterSeries, Mark, Process, Stats, Timeline, Track
from .aliases import Names

__all__ = ["private", "safe_metadata"]

_VERSION = re.compile(r"[\w.+-]{1,40}", re.ASCII)
_SHAPES = re.compile(r"(?:\w+=)?\w+\[[\d, ]*\]", re.ASCII)
_VERSIONS = ("modtrace", "torch", "python", "engine")
_NUMBERS = ("capacity",)


def private(timeline: Timeline, names: Names) -> Timeline:
    """Return the timeline under other names, without the metadata and arguments that a report does not need."""
    process = {
        old: Process(old.pid, old.rank)
        for old in [*(track.process for track in timeline.tracks), *(c.process for c in timeline.counters)]
    }
    return Timeline(
        columns=timeline.columns,
        names=[names.name(name) for name in timeline.names],
        tracks=[
            Track(
                "forward" if track.kind == "forward" else "backward",
                names.thread(track.thread),
                track.tid,
                process[track.process],
            )
            for track in timeline.tracks
        ],
        stats=Stats(**dict(timeline.stats)),
        marks=[
            Mark(mark.time_ns, mark.kind, names.mark(mark.text))
            for mark in timeline.marks
            if mark.kind in ("step", "mark")
        ],
        counters=[
            CounterSeries(names.counter(c.name), names.counter(c.unit), process[c.process], c.time, c.value)
            for c in timeline.counters
        ],
        metadata=safe_metadata(timeline.metadata, names),
        span_args={
            span: {"shapes": shapes}
            for span, said in timeline.span_args.items()
            if (shapes := _shapes(said.get("shapes")))
        },
    )


def safe_metadata(metadata: Mapping[str, object], names: Names) -> dict[str, object]:
    """Return versions and numbers; neither the host nor a hash of its name, nor anything unknown."""
    safe: dict[str, object] = {}
    for key in _VERSIONS:
        value = metadata.get(key)
        if isinstance(value, str) and _VERSION.fullmatch(value):
            safe[key] = names.text(value)
    for key in _NUMBERS:
        value = metadata.get(key)
        if type(value) is int:
            safe[key] = value
    return safe


def _shapes(said: str | None) -> str | None:
    """Return shapes and dtypes, without the arguments' names: those are the source's."""
    if said is None:
        return None
    parts = re.split(r", (?=\w+=|\w+\[|…)", said)
    whole = [part for part in parts if part == "…" or _SHAPES.fullmatch(part)]
    return ", ".join(part.rpartition("=")[2] for part in whole) if len(whole) == len(parts) else None
