"""What a report is made from: a timeline, or a profiler's trace with the timeline in it; all of it, or a part."""

import gzip
import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from ..read import FileKind, load
from ..timeline import Timeline
from ..timeline.excerpt import choose_slowest, last_spans, slowest_steps
from ..write.perfetto import write_perfetto
from .clean_profile import clean_profile, cut_profile
from .clean_timeline import clean_metadata, clean_timeline, without_identity
from .names import ReportNames


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


class TimelineSource:
    """A timeline without a profiler's trace."""

    def __init__(self, timeline: Timeline, names: ReportNames, folder: Path) -> None:
        self.timeline = without_identity(clean_timeline(timeline, names))
        self.count = len(timeline.columns)
        self.notes: list[str] = []
        self._folder = folder

    def part(self, max_items: int) -> TracePart:
        """Return the slowest steps that have at most `max_items` spans, else the last `max_items` spans."""
        timeline, description = self.timeline, None
        if max_items < self.count:
            timeline, description = slowest_steps(timeline, max_items) or last_spans(timeline, max_items)
        path = self._folder / "trace.pftrace.gz"
        write_perfetto(timeline, path)
        return TracePart(path.name, path.read_bytes(), timeline, description)


class ProfileSource:
    """A profiler's trace, plain or merged.

    A plain one becomes a `.pftrace`, as `modtrace merge` makes it. A merged one stays JSON: merging it once more would
    lose what was recorded.
    """

    def __init__(self, path: str | os.PathLike[str], kind: FileKind, names: ReportNames, folder: Path) -> None:
        self._folder, self._kind = folder, kind
        self._clean = clean_profile(path, folder / "clean.json", names)
        self.timeline = _without_notes(load(self._clean.path))
        self.count = len(self._clean.times)
        self.notes = list(self._clean.notes)
        if self._clean.dropped:
            self.notes.append(
                f"{self._clean.dropped:,} events of the profiler's trace were left out as not known to be harmless"
            )

    def part(self, max_items: int) -> TracePart:
        """Return the slowest steps that have at most `max_items` events, else the last `max_items` events."""
        path, timeline, description = self._clean.path, self.timeline, None
        if max_items < self.count:
            windows, description = self._slowest_steps(max_items) or self._last_events(max_items)
            path = self._folder / "part.json"
            cut_profile(self._clean, path, windows)
            timeline = _without_notes(load(path))
        if self._kind is FileKind.MERGED_JSON:
            return TracePart("trace.json.gz", gzip.compress(path.read_bytes(), 6, mtime=0), timeline, description)
        from ..profiler.merge import merge_timeline

        merged = self._folder / "trace.pftrace.gz"
        merge_timeline(path, None, merged)
        return TracePart(merged.name, merged.read_bytes(), timeline, description)

    def _slowest_steps(self, max_events: int) -> tuple[list[tuple[float, float]], str] | None:
        """Return windows of time around the slowest steps, and what these are; None if not even one step fits."""
        steps = self._clean.steps
        if len(steps) < 2:
            return None
        # What lies between the end of a step and the start of the next one belongs to the former.
        ends = np.append(steps[1:], np.inf)
        counts = np.searchsorted(self._clean.times, ends) - np.searchsorted(self._clean.times, steps)
        chosen = choose_slowest(self._clean.step_durations, counts, max_events)
        if not len(chosen):
            return None
        which = "slowest step" if len(chosen) == 1 else f"{len(chosen)} slowest steps"
        windows = [(float(steps[index]), float(ends[index])) for index in chosen.tolist()]
        return windows, f"the profiler's {which} of {len(steps)}"

    def _last_events(self, max_events: int) -> tuple[list[tuple[float, float]], str]:
        times, end = self._clean.times, self._clean.end
        since = float(times[-max_events])
        kept_ms, all_ms = (end - since) / 1e3, (end - times[0]) / 1e3
        return [(since, float("inf"))], f"the last {kept_ms:,.3f} ms of {all_ms:,.3f} ms"


ReportSource: TypeAlias = TimelineSource | ProfileSource
"""What a report is made from; private things are already gone."""


def _without_notes(timeline: Timeline) -> Timeline:
    """Return the timeline of a copy, in which all texts are replaced, without what reading it says of its file."""
    return replace(timeline, metadata=clean_metadata(timeline.metadata))
