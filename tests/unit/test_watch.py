"""`modtrace watch`: conditions, what a follower gives of a ring written by hand, and which windows are kept."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

import modtrace
from modtrace.cli.group import group as commands
from modtrace.live.follow import KEEP_PREFIX, EndedStep, RingFollower
from modtrace.live.triggers import Condition, parse_conditions
from modtrace.live.watch import Metrics, Watcher
from modtrace.live.whole_run import StepsFile, WholeRunWriter
from modtrace.live.windows import KEPT, KeepLimits, KeptFolder, WindowKeeper, kept_folder
from modtrace.ranks.slow import find_late_in_rings
from modtrace.ring import Kind, RingSnapshot, has_news, read_ring
from modtrace.ring.file_format import SLOTS_OFFSET
from modtrace.ring.slot_format import SLOT_BYTES
from tests.support.watched_training import MS, SECOND, Training


def watch(path: Path, when: str | tuple[()] = "step > 3x", **limits: int) -> tuple[Watcher, list[str]]:
    lines: list[str] = []
    keeper = WindowKeeper(KeptFolder(kept_folder(path)), KeepLimits(**limits), lines.append, find_late_in_rings)
    return Watcher([str(path)], parse_conditions(when), keeper, lines.append), lines


def lines_file(folder: Path, max_lines: int = 100) -> StepsFile:
    return StepsFile(KeptFolder(folder), "steps.jsonl", pytest.fail, max_lines)


def kept(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*.pftrace"))


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("step > 3x", ("step", "", None, 3.0)),
        ("step>2.5x", ("step", "", None, 2.5)),
        ("step > 500ms", ("step", "", 500 * MS, 0.0)),
        ("gc > 200 ms", ("part", "gc", 200 * MS, 0.0)),
        ("data > 1s", ("part", "data loading", SECOND, 0.0)),
        ("data loading > 2x", ("part", "data loading", None, 2.0)),
        ("range my > work > 1.5s", None),
        ("range augment > 1.5s", ("part", "augment", 1500 * MS, 0.0)),
        ("module GPT.h.* > 50us", ("module", "GPT.h.*", 50_000, 0.0)),
        ("hang 60s", ("hang", "", 60 * SECOND, 0.0)),
        ("hang 2min", ("hang", "", 120 * SECOND, 0.0)),
        ("signal", ("signal", "", None, 0.0)),
        ("hang", None),
        ("hang 0s", None),
        ("step > 0x", None),
        ("data > 0s", None),
        ("module * > 0ms", None),
        ("", None),
        (" ; ", None),
        ("stepp > 3x", None),
        ("step > 3", None),
        ("step < 3x", None),
        ("module GPT > 3x", None),
        ("module > 3ms", None),
    ],
)
def test_a_condition_is_understood_or_the_forms_are_listed(text: str, condition: tuple[object, ...] | None) -> None:
    if condition is not None:
        assert parse_conditions(text) == (Condition(text, *condition),)  # type: ignore[arg-type]
        return
    with pytest.raises(modtrace.ModtraceError, match=r'is not a condition; the forms are "step > 3x".*"hang 60s"'):
        parse_conditions(text)


@pytest.mark.parametrize("given", [5, True, b"signal", ["signal", 5], [b"signal"]])
def test_a_condition_that_is_no_text_is_refused_like_an_invalid_text(tmp_path: Path, given: object) -> None:
    with pytest.raises(
        modtrace.RecordingError, match=r"keep_when: (5|True|b'signal') is not a condition; the forms are "
    ):
        modtrace.record(ring=tmp_path / "run.modtrace", keep_when=given)  # type: ignore[arg-type]


def test_several_conditions_are_one_text_or_more() -> None:
    assert [c.text for c in parse_conditions(["step > 3x; gc > 1s;", "hang 5s"])] == ["step > 3x", "gc > 1s", "hang 5s"]
    assert parse_conditions([]) == ()


@pytest.mark.parametrize("every", [1, 3, 100])
@pytest.mark.parametrize("marks", [1, 2])
def test_each_step_is_given_once_with_what_it_took(tmp_path: Path, every: int, marks: int) -> None:
    training = Training(tmp_path / "run.modtrace")
    follower, given = RingFollower(tmp_path / "run.modtrace"), list[EndedStep]()
    for number in range(40):
        training.step(data=number, head=3 * number, marks=marks)
        if number % every == every - 1:
            given += follower.update().steps
            # The last one can still be ended later by another optimizer.
            assert [step.number for step in given] == list(range(number))
    training.script.close()
    given += follower.update().steps
    assert follower.state == "ended"
    assert [(step.number, round((step.end_ns - step.start_ns) / MS)) for step in given] == [
        (number, 4 * number + 4 + marks) for number in range(40)
    ]
    assert [round(step.parts["data loading"] / MS) for step in given[1:]] == [*range(1, 40)]
    assert [step.is_first for step in given] == [True] + 39 * [False]
    assert (follower.missed_events, follower.total_steps) == (0, 40)


def test_a_ring_that_stops_while_it_is_read_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(tmp_path / "run.modtrace")
    follower = RingFollower(tmp_path / "run.modtrace")
    for _ in range(3):
        training.step()

    def read_and_stop(path: str, count: int) -> RingSnapshot:
        monkeypatch.undo()
        before = read_ring(path, count)
        for _ in range(2):
            training.step()
        training.script.close()
        return before._replace(records=read_ring(path, count).records)  # which are read behind the slots

    monkeypatch.setattr("modtrace.live.follow.read_ring", read_and_stop)
    assert [step.number for step in follower.update().steps] == list(range(5))
    assert follower.state == "ended"


def test_a_step_is_kept_with_those_around_it_once_they_have_ended(tmp_path: Path) -> None:
    training = Training(tmp_path / "run.modtrace")
    watcher, lines = watch(tmp_path / "run.modtrace", when="step > 3x; module *.head > 100ms")
    for number in range(40):
        training.step(head=500 if number == 20 else 5)
        assert watcher.poll()
        assert bool(kept(tmp_path / "run.kept")) == (number >= 23)
    training.script.close()
    assert not watcher.poll()
    file = tmp_path / "run.kept" / "step20-module-.head+step.pftrace"
    assert kept(tmp_path / "run.kept") == [file.name]
    assert len(lines) == 1
    timeline = modtrace.load(file)
    assert np.unique(timeline.columns.step).tolist() == [18, 19, 20, 21, 22]
    assert [round(step.duration_ns / MS) for step in timeline.summary().steps] == [11, 11, 506, 11, 11]
    why = timeline.metadata[KEPT]
    assert why == [
        "Net.head took 500 ms in step 20 (module *.head > 100ms)",
        "step 20 took 506 ms (step > 3x; usually 11 ms)",
        "step 20: 506 ms, of which 503 ms forward; usually 8 ms",
    ]
    text = CliRunner().invoke(commands, ["summary", str(file)]).stdout
    assert "10 spans" in text
    assert "Kept the last" not in text
    assert "overwritten" not in text


@pytest.mark.parametrize(
    ("when", "slow", "name"),
    [
        ("data > 100ms", {"data": 200}, "step20-data-loading.pftrace"),
        ("data > 5x", {"data": 200}, "step20-data-loading.pftrace"),
        ("gc > 100ms", {"gc": 200}, "step20-gc.pftrace"),
        ("other > 100ms", {"gc": 200}, None),
        ("forward > 100ms", {"head": 200}, "step20-forward.pftrace"),
        ("module Net > 100ms", {"head": 200}, "step20-module-Net.pftrace"),
        ("module Net > 100ms", {"data": 200}, None),
        ("step > 100ms", {"head": 200}, "step20-step.pftrace"),
        ("step > 3x", {"head": 15}, None),  # within what the system may stop a thread for
        ("hang 1000min", {"head": 200}, None),
    ],
)
def test_a_slow_step_is_kept_by_its_condition(
    tmp_path: Path, when: str, slow: dict[str, int], name: str | None
) -> None:
    training = Training(tmp_path / "run.modtrace")
    for number in range(40):
        training.step(**slow if number in (0, 20) else {})  # the first one sets up
    training.script.close()
    watcher, _ = watch(tmp_path / "run.modtrace", when=when)
    assert not watcher.poll()
    assert kept(tmp_path / "run.kept") == ([] if name is None else [name])


def test_a_storm_stays_within_its_bounds(tmp_path: Path) -> None:
    training = Training(tmp_path / "run.modtrace")
    for number in range(100):
        training.step(head=300 if number >= 10 and number % 10 == 0 else 5)
    training.script.close()

    def run(name: str, **limits: int) -> tuple[list[str], list[str]]:
        (tmp_path / "run.kept").rename(tmp_path / name) if (tmp_path / "run.kept").exists() else None
        watcher, lines = watch(tmp_path / "run.modtrace", "step > 3x", **limits)
        watcher.run(0)
        return kept(tmp_path / "run.kept"), lines

    steps = [f"step{number}-step.pftrace" for number in range(10, 100, 10)]
    assert run("a", pause_ns=0)[0] == sorted(steps)
    # Ten steps take 0.405 s: two of them pass by in each pause of a second.
    files, lines = run("b", pause_ns=SECOND)
    assert files == sorted(steps[::3])
    first = "step 20 took 306 ms (step > 3x; usually 11 ms)"
    assert lines[-2] == f"6 more windows were not kept because of --pause; the first: {first}"
    files, lines = run("c", pause_ns=0, max_kept=3)
    assert files == sorted(steps[:3])
    assert [line for line in lines if "--max-kept)" in line] == [
        "3 windows are kept (--max-kept); no further window is kept"
    ]
    files, lines = run("d", pause_ns=0)
    assert len(files) == len(steps)
    sizes = [(tmp_path / "run.kept" / name).stat().st_size for name in steps]
    files, lines = run("e", pause_ns=0, max_bytes=sum(sizes[:4]) + 1)
    assert files == sorted(steps[:4])
    assert len([line for line in lines if "--max-bytes); no further" in line]) == 1
    # What is there counts.
    watcher, lines = watch(tmp_path / "run.modtrace", pause_ns=0, max_bytes=sum(sizes[:4]) + 1)
    watcher.run(0)
    assert len(kept(tmp_path / "run.kept")) == 4
    assert lines[-1] == "ended: 0 kept"


def test_a_moment_is_kept_of_all_ranks_of_a_folder(tmp_path: Path) -> None:
    begin = time.monotonic_ns() + 100 * SECOND
    ranks = [Training(tmp_path / f"rank{rank}.modtrace", begin=begin, rank=rank) for rank in range(3)]
    watcher, lines = watch(tmp_path)
    for number in range(30):
        for rank, training in enumerate(ranks):
            training.step(head=300 if number == 20 and rank == 1 else 5, data=1 if number != 20 or rank == 1 else 296)
        assert watcher.poll()
    files = [f"step20-step/rank{rank}-step20-step.pftrace" for rank in range(3)]
    assert kept(tmp_path / "kept") == files
    assert len(lines) == 1
    for rank, file in enumerate(files):
        timeline = modtrace.load(tmp_path / "kept" / file)
        assert timeline.tracks[0].process.rank == rank
        assert {18, 19, 20, 21, 22} <= set(timeline.columns.step.tolist())
    assert modtrace.load_ranks(tmp_path / "kept" / "step20-step").columns.step.max() >= 22


@pytest.mark.parametrize("role", ["", "rollout"])
def test_a_rank_is_called_by_its_role_in_why_a_window_is_kept(tmp_path: Path, role: str) -> None:
    begin = time.monotonic_ns() + 100 * SECOND
    ranks = [Training(tmp_path / f"{rank}.modtrace", begin=begin, rank=rank, role=role) for rank in range(2)]
    watcher, lines = watch(tmp_path)
    for number in range(24):
        for rank, training in enumerate(ranks):
            training.step(head=300 if (number, rank) == (20, 1) else 5)
        watcher.poll()

    [line] = lines
    assert f": {role or 'rank'} 1: step 20 took 306 ms (step > 3x; usually 11 ms)" in line


def test_a_mark_that_asks_to_keep_is_kept_without_a_condition(tmp_path: Path) -> None:
    training = Training(tmp_path / "run.modtrace")
    watcher, lines = watch(tmp_path / "run.modtrace", when=())
    for number in range(12):
        if number == 5:
            training.script.mark(training._after(1), f"{KEEP_PREFIX}loss is nan")
            training.script.mark(training.now, "another mark")
        training.step()
    training.script.close()
    watcher.run(0)
    assert kept(tmp_path / "run.kept") == ["step5-keep-loss-is-nan.pftrace"]
    assert lines == [f"kept {tmp_path}/run.kept/step5-keep-loss-is-nan.pftrace: loss is nan", "ended: 1 kept"]


def test_any_reason_gives_a_name_of_a_file(tmp_path: Path) -> None:
    training = Training(tmp_path / "run.modtrace")
    watcher, _ = watch(tmp_path / "run.modtrace", when=(), pause_ns=0)
    for why in ("../../etc", "a\0b\nc", "ü" * 1000, "", "\ud800"):
        for _ in range(6):
            training.step()
        training.script.mark(training._after(1), f"{KEEP_PREFIX}{why}")
    training.step()
    training.script.close()
    watcher.run(0)
    names = [
        f"step{6 * n}-keep{why}.pftrace"
        for n, why in enumerate(("-..-..-etc", "-a-b-c", "-" + "ü" * 69, "", "-ud800"), 1)
    ]
    assert kept(tmp_path / "run.kept") == sorted(names)


def test_a_hang_is_kept_once_with_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(tmp_path / "run.modtrace")
    for _ in range(10):
        training.step()
    training.script.enter(training.now, training.net, 10)
    training.script.enter(training.now, training.head, 10)
    watcher, lines = watch(tmp_path / "run.modtrace", when="hang 60s")
    last = training.script.events().time_ns[-1]
    for quiet_s in (59, 61, 62):
        now = SimpleNamespace(monotonic_ns=lambda quiet_s=quiet_s: int(last) + quiet_s * SECOND)
        monkeypatch.setattr("modtrace.live.follow.time", now)
        assert watcher.poll()
        assert bool(lines) == (quiet_s > 59)
    assert len(lines) == 1
    assert kept(tmp_path / "run.kept") == ["step10-hang.pftrace"]
    assert "no event for 61 s in Net.head (forward) (hang 60s)" in lines[0]
    steps = np.unique(modtrace.load(tmp_path / "run.kept" / "step10-hang.pftrace").columns.step)
    assert steps.tolist()[-2:] == [9, 10]


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_hang_is_named_by_the_rank_that_others_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    trainings = [Training(tmp_path / f"{rank}.modtrace", begin=10**18, rank=rank) for rank in range(3)]
    for rank, training in enumerate(trainings):
        training.script.note_group("0", "0-2", "default_pg")
        for number in range(10):
            training.script.collective(training.now, Kind.COLLECTIVE_ENTER, '["all_reduce", "0"]', number)
            training.script.collective(training.now, Kind.COLLECTIVE_EXIT, '["all_reduce", "0"]', 8)
            training.step()
        if rank == late:
            training.script.enter(training.now, training.net, 10)
        else:
            training.script.collective(training.now, Kind.COLLECTIVE_ENTER, '["all_reduce", "0"]', 10)
    now_ns = 10**18 + trainings[0].now + 61 * SECOND
    now = SimpleNamespace(monotonic_ns=lambda: now_ns, time_ns=time.time_ns)
    monkeypatch.setattr("modtrace.live.follow.time", now)
    monkeypatch.setattr("modtrace.live.rank_state.time", now)
    watcher, lines = watch(tmp_path, when="hang 60s")

    assert watcher.poll()

    waiting = {0: "1-2", 1: "0, 2", 2: "0-1"}[late]
    waits = (
        f"ranks {waiting} wait in all_reduce #10 for 61.0 s; rank {late} has not called it: in forward Net for 61.0 s"
    )
    assert kept(tmp_path / "kept") == [f"rank{late}-step10-hang/rank{rank}-step10-hang.pftrace" for rank in range(3)]
    assert len(lines) == 1
    assert waits in lines[0]


def test_without_steps_a_slow_call_is_kept_with_what_is_around_it(tmp_path: Path) -> None:
    script = Training(tmp_path / "run.modtrace").script
    name = script.name("Net")
    for number in range(100):
        begin = number * SECOND
        script.enter(begin, name, number)
        script.exit(begin + (300 if number == 50 else 10) * MS, name, number)
    script.close()
    watcher, _ = watch(tmp_path / "run.modtrace", when="module Net > 100ms; step > 2x")
    watcher.run(0)
    assert kept(tmp_path / "run.kept") == ["module-Net.pftrace"]
    spans = modtrace.load(tmp_path / "run.kept" / "module-Net.pftrace").spans
    assert [span.call for span in spans] == list(range(46, 56))


def test_events_overwritten_before_a_look_are_counted(tmp_path: Path) -> None:
    training = Training(tmp_path / "run.modtrace", capacity=64)
    follower = RingFollower(tmp_path / "run.modtrace")
    training.step()
    training.step()
    assert len(follower.update().steps) == 1
    for _ in range(98):
        training.step()
    training.script.close()
    given = follower.update().steps
    # 700 events in all, 14 of which were read; 64 remain: the last nine steps, the first of them cut.
    assert follower.missed_events == 700 - 14 - 64
    assert [step.number for step in given] == list(range(91, 100))
    assert {round((step.end_ns - step.start_ns) / MS) for step in given} == {11}


@pytest.mark.parametrize("cut", [0, 1, 8, 31, 33])
def test_a_ring_has_news_where_an_event_or_the_end_of_its_writer_is_new(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "run.modtrace"
    training = Training(path, capacity=64)
    for number in range(30):
        training.step()
        last = read_ring(path)
        assert not has_news(path, last)
        training.script.mark(training.now, "an event")
        assert has_news(path, last), number
    last = read_ring(path)
    # One that a thread was killed in, and behind it one that another wrote.
    training.script.mark(training.now, "an event")
    training.script.mark(training.now, "an event")
    with path.open("r+b") as file:
        file.seek(SLOTS_OFFSET + last.slots.recorded % 64 * SLOT_BYTES)
        file.write(bytes(SLOT_BYTES))
    assert has_news(path, last)
    last = read_ring(path)
    training.script.close()
    assert has_news(path, last)
    last = read_ring(path)
    os.truncate(path, SLOTS_OFFSET + (last.slots.recorded + 1) % 64 * SLOT_BYTES + cut)
    assert not has_news(path, last)


def test_a_broken_ring_is_named_once(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.modtrace").write_bytes(b"MODTRACE")
    training = Training(tmp_path / "run.modtrace")
    watcher, lines = watch(tmp_path, "step > 3x")
    for number in range(22):
        training.step(head=300 if number == 19 else 5)
    assert watcher.poll()
    wrong = "not a ring file (it does not begin with MODTRACE and a header)"
    broken = [f"{tmp_path}/a.modtrace: {wrong}", f"{tmp_path}/b.modtrace: {wrong}"]
    assert lines == broken
    # One that breaks while it is followed: its windows are not tried.
    os.truncate(tmp_path / "run.modtrace", 8)
    assert watcher.poll()
    assert watcher.poll()
    assert lines == [*broken, f"{tmp_path}/run.modtrace: {wrong}"]
    training.script.close()
    assert not watcher.run(0)
    not_read = "the end of the ring could not be read"
    assert lines[-2:] == [f"{tmp_path}/run.modtrace: {not_read}", "ended: 0 kept"]


def test_a_ring_that_a_new_run_replaces_is_followed_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    training = Training(path)
    watcher, _ = watch(path)
    for _ in range(20):
        training.step()
    assert watcher.poll()
    os.rename(path, tmp_path / "run.1.modtrace")
    other = Training(path)
    for _ in range(30):
        other.step(head=400)
    for number in range(10):
        training.step(head=300 if number == 5 else 5)
    training.script.close()
    assert not watcher.poll()
    assert kept(tmp_path / "run.kept") == ["step25-step.pftrace"]


def test_a_quiet_run_keeps_nothing_and_makes_no_folder(tmp_path: Path) -> None:
    training = Training(tmp_path / "run.modtrace")
    watcher, lines = watch(
        tmp_path / "run.modtrace", when="step > 3x; step > 30ms; data > 10ms; gc > 1ms; hang 1000min"
    )
    for _ in range(60):
        training.step()
        watcher.poll()
    training.script.close()
    watcher.run(0)
    assert lines == ["ended: 0 kept"]
    assert not (tmp_path / "run.kept").exists()


@pytest.fixture
def in_this_process() -> Iterator[None]:
    """Let the command run here: this process stays as it was."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("in_this_process")
