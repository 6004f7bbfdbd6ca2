"""The figures of a watcher for a whole run, compared with NumPy over all durations that the test wrote."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import modtrace
from modtrace.cli.group import group as commands
from modtrace.live.follow import RingFollower
from modtrace.live.whole_run import Distributions, WholeRunWriter
from modtrace.ring import Kind, Ring, whole_run_path
from modtrace.ring.slot_format import NO_NAME
from modtrace.timeline.contents import WHOLE_RUN
from tests.support.event_script import EventScript
from tests.support.watched_training import MS, SECOND, Training

MODULES = 5


class Durations:
    """A run whose modules take random times, from 1 us to a second; the test keeps them all."""

    def __init__(self, path: Path, *, ends_steps: bool = True, capacity: int = 1 << 16) -> None:
        self._path, self._ends_steps = path, ends_steps
        begin = Ring(16).names.records[0]["monotonic"] + 10 * SECOND
        self.script = EventScript(capacity, path, {"pid": os.getpid()}, lambda at: int(begin) + at)
        self._names = [self.script.name(f"Net.{number}") for number in range(MODULES)]
        self._random = np.random.default_rng(0)
        self.of_module: list[list[int]] = [[] for _ in range(MODULES)]
        self.of_step: list[int] = []
        self.now = 0

    def step(self) -> None:
        begin = self.now
        for number, name in enumerate(self._names):
            for _ in range(number + 1):
                ns = int(np.exp(self._random.uniform(np.log(1e3), np.log(1e9))))
                self.of_module[number].append(ns)
                index = len(self.of_module[number])
                self.script.enter(self.now, name, index)
                self.script.exit(self.now + ns, name, index)
                self.now += ns + 10
        if self._ends_steps:
            self.script.event(self.now, Kind.STEP, NO_NAME, len(self.of_step))
        self.of_step.append(self.now - begin)


def check(times: dict[str, int], durations: list[int]) -> None:
    assert times["count"] == len(durations)
    # The clock of a ring that was closed is the mean of two readings: off by less than a thousandth.
    assert times["total_ns"] == pytest.approx(sum(durations), rel=1e-3)
    assert (times["min_ns"], times["max_ns"]) == pytest.approx((min(durations), max(durations)), rel=1e-3)
    for share in (50, 95, 99):
        true = float(np.percentile(durations, share, method="inverted_cdf"))
        assert times[f"p{share}_ns"] == pytest.approx(true, rel=0.02)


@pytest.mark.parametrize("every", [1, 7, 1000])
@pytest.mark.parametrize("ends_steps", [True, False])
def test_a_whole_run_is_what_numpy_says_of_all_durations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, ends_steps: bool
) -> None:
    if every < 1000:  # so that a ring without steps is followed in parts
        monkeypatch.setattr("modtrace.live.follow._FIRST_STEP_EVENTS", 1000)
        monkeypatch.setattr("modtrace.live.follow._CONTEXT_EVENTS", 100)
    path = tmp_path / "run.modtrace"
    run = Durations(path, ends_steps=ends_steps, capacity=1 << 12)
    follower, writer = RingFollower(path), WholeRunWriter(pytest.fail, every_ns=0)
    steps = 60 if every == 1 else 130  # of 31 events
    for number in range(steps):
        run.step()
        if number % every == every - 1:
            writer.add_update(follower, follower.update())
    run.script.close()
    writer.add_update(follower, follower.update())
    writer.close()

    values = json.loads(Path(whole_run_path(str(path))).read_text())
    modules = {row["fqn"]: row for row in values["modules"]}
    assert list(modules) == [f"Net.{number}" for number in range(MODULES)]
    assert {(row["phase"], row["module_class"]) for row in modules.values()} == {("forward", "M")}
    assert values["spans"] == 15 * steps
    assert values["missed_events"] == 0
    for number, durations in enumerate(run.of_module):
        check(modules[f"Net.{number}"], durations)
    if ends_steps:
        check(values["step"], run.of_step)
        assert values["steps"] == steps
        assert values["parts"]["forward"]["count"] == steps
        assert sum(part["total_ns"] for part in values["parts"].values()) == values["step"]["total_ns"]
        assert follower.total_steps == steps


def test_events_overwritten_before_a_look_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    run = Durations(path, capacity=64)
    for _ in range(10):
        run.step()
    run.script.close()
    follower, writer = RingFollower(path), WholeRunWriter(pytest.fail)
    writer.add_update(follower, follower.update())
    values = json.loads(Path(whole_run_path(str(path))).read_text())
    # The last 64 events are two whole steps of 31, and two of the step before.
    assert (values["missed_events"], values["steps"]) == (10 * 31 - 64, 2)
    text = CliRunner().invoke(commands, ["summary", str(path)]).stdout
    assert "246 events were overwritten before the watcher read them" in text


def test_a_watcher_that_comes_late_leaves_the_file_to_the_first(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    training, lines = Training(path, capacity=64), list[str]()
    first, late = (WholeRunWriter(lines.append, every_ns=0) for _ in range(2))
    follower = RingFollower(path)
    for number in range(40):
        training.step()
        if number % 5 == 0:
            first.add_update(follower, follower.update())
    late_follower = RingFollower(path)
    late.add_update(late_follower, late_follower.update())
    training.script.close()
    for writer, following in ((first, follower), (late, late_follower)):
        writer.add_update(following, following.update())
        writer.close()
    assert json.loads(Path(whole_run_path(str(path))).read_text())["steps"] == 40
    assert lines == [f"{path}.whole.json: another watcher, started earlier, writes this file"]


def test_summary_speaks_of_the_whole_run(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    training = Training(path, capacity=64)
    follower, writer = RingFollower(path), WholeRunWriter(pytest.fail, every_ns=0)
    for number in range(200):
        training.step(head=500 if number == 100 else 5)
        if number % 5 == 0:
            writer.add_update(follower, follower.update())
    training.script.close()
    writer.add_update(follower, follower.update())
    text = CliRunner().invoke(commands, ["summary", str(path)]).stdout
    assert "whole run: 200 steps, step p50 11." in text
    assert ", slowest 506.0" in text
    head = CliRunner().invoke(commands, ["summary", str(path), "--only", "*.head"]).stdout.partition("whole run")[2]
    assert [line.split()[0] for line in head.splitlines() if " forward " in line] == ["Net.head"]
    one = CliRunner().invoke(commands, ["summary", str(path), "--limit", "1"]).stdout.partition("whole run")[2]
    assert [line.split()[0] for line in one.splitlines() if " forward " in line] == ["Net"]
    assert "1 more rows of modules" in one
    whole_run = modtrace.load(path).metadata[WHOLE_RUN]
    assert isinstance(whole_run, dict)
    assert (whole_run["steps"], whole_run["spans"], whole_run["kept_steps"]) == (200, 400, 9)
    # Of another run of that name, or damaged: nothing is said of it.
    file = Path(whole_run_path(str(path)))
    values = json.loads(file.read_text())
    for wrong in (
        values | {"begin": 5},
        values | {"steps": "many"},
        values | {"parts": {"forward": 3}},
        values | {"modules": [3]},
        [values],
    ):
        file.write_text(json.dumps(wrong))
        assert "whole run" not in CliRunner().invoke(commands, ["summary", str(path)]).stdout
    file.write_text("{")
    assert modtrace.load(path).metadata[WHOLE_RUN]["spans"] is None


def test_the_file_follows_the_ring_to_its_number(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    training = Training(path)
    training.step()
    training.script.close()
    follower, writer = RingFollower(path), WholeRunWriter(pytest.fail)
    writer.add_update(follower, follower.update())
    Training(path)
    assert Path(whole_run_path(str(tmp_path / "run.1.modtrace"))).exists()
    assert not Path(whole_run_path(str(path))).exists()
    writer.close()  # the watcher of the run before
    assert not Path(whole_run_path(str(path))).exists()
    assert modtrace.load(tmp_path / "run.1.modtrace").metadata[WHOLE_RUN]["steps"] == 1


def test_a_distribution_of_a_few() -> None:
    times: Distributions[str] = Distributions()
    assert times.to_dict() == {}
    times.add(times.rows([]), np.zeros(0, np.int64))
    assert times.to_dict() == {}
    times.add(times.rows(["a", "b", "a", "a"]), np.array([MS, 7, 3 * MS, 0], np.int64))
    b = {"count": 1, "total_ns": 7, "min_ns": 7, "p50_ns": 7, "p95_ns": 7, "p99_ns": 7, "max_ns": 7}
    assert times.to_dict()["b"] == b
    assert times.to_dict()["a"] | {"p50_ns": 0} == {
        "count": 3,
        "total_ns": 4 * MS,
        "min_ns": 0,
        "p50_ns": 0,
        "p95_ns": 3 * MS,
        "p99_ns": 3 * MS,
        "max_ns": 3 * MS,
    }
    a = [of_rows[0] for of_rows in times.quantiles(0, 0.33, 0.34, 1)]
    assert a == [1, 1, pytest.approx(MS, rel=0.01), 3 * MS]
    times.add(times.rows(["c"]), np.array([2**62], np.int64))
    assert [of_rows.tolist()[1:] for of_rows in times.quantiles(0.5)] == [[7, 2**62]]
