"""What a report is made from: a timeline, or a profiler's trace with the timeline in it; all of it, or a part."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from ..read import FileKind, load
from ..timeline import Timeline
from ..timeline.tail import last_spans, last_steps
from ..write.perfetto import write_perfetto
from .aliases import ReportNames
from .clean_profile import clean_profile
from .clean_timeline import clean_timeline

__all__ = ["ProfileSource", "ReportSource", "TimelineSource", "TracePart"]


class TracePart(NamedTuple):
    """The trace, or the part of it, that goes into an archive.

    Attributes:
        file_name: of the trace's file in the archive.
        data: that file's contents.
        timeline: what the page shows.
        description: which part it is (`the last 3 steps of 20`); None for all of it.
    """

    file_name: str
    data: bytes
    timeline: Timeline
    description: str | None


class ReportSource(Protocol):
    """What a report is made from; private things are already gone.

    Attributes:
        timeline: all of it.
        count: how many spans or events it has.
        notes: what the reader should know.
    """

    timeline: Timeline
    count: int
    notes: list[str]

    def last(self, max_items: int) -> TracePart:
        """Return the last `max_items` spans or events, or the last whole steps that have no more."""


class TimelineSource:
    """A timeline without a profiler's trace."""

    def __init__(self, timeline: Timeline, names: ReportNames, folder: Path) -> None:
        self.timeline = clean_timeline(timeline, names)
        self.count = len(timeline.columns)
        self.notes: list[str] = []
        self._folder = folder

    def last(self, max_items: int) -> TracePart:
        """Return the last whole steps that have at most `max_items` spans, else the last `max_items` spans."""
        timeline, description = self.timeline, None
        if max_items < self.count:
            timeline, description = last_steps(timeline, max_items) or last_spans(timeline, max_items)
        path = self._folder / "trace.pftrace.gz"
        write_perfetto(timeline, path)
        return TracePart(path.name, path.read_bytes(), timeline, description)


class ProfileSource:
    """A profiler's trace, plain or merged.

    A plain one becomes a `.pftrace`, as `modtrace merge` makes it. A merged one stays JSON: merging it once more would
    lose what was recorded.
    """

    def __init__(self, path: str | os.PathLike[str], kind: FileKind, names: ReportNames, folder: Path) -> None:
        self._names, self._folder, self._kind = names, folder, kind
        self._clean = clean_profile(path, folder / "clean.json", names)
        self.timeline = clean_timeline(load(self._clean.path), _Unchanged(names))
        self.count = len(self._clean.times)
        self.notes = list(self._clean.notes)
        if self._clean.dropped:
            self.notes.append(
                f"{self._clean.dropped:,} events of the profiler's trace were left out as not known to be harmless"
            )

    def last(self, max_items: int) -> TracePart:
        """Return the profiler's last steps that have at most `max_items` events, else the last `max_items` events."""
        clean, timeline, description = self._clean, self.timeline, None
        if max_items < self.count:
            since = float(clean.times[-max_items])
            steps = clean.steps[clean.steps >= since]
            if len(steps):
                since = float(steps[0])
                which = "last step" if len(steps) == 1 else f"last {len(steps)} steps"
                description = f"the profiler's {which} of {len(clean.steps)}"
            else:
                kept_ms, all_ms = (clean.end - since) / 1e3, (clean.end - clean.times[0]) / 1e3
                description = f"the last {kept_ms:,.3f} ms of {all_ms:,.3f} ms"
            clean = clean_profile(clean.path, self._folder / "end.json", _Unchanged(self._names), since)
            timeline = timeline.window(clean.base + int(np.rint(since * 1e3)))
        if self._kind is FileKind.MERGED_JSON:
            return TracePart("trace.json.gz", gzip.compress(clean.path.read_bytes(), 6, mtime=0), timeline, description)
        from ..profiler import merge

        path = self._folder / "trace.pftrace.gz"
        merge(clean.path, None, path)
        return TracePart(path.name, path.read_bytes(), timeline, description)


class _Unchanged(ReportNames):
    """Names that were replaced before: aliases of aliases would be different ones."""

    def __init__(self, names: ReportNames) -> None:
        super().__init__(names.text)
