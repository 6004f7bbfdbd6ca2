from __future__ import annotations

import hashlib
import io
import json
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from modtrace import RingError
from modtrace.cli.group import group as commands
from modtrace.ring import Kind, Ring
from modtrace.ring.slot_format import (
    CALL_KEY_BITS,
    FORWARD_THREAD_SHIFT,
    KIND_SHIFT,
    NO_NAME,
    SEQUENCE_BITS,
    THREAD_SHIFT,
)
from modtrace.timeline import OpenCall, ThreadStack
from modtrace.where import RankState, group_ranks, headline, read_rank_state
from modtrace.where.durations import format_durations
from modtrace.where.process_status import is_alive
from modtrace.where.rank_groups import format_ranges, format_stack
from modtrace.where.render import render
from tests.support.python_process import start_python

SECOND = 1_000_000_000


class Writer:
    """A ring file of a process that is where the test says; each method takes seconds since the recording's start."""

    def __init__(self, file: Path, rank: int | None = None, **metadata: object) -> None:
        host = hashlib.sha256(f"modtrace {socket.gethostname()}".encode()).hexdigest()[:12]
        known = {"pid": os.getpid(), "engine": "native", "host": host, "rank": rank}
        self.ring = Ring(64, file, {key: value for key, value in (known | metadata).items() if value is not None})
        self.start = self.ring.names.records[0]["monotonic"]
        self.now = 0
        self.write = self.ring.make_writer(lambda: self.start + self.now)
        self.thread = self.ring.names.thread("MainThread", 7, 1)

    def event(self, at: float, kind: Kind, name: int, value: int) -> None:
        self.now = int(at * SECOND)
        self.write(kind << KIND_SHIFT | self.thread << THREAD_SHIFT | name, value)

    def call(self, at: float, kind: Kind, fqn: str, number: int = 0, sequence: int = 0) -> None:
        self.event(at, kind, self.ring.names.name(fqn, fqn, "M"), number << SEQUENCE_BITS | sequence)

    def enter(self, at: float, *fqns: str) -> None:
        for fqn in fqns:
            self.call(at, Kind.FORWARD_ENTER, fqn)

    def leave(self, at: float, *fqns: str) -> None:
        for fqn in fqns:
            self.call(at, Kind.FORWARD_EXIT, fqn)


def seen(state: RankState) -> list[tuple[str, str, float]]:
    """Open calls as (fqn, phase, seconds from the last event back to its begin)."""
    last = state.last_ns
    return [
        (call.fqn, call.phase, (last - call.since_ns) / SECOND) for thread in state.threads for call in thread.calls
    ]


