"""A recording has the same span events in JSON, whether it is saved alone or merged into a profiler's trace."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modtrace import Timeline, load, merge
from modtrace.timeline import Mark, Slices
from tests.support.kineto import BASE, PID, TID, trace, x
from tests.support.small_timelines import call_of_net
from tests.support.timelines import with_args

LEVELS = 600


def moved(timeline: Timeline, start: int) -> Timeline:
    """The timeline, moved to `start` (Unix ns), and to the process and the thread of the tests' traces."""
    shift = start - int(timeline.columns.start[0])
    process = timeline.tracks[0].process._replace(pid=PID)
    return dataclasses.replace(
        timeline,
        slices=dataclasses.replace(
            timeline.columns, start=timeline.columns.start + shift, end=timeline.columns.end + shift
        ),
        tracks=[track._replace(tid=TID, process=process) for track in timeline.tracks],
        marks=[mark._replace(time_ns=mark.time_ns + shift) for mark in timeline.marks],
        counters=[dataclasses.replace(c, time=c.time + shift, process=process) for c in timeline.counters],
    )


def deep() -> Timeline:
    """600 nested calls: more levels than a row has."""
    level = np.arange(LEVELS)
    timeline = call_of_net()
    return with_args(dataclasses.replace(
        timeline,
        slices=Slices.of(
            start=BASE + 1000 * level, end=BASE + 10_000_000 - 1000 * level, name=level % 2, phase=0 * level,
            track=0 * level, depth=level, parent=level - 1, call=level, step=0 * level, link=0 * level - 1,
            complete=level != 3,
        ),
        tracks=timeline.tracks[:1],  # a merge leaves out a track without a span
        marks=[Mark(BASE + 10, "mark", "here")],
        counters=[],
    ), {599: {"shapes": "float32[2]"}})  # fmt: skip


RECORDINGS = {"a net with a layer": call_of_net(), "more levels than a row has": deep()}


def said(events: list[dict[str, Any]], start: float) -> list[dict[str, Any]]:
    """The events of a recording, with row names in place of row ids, and times since `start` (µs)."""
    rows = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    kept = []
    for event in events:
        if event["ph"] in ("X", "s", "f", "i", "C"):
            rest = {key: value for key, value in event.items() if key not in ("pid", "tid")}
            row = rows.get((event["pid"], event.get("tid")), "")
            kept.append(rest | {"row": row, "ts": round(1000 * (event["ts"] - start))})
    return kept


@pytest.mark.parametrize("name", RECORDINGS)
def test_a_saved_and_a_merged_trace_have_the_same_events(tmp_path: Path, name: str) -> None:
    timeline = moved(RECORDINGS[name], BASE + 1_000_000)
    (tmp_path / "profile.json").write_bytes(trace(x("user_annotation", "op", 1_000, 1_000_000_000)))

    timeline.save(tmp_path / "saved.json")
    merge(tmp_path / "profile.json", timeline, tmp_path / "merged.json")

    saved = json.loads((tmp_path / "saved.json").read_text())
    merged = json.loads((tmp_path / "merged.json").read_text())
    assert merged["traceEvents"][0]["name"] == "op"
    alone = said(saved["traceEvents"], 0.0)
    assert len([event for event in alone if event["ph"] == "X"]) == len(timeline.columns)
    assert said(merged["traceEvents"][1:], 1000.0) == alone


@pytest.mark.parametrize("name", RECORDINGS)
def test_a_merged_trace_has_the_header_of_a_saved_one(tmp_path: Path, name: str) -> None:
    timeline = moved(RECORDINGS[name], BASE + 1_000_000)
    (tmp_path / "profile.json").write_bytes(trace(x("user_annotation", "op", 1_000, 1_000_000_000)))

    timeline.save(tmp_path / "saved.json")
    merge(tmp_path / "profile.json", timeline, tmp_path / "merged.json")

    alone = json.loads((tmp_path / "saved.json").read_text())["otherData"]
    header = json.loads((tmp_path / "merged.json").read_text())["modtrace"]["header"]
    assert header == alone
    assert header["stats"] == dict(timeline.stats)


@pytest.mark.parametrize("name", RECORDINGS)
def test_both_are_read_as_the_same_timeline(tmp_path: Path, name: str) -> None:
    timeline = moved(RECORDINGS[name], BASE + 1_000_000)
    (tmp_path / "profile.json").write_bytes(trace(x("user_annotation", "op", 1_000, 1_000_000_000)))

    timeline.save(tmp_path / "saved.json")
    merge(tmp_path / "profile.json", timeline, tmp_path / "merged.json")

    saved, merged = load(tmp_path / "saved.json"), load(tmp_path / "merged.json")
    assert list(saved.spans) == list(merged.spans) == list(timeline.spans)
    assert saved.span_args == merged.span_args == timeline.span_args
    assert saved.stats == merged.stats == timeline.stats
    assert saved.metadata == merged.metadata == timeline.metadata
    assert saved.marks == merged.marks == timeline.marks
