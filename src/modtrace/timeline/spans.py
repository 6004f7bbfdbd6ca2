"""Span, and the sequence of a timeline's spans."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .._tables import make_frame
from .._typing import AnyArray
from .contents import Name, Process
from .lazy_rows import LazyRows
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


class Spans(LazyRows[Span]):
    """The spans of a timeline in start order; a `Span` is made when it is asked for, so a million are cheap to hold."""

    def __init__(
        self, columns: Slices, names: Sequence[Name], tracks: Sequence[str], processes: Sequence[Process]
    ) -> None:
        self._columns = columns
        self._names = names
        self._tracks = tracks
        self._processes = processes

    def __len__(self) -> int:
        return len(self._columns)

    def take(self, rows: AnyArray | slice) -> "Spans":
        """Return some of the spans, as `Slices.take` does."""
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
        each = zip(*(column[rows].tolist() for column in columns), strict=True)
        for name, phase, start_ns, end_ns, depth, track, call, step, complete in each:
            label, fqn, module_class = self._names[name]
            of_call = call, step, complete, self._processes[track]
            yield Span(label, fqn, module_class, PHASES[phase], start_ns, end_ns, depth, self._tracks[track], *of_call)