def test_the_command_keeps_and_ends_with_the_ring(tmp_path: Path) -> None:
    training = Training(tmp_path / "run.modtrace")
    for number in range(30):
        training.step(head=300 if number == 20 else 5)
    training.script.close()
    result = CliRunner().invoke(
        commands, ["watch", str(tmp_path / "run.modtrace"), "--keep-when", "step > 3x", "-o", str(tmp_path / "here")]
    )
    assert (result.exit_code, result.stdout) == (0, "")
    assert kept(tmp_path / "here") == ["step20-step.pftrace"]


def test_each_step_has_a_line(tmp_path: Path) -> None:
    training = Training(tmp_path / "run.modtrace", rank=3)
    for number in range(40):
        training.step(data={20: 200, 30: 7}.get(number, 1))
    training.script.close()
    (tmp_path / "steps.jsonl").write_text("of an earlier run")
    steps, follower = (
        lines_file(tmp_path),
        RingFollower(tmp_path / "run.modtrace"),
    )
    steps.add_update(follower, follower.update())
    steps.close()
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(40)]
    assert (tmp_path / "steps.1.jsonl").read_text() == "of an earlier run"
    causes = {line["step"]: line["cause"] for line in lines if line["cause"]}
    assert causes[20] == "step 20: 210 ms, of which 200 ms data loading; usually 1 ms"
    # The summary and the watcher have one rule of which steps are slow.
    summary = modtrace.load(tmp_path / "run.modtrace").summary()
    assert causes == {step.step: step.cause for step in summary.step_parts if step.cause}
    assert [*causes] == [20, 30]
    assert (lines[20]["rank"], lines[20]["pid"]) == (3, os.getpid())
    for line in lines:
        assert sum(line["parts"].values()) == line["duration_ns"]
    assert [round(line["duration_ns"] / MS) for line in lines[18:22]] == [11, 11, 210, 11]


