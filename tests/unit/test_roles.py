"""Roles: processes of one job that do different things, each role with ranks of its own or all in one world."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import modtrace
from modtrace import ModtraceError
from modtrace._ranks import role_in
from modtrace.cli.commands import ranks as ranks_commands
from modtrace.cli.group import group as commands
from modtrace.live.rank_state import rank_state_of
from modtrace.live.where import WhereResult, where
from modtrace.ranks import all_ranks, find_rank_recordings
from modtrace.ranks.pack import pack
from modtrace.ranks.slow import find_late_in_rings
from modtrace.ring import Kind, read_ring
from modtrace.timeline import RingAnalysis
from modtrace.write.slices import CollectiveFlows
from tests.support.event_script import WALL, EventScript

MS = 1_000_000
BEGIN = 10**16


def write(path: Path, role: str, rank: int, *, late_ns: int = 0, group: str = "0-1", pid: int = 1) -> None:
    """Write a ring of 20 steps: 2 ms of a module, in each fourth `late_ns` more, then an all-reduce."""
    script = EventScript(512, path, {"pid": pid, "rank": rank, **({"role": role} if role else {})})
    script.note({"kind": "clock", "clock": "a"})
    script.note_group("0", group, "default_pg")
    net, text = script.name("Net", "Net", "Net"), json.dumps(["all_reduce", "0"])
    for step in range(20):
        begin = BEGIN + step * 50 * MS
        called = begin + 2 * MS + (late_ns if step % 4 == 2 else 0)
        script.enter(begin, net, step)
        script.exit(called, net, step)
        script.collective(called, Kind.COLLECTIVE_ENTER, text, step)
        done = begin + 40 * MS
        script.collective(done, Kind.COLLECTIVE_EXIT, text, 4096)
        script.step(done, step)
    script.close()


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Two trainers and two rollouts with ranks of their own; rollout 1 comes 30 ms late now and then."""
    folder = tmp_path / "job"
    folder.mkdir()
    for number, (role, rank, late_ns) in enumerate(
        [("trainer", 0, 0), ("trainer", 1, 0), ("rollout", 0, 0), ("rollout", 1, 30 * MS)]
    ):
        write(folder / f"{role}{rank}.modtrace", role, rank, late_ns=late_ns, pid=10 + number)
    return folder


def test_processes_of_all_roles_are_in_one_trace_each_by_its_role_and_rank(job: Path, tmp_path: Path) -> None:
    modtrace.load_ranks(job).save(tmp_path / "all.pftrace")
    modtrace.load_ranks(job).save(tmp_path / "all.json")

    for name in ("all.pftrace", "all.json"):
        whole = modtrace.load(tmp_path / name)
        assert list(dict.fromkeys(track.process.name for track in whole.tracks)) == [
            "rollout 0 · python",
            "rollout 1 · python",
            "trainer 0 · python",
            "trainer 1 · python",
        ]
        places = [(one["role"], one["rank"]) for one in whole.metadata["ranks"]]
        assert places == [("rollout", 0), ("rollout", 1), ("trainer", 0), ("trainer", 1)]


def test_arrows_join_the_calls_of_one_role_and_not_those_of_another_with_the_same_group(job: Path) -> None:
    whole = modtrace.load_ranks(job)
    flows, table = CollectiveFlows(whole), whole.collectives

    roles: dict[int, set[str]] = {}
    for row in range(len(table)):
        roles.setdefault(int(flows.flow[row]), set()).add(whole.tracks[int(table.track[row])].process.role)

    assert len(roles) == 2 * 20
    assert sorted(map(sorted, roles.values())) == [["rollout"]] * 20 + [["trainer"]] * 20


def test_late_ranks_are_found_in_each_role(job: Path, tmp_path: Path) -> None:
    whole = modtrace.find_slow_ranks(job)
    with pytest.raises(
        ModtraceError, match=r"several roles with ranks of their own \(rollout, trainer\).*--role trainer"
    ):
        pack(find_rank_recordings(job), tmp_path / "dataset")
    with pytest.raises(ModtraceError, match="no recording has the role 'driver'; there are: rollout, trainer"):
        modtrace.find_slow_ranks(job, role="driver")

    rollouts = modtrace.find_slow_ranks(job, role="rollout")
    assert {step.rank for step in rollouts.late} == {1}
    assert whole.sentences[0] == "4 processes of 2 roles"
    assert [f"rollout: {line}" for line in rollouts.sentences] == whole.sentences[1:4]
    assert whole.to_dict()["roles"]["rollout"] == rollouts.to_dict()
    assert not modtrace.find_slow_ranks(job, role="trainer").late


