from __future__ import annotations

import dataclasses

import numpy as np

from modtrace.timeline import Process, Track
from tests.support.timelines import timeline_of

RANKS = [Process(7, 0), Process(7, 1)]


def test_a_thread_of_each_rank_may_have_the_same_name() -> None:
    tracks = [Track(kind, "MainThread", 7, rank) for rank in RANKS for kind in ("forward", "backward")]
    spans = timeline_of((0, 1, "a"), (2, 3, "a"), (4, 5, "a"), (6, 7, "a"))
    columns = dataclasses.replace(spans.columns, track=np.arange(4, dtype=np.int32))
    timeline = dataclasses.replace(spans, slices=columns, tracks=tracks)

    assert timeline.track_names == ["forward · MainThread", "backward · MainThread"] * 2
    assert [span.track for span in timeline.spans] == timeline.track_names


def test_threads_of_one_process_that_share_a_name_have_their_ids() -> None:
    tracks = [Track("forward", "pool", tid, RANKS[0]) for tid in (8, 9)] + [Track("forward", "pool", 8, RANKS[1])]
    timeline = dataclasses.replace(timeline_of(), tracks=tracks)

    assert timeline.track_names == ["forward · pool 8", "forward · pool 9", "forward · pool"]
