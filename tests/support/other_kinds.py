"""Timelines with slices that are no modules'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from modtrace.timeline import BackwardPass, Collectives, Timeline, Track
from modtrace.timeline.join import with_slices
from modtrace.timeline.select import keep_rows, steps_at
from modtrace.timeline.slices import BACKWARD_PASS, COLLECTIVE, WAIT, Slices

__all__ = ["with_collectives", "with_passes"]


def with_collectives(timeline: Timeline, collectives: Collectives) -> Timeline:
    """The timeline with these collectives and waits in place of its own."""
    rows, details = collectives.slices()
    return with_slices(_without(timeline, COLLECTIVE, WAIT), rows, collective_details=details)


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
    return with_slices(replace(_without(timeline, BACKWARD_PASS), tracks=tracks), rows)


def _without(timeline: Timeline, *kinds: int) -> Timeline:
    return keep_rows(timeline, np.flatnonzero(~np.isin(timeline.slices.kind, kinds)))
