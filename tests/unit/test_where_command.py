"""`modtrace where`: what it prints, and Python stacks beside it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from modtrace import RingError
from modtrace._processes import child_processes, read_process_stat
from modtrace.cli.group import group as commands
from modtrace.live import places
from modtrace.live.rank_state import read_rank_state
from modtrace.live.where import where as look
from modtrace.ring import Kind, owner
from modtrace.ring.slot_format import (
    NO_NAME,
)
from tests.support.python_process import start_python
from tests.support.where_rings import SECOND, Writer


def where(*arguments: object) -> Result:
    return CliRunner().invoke(commands, ["where", *map(str, arguments)])


def test_stacks_come_from_py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "py-spy").write_text('#!/bin/sh\necho "Process $3: $1 $2"\n')
    (tmp_path / "py-spy").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    Writer(tmp_path / "run.modtrace", rank=4).enter(0, "Net")
    Writer(tmp_path / "dead.modtrace", rank=5, pid=1 << 30).enter(0, "Net")

    done = where("--stacks", tmp_path / "run.modtrace", tmp_path / "dead.modtrace")

    assert done.stdout.splitlines()[-5:] == [
        "--- rank 4",
        f"Process {os.getpid()}: dump --pid",
        "",
        "--- rank 5",
        f"pid {1 << 30}: no stacks, because it does not run on this machine",
    ]


def test_a_process_that_waits_for_its_data_loader_shows_its_child_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "py-spy").write_text('#!/bin/sh\necho "Process $3"\n')
    (tmp_path / "py-spy").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    children = {"6": "in poll", "7": "in nanosleep", "8": "in poll"}
    asked: list[int] = []

    def children_of(pid: int) -> dict[int, str]:
        asked.append(pid)
        return {int(child): place for child, place in children.items()}

    monkeypatch.setattr(places, "child_processes", children_of)
    loading, inside = Writer(tmp_path / "0.modtrace"), Writer(tmp_path / "1.modtrace")
    loading.event(0, Kind.RANGE_BEGIN, loading.ring.names.text('["data loading", "next"]'), 0)
    inside.enter(0, "Net")
    now_ns = max(loading.start, inside.start) + 90 * SECOND
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)

    done = where("--stacks", tmp_path / "0.modtrace", tmp_path / "1.modtrace")

    lines = done.stdout.splitlines()
    assert "0.modtrace seems hung: in data loading for 90.0 s; child processes: pid 7 in nanosleep, 2 in poll" in (
        " ".join(lines)
    )
    assert lines[lines.index("--- 0.modtrace") :] == [
        *("--- 0.modtrace", f"Process {os.getpid()}"),
        *(line for child in children for line in ("", f"child process {child}:", f"Process {child}")),
        *("", "--- 1.modtrace", f"Process {os.getpid()}"),
    ]
    assert set(asked) == {os.getpid()}


def test_children_are_found_with_what_they_do() -> None:
    with start_python("-c", "") as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert child_processes(os.getpid())[process.pid] == "dead"
        assert process.pid not in child_processes(process.pid)
        children = child_processes(os.getppid())
    assert children[os.getpid()] == "running"


def test_stacks_without_py_spy_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    Writer(tmp_path / "run.modtrace", rank=4).enter(0, "Net")

    assert "pip install py-spy" in where("--stacks", tmp_path / "run.modtrace").stderr


def test_stacks_are_not_asked_of_a_process_that_has_not_the_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    # Another program, which handles the signal for a purpose of its own; a ring names it that has come from elsewhere.
    handles = "import signal, time; signal.signal(10, lambda *_: print('got it', flush=True)); print(flush=True)"
    with start_python("-c", f"{handles}; signal.pause()") as process:
        assert process.stdout is not None
        process.stdout.readline()
        ring = tmp_path / "run.modtrace"
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(owner, "read_process_stat", lambda _: read_process_stat(process.pid))
            Writer(ring, pid=process.pid, stacks_signal=int(signal.SIGUSR1))
        without = where("--stacks", ring)
        (tmp_path / "run.modtrace.stacks").touch()
        with_file = where("--stacks", ring)
        (tmp_path / "run.modtrace.stacks").unlink()
        (tmp_path / "run.modtrace.stacks").symlink_to("/dev/null")
        with_link = where("--stacks", ring)
        (tmp_path / "run.modtrace.stacks").unlink()
        os.mkfifo(tmp_path / "run.modtrace.stacks")
        with_pipe = where("--stacks", ring)
        process.kill()
        told = process.stdout.read()

    stacks = f"{ring}.stacks"
    assert [done.stdout.splitlines()[-1] for done in (without, with_file, with_link, with_pipe)] == [
        f"pid {process.pid}: no stacks: {stacks}: No such file or directory",
        f"pid {process.pid}: no stacks: it has not registered signal 10 for {stacks}",
        f"pid {process.pid}: no stacks: {stacks}: Too many levels of symbolic links",
        f"pid {process.pid}: no stacks: it has not registered signal 10 for {stacks}",
    ]
    assert told == ""


def test_command_takes_the_rings_of_a_folder(tmp_path: Path) -> None:
    for rank in range(2):
        Writer(tmp_path / f"run-{rank}.modtrace", rank=rank).enter(0, "Net")
    (tmp_path / "trace.json").write_text("[]")
    (tmp_path / "empty").mkdir()

    done = where("--format", "json", tmp_path, tmp_path / "run-1.modtrace")
    without = where(tmp_path / "empty", tmp_path / "*.ring")

    assert [state["rank"] for state in json.loads(done.stdout)["ranks"]] == [0, 1]
    assert without.exit_code == 1
    assert without.stdout.splitlines() == [
        f"{tmp_path}/empty: no recording in this folder; they end in .modtrace",
        f"{tmp_path}/*.ring: no file matches",
    ]


def test_the_command_prints_a_line_per_group(tmp_path: Path) -> None:
    for rank in range(3):
        writer = Writer(tmp_path / f"run-{rank}.modtrace", rank=rank, pid=1 << 30)
        writer.event(0, Kind.STEP, NO_NAME, 7)
        writer.enter(0, "Net", "Net.b" if rank == 1 else "Net.a")

    done = where(tmp_path / "run-*.modtrace", tmp_path / "run-0.modtrace")

    lines = done.stdout.splitlines()
    assert done.exit_code == 0
    assert lines[0] == "rank 1 died in Net.b, the other 2 in Net.a, after step 7"
    assert lines[2].split() == ["pid", "state", "step", "thread", "in", "for", "usually"]
    pid = str(1 << 30)
    assert lines[3].split()[:11] == ["rank", "1", pid, "dead", "7", "MainThread", "forward", "Net", "›", "b", "(M)"]
    assert lines[4].split()[:11] == ["ranks", "0,", "2", f"{pid},", pid, "dead", "7", *lines[3].split()[5:9]]
    assert len(lines) == 5


def test_the_command_prints_json(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run.modtrace", rank=2, pid=1 << 30)
    for number, (begin, end) in enumerate(((0.125, 0.25), (0.25, 0.5), (0.5, 1))):
        writer.call(begin, Kind.FORWARD_ENTER, "Net.a", number)
        writer.call(end, Kind.FORWARD_EXIT, "Net.a", number)
    writer.enter(1, "Net")
    writer.call(3, Kind.FORWARD_ENTER, "Net.a", 3)

    done = where("--format", "json", tmp_path / "run.modtrace")

    (rank,) = json.loads(done.stdout)["ranks"]
    wall = rank.pop("last_event_ns")
    assert abs(wall - time.time_ns() - 3 * SECOND) < 60 * SECOND
    assert rank == {
        "file": str(tmp_path / "run.modtrace"),
        "rank": 2,
        "pid": 1 << 30,
        "engine": "native",
        "state": "dead",
        "step": None,
        "memory": [],
        "unsaved": "",
        "collectives": [],
        "sends_and_receives": [],
        "last_event_seconds": 0.0,
        "threads": [
            {
                "thread": "MainThread",
                "tid": 7,
                "last_event_seconds": 0.0,
                "seems_hung": False,
                "stack": [
                    {"fqn": "Net", "class": "M", "phase": "forward", "seconds": 2.0, "usual_seconds": None},
                    {"fqn": "Net.a", "class": "M", "phase": "forward", "seconds": 0.0, "usual_seconds": 0.25},
                ],
            }
        ],
        "streams": [],
    }


def test_command_with_an_unreadable_ring_reports_it_and_shows_the_rest(tmp_path: Path) -> None:
    Writer(tmp_path / "a.modtrace", rank=0, pid=1 << 30).enter(0, "Net")
    (tmp_path / "b.modtrace").write_text("something else")

    done = where(tmp_path / "*.modtrace", tmp_path / "absent")

    assert done.exit_code == 1
    assert f"{tmp_path}/b.modtrace: not a ring file" in done.stdout
    assert f"{tmp_path}/absent: cannot be read: No such file or directory" in done.stdout
    assert "rank 0" in done.stdout
    with pytest.raises(RingError):
        read_rank_state(tmp_path / "b.modtrace")


def test_command_for_a_recording_without_events_shows_no_module(tmp_path: Path) -> None:
    Writer(tmp_path / "run.modtrace")

    done = where(tmp_path / "run.modtrace")

    assert done.exit_code == 0
    assert "no module" in done.stdout


def test_a_trace_in_place_of_a_ring_is_named_so(tmp_path: Path) -> None:
    trace = tmp_path / "step.pftrace"
    trace.write_bytes(b"\n\0")

    done = where(trace)

    assert done.exit_code == 1
    said = f"{trace}: this is a trace, and not the ring file of a process; see it with modtrace summary"
    assert said in " ".join(done.stdout.split())


def test_command_with_wrong_usage_exits_with_2() -> None:
    assert where().exit_code == 2
    assert where("--watch", "--format", "json", "run.modtrace").exit_code == 2
    with_stacks = where("--format", "json", "--stacks", "run.modtrace")
    assert (with_stacks.exit_code, with_stacks.stderr.splitlines()[-1]) == (
        2,
        "modtrace: --format json has no Python stacks; leave out --stacks.",
    )


def test_where_in_python_says_what_the_command_prints_as_json(tmp_path: Path) -> None:
    for rank in range(3):
        writer = Writer(tmp_path / f"run-{rank}.modtrace", rank=rank, pid=1 << 30)
        writer.enter(0, "Net", "Net.b" if rank == 1 else "Net.a")
    result = look(tmp_path)
    assert result.sentence == "rank 1 died in Net.b, the other 2 in Net.a"
    assert ([state.rank for state in result.ranks], result.hangs, result.records, result.errors) == (
        [0, 1, 2],
        [],
        [],
        [],
    )

    done = where("--format", "json", tmp_path)
    printed = json.loads(done.stdout)
    assert (done.exit_code, list(printed)) == (0, ["sentence", "hangs", "ranks", "errors"])
    assert json.loads(result.to_json()) == printed
    assert printed["ranks"] == [state.to_dict() for state in result.ranks]
    assert (printed["sentence"], printed["hangs"], printed["errors"]) == (result.sentence, [], [])
    assert where("--format", "json", "--watch", tmp_path).exit_code == 2


def test_the_sentence_names_who_keeps_others_waiting(tmp_path: Path) -> None:
    waits = Writer(tmp_path / "run-0.modtrace", rank=0, pid=1 << 30)
    waits.event(1, Kind.COLLECTIVE_ENTER, waits.ring.names.text('["barrier", "0"]'), 0)
    waits.ring.names.group("0", "0-1", "default_pg")
    Writer(tmp_path / "run-1.modtrace", rank=1, pid=1 << 30).enter(0, "Net")
    sentence = "rank 0 died waiting in barrier #0; rank 1 died before calling it, in forward Net"
    assert look([tmp_path / "run-0.modtrace", tmp_path / "run-1.modtrace"]).sentence == sentence

    (hang,) = json.loads(where("--format", "json", tmp_path).stdout)["hangs"]
    assert hang.pop("wait_seconds") == 0
    assert hang == {
        "text": sentence,
        "operator": "barrier",
        "group": "0",
        "counter": 0,
        "waiting": [0],
        "not_called": [],
        "dead": [1],
        "called_other": [],
        "unknown": [],
        "is_cause": True,
    }


def test_where_in_python_keeps_what_is_wrong_with_files(tmp_path: Path) -> None:
    result = look([tmp_path / "absent.modtrace", tmp_path])
    assert (result.ranks, result.sentence) == ([], "")
    assert result.errors == [
        f"{tmp_path}: no recording in this folder; they end in .modtrace",
        f"{tmp_path}/absent.modtrace: cannot be read: No such file or directory",
    ]