def test_the_empty_rings_of_launchers_count_for_no_role(job: Path) -> None:
    for role in ("trainer", "rollout"):
        EventScript(16, job / f"{role}-0.modtrace", {}).close()
    EventScript(16, job / "again-0.modtrace", {"rank": 0, "role": "trainer"}).close()

    assert [(file.role, file.rank_in_world) for file in find_rank_recordings(job)] == [
        ("rollout", 0),
        ("rollout", 1),
        ("trainer", 0),
        ("trainer", 1),
    ]


def test_a_driver_needs_no_number(job: Path) -> None:
    EventScript(16, job / "driver.modtrace", {"role": "driver"}).close()

    assert [(file.role, file.rank_in_world) for file in find_rank_recordings(job)][:2] == [
        ("driver", 0),
        ("rollout", 0),
    ]


def test_two_recordings_of_one_role_and_rank_are_refused(job: Path) -> None:
    write(job / "again.modtrace", "rollout", 1)

    with pytest.raises(
        ModtraceError, match=r"both of rollout 1; leave one in the folder: if .* again, move the earlier"
    ):
        find_rank_recordings(job)


def test_roles_of_one_world_keep_their_ranks_and_are_compared(tmp_path: Path) -> None:
    write(tmp_path / "0.modtrace", "trainer", 0)
    write(tmp_path / "1.modtrace", "rollout", 1, late_ns=30 * MS)

    assert [(file.role, file.rank, file.world) for file in find_rank_recordings(tmp_path)] == [
        ("trainer", 0, ""),
        ("rollout", 1, ""),
    ]
    assert {step.rank for step in modtrace.find_slow_ranks(tmp_path).late} == {1}


def test_some_ranks_are_those_of_each_role(job: Path) -> None:
    whole = modtrace.load_ranks(job, ranks=[1])

    assert {track.process.name for track in whole.tracks} == {"rollout 1 · python", "trainer 1 · python"}


def test_a_job_that_runs_is_told_by_role_and_rank(job: Path) -> None:
    found = where(job)

    assert sorted(one.label for one in found.ranks) == ["rollout 0", "rollout 1", "trainer 0", "trainer 1"]
    assert found.sentence == (
        "rollout: ranks 0-1 were in no module when they ended; trainer: ranks 0-1 were in no module when they ended"
    )


def test_waiting_ranks_are_found_within_a_role() -> None:
    """Rollout 0 has called its first all-reduce, and waits for rollout 1; both trainers have left three."""
    states = []
    for role, rank, calls in [("trainer", 0, 3), ("trainer", 1, 3), ("rollout", 0, 1), ("rollout", 1, 0)]:
        script = EventScript(64, None, {"pid": 1, "rank": rank, "role": role})
        script.note_group("0", "0-1", "default_pg")
        text = json.dumps(["all_reduce", "0"])
        script.step(BEGIN, 0)
        for call in range(calls):
            script.collective(BEGIN + (2 * call + 1) * MS, Kind.COLLECTIVE_ENTER, text, call)
            if call < calls - 1 or role == "trainer":
                script.collective(BEGIN + (2 * call + 2) * MS, Kind.COLLECTIVE_EXIT, text, 4096)
        analysis = RingAnalysis(script.snapshot()._replace(writer="running", known_pid=True))
        states.append(rank_state_of(f"{role}{rank}", analysis, (BEGIN + 9_000 * MS, WALL + BEGIN + 9_000 * MS)))

    result = WhereResult(states, [], [])

    [hang] = result.hangs
    assert (hang.waiting, hang.not_called) == ((0,), (1,))
    assert result.sentence.startswith("rollout: rank 0 waits in all_reduce #0")
    assert "; trainer: ranks 0-1 are in no module" in result.sentence


