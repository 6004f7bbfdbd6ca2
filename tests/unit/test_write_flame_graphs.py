"""Flame graphs of other programs: collapsed stacks and speedscope's format, worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from modtrace import Timeline
from modtrace.timeline import BACKWARD, FORWARD, RECOMPUTE, Name, Process, Slices, Track
from tests.support.timelines import timelines

BASE = 1_700_000_000_000_000_000


def two_steps(second_process: Process | None = None) -> Timeline:
    """Return Net [0, 10) with Net.a [2, 5), and its backward [20, 30) with a recompute of Net.a [21, 24), twice."""
    main = Process(7, 0)
    rows = [
        (FORWARD, 0, 0, 10, 0, 0, -1), (FORWARD, 1, 2, 5, 0, 1, 0), (BACKWARD, 0, 20, 30, 1, 0, -1),
        (RECOMPUTE, 1, 21, 24, 1, 1, 2),
    ]  # fmt: skip
    phase, name, start, end, track, depth, parent = (
        np.array(values)
        for values in zip(
            *rows,
            *((*row[:2], row[2] + 100, row[3] + 100, *row[4:6], row[6] + 4 if row[6] >= 0 else -1) for row in rows),
            strict=True,
        )
    )
    columns = Slices.of(
        start=start + BASE, end=end + BASE, name=name, phase=phase, track=track, depth=depth, parent=parent,
        call=[0] * 4 + [1] * 4, step=[0] * 4 + [1] * 4, link=[-1] * 8, complete=[1] * 8,
    )  # fmt: skip
    names = [Name("Net", "Net", "Net"), Name("a;b: Linear", "Net.a;b", "Linear")]
    tracks = [Track("forward", "MainThread", 7, main), Track("backward", "MainThread", 7, second_process or main)]
    return Timeline(columns, names, tracks)


def test_stacks_add_up_over_steps(tmp_path: Path) -> None:
    two_steps().save(tmp_path / "t.folded")

    assert (tmp_path / "t.folded").read_text().splitlines() == [
        "forward;Net 14",
        "backward;Net 14",
        "forward;Net;a,b: Linear 6",
        "backward;Net;a,b: Linear (recompute) 6",
    ]


def test_stacks_of_several_processes_are_apart(tmp_path: Path) -> None:
    two_steps(Process(8, 1)).save(tmp_path / "t.folded")

    assert (tmp_path / "t.folded").read_text().splitlines()[:2] == [
        "rank 0 · python;forward;Net 14",
        "rank 1 · python;backward;Net 14",
    ]


def test_speedscope_has_a_profile_per_track(tmp_path: Path) -> None:
    two_steps().save(tmp_path / "t.speedscope.json")

    document = json.loads((tmp_path / "t.speedscope.json").read_text())
    frames = [frame["name"] for frame in document["shared"]["frames"]]
    events = [
        [(event["type"], frames[event["frame"]], event["at"]) for event in profile["events"]]
        for profile in document["profiles"]
    ]

    assert document["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    assert [(p["type"], p["name"], p["unit"], p["startValue"], p["endValue"]) for p in document["profiles"]] == [
        ("evented", "rank 0 · python · forward · MainThread", "nanoseconds", 0, 110),
        ("evented", "rank 0 · python · backward · MainThread", "nanoseconds", 0, 130),
    ]
    inner = "a;b: Linear (recompute)"
    assert events[1] == [
        ("O", "Net", 20), ("O", inner, 21), ("C", inner, 24), ("C", "Net", 30),
        ("O", "Net", 120), ("O", inner, 121), ("C", inner, 124), ("C", "Net", 130),
    ]  # fmt: skip
    assert len(events[0]) == 8


@given(timelines())
def test_events_nest_and_go_forward_and_self_times_add_up(
    tmp_path_factory: pytest.TempPathFactory, timeline: Timeline
) -> None:
    folder = tmp_path_factory.getbasetemp()
    timeline.save(folder / "t.speedscope.json")
    timeline.save(folder / "t.folded")
    columns = timeline.columns

    for index, profile in enumerate(json.loads((folder / "t.speedscope.json").read_text())["profiles"]):
        stack: list[int] = []
        moment = profile["startValue"]
        opened = 0
        for event in profile["events"]:
            assert event["at"] >= moment
            moment = event["at"]
            if event["type"] == "O":
                stack.append(event["frame"])
                opened += 1
            else:
                assert stack.pop() == event["frame"]
        assert stack == []
        assert moment <= profile["endValue"]
        assert opened == int(np.count_nonzero(columns.track == index))
    total = sum(int(line.rpartition(" ")[2]) for line in (folder / "t.folded").read_text().splitlines())
    outermost = columns.parent < 0
    assert total == int((columns.end - columns.start)[outermost].sum())
