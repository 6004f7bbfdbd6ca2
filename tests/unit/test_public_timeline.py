"""Whatever gives users a timeline returns `modtrace.Timeline`, the plain timeline with methods."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

import modtrace
from modtrace.timeline import Timeline as TimelineData
from modtrace.write import SUFFIXES, write
from tests.support.training_timeline import training

READ_AGAIN = [suffix for suffix in SUFFIXES if suffix not in {".speedscope.json", ".folded"}]


@pytest.mark.parametrize("suffix", READ_AGAIN)
def test_a_saved_timeline_is_read_back_with_methods(suffix: str, tmp_path: Path) -> None:
    saved = training()
    saved.save(tmp_path / f"a{suffix}")
    back = modtrace.load(tmp_path / f"a{suffix}")
    assert type(back) is modtrace.Timeline
    assert back.summary().steps[0].step == saved.summary().steps[0].step


def test_a_part_of_a_timeline_has_methods_too() -> None:
    whole = training()
    parts = whole.window(), whole.steps(0, 1), whole.only("*"), whole.typical_step(), replace(whole, marks=[])
    assert {type(part) for part in parts} == {modtrace.Timeline}
    table = whole.summary().to_csv()
    packed = pickle.loads(pickle.dumps(whole))
    assert type(packed) is modtrace.Timeline
    assert packed.summary().to_csv() == table


def test_plain_data_becomes_a_timeline_without_a_copy(tmp_path: Path) -> None:
    plain = TimelineData(**training().__getstate__())
    bound = modtrace.Timeline.of(plain)
    assert all(getattr(bound, field.name) is getattr(plain, field.name) for field in fields(plain))
    assert modtrace.Timeline.of(bound) is bound
    bound.save(tmp_path / "bound.json")
    write(plain, tmp_path / "plain.json")
    assert (tmp_path / "bound.json").read_bytes() == (tmp_path / "plain.json").read_bytes()


def test_a_recording_and_a_job_give_a_timeline(tmp_path: Path) -> None:
    with modtrace.record(tmp_path / "rank0.pftrace", ring=tmp_path / "rank0.modtrace", engine="python") as recording:
        torch.nn.Linear(2, 2)(torch.ones(1, 2))
        running = recording.snapshot()
    given = running, recording.timeline(), modtrace.load(tmp_path / "rank0.modtrace")
    assert {type(timeline) for timeline in given} == {modtrace.Timeline}
    assert [len(timeline.spans) for timeline in given] == [1, 1, 1]
