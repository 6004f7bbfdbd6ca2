"""Tracks of threads that share a name, and a timeline as a data frame."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from modtrace import ModtraceError
from modtrace.timeline import Process, Track
from tests.support.timelines import timeline_of

RANKS = [Process(7, 0), Process(7, 1)]


def test_threads_of_different_ranks_may_have_the_same_name() -> None:
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


def frame_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `frame` find only this library; its DataFrame is a dict of lists."""
    for other in ("pandas", "polars"):
        monkeypatch.setitem(sys.modules, other, None)  # as if it were not installed
    made = SimpleNamespace(DataFrame=lambda columns: {key: list(column) for key, column in columns.items()})
    if name:
        monkeypatch.setitem(sys.modules, name, made)


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_frame_has_a_row_per_span_with_its_duration(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    frame_library(library, monkeypatch)
    timeline = timeline_of((0, 10, "a"), (2, 5, "a.b"), (7, 9, "a.b"))
    frame = timeline.frame()
    assert frame["duration_ns"] == [10, 3, 2]
    for field in timeline.spans[0]._fields[:-1]:
        assert frame[field] == [getattr(span, field) for span in timeline.spans]
    assert frame["process"] == [span.process.name for span in timeline.spans]
    assert {key: len(column) for key, column in timeline_of().frame().items()} == dict.fromkeys(frame, 0)


def test_without_a_library_for_frames_an_error_names_the_packages_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    frame_library("", monkeypatch)
    with pytest.raises(ModtraceError, match=r"needs pandas or polars: pip install pandas"):
        timeline_of((0, 10, "a")).frame()
