"""Span, and the sequence of a timeline's spans."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, overload

import numpy as np

from .._tables import make_frame
from .contents import Name, Process
from .slices import PHASES, Slices


class Span(NamedTuple):
    """One call of a module in one phase, from when to when.

    A call whose backward is interleaved with another's has several backward spans.

    Attributes:
        name: the path below the nearest called ancestor and the class (`h.0: Block`); the class alone for a root.
        fqn: the module's fully qualified name (`GPT.transformer.h.0`).
        module_class: the name of the module's class (`Block`).
        phase: "forward", "backward" or "recompute" (a forward that a checkpoint runs again).
        start_ns: when it began, integer nanoseconds since the Unix epoch.
        end_ns: when it ended, integer nanoseconds since the Unix epoch; never less than `start_ns`.
        depth: how many spans are around it on its track.
        track: the name of the track that it lies on (`forward · MainThread`).
        call: which call of this module it is, from 0; the same for forward, backward and recompute of one call.
        step: how many training steps had ended when it began.
        complete: False where its enter or exit was overwritten or never came; its times are then the known part.
        process: the process it belongs to; a rank or a worker of a `DataLoader` is one of its own.

    Examples:
        >>> [span for span in timeline.spans if span.phase == "backward" and span.duration_ns > 1_000_000]
    """

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
    process: Process

    @property
    def duration_ns(self) -> int:
        """How long it took, in nanoseconds."""
        return self.end_ns - self.start_ns


class Spans(Sequence[Span]):
    """The spans of a timeline in start order; a `Span` is made when it is asked for, so a million are cheap to hold.

    Args:
        columns: the spans as columns.
        names: what `columns.name` points into.
        tracks: the name of each track that `columns.track` points into.
        processes: the process of each track.
    """

    _CHUNK = 1 << 14

    def __init__(
        self, columns: Slices, names: Sequence[Name], tracks: Sequence[str], processes: Sequence[Process]
    ) -> None:
        self._columns = columns
        self._names = names
        self._tracks = tracks
        self._processes = processes

    def __len__(self) -> int:
        return len(self._columns)

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> "Spans": ...
    def __getitem__(self, index: int | slice) -> "Span | Spans":
        if isinstance(index, slice):
            chosen = self._columns.take(np.arange(len(self))[index])
            return Spans(chosen, self._names, self._tracks, self._processes)
        position = range(len(self))[index]
        return next(self._rows(position, position + 1))

    def __iter__(self) -> Iterator[Span]:
        starts = range(0, len(self), self._CHUNK)
        return itertools.chain.from_iterable(self._rows(start, start + self._CHUNK) for start in starts)

    def __repr__(self) -> str:
        return f"<{len(self)} spans>"

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

    def _rows(self, start: int, stop: int) -> Iterator[Span]:
        c = self._columns
        part = slice(start, stop)
        columns = c.name, c.phase, c.start, c.end, c.depth, c.track, c.call, c.step, c.complete
        rows = zip(*(column[part].tolist() for column in columns), strict=True)
        for name, phase, start_ns, end_ns, depth, track, call, step, complete in rows:
            label, fqn, module_class = self._names[name]
            of_call = call, step, complete, self._processes[track]
            yield Span(label, fqn, module_class, PHASES[phase], start_ns, end_ns, depth, self._tracks[track], *of_call)
