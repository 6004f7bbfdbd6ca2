"""Timelines made of others: with more slices, several together, at other times, with other processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from .._typing import AnyArray, Int64Array
from .collectives import CollectiveDetails
from .contents import GPU, Process, Stats, Track
from .nesting import nest_by_time
from .select import keep_rows
from .slices import BACKWARD, DTYPES, MODULE, RECOMPUTE, Slices, append_to, is_sorted, join_columns, sort_by_start

if TYPE_CHECKING:
    from .contents import Name
    from .timeline import Timeline


def with_slices(
    timeline: Timeline,
    rows: Slices,
    span_args: Mapping[int, Mapping[str, str]] | None = None,
    collective_details: CollectiveDetails | None = None,
) -> Timeline:
    """Return the timeline with more slices, whose names and tracks are the timeline's.

    Args:
        timeline: what is added to.
        rows: the slices; no other slice of the timeline is around or in one of them.
        span_args: what some of them hold beyond the fixed fields, by index.
        collective_details: what their `detail` points into, if they have any.
    """
    if collective_details is not None:
        first = len(timeline.collective_details)
        rows = replace(rows, detail=np.where(rows.detail < 0, -1, rows.detail + first).astype(np.int32))
        details = CollectiveDetails.joined([timeline.collective_details, collective_details])
        timeline = replace(timeline, collective_details=details)
    if not len(rows):
        return timeline
    slices, position = sort_by_start(join_columns([timeline.slices, rows]))
    all_args = [*timeline.span_args.items()]
    all_args += [(len(timeline.slices) + row, args) for row, args in (span_args or {}).items()]
    return replace(timeline, slices=slices, span_args={int(position[row]): args for row, args in all_args})


def with_modules(timeline: Timeline, columns: Slices, span_args: Mapping[int, Mapping[str, str]]) -> Timeline:
    """Return the timeline with other slices of modules.

    Args:
        timeline: whose other slices stay.
        columns: the slices of modules, in start order.
        span_args: what some of them hold beyond the fixed fields, by index.
    """
    return with_slices(keep_rows(timeline, np.flatnonzero(timeline.slices.kind != MODULE)), columns, span_args)


def put_modules_before(
    timeline: Timeline, columns: dict[str, AnyArray], span_args: Mapping[int, Mapping[str, str]]
) -> Timeline:
    """Return a timeline that has no modules yet with slices of modules.

    Args:
        timeline: with other slices.
        columns: of the modules, as of `Slices`; they grow in place, so that memory holds them once.
        span_args: what some of the modules hold beyond the fixed fields, by index.
    """
    count, rest = len(columns["start"]), timeline.slices
    rest = replace(rest, parent=np.where(rest.parent >= 0, rest.parent + count, -1))
    columns |= {"kind": np.full(count, MODULE, np.int8), "detail": np.full(count, -1, np.int32)}
    append_to(columns, {field: getattr(rest, field) for field in DTYPES})
    slices = Slices(**columns)
    args = {**span_args, **{count + row: of_row for row, of_row in timeline.span_args.items()}}
    if not is_sorted(slices):
        slices, position = sort_by_start(slices)
        args = {int(position[row]): of_row for row, of_row in args.items()}
    return replace(timeline, slices=slices, span_args=args)


def join(parts: Sequence[Timeline], track_order: Sequence[int] | None = None, *, sort: bool = True) -> Timeline:
    """Return one timeline of several, whose names, tracks and links stay apart.

    Counts of stats add up. Marks and metadata are those of the first part.

    Args:
        parts: at least one.
        track_order: the order of the joined tracks, as indices into the tracks of all parts one after the other.
        sort: False keeps the slices in the order of the parts; these then hold modules only.
    """
    tracks = [track for part in parts for track in part.tracks]
    order = np.arange(len(tracks)) if track_order is None else np.array(track_order, np.int64)
    new_track = np.zeros(max(len(tracks), 1), np.int32)
    new_track[order] = np.arange(len(order))
    first_row = first_name = first_track = first_link = first_detail = 0
    moved = []
    span_args: dict[int, Mapping[str, str]] = {}
    for part in parts:
        rows = part.slices
        moved.append(
            replace(
                rows,
                name=np.where(rows.name < 0, -1, rows.name + first_name).astype(np.int32),
                track=new_track[rows.track + first_track],
                link=np.where(rows.link < 0, -1, rows.link + first_link),
                detail=np.where(rows.detail < 0, -1, rows.detail + first_detail).astype(np.int32),
            )
        )
        span_args |= {first_row + row: args for row, args in part.span_args.items()}
        first_row += len(rows)
        first_name += len(part.names)
        first_track += len(part.tracks)
        first_link += int(rows.link.max(initial=-1)) + 1
        first_detail += len(part.collective_details)
    slices = join_columns(moved)
    if sort:
        slices, position = sort_by_start(slices)
        span_args = {int(position[row]): args for row, args in span_args.items()}
    return replace(
        parts[0],
        slices=slices,
        names=[name for part in parts for name in part.names],
        tracks=[tracks[index] for index in order.tolist()],
        stats=Stats(*(sum(part.stats[count] for part in parts) for count in Stats())),
        counters=[counter for part in parts for counter in part.counters],
        span_args=span_args,
        collective_details=CollectiveDetails.joined([part.collective_details for part in parts]),
        gpu_work=None,
        begin_ns=None,
    )


def add_gpu_tracks(
    timeline: Timeline, streams: Sequence[tuple[int, int]], spans: Slices, names: Sequence[Name] | None = None
) -> Timeline:
    """Return the timeline with a track per stream; a span there has the link of the call that launched its work.

    The tracks belong to the process of the timeline's first track.

    Args:
        timeline: what ran on threads.
        streams: device and stream of each track that is to be made.
        spans: those above the streams, nested on each; their tracks are indices into `streams`, and phase and call are
            those of the call that launched the work.
        names: those of the timeline, and after them those that it does not know; None: it knows all.
    """
    if not len(spans):
        return timeline
    process = timeline.tracks[0].process if timeline.tracks else Process(0)
    track, link = spans.track + len(timeline.tracks), _links(timeline.columns, spans)
    tracks = [Track(GPU, f"stream {stream}", stream, process, device, stream) for device, stream in streams]
    known = replace(timeline, names=timeline.names if names is None else names, tracks=[*timeline.tracks, *tracks])
    return with_slices(known, nest_by_time(replace(spans, track=track, link=link)))


def _links(columns: Slices, spans: Slices) -> Int64Array:
    """Return the link of each span's call, -1 where it has none; a recompute has none on its thread either."""
    known: dict[tuple[int, int], int] = {}
    for row in np.flatnonzero((columns.link >= 0) & (columns.phase <= BACKWARD)).tolist():
        known.setdefault((int(columns.name[row]), int(columns.call[row])), int(columns.link[row]))
    keys = zip(spans.name.tolist(), spans.call.tolist(), spans.phase.tolist(), strict=True)
    return np.array([-1 if phase == RECOMPUTE else known.get((name, call), -1) for name, call, phase in keys], np.int64)


