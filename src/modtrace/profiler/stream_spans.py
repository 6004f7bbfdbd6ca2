"""Spans above the streams of GPUs, for the modules and collectives whose work ran there."""

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
"""Key of a call: forward span, phase and replay; of a collective: -1 and the piece; of no module: -2 and the reason."""

GPU_WORK = "gpu_work"
"""Arg of a slice above a stream: the number of its kernels, memcpys and memsets."""
REASON = "reason"
"""Arg of a slice above a stream that has no module: the reason."""


def collective_name(collective: str, owner: Name | None) -> Name:
    """Return the name of a collective's span, below the module that launched it.

    Example:
        >>> collective_name("all_reduce", Name("a: Linear", "Net.a", "Linear"))
        Name(label='all_reduce: communication', fqn='Net.a.all_reduce', module_class='communication')
    """
    fqn = collective if owner is None else f"{owner.fqn}.{collective}"
    return Name(f"{collective}: {COMMUNICATION}", fqn, COMMUNICATION)


def build_stream_spans(timeline: Timeline, events: ProfilerEvents, owners: WorkOwners) -> tuple[Slices, list[Name]]:
    """Return the spans above the streams, and their names; streams without work of a module have no spans.

    Spans are in ns from the trace's base, in order of (track, start, depth), with phase, call, name and step of the
    launching call; tracks are the trace's. Names of collectives follow the timeline's. `REASON` is for work without
    module.
    """
    paths = _Paths(timeline)
    work, columns = events.work, timeline.columns
    rows: list[tuple[int, ...]] = []
    for track in np.unique(work.track[owners.span >= 0]).tolist():
        pieces = np.flatnonzero(work.track == track)
        pieces = pieces[np.argsort(work.start_ns[pieces], kind="stable")]
        starts = work.start_ns[pieces]
        stack: list[int] = []
        spans = spans_from_intervals(_intervals(paths, events, owners, pieces))
        edges = np.searchsorted(starts, [(span.start_ns, span.end_ns) for span in spans]).tolist()
        for span, (first, last) in zip(spans, edges, strict=True):
            del stack[span.depth :]
            outer = stack[-1] if stack else -1
            stack.append(len(rows))
            piece = int(pieces[first])
            key = paths.keys[span.key]  # type: ignore[index]
            is_collective = span.key[0] == _COLLECTIVE  # type: ignore[index]
            collective = int(owners.collective[piece]) if is_collective else -1
            reason = 0 if key >= 0 else int(owners.reason[piece])
            work_columns = last - first, collective, int(owners.step[piece]), reason
            rows.append((track, span.start_ns, span.end_ns, key, span.depth, outer, *work_columns))
    track, start, end, call, depth, parent, count, collective, step, reason = np.array(rows, np.int64).reshape(-1, 10).T
    names, numbers = [*timeline.names], dict[Name, int]()
    name = np.where(call >= 0, columns.name[call], -1)
    for row in np.flatnonzero(collective >= 0).tolist():
        owner = names[name[row]] if name[row] >= 0 else None
        new_name = collective_name(events.collective_names[collective[row]], owner)
        name[row] = numbers.setdefault(new_name, len(names))
        if name[row] == len(names):
            names.append(new_name)
    has_call, ownerless = call >= 0, np.flatnonzero(call < 0)
    args = {
        REASON: ArgColumn(ownerless, reason[ownerless], [reason.text for reason in NoModuleReason]),
        GPU_WORK: ArgColumn(np.arange(len(count)), count),
    }
    calls = {"phase": np.where(has_call, columns.phase[call], 0), "call": np.where(has_call, columns.call[call], 0)}
    extents = {"track": track, "start": start, "end": end, "depth": depth, "parent": parent}
    return Slices.of(without_empty(args), **extents, **calls, name=name, step=step), names