def test_processes_of_one_world_are_called_by_their_roles_in_all_that_is_said_of_them(tmp_path: Path) -> None:
    for rank, (role, late_ns) in enumerate([("trainer", 0), ("trainer", 0), ("rollout", 30 * MS)]):
        write(tmp_path / f"{rank}.modtrace", role, rank, late_ns=late_ns, group="0-2")

    run = modtrace.find_slow_ranks(tmp_path)

    lines = run.to_text().splitlines()
    assert lines[2].startswith("rollout 2 was late in 5 of 20 steps, by 30.000 ms on average, mostly in Net forward")
    assert "rollout 2              5  150.000     0.000  now and then  Net forward" in lines
    assert "Net     forward              5  150.000  rollout 2" in lines
    assert "   2  late     rollout 2  Net     forward   30.000      30.000   0.0   50.000" in lines
    assert run.to_csv().splitlines()[1].startswith("2,late,rollout 2,Net,forward,")
    assert run.to_dict()["processes"] == [
        {"rank": 0, "role": "trainer"},
        {"rank": 1, "role": "trainer"},
        {"rank": 2, "role": "rollout"},
    ]
    page = tmp_path / "page.html"
    run.save(page)
    assert page.read_text().count(">rollout 2<") == 1 + 1 + 5
    assert "Each row is a rank (trainer 0 at the top, rollout 2 at the bottom)" in page.read_text()
    rings = {rank: read_ring(tmp_path / f"{rank}.modtrace") for rank in range(3)}
    assert find_late_in_rings(rings)[0].sentence == "rollout 2 came late in step 2 by 30 ms, in Net forward"


def test_the_peak_of_each_role_is_told_though_their_ranks_are_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, (role, held) in enumerate([("trainer", 4 << 20), ("rollout", 9 << 20)]):
        script = EventScript(64, tmp_path / f"{number}.modtrace", {"pid": number + 1, "rank": 0, "role": role})
        net = script.name("Net", "Net", "Net")
        script.enter(BEGIN, net, 0)
        script.collective(BEGIN, Kind.COUNTER, "allocated", held)
        script.exit(BEGIN + MS, net, 0)
        script.close()

    with pytest.raises(SystemExit):
        commands(["ranks", "timeline", str(tmp_path), "-o", str(tmp_path / "all.json")])

    peak = "rollout 0 held most memory: 9.00 MiB at its peak, 5.00 MiB (125.0%) more than the other"
    assert peak in capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("reached", [False, True])
def test_a_waiting_rank_has_the_name_of_its_role_if_roles_share_rank_numbers(reached: bool) -> None:
    states = []
    for rank, role in enumerate(["trainer", "trainer", "rollout"]):
        script = EventScript(64, None, {"pid": 1, "rank": rank, "role": role})
        script.note_group("0", "0-2", "default_pg")
        if rank < 2 or reached:
            script.collective(BEGIN, Kind.COLLECTIVE_ENTER, '["all_reduce", "0"]', 0)
        analysis = RingAnalysis(script.snapshot()._replace(writer="running", known_pid=True))
        states.append(rank_state_of(f"{rank}", analysis, (BEGIN + 9_000 * MS, WALL + BEGIN + 9_000 * MS)))

    [hang] = WhereResult(states, [], []).hangs

    waits = "trainer 0-1, rollout 2 wait" if reached else "trainer 0-1 wait"
    then = "all ranks called it, so it does not complete" if reached else "rollout 2 has not called it: place unknown"
    assert hang.text.startswith(f"{waits} in all_reduce #0 for 9.0 s; {then}")


