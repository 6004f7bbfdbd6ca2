"""Collectives and backward passes as spans, for the page, which draws all that lies on a track alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...formats.communication_args import collective_args, slice_name
from ...formats.pass_args import SLICE_NAME
from ...timeline import FORWARD, Columns, Name, Timeline
from ...timeline.columns import join_columns, sort_by_start
from ...timeline.contents import PASSES
from ...timeline.nesting import nest_by_time
from ...timeline.select import steps_at
from .whole_passes import pass_track

__all__ = ["with_row_spans"]


class _Row(NamedTuple):
    start: int
    end: int
    track: int
    name: Name
    call: int
    step: int
    complete: bool
    args: Mapping[str, str]


def with_row_spans(timeline: Timeline) -> Timeline:
    """Return the timeline with a span for each collective, each wait and each backward pass, on their tracks.

    What the spans of modules have no field for is in their args. Their phase says nothing.
    """
    rows = [*_communication(timeline), *_passes(timeline)]
    if not rows:
        return timeline
    count, spans = len(rows), len(timeline.columns)
    names: dict[Name, int] = {}
    start, end, track, _, call, step, complete, args = zip(*rows, strict=True)
    added = nest_by_time(
        Columns.of(
            start=start,
            end=end,
            name=[len(timeline.names) + names.setdefault(row.name, len(names)) for row in rows],
            phase=np.full(count, FORWARD),
            track=track,
            depth=np.zeros(count),
            parent=np.full(count, -1),
            call=call,
            step=step,
            link=np.full(count, -1),
            complete=complete,
        )
    )
    joined, position = sort_by_start(join_columns([timeline.columns, added]))  # all as modules, in one block
    own_args = {row: args for row, args in timeline.span_args.items() if row < spans}
    all_args = {**own_args, **{spans + index: own for index, own in enumerate(args) if own}}
    return replace(
        timeline,
        slices=joined,
        names=[*timeline.names, *names],
        span_args={int(position[span]): own for span, own in all_args.items()},
    )


def _communication(timeline: Timeline) -> Iterator[_Row]:
    table = timeline.collectives
    for row, track in zip(table, table.track.tolist(), strict=True):
        label = slice_name(row)
        name = Name(label, f"{row.operator or 'wait'} · group {row.group}", label)
        args = {key: str(value) for key, value in collective_args(row).items()}
        yield _Row(row.start_ns, row.end_ns, track, name, row.counter or 0, row.step, row.complete, args)


def _passes(timeline: Timeline) -> Iterator[_Row]:
    tracks = {track: index for index, track in enumerate(timeline.tracks) if track.kind == PASSES}
    name = Name(SLICE_NAME, PASSES, SLICE_NAME)
    starts = np.array([run.start_ns for run in timeline.backward_passes], np.int64)
    for call, (run, step) in enumerate(zip(timeline.backward_passes, steps_at(timeline, starts).tolist(), strict=True)):
        yield _Row(run.start_ns, run.end_ns, tracks[pass_track(run)], name, call, step, run.complete, {})
