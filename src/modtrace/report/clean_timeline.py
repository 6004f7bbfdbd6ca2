"""Copy a timeline for a report: every field is chosen here, none is passed on by default."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from ..timeline import (
    BackwardPass,
    CollectiveName,
    Collectives,
    CounterSeries,
    Group,
    Mark,
    Process,
    Stats,
    Timeline,
    Track,
)
from ..timeline.contents import TRACK_KINDS
from ..timeline.rewrite import replace_processes
from .aliases import ReportNames
from .system_info import clean_metadata

__all__ = ["clean_timeline"]

_SHAPE = re.compile(r"(?:\w+=)?\w+\[[\d, ]*\]", re.ASCII)


def clean_timeline(timeline: Timeline, names: ReportNames) -> Timeline:
    """Return the timeline with its texts replaced, without the metadata and arguments that a report does not need.

    Args:
        timeline: as recorded.
        names: replaces texts.
    """
    timeline = replace_processes(timeline, lambda process: Process(process.pid, process.rank))
    copy = Timeline(
        columns=timeline.columns,
        names=[names.name(name) for name in timeline.names],
        tracks=[
            Track(
                track.kind if track.kind in TRACK_KINDS else "backward",
                names.thread(track.thread) if track.stream is None else f"stream {track.stream}",
                track.tid,
                track.process,
                track.device,
                track.stream,
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
            CounterSeries(names.counter(c.name), names.counter(c.unit), c.process, c.time, c.value)
            for c in timeline.counters
        ],
        metadata=clean_metadata(timeline.metadata),
        backward_passes=[
            BackwardPass(run.start_ns, run.end_ns, names.thread(run.thread), run.tid, run.process, run.complete)
            for run in timeline.backward_passes
        ],
        span_args={span: cleaned for span, args in timeline.span_args.items() if (cleaned := _clean_args(args, names))},
        collectives=_clean_collectives(timeline.collectives, names),
    )
    return replace(copy, collectives=replace(copy.collectives, track_names=copy.track_names))


def _clean_args(args: Mapping[str, str], names: ReportNames) -> dict[str, str]:
    """Return the args that a report holds."""
    compiled = args.get("compiled_modules")
    cleaned = {
        "shapes": _clean_shapes(args.get("shapes")),
        "compiled_modules": None if compiled is None else names.inner_modules(compiled),
    }
    return {name: text for name, text in cleaned.items() if text}


def _clean_collectives(collectives: Collectives, names: ReportNames) -> Collectives:
    """Return them with the names of groups replaced, which can be the user's; numbers of ranks stay."""
    return replace(
        collectives,
        names=[
            CollectiveName(
                names.collective(name.operator), names.group(name.group), name.peer, _clean_device(name.device)
            )
            for name in collectives.names
        ],
        groups=[Group(names.group(g.name), g.ranks, names.group(g.description)) for g in collectives.groups],
    )


def _clean_device(device: str) -> str:
    """Return the type of a device as torch names it; a backend of one's own can be called anything."""
    return device if device in ("", "cuda", "hpu", "mtia", "npu", "xla", "xpu") else "privateuseone"


def _clean_shapes(shapes: str | None) -> str | None:
    """Return shapes and dtypes without the names of arguments; None if there is anything else in it."""
    if shapes is None:
        return None
    parts = re.split(r", (?=\w+=|\w+\[|…)", shapes)
    if not all(part == "…" or _SHAPE.fullmatch(part) for part in parts):
        return None
    return ", ".join(part.rpartition("=")[2] for part in parts)