def test_the_commands_take_a_role(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "trainers.json"
    with pytest.raises(SystemExit) as ended:
        commands(["ranks", "timeline", str(job), "--role", "trainer", "-o", str(output)])

    assert ended.value.code == 0
    assert {track.process.role for track in modtrace.load(output).tracks} == {"trainer"}
    assert capsys.readouterr().err.startswith("2 ranks, ")


def write_many(folder: Path, calls: int) -> None:
    """Write 32 trainers, which call a net of three levels twice in each of two steps, and rollouts, `calls` times."""
    folder.mkdir()
    for number in range(64):
        role, times = (("trainer", 2), ("rollout", calls))[number // 32]
        script = EventScript(
            1 << 13, folder / f"{number}.modtrace", {"pid": number + 1, "rank": number % 32, "role": role}
        )
        script.note({"kind": "clock", "clock": "a"})
        nets, now = [script.name("Net" + ".part" * level) for level in range(3)], BEGIN
        for step in range(2):
            for call in range(step * times, (step + 1) * times):
                for level, net in enumerate((*nets, *reversed(nets))):
                    now += MS
                    (script.enter if level < 3 else script.exit)(now, net, call)
            script.step(now, step)
        script.close()


@pytest.mark.parametrize(
    ("calls", "budget", "ranks", "levels", "others"),
    [
        (20, 1_000_000, (32, 32), None, 0),
        (200, 1_000_000, (32, 32), 2, 0),
        (300, 1_000_000, (32, 32), 1, 0),
        (20, 20_000, (16, 21), 1, 27),
    ],
)
def test_many_processes_take_a_megabyte_a_step(
    calls: int,
    budget: int,
    ranks: tuple[int, int],
    levels: int | None,
    others: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call takes 55 bytes, so that 18,181 fit: all, two of three levels, one, and of 20,000 bytes 16 pairs and 5."""
    write_many(tmp_path / "job", calls)
    monkeypatch.setattr(ranks_commands, "_BYTES_PER_STEP", budget)
    output = tmp_path / "all.pftrace"

    with pytest.raises(SystemExit):
        commands(["ranks", "timeline", str(tmp_path / "job"), "-o", str(output)])

    said = capsys.readouterr().err
    assert output.stat().st_size <= 2 * 1_000_000
    kept: Any = modtrace.load(output).metadata["ranks"]
    assert tuple(sum(one["role"] == role for one in kept) for role in ("rollout", "trainer")) == ranks
    rollouts = [one.get("levels") for one in kept if one["role"] == "rollout"]
    assert rollouts == [levels] * len(rollouts)
    few = f"{ranks[0]} rollouts with {levels} level{'s' * (levels != 1)} of modules, to limit a step to 1 MB"
    assert (few in said) == bool(levels)
    assert (f"{others} ranks left out, to limit a step to 1 MB; --ranks selects others" in said) == bool(others)


def test_ranks_that_do_not_fit_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four show that a rank takes 1,210 bytes on average: 29 more fit. Then come two fours, and both roles are full."""
    write_many(tmp_path / "job", 20)
    load = Mock(wraps=all_ranks.load_rank)
    monkeypatch.setattr(all_ranks, "_RANKS_AT_ONCE", 4)
    monkeypatch.setattr(all_ranks, "load_rank", load)

    whole = modtrace.load_ranks(tmp_path / "job", bytes_per_step=20_000)

    kept: Any = whole.metadata["ranks"]
    assert (len(kept), whole.metadata["left_out"], load.call_count) == (37, 27, 41)
    assert "nothing was lost" in str(whole.summary())  # no rank lost any of its events


@pytest.mark.parametrize(
    ("environment", "role"),
    [
        ({}, None),
        ({"ROLE_NAME": "default"}, None),
        ({"ROLE_NAME": "rollout"}, "rollout"),
        ({"ROLE_NAME": "a b"}, None),
        ({"ROLE_NAME": ""}, None),
    ],
)
def test_torchrun_says_the_role(environment: dict[str, str], role: str | None) -> None:
    assert role_in(environment) == role


@pytest.mark.parametrize("role", ["", "a b", "x" * 41, "a/b", "a\n", 3])
def test_a_role_that_no_process_can_be_called_is_refused(role: object) -> None:
    with pytest.raises(modtrace.RecordingError, match=r"role is .*; it must be a name of at most 40 letters"):
        modtrace.record(role=role)  # type: ignore[arg-type]


def test_a_recording_has_its_role_and_a_report_has_it_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("RANK", "3")
    net = torch.nn.Linear(2, 2)
    with modtrace.record(tmp_path / "one.json", role="rollout", engine="python") as recording:
        net(torch.ones(1, 2)).sum().backward()

    assert {track.process.name for track in recording.timeline().tracks} == {"rollout 3 · python"}
    assert {track.process.role for track in modtrace.load(tmp_path / "one.json").tracks} == {"rollout"}
    modtrace.report(tmp_path / "one.json", tmp_path / "report.zip")
    with zipfile.ZipFile(tmp_path / "report.zip") as archive:
        assert not [name for name in archive.namelist() if b"rollout" in archive.read(name)]
