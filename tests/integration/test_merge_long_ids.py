"""Ids of processes and threads beyond 32 bits, such as those of macOS, are merged and loaded again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import modtrace
from modtrace import Timeline
from modtrace.timeline import Process
from tests.support.kineto import recording, trace, x
from tests.support.trace_processor import TraceProcessor

PID, TID = (1 << 40) + 7, (1 << 52) + 1
IDS = pytest.mark.parametrize(("pid", "tid"), [(100, TID), (PID, 101), (PID, TID)])


def recorded(pid: int, tid: int) -> Timeline:
    timeline = recording(("Net", 1000, 5000, 0), ("a: Linear", 1100, 2000, 1), ("Net", 6000, 6400, 0, "backward"))
    return replace(timeline, tracks=[track._replace(tid=tid, process=Process(pid)) for track in timeline.tracks])


def profile(folder: Path, pid: int, tid: int) -> Path:
    path = folder / "profile.json"
    where = {"pid": pid, "tid": tid}
    path.write_bytes(
        trace(
            *(x("cpu_op", f"modtrace.sync#{at}", at, at, **where) for at in range(500, 8000, 500)),
            x("python_function", "nn.Module: Net_0", 1000, 5000, **where),
            x("cpu_op", "aten::op", 1200, 1300, **where, Sequence_number=1),
        )
    )
    return path


@IDS
@pytest.mark.parametrize("suffix", [".json", ".json.gz", ".pftrace"])
def test_a_merged_trace_is_loaded_again(tmp_path: Path, suffix: str, pid: int, tid: int) -> None:
    timeline = recorded(pid, tid)
    modtrace.merge(profile(tmp_path, pid, tid), timeline, tmp_path / f"merged{suffix}")
    loaded = modtrace.load(tmp_path / f"merged{suffix}")
    assert list(loaded.tracks) == list(timeline.tracks)
    assert [(span.fqn, span.phase, span.duration_ns) for span in loaded.spans] == [
        ("Net", "forward", 4000),
        ("Net.a", "forward", 900),
        ("Net", "backward", 400),
    ]


@IDS
@pytest.mark.parametrize("suffix", [".json", ".pftrace"])
def test_names_from_the_trace_itself_are_loaded_again(tmp_path: Path, suffix: str, pid: int, tid: int) -> None:
    modtrace.merge(profile(tmp_path, pid, tid), None, tmp_path / f"merged{suffix}")
    loaded = modtrace.load(tmp_path / f"merged{suffix}")
    assert [(track.tid, track.process.pid) for track in loaded.tracks] == [(tid, pid)]
    assert [span.fqn for span in loaded.spans] == ["Net_0"]


@IDS
@pytest.mark.parametrize("suffix", [".json", ".pftrace", ".html"])
def test_a_recording_with_such_ids_is_saved(
    tmp_path: Path, suffix: str, pid: int, tid: int, trace_processor: type[TraceProcessor]
) -> None:
    timeline = recorded(pid, tid)
    timeline.save(tmp_path / f"saved{suffix}")
    if suffix == ".html":
        return
    loaded = modtrace.load(tmp_path / f"saved{suffix}")
    assert list(loaded.tracks) == list(timeline.tracks)
    assert list(loaded.spans) == list(timeline.spans)
    opened = trace_processor.open(tmp_path / f"saved{suffix}")
    assert opened.import_problems() == {}
    assert opened.query("select count() as spans from slice") == [{"spans": 3}]
