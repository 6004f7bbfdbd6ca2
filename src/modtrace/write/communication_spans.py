"""Collectives as spans, for the page, which draws all that lies on a track alike."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from ..formats.communication_args import collective_args, slice_name
from ..timeline import FORWARD, Columns, Name, Timeline
from ..timeline.columns import in_start_order
from ..timeline.nesting import nest_by_time

__all__ = ["with_collective_spans"]


def with_collective_spans(timeline: Timeline) -> Timeline:
    """Return the timeline with a span for each collective and each wait, on their tracks.

    What the spans of modules have no field for is in their args. Their phase says nothing.
    """
    table = timeline.collectives
    if not len(table):
        return timeline
    count, spans = len(table), len(timeline.columns)
    rows = list(table)
    names: dict[Name, int] = {}
    labels = [slice_name(row) for row in rows]
    name = [
        names.setdefault(Name(label, f"{row.operator or 'wait'} · group {row.group}", label), len(names))
        for label, row in zip(labels, rows, strict=True)
    ]
    added = nest_by_time(
        Columns.of(
            start=table.start,
            end=table.end,
            name=len(timeline.names) + np.array(name),
            phase=np.full(count, FORWARD),
            track=table.track,
            depth=np.zeros(count),
            parent=np.full(count, -1),
            call=np.maximum(table.counter, 0),
            step=table.step,
            link=np.full(count, -1),
            complete=table.complete,
        )
    )
    added = replace(added, parent=np.where(added.parent >= 0, added.parent + spans, -1))
    joined = Columns(
        *(np.concatenate([getattr(timeline.columns, f.name), getattr(added, f.name)]) for f in fields(Columns))
    )
    position = np.empty(spans + count, np.int64)
    position[np.lexsort((joined.depth, joined.start))] = np.arange(spans + count)
    own_args = [{key: str(value) for key, value in collective_args(row).items()} for row in rows]
    all_args = {**timeline.span_args, **dict(enumerate(own_args, spans))}
    return replace(
        timeline,
        columns=in_start_order(joined),
        names=[*timeline.names, *names],
        span_args={int(position[span]): args for span, args in all_args.items()},
    )
