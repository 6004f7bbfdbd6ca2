"""Put slices and timelines together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from .collectives import CollectiveDetails
from .contents import PASSES, Stats, Track
from .select import keep_rows, steps_at
from .slices import BACKWARD_PASS, COLLECTIVE, MODULE, WAIT, Slices, join_columns, sort_by_start

if TYPE_CHECKING:
    from .collectives import Collectives
    from .contents import BackwardPass
    from .timeline import Timeline

__all__ = ["join", "with_collectives", "with_modules", "with_passes", "with_slices"]


def with_slices(timeline: Timeline, rows: Slices, *, instead_of: Collection[int] = ()) -> Timeline:
    """Return the timeline with more slices, whose names and tracks are the timeline's.

    Args:
        timeline: what is added to.
        rows: slices that no other slice of the timeline is around or in.
        instead_of: kinds whose present slices go.
    """
    if instead_of:
        timeline = keep_rows(timeline, np.flatnonzero(~np.isin(timeline.slices.kind, [*instead_of])))
    if not len(rows):
        return timeline
    slices, position = sort_by_start(join_columns([timeline.slices, rows]))
    span_args = {int(position[row]): args for row, args in timeline.span_args.items()}
    return replace(timeline, slices=slices, span_args=span_args)


def with_modules(timeline: Timeline, columns: Slices, span_args: Mapping[int, Mapping[str, str]]) -> Timeline:
    """Return the timeline with other slices of modules.

    Args:
        timeline: whose other slices stay.
        columns: the slices of modules, in start order.
        span_args: what some of them hold beyond the fixed fields, by index.
    """
    rest = keep_rows(timeline, np.flatnonzero(timeline.slices.kind != MODULE))
    if not len(rest.slices):
        return replace(timeline, slices=columns, span_args=span_args)
    behind = {len(columns) + row: args for row, args in rest.span_args.items()}
    return replace(timeline, slices=join_columns([columns, rest.slices]), span_args={**span_args, **behind})


def with_collectives(timeline: Timeline, collectives: Collectives) -> Timeline:
    """Return the timeline with these collectives and waits in place of its own."""
    rows, details = collectives.slices()
    timeline = with_slices(timeline, rows, instead_of=(COLLECTIVE, WAIT))
    return replace(timeline, collective_details=details)


def with_passes(timeline: Timeline, passes: Sequence[BackwardPass]) -> Timeline:
    """Return the timeline with these backward passes in place of its own, each on the track of its thread.

    A pass is of the step in which it began. Tracks that are missing are added behind the others.
    """
    of_pass = [Track(PASSES, run.thread, run.tid, run.process) for run in passes]
    tracks = list(dict.fromkeys([*timeline.tracks, *of_pass]))
    index = {track: number for number, track in enumerate(tracks)}
    start = np.array([run.start_ns for run in passes], np.int64)
    rows = Slices.of_kind(
        BACKWARD_PASS,
        start,
        end=[run.end_ns for run in passes],
        track=[index[track] for track in of_pass],
        step=steps_at(timeline, start),
        complete=[run.complete for run in passes],
    )
    return with_slices(replace(timeline, tracks=tracks), rows, instead_of=(BACKWARD_PASS,))


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
    )
