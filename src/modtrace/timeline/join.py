"""Put slices and timelines together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from .._typing import AnyArray
from .collectives import CollectiveDetails
from .contents import Stats
from .select import keep_rows
from .slices import DTYPES, MODULE, Slices, append_to, is_sorted, join_columns, sort_by_start

if TYPE_CHECKING:
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