def test_rank_state_in_forward_has_the_open_calls(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run.modtrace", rank=3)
    writer.enter(1, "Net", "Net.a")
    writer.leave(2, "Net.a")
    writer.event(3, Kind.STEP, NO_NAME, 41)
    writer.enter(4, "Net.b")

    state = read_rank_state(tmp_path / "run.modtrace")

    assert (state.rank, state.pid, state.engine, state.state, state.step) == (3, os.getpid(), "native", "running", 41)
    assert seen(state) == [("Net", "forward", 3.0), ("Net.b", "forward", 0.0)]
    assert abs(state.last_unix_ns - time.time_ns() - 4 * SECOND) < 60 * SECOND


def test_rank_state_in_a_native_backward_has_the_call_path_of_the_node(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run.modtrace")
    net, inner = writer.ring.names.name("Net", "Net", "M"), writer.ring.names.name("a", "Net.a", "M")
    for at, kind, name, sequence in [
        (1, Kind.FORWARD_ENTER, net, 10),
        (2, Kind.FORWARD_ENTER, inner, 12),
        (3, Kind.FORWARD_EXIT, inner, 15),
        (4, Kind.FORWARD_EXIT, net, 18),
    ]:
        writer.event(at, kind, name, sequence)
    origin = 1 << FORWARD_THREAD_SHIFT
    writer.event(5, Kind.NODE_BEGIN, origin, 16)
    writer.event(6, Kind.NODE_END, origin, 16)
    writer.event(7, Kind.NODE_BEGIN, origin, 13)

    assert seen(read_rank_state(tmp_path / "run.modtrace")) == [("Net", "backward", 0.0), ("Net.a", "backward", 0.0)]


def test_rank_state_in_a_recomputation_has_backward_and_recompute(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run.modtrace")
    writer.enter(1, "Net")
    writer.leave(2, "Net")
    net = writer.ring.names.name("Net", "Net", "M")
    writer.event(3, Kind.CALL_BACKWARD, net, 5 << CALL_KEY_BITS)
    writer.call(4, Kind.RECOMPUTE_ENTER, "Net")

    assert seen(read_rank_state(tmp_path / "run.modtrace")) == [("Net", "backward", 1.0), ("Net", "recompute", 0.0)]


def test_a_portable_backward_that_is_over_is_not_open(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run.modtrace")
    writer.enter(1, "Net")
    writer.leave(2, "Net")
    net = writer.ring.names.name("Net", "Net", "M")
    writer.event(3, Kind.CALL_BACKWARD, net, 5 << CALL_KEY_BITS)
    writer.event(4, Kind.BACKWARD_OVER, NO_NAME, 5)

    assert seen(read_rank_state(tmp_path / "run.modtrace")) == []


def test_a_call_whose_exit_was_torn_is_not_open(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run.modtrace")
    writer.enter(1, "Net", "Net.a")
    writer.leave(2, "Net.a", "Net")
    writer.enter(3, "Other")
    # Slot 2 holds the exit of Net.a.
    slot = writer.ring.offset + 2 * 32
    writer.ring.buffer[slot : slot + 32] = bytes(32)

    assert seen(read_rank_state(tmp_path / "run.modtrace")) == [("Other", "forward", 0.0)]


@pytest.mark.parametrize(
    ("metadata", "stopped", "state"),
    [
        ({}, False, "running"),
        ({"host": socket.gethostname()}, False, "running"),
        ({}, True, "stopped"),
        ({"host": "elsewhere"}, False, "unknown"),
        ({"host": "elsewhere"}, True, "stopped"),
        ({"pid": 1 << 30}, False, "dead"),
        ({"pid": 0}, False, "dead"),
    ],
)
def test_state_follows_from_process_host_and_recording(
    tmp_path: Path, metadata: dict[str, Any], stopped: bool, state: str
) -> None:
    writer = Writer(tmp_path / "run.modtrace", **metadata)
    writer.enter(0, "Net")
    if stopped:
        writer.ring.close()

    found = read_rank_state(tmp_path / "run.modtrace")

    assert found.state == state
    assert (found.now_ns > found.last_ns) == (state in ("running", "unknown"))


def test_a_process_that_was_killed_and_not_waited_for_is_not_alive() -> None:
    process = start_python("-c", "input()", stdin=subprocess.PIPE)
    began = time.time_ns()
    assert is_alive(process.pid, began)

    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    assert not is_alive(process.pid, began)
    process.communicate()
    assert not is_alive(process.pid, began)


def test_a_number_that_was_given_again_is_another_process() -> None:
    assert is_alive(os.getpid(), time.time_ns())
    assert not is_alive(os.getpid(), time.time_ns() - 3600 * SECOND * 24 * 365)


def state(rank: int | None, *stack: tuple[str, str], step: int | None = 5, **fields: Any) -> RankState:
    calls = tuple(OpenCall(fqn, phase, 100 * SECOND) for fqn, phase in stack)
    threads = (ThreadStack("MainThread", 1, calls, 101 * SECOND), ThreadStack("other", 2, (), 0))
    known: dict[str, Any] = {"path": f"run-{rank}.modtrace", "pid": 1, "engine": "native", "state": "running"}
    return RankState(
        **(known | {"now_ns": 112 * SECOND, "last_unix_ns": 0} | fields), rank=rank, step=step, threads=threads
    )


def test_ranks_that_agree_are_one_group_and_the_odd_one_comes_first() -> None:
    ahead = (("GPT", "forward"), ("GPT.h.8", "forward"), ("GPT.h.8.attn", "forward"))
    behind = (("GPT", "forward"), ("GPT.h.7", "forward"), ("GPT.h.7.mlp", "forward"))

    groups = group_ranks(state(rank, *(behind if rank == 3 else ahead)) for rank in reversed(range(64)))

    assert [one.label for one in groups] == ["rank 3", "ranks 0-2, 4-63"]
    assert headline(groups) == "rank 3 is in GPT.h.7.mlp, the other 63 in GPT.h.8.attn"


def test_ranks_differ_by_step_state_and_phase() -> None:
    groups = group_ranks(
        [
            state(0, ("GPT", "forward")),
            state(1, ("GPT", "backward")),
            state(2, ("GPT", "forward"), step=6),
            state(3, ("GPT", "forward"), state="dead"),
            state(4, ("GPT", "forward")),
        ]
    )

    assert [one.label for one in groups] == ["rank 1", "rank 2", "rank 3", "ranks 0, 4"]
    assert headline(groups) == "ranks 0-4 are in GPT"


def test_headline_of_three_groups_names_each_module() -> None:
    groups = group_ranks(
        [state(0, ("A", "forward")), *[state(rank, ("B", "forward")) for rank in (1, 2)]]
        + [state(rank) for rank in (3, 4, 5)]
    )

    assert headline(groups) == "rank 0 is in A, ranks 1-2 in B, the other 3 in no module"


def test_files_without_a_rank_are_called_by_their_name() -> None:
    groups = group_ranks(
        [state(None, ("A", "forward"), path="/runs/a.modtrace"), state(None, ("A", "forward"), path="b")]
    )

    assert [one.label for one in groups] == ["a.modtrace, b"]


def test_of_many_files_without_a_rank_the_first_are_named() -> None:
    groups = group_ranks(state(None, ("A", "forward"), path=f"{number}.modtrace") for number in range(9))

    assert [one.label for one in groups] == ["0.modtrace, 1.modtrace, 7 more files"]
    assert [one.label for one in group_ranks(groups[0].ranks[:3])] == ["0.modtrace, 1.modtrace, 2.modtrace"]


def test_format_stack_shortens_inner_names_and_names_each_phase() -> None:
    assert format_stack([]) == ""
    assert (
        format_stack([("GPT", "forward"), ("GPT.h.7", "forward"), ("GPT.h.7.mlp", "forward")])
        == "forward GPT › h.7 › mlp"
    )
    assert format_stack(
        [("GPT", "backward"), ("GPT.h.7", "backward"), ("GPT.h.7", "recompute"), ("Other", "recompute")]
    ) == ("backward GPT › h.7 · recompute GPT.h.7 › Other")


def test_usual_duration_is_the_median_of_ended_calls_of_that_phase(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run.modtrace")
    for number, seconds in enumerate((1, 4, 2)):
        writer.call(10 * number, Kind.FORWARD_ENTER, "Net", number)
        writer.call(10 * number + seconds, Kind.FORWARD_EXIT, "Net", number)
    writer.call(30, Kind.RECOMPUTE_ENTER, "Net", 2)
    writer.call(39, Kind.RECOMPUTE_EXIT, "Net", 2)
    writer.call(40, Kind.FORWARD_ENTER, "Net", 3)

    assert read_rank_state(tmp_path / "run.modtrace").usual_ns == {("Net", "forward"): 2 * SECOND}


def test_usual_duration_of_a_native_backward_is_that_of_a_node(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run.modtrace")
    net = writer.ring.names.name("Net", "Net", "M")
    origin = 1 << FORWARD_THREAD_SHIFT
    writer.event(1, Kind.FORWARD_ENTER, net, 10)
    writer.event(2, Kind.FORWARD_EXIT, net, 18)
    for begin, end, sequence in ((5, 8, 16), (9, 10, 15), (11, 16, 14)):
        writer.event(begin, Kind.NODE_BEGIN, origin, sequence)
        writer.event(end, Kind.NODE_END, origin, sequence)
    writer.event(20, Kind.NODE_BEGIN, origin, 13)

    # A node lasts until the next one begins, as in a trace: 4, 2 and 9 seconds.
    assert read_rank_state(tmp_path / "run.modtrace").usual_ns == {("Net", "backward"): 4 * SECOND}


@pytest.mark.parametrize(
    ("usual_s", "lasts_s", "state_name", "hung"),
    [
        (1, 10.1, "running", True),
        (1, 9.9, "running", False),
        (0.01, 5.1, "running", True),
        (0.01, 4.9, "running", False),
        (None, 60.1, "running", True),
        (None, 59.9, "running", False),
        (1, 1000, "dead", False),
    ],
)
def test_a_call_that_takes_ten_times_as_long_seems_hung(
    usual_s: float | None, lasts_s: float, state_name: str, hung: bool
) -> None:
    usual = {} if usual_s is None else {("Net", "forward"): int(usual_s * SECOND)}
    now_ns = 100 * SECOND + int(lasts_s * SECOND)
    found = state(0, ("Net", "forward"), usual_ns=usual, now_ns=now_ns, state=state_name)

    assert found.seems_hung(found.threads[0]) is hung
    assert not found.seems_hung(found.threads[1])
    colors = render(group_ranks([found]))
    console = Console(force_terminal=True, color_system="standard", width=120, file=io.StringIO())
    console.print(colors)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("\x1b[1;31mforward Net" in text) is hung


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
        f"pid {1 << 30}: no stacks, as it does not run on this machine",
    ]


def test_stacks_without_py_spy_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    Writer(tmp_path / "run.modtrace", rank=4).enter(0, "Net")

    assert "pip install py-spy" in where("--stacks", tmp_path / "run.modtrace").stderr


def test_format_ranges_and_durations_are_short() -> None:
    assert format_ranges([5, 0, 1, 2, 2, 9, 8]) == "0-2, 5, 8-9"
    assert format_durations([0.0123]) == "12 ms"
    assert format_durations([0.00042]) == "0.4 ms"
    assert format_durations([12.34, 12.3]) == "12.3 s"
    assert format_durations([0.5, 119.0]) == "500 ms to 119.0 s"
    assert format_durations([125.0]) == "2 min 5 s"
    assert format_durations([7200 + 61.0]) == "2 h 1 min"


def where(*arguments: object) -> Result:
    return CliRunner().invoke(commands, ["where", *map(str, arguments)])


def test_the_command_prints_a_line_per_group(tmp_path: Path) -> None:
    for rank in range(3):
        writer = Writer(tmp_path / f"run-{rank}.modtrace", rank=rank, pid=1 << 30)
        writer.event(0, Kind.STEP, NO_NAME, 7)
        writer.enter(0, "Net", "Net.b" if rank == 1 else "Net.a")

    done = where(tmp_path / "run-*.modtrace", tmp_path / "run-0.modtrace")

    lines = done.stdout.splitlines()
    assert done.exit_code == 0
    assert lines[0] == "rank 1 is in Net.b, the other 2 in Net.a"
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

    done = where("--json", tmp_path / "run.modtrace")

    (found,) = json.loads(done.stdout)
    wall = found.pop("last_event_ns")
    assert abs(wall - time.time_ns() - 3 * SECOND) < 60 * SECOND
    assert found == {
        "file": str(tmp_path / "run.modtrace"),
        "rank": 2,
        "pid": 1 << 30,
        "engine": "native",
        "state": "dead",
        "step": None,
        "collectives": [],
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


def test_command_with_wrong_usage_exits_with_2() -> None:
    assert where().exit_code == 2
    assert where("--watch", "--json", "run.modtrace").exit_code == 2
