"""Timeline: the spans of one recording, and what is known about it."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple, overload

import numpy as np

from .._typing import Int64Array
from . import select as window
from .columns import PHASES, Columns
from .summary import Summary, summarize

__all__ = ["CounterSeries", "Mark", "Name", "Process", "Span", "Spans", "Stats", "Timeline", "Track"]


class Name(NamedTuple):
    """What a module is called.

    Attributes:
        label: the slice's name: the path below the nearest called ancestor and the class (`h.0: Block`);
            the class alone for a root.
        fqn: the fully qualified name (`GPT.transformer.h.0`).
        module_class: the name of the module's class (`Block`).
    """

    label: str
    fqn: str
    module_class: str


class Process(NamedTuple):
    """The process that was recorded: its OS pid, its distributed rank (None where there is none), and its name."""

    pid: int
    rank: int | None = None
    program: str = "python"

    @property
    def name(self) -> str:
        """What a trace calls the process (`rank 0 · python`)."""
        return self.program if self.rank is None else f"rank {self.rank} · {self.program}"


class Track(NamedTuple):
    """One row of slices: what ran `forward` or `backward` on one thread.

    Attributes:
        kind: "forward" or "backward"; recompute lies on the backward track of its thread.
        thread: the thread's name (`MainThread`, `pt_autograd_0`).
        tid: the thread's id as the operating system has it.
        process: the process it belongs to.
    """

    kind: str
    thread: str
    tid: int
    process: Process

    @property
    def name(self) -> str:
        """What a trace calls the track (`forward · MainThread`)."""
        return f"{self.kind} · {self.thread}"


class Mark(NamedTuple):
    """A moment: `kind` is "step" (the end of a training step), "mark" or "sync"; `time_ns` Unix nanoseconds."""

    time_ns: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class CounterSeries:
    """A sampled quantity.

    Attributes:
        name: what was sampled (`process RSS`).
        unit: its unit (`bytes`).
        process: whose it is.
        time: int64[n], Unix nanoseconds, ascending.
        value: int64[n].
    """

    name: str
    unit: str
    process: Process
    time: Int64Array
    value: Int64Array


@dataclass(frozen=True, slots=True)
class Stats(Mapping[str, int]):
    """What a recording kept and lost, by name; also readable as a mapping (`stats["recorded"]`).

    Attributes:
        recorded: events written to the ring since it was started.
        overwritten: of these, the events whose slots were used again.
        torn: slots that were being written when they were read or when the process died.
        unfinished: spans whose exit never came.
        unstarted: spans whose enter was overwritten.
        unattributed: autograd nodes that belong to no module call.
    """

    recorded: int = 0
    overwritten: int = 0
    torn: int = 0
    unfinished: int = 0
    unstarted: int = 0
    unattributed: int = 0

    def __getitem__(self, key: str) -> int:
        if key not in iter(self):
            raise KeyError(key)
        value: int = getattr(self, key)
        return value

    def __iter__(self) -> Iterator[str]:
        return (f.name for f in fields(self))

    def __len__(self) -> int:
        return len(fields(self))


class Span(NamedTuple):
    """One slice of a timeline; times are integer nanoseconds since the Unix epoch."""

    name: str
    fqn: str
    module_class: str
    phase: str
    start_ns: int
    end_ns: int
    depth: int
    track: str
    call: int
    step: int
    complete: bool

    @property
    def duration_ns(self) -> int:
        """How long it took, in nanoseconds."""
        return self.end_ns - self.start_ns


class Spans(Sequence[Span]):
    """The spans of a timeline in start order; a `Span` is made when it is asked for."""

    _CHUNK = 1 << 14

    def __init__(self, columns: Columns, names: Sequence[Name], tracks: Sequence[str]) -> None:
        self._columns = columns
        self._names = names
        self._tracks = tracks

    def __len__(self) -> int:
        return len(self._columns)

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> Spans: ...
    def __getitem__(self, index: int | slice) -> Span | Spans:
        if isinstance(index, slice):
            return Spans(self._columns.take(np.arange(len(self))[index]), self._names, self._tracks)
        position = range(len(self))[index]
        return next(self._rows(position, position + 1))

    def __iter__(self) -> Iterator[Span]:
        starts = range(0, len(self), self._CHUNK)
        return itertools.chain.from_iterable(self._rows(start, start + self._CHUNK) for start in starts)

    def __repr__(self) -> str:
        return f"<{len(self)} spans>"

    def _rows(self, start: int, stop: int) -> Iterator[Span]:
        c = self._columns
        part = slice(start, stop)
        rows = zip(
            c.name[part].tolist(),
            c.phase[part].tolist(),
            c.start[part].tolist(),
            c.end[part].tolist(),
            c.depth[part].tolist(),
            c.track[part].tolist(),
            c.call[part].tolist(),
            c.step[part].tolist(),
            c.complete[part].tolist(),
            strict=True,
        )
        for name, phase, begin, end, depth, track, call, step, complete in rows:
            label, fqn, module_class = self._names[name]
            yield Span(
                label, fqn, module_class, PHASES[phase], begin, end, depth, self._tracks[track], call, step, complete
            )


@dataclass(frozen=True)
class Timeline:
    """The spans of one recording, and what is known about it.

    Attributes:
        columns: the spans as NumPy columns, in start order.
        names: what `columns.name` points into.
        tracks: what `columns.track` points into.
        stats: what was kept and what was lost.
        marks: steps and marks, in time order.
        counters: sampled quantities.
        metadata: about the recording as a whole: `torch`, `engine`, `modtrace` versions and the like; JSON values.
        span_args: what one span says beyond the fixed fields (`{"shapes": "float32[2, 8]"}`), by position.
    """

    columns: Columns
    names: Sequence[Name] = ()
    tracks: Sequence[Track] = ()
    stats: Stats = field(default_factory=Stats)
    marks: Sequence[Mark] = ()
    counters: Sequence[CounterSeries] = ()
    metadata: Mapping[str, object] = field(default_factory=dict)
    span_args: Mapping[int, Mapping[str, str]] = field(default_factory=dict)

    @property
    def spans(self) -> Spans:
        """The spans in start order."""
        return Spans(self.columns, self.names, self.track_names)

    @property
    def track_names(self) -> list[str]:
        """One name per track; the thread's id is added where two threads of a process have the same name."""
        shared = Counter((track.process, track.name) for track in self.tracks)
        return [
            track.name if shared[track.process, track.name] == 1 else f"{track.name} {track.tid}"
            for track in self.tracks
        ]

    def __repr__(self) -> str:
        if not len(self.columns):
            return "<Timeline: no spans>"
        length = (int(self.columns.end.max()) - int(self.columns.start[0])) / 1e6
        return f"<Timeline: {len(self.columns)} spans on {len(self.tracks)} tracks, {length:.3f} ms>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline to `path`; the suffix picks the format.

        Raises:
            WriteError: the suffix is not known, or the file cannot be written; an existing file is intact.
        """
        from ..write import write  # a timeline can be built and read without any writer

        write(self, path)

    def window(self, start_ns: int | None = None, end_ns: int | None = None) -> Timeline:
        """Return what lies in a stretch of time (Unix nanoseconds); see `modtrace.timeline.window`."""
        return window.window(self, start_ns, end_ns)

    def steps(self, first: int | None = None, last: int | None = None) -> Timeline:
        """Return the spans that began in the steps from `first` to before `last`."""
        return window.steps(self, first, last)

    def modules(self, pattern: str | None = None, max_depth: int | None = None) -> Timeline:
        """Return the spans of modules whose fully qualified name matches `pattern`; see `modtrace.timeline.modules`."""
        return window.modules(self, pattern, max_depth)

    def _repr_html_(self) -> str:
        """Show the timeline in a notebook: the offline viewer, in a frame of its own."""
        from ..view.notebook_html import iframe_html

        return iframe_html(self)

    def summary(self) -> Summary:
        """Total per module: calls, forward, backward and self time."""
        return summarize(self)