def _intervals(
    paths: "_Paths", events: ProfilerEvents, owners: WorkOwners, pieces: Int64Array
) -> Iterator[LabelledInterval]:
    owner_columns = np.array([owners.span, owners.reason, owners.collective, owners.replay])[:, pieces]
    # Successive pieces of one call are one interval; each collective is an interval of its own.
    starts = np.flatnonzero(np.append(True, np.diff(owner_columns).any(axis=0)) | (owner_columns[2] >= 0))
    first, ends = pieces[starts], np.maximum.reduceat(events.work.end_ns[pieces], starts)
    rows = np.array([first, events.work.start_ns[first], ends, *owner_columns[:, starts]]).T.tolist()
    for piece, start, end, span, reason, collective, replay in rows:
        path = paths.path_of(span, replay) if span >= 0 else (paths.add_key(_NO_MODULE, reason),)
        if collective >= 0:
            path = (*path, paths.add_key(_COLLECTIVE, piece, span))
        yield LabelledInterval(start, end, path)


def with_stream_spans(timeline: Timeline, spans: Slices, names: Sequence[Name], tracks: Sequence[TrackKey]) -> Timeline:
    """Return the timeline with a track per stream and the spans above it, except those without a module."""
    has_module = np.ones(len(spans), np.bool_)
    if REASON in spans.args:
        has_module[spans.args[REASON].rows] = False
    spans = spans.take(has_module)
    used_tracks, stream = np.unique(spans.track, return_inverse=True)
    all_names = [*timeline.names]
    numbers = {name: number for number, name in reversed([*enumerate(all_names)])}
    new_number: dict[int, int] = {}
    for number in dict.fromkeys(spans.name.tolist()):
        # The numbers of modules stay, since two processes can have modules of one name.
        is_module = number < len(timeline.names)
        new_number[number] = number if is_module else numbers.setdefault(names[number], len(all_names))
        if new_number[number] == len(all_names):
            all_names.append(names[number])
    streams = [
        (pid if isinstance(pid, int) else 0, tid if isinstance(tid, int) else 0)
        for pid, tid in (tracks[track] for track in used_tracks.tolist())
    ]
    name = [new_number[number] for number in spans.name.tolist()]
    start, end, step = spans.start, spans.end, spans.step
    rows = Slices.of(start=start, end=end, name=name, phase=spans.phase, track=stream, call=spans.call, step=step)
    return add_gpu_tracks(timeline, streams, rows, all_names)


def describe_slices(spans: Slices, names: Sequence[Name]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield label, category and args of each span from `build_stream_spans`.

    The category is the phase of its call, or "gpu" without a call. The args identify the call, or give the reason for
    its absence, and contain the amount of work.
    """
    columns = (column.tolist() for column in (spans.name, spans.phase, spans.call, spans.step))
    for args, number, phase, call, step in zip(args_by_row(spans.args).values(), *columns, strict=True):
        name = names[number] if number >= 0 else None
        label = NO_MODULE if name is None else name.label or UNNAMED
        if name is None or REASON in args:
            yield label, "gpu", {**args}
        else:
            call_args = {"fqn": name.fqn, "module_class": name.module_class, "call": call, "step": step}
            yield label, PHASES[phase], {**call_args, **args}


class _Paths:
    """Finds the chain of calls around a span, as keys that all spans of one call and phase share.

    Attributes:
        keys: one span for each key, or -1.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._calls = CallIndex(timeline)
        self._phase: Int8Array = timeline.columns.phase
        self._parent = timeline.columns.parent
        self._path_of: dict[tuple[int, int], tuple[_Key, ...]] = {}
        self.keys: dict[_Key, int] = {}

    def path_of(self, span: int, replay: int) -> tuple[_Key, ...]:
        """Return the keys of a span and of the spans around it, outermost first."""
        path = self._path_of.get((span, replay))
        if path is None:
            outer = int(self._parent[span])
            key = (self._calls.forward_span_of(span), int(self._phase[span]), replay)
            self.keys.setdefault(key, span)
            path = (*(self.path_of(outer, replay) if outer >= 0 else ()), key)
            self._path_of[span, replay] = path
        return path

    def add_key(self, kind: int, number: int, span: int = -1) -> _Key:
        """Return the key of a collective or of a reason, launched in `span`."""
        key = (kind, number, -1)
        self.keys[key] = span
        return key