def move_times(timeline: Timeline, move: Callable[[Int64Array], Int64Array]) -> Timeline:
    """Return the timeline with all its times moved.

    Args:
        timeline: what to move.
        move: int64 nanoseconds → where they are moved to; keeps their order.
    """
    slices, details, marks = timeline.slices, timeline.collective_details, timeline.marks
    mark_times = move(np.array([mark.time_ns for mark in marks], np.int64)).tolist()
    return replace(
        timeline,
        slices=replace(slices, start=move(slices.start), end=move(slices.end)),
        collective_details=replace(details, done=np.where(details.done >= 0, move(details.done), -1)),
        marks=[mark._replace(time_ns=time) for mark, time in zip(marks, mark_times, strict=True)],
        counters=[replace(counter, time=move(counter.time)) for counter in timeline.counters],
        begin_ns=None if timeline.begin_ns is None else int(move(np.array([timeline.begin_ns]))[0]),
    )


def replace_processes(timeline: Timeline, process_of: Callable[[Process], Process]) -> Timeline:
    """Return the timeline with another process wherever it names one."""
    return replace(
        timeline,
        tracks=[track._replace(process=process_of(track.process)) for track in timeline.tracks],
        counters=[replace(counter, process=process_of(counter.process)) for counter in timeline.counters],
    )