def test_the_lines_of_the_last_three_runs_are_kept_under_numbers(tmp_path: Path) -> None:
    training = Training(tmp_path / "run.modtrace")
    for _ in range(3):
        training.step()
    training.script.close()
    for run in range(6):
        steps, follower = (
            lines_file(tmp_path),
            RingFollower(tmp_path / "run.modtrace"),
        )
        steps.add_update(follower, follower.update())
        steps.close()
        with (tmp_path / "steps.jsonl").open("a") as file:
            file.write(f"{run}")
    kept = {path.name: path.read_text().splitlines()[-1] for path in tmp_path.glob("steps*.jsonl")}
    assert kept == {"steps.3.jsonl": "2", "steps.4.jsonl": "3", "steps.5.jsonl": "4", "steps.jsonl": "5"}


def test_two_watchers_of_one_ring_have_a_file_of_lines_each(tmp_path: Path) -> None:
    training = Training(tmp_path / "run.modtrace")
    watchers = [(lines_file(tmp_path), RingFollower(tmp_path / "run.modtrace"))]
    for number in range(12):
        training.step()
        if number == 6:
            watchers.append((lines_file(tmp_path), RingFollower(tmp_path / "run.modtrace")))
        for steps, follower in watchers:
            steps.add_update(follower, follower.update())
    training.script.close()
    for steps, follower in watchers:
        steps.add_update(follower, follower.update())
        steps.close()

    for name in ("steps.1.jsonl", "steps.jsonl"):
        assert [json.loads(line)["step"] for line in (tmp_path / name).read_text().splitlines()] == [*range(12)]


