"""Merging a profile that torch.profiler writes now, on the CPU, with a recording of the same steps."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.checkpoint import checkpoint

import modtrace
from modtrace.timeline.join import move_times
from tests.support.trace_processor import TraceProcessor

CPU = [ProfilerActivity.CPU]
NODE = "autograd::engine::evaluate_function: "


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.GELU())
        self.plain = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.plain(checkpoint(self.inner, x, use_reentrant=False))
        return out


def steps(count: int, after: Callable[[], None] = lambda: None) -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(8, 16, requires_grad=True)
    for _ in range(count):
        net(x).sum().backward()
        after()


def slices(path: Path, *, ours: bool) -> list[dict[str, Any]]:
    events = json.loads(path.read_text())["traceEvents"]
    return [e for e in events if e["ph"] == "X" and (e["cat"] in ("forward", "backward", "recompute")) == ours]


def ns(microseconds: float) -> int:
    whole = int(microseconds)
    return whole * 1000 + round((microseconds - whole) * 1000)


def extent(event: dict[str, Any]) -> tuple[int, int]:
    return ns(event["ts"]), ns(event["ts"]) + ns(event["dur"])


def seated_by(latest: int) -> int:
    """The ns by which slices are moved so that they nest for readers that compute ns from doubles of µs.

    The profiler's times count from a base that is moved every three months. From 51 days after that on, doubles of µs
    lie a nanosecond apart.
    """
    return 1 if latest >= 1000 << 42 else 0


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, modtrace.Timeline]:
    """A profile with stacks, and the recording of the same three steps."""
    with modtrace.record(engine="python") as recording, profile(activities=CPU, with_stack=True) as profiler:
        steps(3, recording.step)
    path = tmp_path / "profile.json"
    profiler.export_chrome_trace(str(path))
    return path, recording.timeline()


def test_the_recording_lies_over_the_trace(both: tuple[Path, modtrace.Timeline], tmp_path: Path) -> None:
    profiled, timeline = both
    out = tmp_path / "out.json"
    told = modtrace.merge(profiled, timeline, out)
    assert told.metadata["alignment"]["method"] == "sync marks"
    ours = slices(out, ours=True)
    forward = sorted((extent(e), e["args"]["fqn"]) for e in ours if e["cat"] != "backward")
    seen = sorted(extent(e) for e in slices(profiled, ours=False) if e["name"].startswith("nn.Module: "))
    assert len(forward) == len(seen) == 3 * (5 + 3)
    for (slice_, _), module in zip(forward, seen, strict=True):
        # The profiler's slice of a call contains the code that records it, too.
        assert module[0] - 2000 <= slice_[0]
        assert slice_[1] <= module[1] + 2000
    backward = [extent(e) for e in ours if e["cat"] == "backward"]
    nodes = [extent(e) for e in slices(profiled, ours=False) if e["name"].startswith(NODE)]
    by = seated_by(max(end for _, end in nodes))
    assert not [
        (ours, node)
        for ours in backward
        for node in nodes
        for (s, e), (begin, end) in ((ours, node), (node, ours))
        if s + by < begin < e - by and e + by < end
    ]
    assert told.metadata["attributed_nodes"] == told.metadata["nodes"] - 3  # the sum lies outside the model


@pytest.mark.parametrize("engine", ["auto", "python"])
def test_a_profile_with_stacks_nests_as_without_a_recording(tmp_path: Path, engine: Literal["auto", "python"]) -> None:
    with modtrace.record(engine=engine), profile(activities=CPU, with_stack=True) as profiler:
        steps(3)
    profiler.export_chrome_trace(str(tmp_path / "profile.json"))
    events = slices(tmp_path / "profile.json", ours=False)
    marks = [(e["tid"], *extent(e)) for e in events if e["name"].startswith("modtrace.sync#")]
    assert len(marks) >= 3
    others = [(e["tid"], *extent(e), e["name"]) for e in events if not e["name"].startswith("modtrace.sync#")]
    assert not [
        name
        for tid, begin, end in marks
        for on, start, stop, name in others
        if on == tid and (begin < start < end < stop or start < begin < stop < end)
    ]


def test_without_sync_marks_operators_align_the_clocks(tmp_path: Path) -> None:
    with modtrace.record(engine="python") as recording, profile(activities=CPU) as profiler:
        steps(20)
    profiler.export_chrome_trace(str(tmp_path / "profile.json"))
    timeline = recording.timeline()
    by_marks = modtrace.merge(tmp_path / "profile.json", timeline, tmp_path / "marks.pftrace")
    moved = replace(move_times(timeline, lambda times: times + 15_000), marks=[])
    merged = modtrace.merge(tmp_path / "profile.json", moved, tmp_path / "found.pftrace")
    methods = [told.metadata["alignment"]["method"] for told in (by_marks, merged)]
    assert methods == ["sync marks", "wall clock"]
    assert "usually agree within 10 µs" in merged.alignment
    starts = [
        {(span.fqn, span.call): span.start_ns for span in modtrace.load(told.path).spans if span.phase == "forward"}
        for told in (by_marks, merged)
    ]
    assert len(starts[0]) == len(starts[1]) == 20 * 5
    apart = [abs(starts[0][call] - starts[1][call]) for call in starts[0]]
    # Each time is off by at most its bound.
    bounds = [told.metadata["alignment"]["operators"] for told in (by_marks, merged)]
    assert max(apart) <= sum(bound["bound_ns"] for bound in bounds)
    assert sorted(apart)[len(apart) // 2] <= sum(bound["typical_ns"] for bound in bounds)


def test_it_imports_with_no_fault_of_ours(
    both: tuple[Path, modtrace.Timeline], tmp_path: Path, trace_processor: type[TraceProcessor]
) -> None:
    profiled, timeline = both
    before = trace_processor.open(profiled).import_problems()
    for name in ("out.json", "out.json.gz"):
        modtrace.merge(profiled, timeline, tmp_path / name)
        assert trace_processor.open(tmp_path / name).import_problems() == before
    modtrace.merge(profiled, timeline, tmp_path / "out.pftrace")
    assert trace_processor.open(tmp_path / "out.pftrace").import_problems() == {}


@pytest.mark.parametrize("name", ["out.json", "out.pftrace"])
def test_steps_lie_on_a_row_of_their_own(
    both: tuple[Path, modtrace.Timeline], tmp_path: Path, name: str, trace_processor: type[TraceProcessor]
) -> None:
    profiled, timeline = both
    modtrace.merge(profiled, timeline, tmp_path / name)

    rows = trace_processor.open(tmp_path / name).query(
        "select s.name, coalesce(th.name, t.name) as track from slice s join track t on t.id = s.track_id "
        "left join thread_track tt on tt.id = t.id left join thread th using (utid) where s.name glob 'step *' "
        "order by s.ts"
    )
    assert rows == [{"name": f"step {number}", "track": "steps and marks"} for number in range(3)]


def test_reconstruction_agrees_with_the_recording(both: tuple[Path, modtrace.Timeline], tmp_path: Path) -> None:
    profiled, timeline = both
    modtrace.merge(profiled, timeline, tmp_path / "recorded.json")
    modtrace.merge(profiled, None, tmp_path / "alone.json")
    names = {"Net_0": "Net", "Sequential_0": "inner", "Linear_0": "0", "GELU_0": "1", "Linear_1": "plain"}

    def seen(path: Path) -> list[tuple[str, str, int, int]]:
        return sorted(
            (
                ".".join(names.get(part, part) for part in e["args"]["fqn"].split(".")),
                e["cat"],
                e["args"]["call"],
                round(e["dur"] * 1000) if e["cat"] == "backward" else 0,
            )
            for e in slices(path, ours=True)
        )

    assert seen(tmp_path / "alone.json") == seen(tmp_path / "recorded.json")


def test_the_handler_records_exports_and_merges_each_cycle(tmp_path: Path) -> None:
    handler = modtrace.on_trace_ready(tmp_path / "traces", worker_name="w", engine="python")
    plan = schedule(wait=1, warmup=1, active=2, repeat=2)
    with handler, profile(activities=CPU, schedule=plan, on_trace_ready=handler, acc_events=True) as profiler:
        steps(8, profiler.step)
    assert [path.name for path in handler.paths] == ["w.0.json.gz", "w.1.json.gz"]
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == ["w.0.json.gz", "w.1.json.gz"]
    for path in handler.paths:
        summary = modtrace.load(path).summary()
        assert {row.fqn for row in summary.rows} == {"Net", "Net.inner", "Net.inner.0", "Net.inner.1", "Net.plain"}
    with modtrace.record(engine="python"):
        pass  # the handler's recording has ended


def test_the_handler_uses_a_recording_that_runs(tmp_path: Path) -> None:
    with modtrace.record(engine="python") as recording:
        handler = modtrace.on_trace_ready(tmp_path)
        with profile(activities=CPU, on_trace_ready=handler):
            steps(2)
        handler.close()
        assert recording.running
    assert len(handler.paths) == 1


def test_a_trace_that_cannot_be_merged_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def export_chrome_trace(self, path: str) -> None:
            Path(path).write_text("no trace")

    with modtrace.on_trace_ready(tmp_path, worker_name="w", engine="python") as handler, caplog.at_level(logging.ERROR):
        handler(Broken())  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["w.0.unmerged.json"]
    assert "could not be merged" in caplog.text
