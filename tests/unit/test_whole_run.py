"""A full ring's knowledge of a run that it holds only the end of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import modtrace
from modtrace.ring import FIRST_STEP, Kind, Ring
from modtrace.ring.slot_format import KIND_SHIFT, NO_NAME
from tests.support.timelines import build_timeline

SECOND = 1_000_000_000


def test_a_ring_of_16_has_the_last_five_of_ten_steps_of_three_events(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sentence = "Kept the last 5 of 10 steps (ring full); `--capacity 30` keeps all"
    module, data = nn.Identity(), torch.ones(1)

    with modtrace.record(tmp_path / "a.pftrace", capacity=16, engine="python", ranges=False) as recording:
        for _ in range(10):
            module(data)
            recording.step()

    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [sentence]
    for timeline in (recording.timeline(), modtrace.load(tmp_path / "a.pftrace")):
        summary = timeline.summary()
        assert sentence in str(summary).splitlines()
        whole_run = json.loads(summary.to_json())["overview"]["whole_run"]
        seconds = whole_run.pop("seconds")
        assert whole_run == {"steps": 10, "spans": None, "kept_steps": 5}
        assert sum(step.duration_ns for step in summary.steps) / 1e9 < seconds


@pytest.mark.parametrize(
    ("capacity", "first_step", "expected", "sentence"),
    [
        (64, {FIRST_STEP: 100}, {"steps": 10, "spans": 10, "kept_steps": 10}, None),
        (64, {}, {"steps": 10, "spans": 10, "kept_steps": 10}, None),
        (16, {FIRST_STEP: 100}, {"steps": 10, "spans": None, "kept_steps": 5}, "last 5 of 10 steps"),
        # A part of a recording, whose first step is unknown.
        (16, {}, {"steps": None, "spans": None, "kept_steps": 5}, "last 5 steps"),
    ],
)
def test_unknown_figures_of_a_ring_are_none(
    capacity: int, first_step: dict[str, object], expected: dict[str, object], sentence: str | None
) -> None:
    ring = Ring(capacity, metadata=first_step)
    ring.names.thread("MainThread", 1, 1)
    name = ring.names.name("Net", "Net", "Net")
    begin = ring.names.records[0]["monotonic"]
    seconds = iter(range(30))
    write = ring.make_writer(lambda: begin + next(seconds) * SECOND)
    for step in range(10):
        write(Kind.FORWARD_ENTER << KIND_SHIFT | name, 0)
        write(Kind.FORWARD_EXIT << KIND_SHIFT | name, 0)
        write(Kind.STEP << KIND_SHIFT | NO_NAME, 100 + step)

    summary = build_timeline(ring.read()).summary()

    assert summary.overview is not None
    assert summary.overview.whole_run == {**expected, "seconds": 29.0}
    line = f"Kept the {sentence} (ring full); `--capacity 30` keeps all"
    assert (line in str(summary).splitlines()) == (sentence is not None)
    assert ("Kept" in str(summary)) == (sentence is not None)


def test_a_full_ring_without_steps_counts_events() -> None:
    module, data = nn.Identity(), torch.ones(1)
    with modtrace.record(capacity=16, engine="python", ranges=False) as recording:
        for _ in range(10):
            module(data)

    assert "Kept the last 16 of 20 events (ring full); `--capacity 20` keeps all" in str(recording.timeline().summary())
