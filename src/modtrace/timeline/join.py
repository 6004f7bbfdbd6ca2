"""Timelines made from timelines: with more slices, joined, with moved times, with other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from .._arrays import AnyArray, Int64Array
from .contents import GPU, Process, Stats, Track
from .nesting import nest_by_time
from .select import keep_rows
from .slices import (
    BACKWARD,
    DTYPES,
    MODULE,
    RECOMPUTE,
    Arg,
    Args,
    Slices,
    append_to,
    join_args,
    join_columns,
    map_arg,
    sort_by_start,
)

if TYPE_CHECKING:
    from .collectives import Group
    from .contents import Name
    from .timeline import Timeline


class OnePiece:
    """A timeline as a single piece."""

    is_single, is_joined_to_write = True, False

    def __init__(self, timeline: Timeline) -> None:
        self._timeline, self.spans = timeline, len(timeline.columns)

    def __iter__(self) -> Iterator[Timeline]:
        yield self._timeline

    def rest(self) -> Timeline:
        """Return the timeline without the modules of earlier pieces: all of it here."""
        return self._timeline

    def join(self) -> Timeline:
        """Return the whole timeline."""
        return self._timeline


def with_slices(timeline: Timeline, rows: Slices) -> Timeline:
    """Return the timeline with more slices, which use its names and tracks, but do not nest with its slices."""
    if not len(rows):
        return timeline
    return replace(timeline, slices=sort_by_start(join_columns([timeline.slices, rows])))


def with_modules(timeline: Timeline, columns: Slices) -> Timeline:
    """Return the timeline with other slices of modules, given in start order."""
    return with_slices(keep_rows(timeline, np.flatnonzero(timeline.slices.kind != MODULE)), columns)


def put_modules_before(timeline: Timeline, columns: dict[str, AnyArray], args: Args) -> Timeline:
    """Return a timeline without modules with modules added; their columns grow in place, without a second copy."""
    count, slices = len(columns["start"]), timeline.slices
    slices = replace(slices, parent=np.where(slices.parent >= 0, slices.parent + count, -1))
    columns |= {"kind": np.full(count, MODULE, np.int8)}
    append_to(columns, {name: getattr(slices, name) for name in DTYPES})
    joined = Slices(**columns, args=join_args([(0, args), (count, slices.args)]))
    return replace(timeline, slices=sort_by_start(joined))


def join(parts: Sequence[Timeline], track_order: Sequence[int] | None = None, *, sort: bool = True) -> Timeline:
    """Return several timelines as one, with separate names, tracks and links.

    Stats are summed. Marks and metadata come from the first part. `track_order` has indexes into the tracks of all
    parts. If not `sort`, the slices, which must be modules, stay in the order of the parts.
    """
    tracks = [track for part in parts for track in part.tracks]
    order = np.arange(len(tracks)) if track_order is None else np.array(track_order, np.int64)
    new_track = np.zeros(max(len(tracks), 1), np.int32)
    new_track[order] = np.arange(len(order))
    first_name = first_track = first_link = 0
    renumbered = []
    for part in parts:
        rows = part.slices
        renumbered.append(
            replace(
                rows,
                name=np.where(rows.name < 0, -1, rows.name + first_name).astype(np.int32),
                track=new_track[rows.track + first_track],
                link=np.where(rows.link < 0, -1, rows.link + first_link),
            )
        )
        first_name += len(part.names)
        first_track += len(part.tracks)
        first_link += int(rows.link.max(initial=-1)) + 1
    slices = join_columns(renumbered)
    groups: dict[str, Group] = {}
    for group in (group for part in parts for group in part.groups):
        groups.setdefault(group.name, group)  # the first of several with one name
    return replace(
        parts[0],
        slices=sort_by_start(slices) if sort else slices,
        names=[name for part in parts for name in part.names],
        tracks=[tracks[index] for index in order.tolist()],
        stats=Stats(*(sum(part.stats[count] for part in parts) for count in Stats())),
        counters=[counter for part in parts for counter in part.counters],
        groups=[*groups.values()],
        gpu_work=None,
        begin_ns=None,
    )


def add_gpu_tracks(
    timeline: Timeline, streams: Sequence[tuple[int, int]], spans: Slices, names: Sequence[Name] | None = None
) -> Timeline:
    """Return the timeline with a track per stream, and spans that are linked to the call that launched their work.

    `Slices.track` of the spans indexes `streams`, (device, stream) of the process of the timeline's first track. Phase
    and call of a span come from the launching call. `names` starts with the timeline's names; None: only these.
    """
    if not len(spans):
        return timeline
    process = timeline.tracks[0].process if timeline.tracks else Process(0)
    track, link = spans.track + len(timeline.tracks), _links(timeline.columns, spans)
    tracks = [Track(GPU, f"stream {stream}", stream, process, device, stream) for device, stream in streams]
    extended = replace(timeline, names=timeline.names if names is None else names, tracks=[*timeline.tracks, *tracks])
    return with_slices(extended, nest_by_time(replace(spans, track=track, link=link)))


def _links(columns: Slices, spans: Slices) -> Int64Array:
    """Return the link of each span's call; -1 if there is none, and for a recompute, whose thread span has none."""
    link_by_call: dict[tuple[int, int], int] = {}
    for row in np.flatnonzero((columns.link >= 0) & (columns.phase <= BACKWARD)).tolist():
        link_by_call.setdefault((int(columns.name[row]), int(columns.call[row])), int(columns.link[row]))
    keys = zip(spans.name.tolist(), spans.call.tolist(), spans.phase.tolist(), strict=True)
    return np.array(
        [-1 if phase == RECOMPUTE else link_by_call.get((name, call), -1) for name, call, phase in keys], np.int64
    )


def move_times(timeline: Timeline, move: Callable[[Int64Array], Int64Array]) -> Timeline:
    """Return the timeline with all times moved; `move` must keep their order."""
    slices, marks = timeline.slices, timeline.marks
    args = map_arg(slices.args, Arg.DONE, lambda column: replace(column, values=move(column.values)))
    mark_times = move(np.array([mark.time_ns for mark in marks], np.int64)).tolist()
    return replace(
        timeline,
        slices=replace(slices, start=move(slices.start), end=move(slices.end), args=args),
        marks=[mark._replace(time_ns=time) for mark, time in zip(marks, mark_times, strict=True)],
        counters=[replace(counter, time=move(counter.time)) for counter in timeline.counters],
        begin_ns=None if timeline.begin_ns is None else int(move(np.array([timeline.begin_ns]))[0]),
    )


def replace_processes(timeline: Timeline, process_of: Callable[[Process], Process]) -> Timeline:
    """Return the timeline with every process replaced."""
    return replace(
        timeline,
        tracks=[track._replace(process=process_of(track.process)) for track in timeline.tracks],
        counters=[replace(counter, process=process_of(counter.process)) for counter in timeline.counters],
    )
