"""Spans above the streams of GPUs: which module's work ran when, and which collective."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .._typing import Int8Array, Int64Array
from ..formats.escape import UNNAMED
from ..timeline import PHASES, Name, Slices, Timeline
from ..timeline.decode.path_spans import LabelledInterval, spans_from_intervals
from ..timeline.join import add_gpu_tracks
from .call_lookup import CallIndex
from .device_work import NO_MODULE, NoModuleReason, WorkOwners
from .event_columns import ProfilerEvents

COMMUNICATION = "communication"
"""The class of a collective among the modules."""

_COLLECTIVE, _NO_MODULE = -1, -2
_Key = tuple[int, int, int]
"""A call: its forward span, phase and replay; a collective: -1 and the piece; no module: -2 and the reason."""


@dataclass(frozen=True)
class StreamSpans:
    """Slices above the work of the streams, in order of (track, start, depth); arrays of equal length."""

    track: Int64Array  # index into `ProfilerEvents.tracks`
    start: Int64Array  # ns from the base
    end: Int64Array
    span: Int64Array  # the span of the recording whose work this is, or -1
    depth: Int64Array  # spans around each
    parent: Int64Array  # index of the span around each, or -1
    work: Int64Array  # kernels, memcpys and memsets in each
    collective: Int64Array  # index into `ProfilerEvents.collective_names`; -1 if it is not a collective
    step: Int64Array  # the step in which the work was launched
    reason: Int64Array  # a `NoModuleReason`, why a span has no module; 0 if it has one

    def __len__(self) -> int:
        return len(self.start)


def collective_name(collective: str, owner: Name | None) -> Name:
    """Return what a collective's span is called, below the module that launched it.

    Example:
        >>> collective_name("all_reduce", Name("a: Linear", "Net.a", "Linear"))
        Name(label='all_reduce: communication', fqn='Net.a.all_reduce', module_class='communication')
    """
    fqn = collective if owner is None else f"{owner.fqn}.{collective}"
    return Name(f"{collective}: {COMMUNICATION}", fqn, COMMUNICATION)


def build_stream_spans(timeline: Timeline, events: ProfilerEvents, owners: WorkOwners) -> StreamSpans:
    """Cut the spans of each device's streams; streams with no work of any module have none.

    Args:
        timeline: the timeline whose spans `owners` points to.
        events: the trace's.
        owners: the owner of each piece of work.
    """
    paths = _Paths(timeline)
    work = events.work
    rows: list[tuple[int, ...]] = []
    for track in np.unique(work.track[owners.span >= 0]).tolist():
        pieces = np.flatnonzero(work.track == track)
        pieces = pieces[np.argsort(work.start[pieces], kind="stable")]
        starts = work.start[pieces]
        stack: list[int] = []
        for span in spans_from_intervals(_intervals(paths, events, owners, pieces)):
            del stack[span.depth :]
            first, last = np.searchsorted(starts, [span.start, span.end])
            around = stack[-1] if stack else -1
            stack.append(len(rows))
            piece = int(pieces[first])
            key = paths.keys[span.key]  # type: ignore[index]
            is_collective = span.key[0] == _COLLECTIVE  # type: ignore[index]
            collective = int(owners.collective[piece]) if is_collective else -1
            reason = 0 if key >= 0 else int(owners.reason[piece])
            of_work = int(last - first), collective, int(owners.step[piece]), reason
            rows.append((track, span.start, span.end, key, span.depth, around, *of_work))
    return StreamSpans(*np.array(rows, np.int64).reshape(-1, 10).T)


def _intervals(
    paths: "_Paths", events: ProfilerEvents, owners: WorkOwners, pieces: Int64Array
) -> Iterator[LabelledInterval]:
    work = events.work
    columns = (work.start, work.end, owners.span, owners.reason, owners.collective, owners.replay)
    rows = zip(pieces.tolist(), *(column[pieces].tolist() for column in columns), strict=True)
    for piece, start, end, span, reason, collective, replay in rows:
        path = paths.of(span, replay) if span >= 0 else paths.without(reason)
        if collective >= 0:
            path = (*path, paths.of_collective(piece, span))
        yield LabelledInterval(start, end, path)


def with_stream_spans(timeline: Timeline, known: Timeline, events: ProfilerEvents, spans: StreamSpans) -> Timeline:
    """Return the timeline with a track per stream, and the spans above; without work that no module asked for.

    Args:
        timeline: what ran on threads.
        known: the timeline whose spans `spans.span` points to.
        events: the trace's.
        spans: as `build_stream_spans` returns them.
    """
    owned = np.flatnonzero(spans.span >= 0)
    used, stream = np.unique(spans.track[owned], return_inverse=True)
    calls, collective = known.columns.take(spans.span[owned]), spans.collective[owned]
    names = [*timeline.names]
    numbers = {name: number for number, name in reversed([*enumerate(names)])}
    name = list[int]()
    for of_call, of_collective in zip(calls.name.tolist(), collective.tolist(), strict=True):
        shown = known.names[of_call]
        if of_collective >= 0:
            shown = collective_name(events.collective_names[of_collective], shown)
        elif of_call < len(timeline.names):  # two processes can have modules of one name
            name.append(of_call)
            continue
        name.append(numbers.setdefault(shown, len(names)))
        if name[-1] == len(names):
            names.append(shown)
    streams = [
        (pid if isinstance(pid, int) else 0, tid if isinstance(tid, int) else 0)
        for pid, tid in (events.tracks[track] for track in used.tolist())
    ]
    start, end, step = spans.start[owned], spans.end[owned], spans.step[owned]
    rows = Slices.of(start=start, end=end, name=name, phase=calls.phase, track=stream, call=calls.call, step=step)
    return add_gpu_tracks(timeline, streams, rows, names)


class StreamSlice(NamedTuple):
    """How a merged trace shows a span above a stream.

    Attributes:
        category: the phase of its call; "gpu" if it belongs to no call.
        label: what it is called.
        args: which call that is, or the reason why there is none, and how many kernels, memcpys and memsets are in it.
    """

    category: str
    label: str
    args: dict[str, Any]


def describe_slices(spans: StreamSpans, timeline: Timeline, collective_names: Sequence[str]) -> Iterator[StreamSlice]:
    """Yield what a merged trace says of each span above a stream.

    Args:
        spans: as `build_stream_spans` returns them.
        timeline: the timeline whose spans `spans.span` points to.
        collective_names: what `spans.collective` points to.
    """
    columns = timeline.columns
    links = spans.span, spans.work, spans.collective, spans.step, spans.reason
    for span, work, collective, step, reason in zip(*(column.tolist() for column in links), strict=True):
        name = timeline.names[columns.name[span]] if span >= 0 else None
        if collective >= 0:
            name = collective_name(collective_names[collective], name)
        label = NO_MODULE if name is None else name.label or UNNAMED
        if span >= 0 and name is not None:
            call = {"fqn": name.fqn, "module_class": name.module_class, "call": int(columns.call[span]), "step": step}
            yield StreamSlice(PHASES[columns.phase[span]], label, call | {"gpu_work": work})
        else:
            yield StreamSlice("gpu", label, {"reason": NoModuleReason(reason).text, "gpu_work": work})


class _Paths:
    """The chain of calls around a span: keys that all spans of one call and phase share.

    Attributes:
        keys: a span of each key, or -1.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._calls = CallIndex(timeline)
        self._phase: Int8Array = timeline.columns.phase
        self._parent = timeline.columns.parent
        self._known: dict[tuple[int, int], tuple[_Key, ...]] = {}
        self.keys: dict[_Key, int] = {}

    def of(self, span: int, replay: int) -> tuple[_Key, ...]:
        path = self._known.get((span, replay))
        if path is None:
            around = int(self._parent[span])
            key = (self._calls.forward_span_of(span), int(self._phase[span]), replay)
            self.keys.setdefault(key, span)
            path = (*(self.of(around, replay) if around >= 0 else ()), key)
            self._known[span, replay] = path
        return path

    def without(self, reason: int) -> tuple[_Key, ...]:
        key = (_NO_MODULE, reason, -1)
        self.keys[key] = -1
        return (key,)

    def of_collective(self, piece: int, span: int) -> _Key:
        key = (_COLLECTIVE, piece, -1)
        self.keys[key] = span
        return key
