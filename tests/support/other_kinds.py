"""Timelines with slices that are no modules'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from modtrace import Timeline
from modtrace.timeline import BackwardPass, CollectiveName, Collectives, Group, Track
from modtrace.timeline import Timeline as TimelineData
from modtrace.timeline.collectives import collective_args
from modtrace.timeline.join import with_slices
from modtrace.timeline.select import keep_rows, steps_at
from modtrace.timeline.slices import BACKWARD_PASS, COLLECTIVE, WAIT, Slices

__all__ = ["collectives_of", "with_collectives", "with_passes"]


def collectives_of(
    names: Sequence[CollectiveName], groups: Sequence[Group], fields: Sequence[str], rows: npt.NDArray[np.int64]
) -> Collectives:
    """The collectives of these rows, whose columns are those fields."""
    kinds = {"is_wait": np.bool_, "complete": np.bool_, "name": np.int32, "track": np.int32}
    columns: dict[str, Any] = {
        field: column.astype(kinds.get(field, np.int64)) for field, column in zip(fields, rows.T, strict=True)
    }
    return Collectives(names, groups, **columns)


def with_collectives(timeline: Timeline, collectives: Collectives) -> Timeline:
    """The timeline with these collectives and waits in place of its own."""
    table = collectives
    rows = Slices.of_kind(
        np.where(table.is_wait, WAIT, COLLECTIVE),
        table.start,
        end=table.end,
        track=table.track,
        step=table.step,
        complete=table.complete,
        args=collective_args(table.names, table.name.astype(np.int64), table.counter, table.nbytes, table.done),
    )
    return Timeline.of(replace(with_slices(_without(timeline, COLLECTIVE, WAIT), rows), groups=table.groups))


def with_passes(timeline: Timeline, passes: Sequence[BackwardPass]) -> Timeline:
    """The timeline with these backward passes in place of its own, on tracks behind the others if they are new."""
    of_pass = [Track("backward pass", run.thread, run.tid, run.process) for run in passes]
    tracks = list(dict.fromkeys([*timeline.tracks, *of_pass]))
    start = np.array([run.start_ns for run in passes], np.int64)
    rows = Slices.of_kind(
        BACKWARD_PASS,
        start,
        end=[run.end_ns for run in passes],
        track=[tracks.index(track) for track in of_pass],
        step=steps_at(timeline, start),
        complete=[run.complete for run in passes],
    )
    return Timeline.of(with_slices(replace(_without(timeline, BACKWARD_PASS), tracks=tracks), rows))


def _without(timeline: Timeline, *kinds: int) -> TimelineData:
    return keep_rows(timeline, np.flatnonzero(~np.isin(timeline.slices.kind, kinds)))