def test_the_watcher_of_a_ring_that_is_gone_ends(tmp_path: Path) -> None:
    done = CliRunner().invoke(commands, ["watch", str(tmp_path / "run.modtrace"), "--no-wait"])

    assert (done.exit_code, done.stderr.splitlines()[-1]) == (0, "modtrace: ended: 0 kept")
    assert list(tmp_path.iterdir()) == []


def test_another_reason_does_not_start_the_pause_of_slow_steps(tmp_path: Path) -> None:
    training = Training(tmp_path / "run.modtrace")
    for number in range(60):
        training.step(data=300 if number == 20 else 1, head=300 if number == 40 else 5)
    training.script.close()

    watch(tmp_path / "run.modtrace", "step > 3x; data > 200ms")[0].run(0)

    assert kept(tmp_path / "run.kept") == ["step20-data-loading+step.pftrace", "step40-step.pftrace"]


def test_after_a_bound_every_second_step_has_a_line_then_every_fourth(tmp_path: Path) -> None:
    training = Training(tmp_path / "run.modtrace")
    steps, follower = (
        lines_file(tmp_path, 8),
        RingFollower(tmp_path / "run.modtrace"),
    )
    training.step()
    for _ in range(34):
        training.step()
        steps.add_update(follower, follower.update())
    steps.close()
    numbers = [json.loads(line)["step"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert numbers == [*range(8), *range(8, 24, 2), *range(24, 34, 4)]


@pytest.mark.usefixtures("in_this_process")
def test_metrics_are_open_metrics_of_the_steps(tmp_path: Path) -> None:
    training = Training(tmp_path / "run.modtrace", rank=3)
    for number in range(11):
        training.step(head=100 * number)
    training.script.close()
    follower, metrics = RingFollower(tmp_path / "run.modtrace"), Metrics(0)
    metrics.add_update(follower, follower.update())
    url = f"http://127.0.0.1:{metrics.port}/metrics"
    with urllib.request.urlopen(url) as answer:
        text = answer.read().decode()
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n")
    lines = text.splitlines()
    label = f'rank="3",pid="{os.getpid()}"'
    values = {(parts := line.rpartition(" "))[0]: float(parts[2]) for line in lines if line[0] != "#"}
    assert values[f"modtrace_steps_total{{{label}}}"] == values[f"modtrace_step_seconds_count{{{label}}}"] == 11
    # Steps of 6, 106 … 1006 ms; the first data loading is 1 ms too. 95 % of 11 are 10.45: the longest one.
    assert values[f'modtrace_step_seconds{{{label},quantile="0.5"}}'] == pytest.approx(0.506, rel=1e-3)
    assert values[f'modtrace_step_seconds{{{label},quantile="0.95"}}'] == pytest.approx(1.006, rel=1e-3)
    assert values[f"modtrace_step_seconds_sum{{{label}}}"] == pytest.approx(5.566, rel=1e-3)
    assert values[f'modtrace_part_seconds_total{{{label},part="data loading"}}'] == pytest.approx(0.011, rel=1e-3)
    parts = [value for name, value in values.items() if name.startswith("modtrace_part")]
    assert sum(parts) == pytest.approx(5.566, rel=1e-3)
    assert [line.split()[2:] for line in lines if line.startswith("# TYPE")] == [
        ["modtrace_steps", "counter"],
        ["modtrace_step_seconds", "summary"],
        ["modtrace_part_seconds", "counter"],
        ["modtrace_quiet_seconds", "gauge"],
    ]
    with pytest.raises(urllib.error.HTTPError, match="404") as refused:
        urllib.request.urlopen(urllib.request.Request(url, headers={"Host": f"evil.example:{metrics.port}"}))
    refused.value.close()
    result = CliRunner().invoke(commands, ["watch", str(tmp_path), "--metrics", str(metrics.port)])
    assert result.exit_code == 2
    metrics.close()


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("option", [["--keep-when", "step > soon"], ["--max-bytes", "lots"], ["--every", "5"]])
def test_wrong_options_are_usage_errors(tmp_path: Path, option: list[str]) -> None:
    result = CliRunner().invoke(commands, ["watch", str(tmp_path), *option])
    assert result.exit_code == 2
    assert option[1] in result.stderr
    assert ('"module GPT.head > 50ms"' in result.stderr) == (option[0] == "--keep-when")


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Open all descriptors that this process may open, as many connections would."""
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, limits[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("in_this_process")
def test_a_ring_that_cannot_be_read_for_a_while_is_read_to_its_end(tmp_path: Path) -> None:
    training = Training(tmp_path / "run.modtrace")
    watcher, lines = watch(tmp_path / "run.modtrace")
    sink, whole = lines_file(tmp_path), WholeRunWriter(lines.append, every_ns=0)
    watcher._sinks = [sink, whole]
    for number in range(30):
        training.step(head=300 if number == 20 else 5)
        if 10 <= number < 22:
            with no_descriptors():
                assert watcher.poll()
        else:
            assert watcher.poll()
    training.script.close()

    assert watcher.run(0)
    assert [line for line in lines if "open files" in line] == [
        f"{tmp_path}/run.modtrace: cannot be read: Too many open files"
    ]
    assert kept(tmp_path / "run.kept") == ["step20-step.pftrace"]
    assert [json.loads(line)["step"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()] == [*range(30)]
    assert json.loads((tmp_path / "run.modtrace.whole.json").read_text())["steps"] == 30


@pytest.mark.parametrize("damage", ["cut", "overwritten"])
def test_a_ring_whose_end_is_never_read_is_an_error(tmp_path: Path, damage: str) -> None:
    training, path = Training(tmp_path / "run.modtrace"), tmp_path / "run.modtrace"
    watcher, lines = watch(path)
    training.step()
    assert watcher.poll()
    if damage == "cut":
        os.truncate(path, 100)
    else:
        with path.open("r+b") as file:
            file.write(bytes(4096))
    for _ in range(100):  # the process lives
        assert watcher.poll()
    training.script.close()

    assert not watcher.run(0)
    assert lines[-2:] == [f"{path}: the end of the ring could not be read", "ended: 0 kept"]
    (tmp_path / "other.modtrace").write_text("no ring, and never was one")
    assert watch(tmp_path / "other.modtrace")[0].run(0)


def test_lines_that_find_no_room_come_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training, said = Training(tmp_path / "run.modtrace"), list[str]()
    steps = StepsFile(KeptFolder(tmp_path), "steps.jsonl", said.append)
    follower = RingFollower(tmp_path / "run.modtrace")
    write = os.write

    def write_some(descriptor: int, data: bytes) -> int:
        if number in range(5, 9):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:100])

    monkeypatch.setattr(os, "write", write_some)
    for number in range(12):  # noqa: B007 (`write_some` reads it)
        with monkeypatch.context() as real:
            real.setattr(os, "write", write)
            training.step()
        steps.add_update(follower, follower.update())
    with monkeypatch.context() as real:
        real.setattr(os, "write", write)
        training.script.close()
    steps.add_update(follower, follower.update())
    steps.close()

    assert [json.loads(line)["step"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()] == [*range(12)]
    assert said == [f"{tmp_path}/steps.jsonl: No space left on device; unwritten lines are kept and written later"]


def test_idle_connections_do_not_keep_the_metrics_from_others(tmp_path: Path) -> None:
    metrics = Metrics(0)
    idle = [socket.create_connection(("127.0.0.1", metrics.port), 10) for _ in range(100)]
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=10) as answer:
        assert answer.read().endswith(b"# EOF\n")
    assert [connection.recv(1) for connection in idle[:60]] == [b""] * 60
    for connection in idle:
        connection.close()
    metrics.close()
