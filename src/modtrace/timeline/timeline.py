"""The data of a timeline: the slices of one recording, and what is known about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from .._interrupts import cached_property
from .._typing import Int64Array
from .args import args_by_row
from .collectives import Collectives, Group
from .contents import BackwardPass, CounterSeries, GpuWork, Mark, Name, Range, Stats, Track
from .slices import BACKWARD_PASS, MODULE, RANGE, Slices
from .spans import Spans


@dataclass(frozen=True)
class Timeline:
    """The slices of one recording, and what is known about it; `modtrace.Timeline` says what each field is."""

    slices: Slices
    names: Sequence[Name] = ()
    tracks: Sequence[Track] = ()
    stats: Stats = field(default_factory=Stats)
    marks: Sequence[Mark] = ()
    counters: Sequence[CounterSeries] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    groups: Sequence[Group] = ()
    gpu_work: GpuWork | None = None
    begin_ns: int | None = None
    trained: frozenset[str] | None = None

    @cached_property
    def columns(self) -> Slices:
        """The slices of modules as NumPy columns, in start order: the first rows of `slices`, not copied."""
        rows = self.slices.block_of(MODULE)
        return self.slices if rows.stop == len(self.slices) else self.slices.take(rows)

    @property
    def span_args(self) -> dict[int, dict[str, int | str]]:
        """What only some slices have, by index of the slice; see `modtrace.timeline.slices.Arg`."""
        return args_by_row(self.slices.args)

    @cached_property
    def step_ends(self) -> Int64Array:
        """int64[n], Unix nanoseconds, ascending: when training steps ended, as marks say it."""
        return np.array([mark.time_ns for mark in self.marks if mark.ends_step], np.int64)

    @cached_property
    def collectives(self) -> Collectives:
        """What the threads did of torch.distributed, as columns and as a sequence of `Collective`."""
        return Collectives.of_slices(self.slices, self.groups, self.track_names)

    @cached_property
    def backward_passes(self) -> Sequence[BackwardPass]:
        """The whole backward passes, in the order of their begins."""
        rows = self.slices.take(self.slices.block_of(BACKWARD_PASS))
        columns = (rows.start.tolist(), rows.end.tolist(), rows.track.tolist(), rows.complete.tolist())
        return [
            BackwardPass(start, end, (track := self.tracks[index]).thread, track.tid, track.process, complete)
            for start, end, index, complete in zip(*columns, strict=True)
        ]

    @cached_property
    def ranges(self) -> Sequence[Range]:
        """What threads did by name, beside modules, in the order of their begins."""
        rows = self.slices.take(self.slices.block_of(RANGE))
        columns = (rows.name, rows.start, rows.end, rows.depth, rows.track, rows.step, rows.complete)
        track_names, ranges = self.track_names, []
        for index, start, end, depth, on, step, complete in zip(*(c.tolist() for c in columns), strict=True):
            name, track = self.names[index], self.tracks[on]
            where = track_names[on], track.thread, track.process
            ranges.append(Range(name.label, name.category or "", start, end, depth, *where, step, complete))
        return ranges

    @property
    def spans(self) -> Spans:
        """The spans in start order."""
        return Spans(self.columns, self.names, self.track_names, [track.process for track in self.tracks])

    @property
    def track_names(self) -> list[str]:
        """One name per track; the thread's id is added where two threads of a process have the same name."""
        count = Counter((track.process, track.name) for track in self.tracks)
        return [
            track.name if count[track.process, track.name] == 1 else f"{track.name} {track.tid}"
            for track in self.tracks
        ]

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the fields alone: what was computed of them is computed again."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __repr__(self) -> str:
        if not len(self.columns):
            return "<Timeline: no spans>"
        length_ms = (int(self.columns.end.max()) - int(self.columns.start[0])) / 1e6
        return f"<Timeline: {len(self.columns)} spans on {len(self.tracks)} tracks, {length_ms:.3f} ms>"
