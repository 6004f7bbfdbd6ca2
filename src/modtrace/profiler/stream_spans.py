"""Spans above the streams of GPUs: which module's work ran when, and which collective."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .._arrays import Int8Array, Int64Array
from ..formats.chrome_values import TrackKey
from ..formats.limits import UNNAMED
from ..timeline import PHASES, Name, Slices, Timeline
from ..timeline.join import add_gpu_tracks
from ..timeline.nesting import LabelledInterval, spans_from_intervals
from ..timeline.slices import ArgColumn, args_by_row, without_empty
from .device_work import NO_MODULE, NoModuleReason, WorkOwners
from .event_collector import ProfilerEvents
from .recorded_part import CallIndex

COMMUNICATION = "communication"
"""The class of a collective among the modules."""

_COLLECTIVE, _NO_MODULE = -1, -2
_Key = tuple[int, int, int]
"""A call: its forward span, phase and replay; a collective: -1 and the piece; no module: -2 and the reason."""


GPU_WORK, REASON = "gpu_work", "reason"
"""Args of a slice above a stream: the number of kernels, memcpys and memsets in it, and why it has no module."""


def collective_name(collective: str, owner: Name | None) -> Name:
    """Return the name of a collective's span, below the module that launched it.

    Example:
        >>> collective_name("all_reduce", Name("a: Linear", "Net.a", "Linear"))
        Name(label='all_reduce: communication', fqn='Net.a.all_reduce', module_class='communication')
    """
    fqn = collective if owner is None else f"{owner.fqn}.{collective}"
    return Name(f"{collective}: {COMMUNICATION}", fqn, COMMUNICATION)


def build_stream_spans(timeline: Timeline, events: ProfilerEvents, owners: WorkOwners) -> tuple[Slices, list[Name]]:
    """Cut the spans of each device's streams; streams with no work of any module have none.

    They are in ns from the trace's base, in order of (track, start, depth), with phase, call, name and step of what
    launched the work; tracks are the trace's. Names are the timeline's, and then those of collectives. What no module
    launched has `REASON`.
    """
    paths = _Paths(timeline)
    work, columns = events.work, timeline.columns
    rows: list[tuple[int, ...]] = []
    for track in np.unique(work.track[owners.span >= 0]).tolist():
        pieces = np.flatnonzero(work.track == track)
        pieces = pieces[np.argsort(work.start[pieces], kind="stable")]
        starts = work.start[pieces]
        stack: list[int] = []
        spans = spans_from_intervals(_intervals(paths, events, owners, pieces))
        edges = np.searchsorted(starts, [(span.start, span.end) for span in spans]).tolist()
        for span, (first, last) in zip(spans, edges, strict=True):
            del stack[span.depth :]
            around = stack[-1] if stack else -1
            stack.append(len(rows))
            piece = int(pieces[first])
            key = paths.keys[span.key]  # type: ignore[index]
            is_collective = span.key[0] == _COLLECTIVE  # type: ignore[index]
            collective = int(owners.collective[piece]) if is_collective else -1
            reason = 0 if key >= 0 else int(owners.reason[piece])
            of_work = last - first, collective, int(owners.step[piece]), reason
            rows.append((track, span.start, span.end, key, span.depth, around, *of_work))
    track, start, end, call, depth, parent, count, collective, step, reason = np.array(rows, np.int64).reshape(-1, 10).T
    names, numbers = [*timeline.names], dict[Name, int]()
    name = np.where(call >= 0, columns.name[call], -1)
    for row in np.flatnonzero(collective >= 0).tolist():
        owner = names[name[row]] if name[row] >= 0 else None
        made = collective_name(events.collective_names[collective[row]], owner)
        name[row] = numbers.setdefault(made, len(names))
        if name[row] == len(names):
            names.append(made)
    owned, none = call >= 0, np.flatnonzero(call < 0)
    args = {
        REASON: ArgColumn(none, reason[none], [reason.text for reason in NoModuleReason]),
        GPU_WORK: ArgColumn(np.arange(len(count)), count),
    }
    of_call = {"phase": np.where(owned, columns.phase[call], 0), "call": np.where(owned, columns.call[call], 0)}
    place = {"track": track, "start": start, "end": end, "depth": depth, "parent": parent}
    return Slices.of(without_empty(args), **place, **of_call, name=name, step=step), names


def _intervals(
    paths: "_Paths", events: ProfilerEvents, owners: WorkOwners, pieces: Int64Array
) -> Iterator[LabelledInterval]:
    of_call = np.array([owners.span, owners.reason, owners.collective, owners.replay])[:, pieces]
    # What ran one after another for one call is one interval; collectives have one each.
    begins = np.flatnonzero(np.append(True, np.diff(of_call).any(axis=0)) | (of_call[2] >= 0))
    first, ends = pieces[begins], np.maximum.reduceat(events.work.end[pieces], begins)
    rows = np.array([first, events.work.start[first], ends, *of_call[:, begins]]).T.tolist()
    for piece, start, end, span, reason, collective, replay in rows:
        path = paths.of(span, replay) if span >= 0 else (paths.of_no_call(_NO_MODULE, reason),)
        if collective >= 0:
            path = (*path, paths.of_no_call(_COLLECTIVE, piece, span))
        yield LabelledInterval(start, end, path)


def with_stream_spans(timeline: Timeline, spans: Slices, names: Sequence[Name], tracks: Sequence[TrackKey]) -> Timeline:
    """Return the timeline with a track per stream, and the spans above; without work that no module asked for."""
    is_owned = np.ones(len(spans), np.bool_)
    if REASON in spans.args:
        is_owned[spans.args[REASON].rows] = False
    owned = spans.take(is_owned)
    used, stream = np.unique(owned.track, return_inverse=True)
    all_names = [*timeline.names]
    numbers = {name: number for number, name in reversed([*enumerate(all_names)])}
    new: dict[int, int] = {}
    for number in dict.fromkeys(owned.name.tolist()):
        # Two processes can have modules of one name.
        is_module = number < len(timeline.names)
        new[number] = number if is_module else numbers.setdefault(names[number], len(all_names))
        if new[number] == len(all_names):
            all_names.append(names[number])
    streams = [
        (pid if isinstance(pid, int) else 0, tid if isinstance(tid, int) else 0)
        for pid, tid in (tracks[track] for track in used.tolist())
    ]
    name = [new[number] for number in owned.name.tolist()]
    start, end, step = owned.start, owned.end, owned.step
    rows = Slices.of(start=start, end=end, name=name, phase=owned.phase, track=stream, call=owned.call, step=step)
    return add_gpu_tracks(timeline, streams, rows, all_names)


def describe_slices(spans: Slices, names: Sequence[Name]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield label, category and args of each span above a stream, as `build_stream_spans` returns them.

    The category is the phase of its call, or "gpu" without one. The args say which call it is, or why there is none,
    and how much work is in it.
    """
    columns = (column.tolist() for column in (spans.name, spans.phase, spans.call, spans.step))
    for args, number, phase, call, step in zip(args_by_row(spans.args).values(), *columns, strict=True):
        name = names[number] if number >= 0 else None
        label = NO_MODULE if name is None else name.label or UNNAMED
        if name is None or REASON in args:
            yield label, "gpu", {**args}
        else:
            of_call = {"fqn": name.fqn, "module_class": name.module_class, "call": call, "step": step}
            yield label, PHASES[phase], {**of_call, **args}


class _Paths:
    """The chain of calls around a span: keys that all spans of one call and phase share.

    Attributes:
        keys: a span of each key, or -1.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._calls = CallIndex(timeline)
        self._phase: Int8Array = timeline.columns.phase
        self._parent = timeline.columns.parent
        self._path_of: dict[tuple[int, int], tuple[_Key, ...]] = {}
        self.keys: dict[_Key, int] = {}

    def of(self, span: int, replay: int) -> tuple[_Key, ...]:
        """Return the keys of a span and of those around it, the outermost first."""
        path = self._path_of.get((span, replay))
        if path is None:
            around = int(self._parent[span])
            key = (self._calls.forward_span_of(span), int(self._phase[span]), replay)
            self.keys.setdefault(key, span)
            path = (*(self.of(around, replay) if around >= 0 else ()), key)
            self._path_of[span, replay] = path
        return path

    def of_no_call(self, kind: int, number: int, span: int = -1) -> _Key:
        """Return the key of a collective or of a reason, launched in `span`."""
        key = (kind, number, -1)
        self.keys[key] = span
        return key
