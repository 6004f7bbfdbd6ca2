"""The data of a timeline: the slices of one recording, the sequence of its spans, and its metadata."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast, overload

import numpy as np

from .._arrays import AnyArray, Int64Array
from .._interrupts import cached_property
from .._tables import make_frame
from ..ring.event_text import RangeCategory
from .collectives import Collectives, Group
from .contents import BackwardPass, CounterSeries, GpuWork, Mark, Name, Process, Range, Stats, Track
from .slices import BACKWARD_PASS, MODULE, PHASES, RANGE, Phase, Slices, args_by_row

if TYPE_CHECKING:
    from typing_extensions import Self


_Row_co = TypeVar("_Row_co", covariant=True)


class LazyRows(Sequence[_Row_co]):
    """Columns whose records are created on access, so a million rows need little memory."""

    _CHUNK = 1 << 14

    def take(self, rows: AnyArray | slice) -> Self:
        """Return the rows at the indexes, or selected by a mask or a slice."""
        raise NotImplementedError

    def _make(self, rows: slice) -> Iterator[_Row_co]:
        """Yield the rows from the start of a slice to before its stop."""
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> _Row_co: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> _Row_co | Self:
        if isinstance(index, slice):
            return self.take(index)
        position = range(len(self))[index]
        return next(self._make(slice(position, position + 1)))

    def __iter__(self) -> Iterator[_Row_co]:
        starts = range(0, len(self), self._CHUNK)
        return itertools.chain.from_iterable(self._make(slice(start, start + self._CHUNK)) for start in starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} {type(self).__name__.lower()}>"


class Span(NamedTuple):
    """One call of a module in one phase, with its start and end.

    A call whose backward is interleaved with another call's has several backward spans.

    Attributes:
        name: the path below the nearest called ancestor and the class (`h.0: Block`); only the class for a root.
        fqn: the module's fully qualified name (`GPT.transformer.h.0`).
        module_class: the name of the module's class (`Block`).
        phase: "forward", "backward" or "recompute" (a forward that a checkpoint runs again).
        start_ns: start in integer nanoseconds since the Unix epoch.
        end_ns: end in integer nanoseconds since the Unix epoch; never less than `start_ns`.
        depth: number of spans around it on its track.
        track: name of its track (`forward · MainThread`).
        call: number of the module's call, from 0; equal for forward, backward and recompute of one call.
        step: number of training steps that had ended at its start.
        complete: False if its enter or exit was overwritten or never came; its times are then the known part.
        process: the process that it belongs to; each rank and each worker of a `DataLoader` is a process.

    Examples:
        >>> [span for span in timeline.spans if span.phase == "backward" and span.duration_ns > 1_000_000]
    """

    name: str
    fqn: str
    module_class: str
    phase: Phase
    start_ns: int
    end_ns: int
    depth: int
    track: str
    call: int
    step: int
    complete: bool
    process: Process

    @property
    def duration_ns(self) -> int:
        """The duration in nanoseconds."""
        return self.end_ns - self.start_ns


class Spans(LazyRows[Span]):
    """The spans of a timeline in start order; each `Span` is created on access, so a million need little memory."""

    def __init__(
        self, columns: Slices, names: Sequence[Name], tracks: Sequence[str], processes: Sequence[Process]
    ) -> None:
        self._columns = columns
        self._names = names
        self._tracks = tracks
        self._processes = processes

    def __len__(self) -> int:
        return len(self._columns)

    def take(self, rows: AnyArray | slice) -> Spans:
        """Return the spans in `rows`, see `Slices.take`."""
        return Spans(self._columns.take(rows), self._names, self._tracks, self._processes)

    def to_frame(self) -> Any:
        """Return a DataFrame with a row per span; see `Timeline.frame`."""
        c = self._columns
        names = c.name.tolist()
        labels, fqns, classes = (
            [column[i] for i in names] for column in (zip(*self._names, strict=True) if names else 3 * [()])
        )
        columns = {
            "name": labels,
            "fqn": fqns,
            "module_class": classes,
            "phase": [PHASES[i] for i in c.phase.tolist()],
            "start_ns": c.start,
            "end_ns": c.end,
            "duration_ns": c.end - c.start,
            "depth": c.depth,
            "track": [self._tracks[i] for i in c.track.tolist()],
            "call": c.call,
            "step": c.step,
            "complete": c.complete,
            "process": [self._processes[i].name for i in c.track.tolist()],
        }
        return make_frame(columns)

    def _make(self, rows: slice) -> Iterator[Span]:
        c = self._columns
        columns = c.name, c.phase, c.start, c.end, c.depth, c.track, c.call, c.step, c.complete
        rows_of_columns = zip(*(column[rows].tolist() for column in columns), strict=True)
        for name, phase, start_ns, end_ns, depth, track, call, step, complete in rows_of_columns:
            label, fqn, module_class = self._names[name]
            last_fields = self._tracks[track], call, step, complete, self._processes[track]
            yield Span(label, fqn, module_class, PHASES[phase], start_ns, end_ns, depth, *last_fields)


@dataclass(frozen=True)
class Timeline:
    """The slices of one recording, and its metadata; `modtrace.Timeline` documents the fields."""

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
        """The args of slices, by name, by index of the slice: values that only some slices have, such as `flops`."""
        return args_by_row(self.slices.args)

    @cached_property
    def step_ends(self) -> Int64Array:
        """int64[n], ascending: the ends of training steps by their marks, Unix nanoseconds."""
        return np.array([mark.time_ns for mark in self.marks if mark.ends_step], np.int64)

    @cached_property
    def collectives(self) -> Collectives:
        """The calls of torch.distributed, as columns and as a sequence of `Collective`."""
        return Collectives.of_slices(self.slices, self.groups, self.track_names)

    @cached_property
    def backward_passes(self) -> Sequence[BackwardPass]:
        """The backward passes, each from its call to its return, in the order of their starts."""
        rows = self.slices.take(self.slices.block_of(BACKWARD_PASS))
        columns = (rows.start.tolist(), rows.end.tolist(), rows.track.tolist(), rows.complete.tolist())
        return [
            BackwardPass(start, end, (track := self.tracks[index]).thread, track.tid, track.process, complete)
            for start, end, index, complete in zip(*columns, strict=True)
        ]

    @cached_property
    def ranges(self) -> Sequence[Range]:
        """The named ranges of threads other than modules, in the order of their starts."""
        rows = self.slices.take(self.slices.block_of(RANGE))
        columns = (rows.name, rows.start, rows.end, rows.depth, rows.track, rows.step, rows.complete)
        track_names, ranges = self.track_names, []
        for index, start, end, depth, track_index, step, complete in zip(*(c.tolist() for c in columns), strict=True):
            name, track = self.names[index], self.tracks[track_index]
            track_fields = track_names[track_index], track.thread, track.process
            category = cast("RangeCategory", name.category or "")
            ranges.append(Range(name.label, category, start, end, depth, *track_fields, step, complete))
        return ranges

    @property
    def spans(self) -> Spans:
        """The spans in start order."""
        return Spans(self.columns, self.names, self.track_names, [track.process for track in self.tracks])

    @property
    def track_names(self) -> list[str]:
        """One name per track; the thread's id is added if two threads of a process have the same name."""
        count = Counter((track.process, track.name) for track in self.tracks)
        return [
            track.name if count[track.process, track.name] == 1 else f"{track.name} {track.tid}"
            for track in self.tracks
        ]

    def __getstate__(self) -> dict[str, Any]:
        """Return only the fields for pickling; computed values are computed again."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __repr__(self) -> str:
        if not len(self.columns):
            return "<Timeline: no spans>"
        length_ms = (int(self.columns.end.max()) - int(self.columns.start[0])) / 1e6
        return f"<Timeline: {len(self.columns)} spans on {len(self.tracks)} tracks, {length_ms:.3f} ms>"
