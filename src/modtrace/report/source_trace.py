"""What a report is made from: a timeline, or a profiler's trace with the timeline in it; whole, or its end."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from ..read.any_trace import Kind, timeline_of
from ..timeline import Timeline
from ..timeline.tail import last_spans, last_steps
from ..write.perfetto import write_perfetto
from .aliases import Names
from .clean_profile import clean_profile
from .clean_timeline import private

__all__ = ["Material", "OfProfile", "OfTimeline", "Part"]


class Part(NamedTuple):
    """What goes into an archive.

    Attributes:
        name: of the trace's file.
        trace: its bytes.
        timeline: what the page shows.
        what: which part it is (`the last 3 of 20 steps`); None for all.
    """

    name: str
    trace: bytes
    timeline: Timeline
    what: str | None


class Material(Protocol):
    """What a report is made from; nothing private is in it any more.

    Attributes:
        timeline: the whole.
        count: how many spans or events it has.
        notes: what the reader should know.
    """

    timeline: Timeline
    count: int
    notes: list[str]

    def end(self, most: int) -> Part:
        """Return the last `most` spans or events, or the last steps that have no more."""


class OfTimeline:
    """A timeline, and nothing beside."""

    def __init__(self, timeline: Timeline, names: Names, folder: Path) -> None:
        self.timeline = private(timeline, names)
        self.count = len(timeline.columns)
        self.notes: list[str] = []
        self._folder = folder

    def end(self, most: int) -> Part:
        """Return the last steps that have at most `most` spans, or the last `most` spans."""
        timeline, what = self.timeline, None
        if most < self.count:
            timeline, what = last_steps(timeline, most) or last_spans(timeline, most)
        path = self._folder / "trace.pftrace.gz"
        write_perfetto(timeline, path)
        return Part(path.name, path.read_bytes(), timeline, what)


class OfProfile:
    """A profiler's trace, plain or merged.

    A plain one becomes Perfetto's format, as `modtrace merge` makes it; a merged one remains JSON, as merging it
    once more would lose what was recorded.
    """

    def __init__(self, path: str | os.PathLike[str], kind: Kind, names: Names, folder: Path) -> None:
        self._source, self._names, self._folder, self._kind = path, names, folder, kind
        self._clean = clean_profile(path, folder / "clean.json", names)
        self.timeline = private(timeline_of(self._clean.path, kind), _AsTheyAre(names))
        self.count = len(self._clean.times)
        self.notes = list(self._clean.notes)
        if self._clean.dropped:
            self.notes.append(
                f"{self._clean.dropped:,} events of the profiler's trace were left out as not known to be harmless"
            )

    def end(self, most: int) -> Part:
        """Return the last steps of the profiler that have at most `most` events, or the last `most` events."""
        clean, timeline, what = self._clean, self.timeline, None
        if most < self.count:
            since = float(clean.times[-most])
            steps = clean.steps[clean.steps >= since]
            if len(steps):
                since = float(steps[0])
                which = "last step" if len(steps) == 1 else f"last {len(steps)} steps"
                what = f"the profiler's {which} of {len(clean.steps)}"
            else:
                what = f"the last {(clean.end - since) / 1e3:,.3f} ms of {(clean.end - clean.times[0]) / 1e3:,.3f} ms"
            clean = clean_profile(clean.path, self._folder / "end.json", _AsTheyAre(self._names), since)
            timeline = timeline.window(clean.base + int(np.rint(since * 1e3)))
        if self._kind is Kind.MERGED:
            return Part("trace.json.gz", gzip.compress(clean.path.read_bytes(), 6, mtime=0), timeline, what)
        from ..profiler import merge

        path = self._folder / "trace.pftrace.gz"
        merge(clean.path, None, path)
        return Part(path.name, path.read_bytes(), timeline, what)


class _AsTheyAre(Names):
    """Names that have been through others already; aliases of aliases would be others."""

    def __init__(self, names: Names) -> None:
        super().__init__(names.text)
