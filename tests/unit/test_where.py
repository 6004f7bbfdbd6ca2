"""The place of a process, read from its ring file."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from modtrace import ModtraceError
from modtrace._pools import ParallelReader, processor_count
from modtrace.cli.group import group as commands
from modtrace.live.hangs import hung_sentences
from modtrace.live.places import format_stack, group_ranks, headline
from modtrace.live.rank_state import read_rank_state
from modtrace.live.where import RankState
from modtrace.live.where_table import render
from modtrace.ring import Kind
from modtrace.ring.event_text import range_text
from modtrace.ring.file_format import SLOTS_OFFSET
from modtrace.ring.owner import process_start
from modtrace.ring.slot_format import (
    CALL_KEY_BITS,
    FORWARD_THREAD_SHIFT,
    NO_NAME,
    SLOT_BYTES,
)
from tests.support.python_process import start_python
from tests.support.where_rings import SECOND, Writer, state


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


def test_a_backward_of_the_python_engine_that_is_over_is_not_open(tmp_path: Path) -> None:
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
        ({"host": "elsewhere"}, False, "running"),  # a container's name: the kernel is the same
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

    rank_state = read_rank_state(tmp_path / "run.modtrace")

    assert rank_state.state == state
    assert (rank_state.now_ns > rank_state.last_ns) == (state in ("running", "unknown"))


def test_a_file_that_was_cut_is_an_error(tmp_path: Path) -> None:
    Writer(tmp_path / "gone", rank=0, pid=1 << 30).enter(1, "Net")
    with open(tmp_path / "gone", "r+b") as file:
        file.truncate(SLOTS_OFFSET + 64 * SLOT_BYTES)  # the names and the clock lie behind the slots

    done = CliRunner().invoke(commands, ["where", str(tmp_path / "gone")])

    assert f"{tmp_path}/gone: its last {1 << 20:,} bytes were cut off" in "".join(done.output.splitlines())
    assert "died" not in done.output
    assert done.exit_code == 1


def test_time_that_passes_behind_the_look_is_no_time_in_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(tmp_path / "run.modtrace", pid=os.getpid())
    writer.enter(0, "Net")
    looked = time.monotonic_ns() + 5 * SECOND
    clocks = iter([looked, looked + 60 * SECOND])
    monkeypatch.setattr(time, "monotonic_ns", lambda: next(clocks))

    assert read_rank_state(tmp_path / "run.modtrace").now_ns == looked


def test_a_process_that_was_killed_and_not_waited_for_is_not_there() -> None:
    process = start_python("-c", "input()", stdin=subprocess.PIPE)
    assert process_start(process.pid)

    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    with pytest.raises(ProcessLookupError):
        process_start(process.pid)
    process.communicate()
    with pytest.raises(ProcessLookupError):
        process_start(process.pid)


def test_on_windows_no_process_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    # What asks a process elsewhere interrupts it there.
    monkeypatch.setattr("os.kill", None)
    with monkeypatch.context() as windows:
        windows.setattr("os.name", "nt")
        process = process_start(os.getpid())

    assert process is None


@pytest.mark.parametrize(
    ("modules", "shown"),
    [
        ("mlp: MLP, mlp.up: Linear, mlp.act: GELU", "forward Net › h.0 (M, 3 compiled modules inside)"),
        ("mlp: MLP", "forward Net › h.0 (M, 1 compiled module inside)"),
        ("", "forward Net › h.0 (M)"),
    ],
)
def test_a_compiled_region_is_told_with_the_modules_inside(tmp_path: Path, modules: str, shown: str) -> None:
    writer = Writer(tmp_path / "run.modtrace")
    writer.enter(1, "Net", "Net.h.0")
    writer.ring.names.compiled(writer.ring.names.name("Net.h.0", "Net.h.0", "M"), modules)

    rank = read_rank_state(tmp_path / "run.modtrace")

    out = io.StringIO()
    Console(file=out, width=200, markup=False, highlight=False).print(render(group_ranks([rank])))
    assert shown in out.getvalue()
    told = [call.get("compiled_modules") for call in rank.to_dict()["threads"][0]["stack"]]
    assert told == [None, modules.count(":") or None]


def test_why_the_modules_inside_are_unknown_is_told(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run.modtrace")
    writer.enter(1, "Net")
    name = writer.ring.names.name("Net", "Net", "M")
    why = "compiled before the first recording"
    writer.ring.names.compiled(name, "", {"graph": "", "unknown": why, "work": [], "kernels": []})

    rank = read_rank_state(tmp_path / "run.modtrace")

    out = io.StringIO()
    Console(file=out, width=200, markup=False, highlight=False).print(render(group_ranks([rank])))
    why += " (record from before its first call)"
    assert f"forward Net (M, modules inside unknown: {why})" in out.getvalue()
    (call,) = rank.to_dict()["threads"][0]["stack"]
    assert call["compiled_unknown"] == why
    assert "compiled_modules" not in call


def test_a_backward_pass_of_a_compiled_region_is_told_with_the_modules_inside(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run.modtrace")
    writer.call(1, Kind.FORWARD_ENTER, "Net", sequence=10)
    writer.call(2, Kind.FORWARD_EXIT, "Net", sequence=12)
    writer.ring.names.compiled(writer.ring.names.name("Net", "Net", "M"), "up: Linear, down: Linear")
    writer.event(3, Kind.NODE_BEGIN, 1 << FORWARD_THREAD_SHIFT, 11)

    calls = read_rank_state(tmp_path / "run.modtrace").threads[0].calls

    assert [(call.phase, call.described_class) for call in calls] == [("backward", "M, 2 compiled modules inside")]


def test_waiting_in_a_backward_pass_is_told_by_the_last_node_before_it() -> None:
    behind = (("GPT", "forward"), ("GPT.wte", "after backward"))
    waits = "backward, waiting after the last node of GPT.wte"
    first = "backward, before the first node of a module"

    assert format_stack(behind) == f"forward GPT · {waits}"
    assert format_stack([("", "after backward")]) == first
    assert format_stack([("", "backward")]) == "backward, in a node outside all modules"
    groups = group_ranks([state(0, *behind), state(1, ("", "after backward")), state(2), state(3)])
    assert [group.innermost for group in groups] == [waits, first, ""]
    assert headline(groups) == f"rank 0 is in {waits}, rank 1 in {first}, the other 2 in no module"
    out = io.StringIO()
    Console(file=out, width=200, markup=False, highlight=False).print(render(groups))
    rows = [line.split() for line in out.getvalue().splitlines()[-3:]]
    assert rows == [
        [*("rank", "0", "1", "running", "5", "MainThread", "forward", "GPT", "·", *waits.split(), "12.0", "s")],
        [*("rank", "1", "1", "running", "5", "MainThread", *first.split(), "12.0", "s")],
        [*("ranks", "2-3", "1,", "1", "running", "5", "no", "module", "11.0", "s")],
    ]


@pytest.mark.parametrize(("number", "known"), [(12, 12), (0, None), (-3, None), (1 << 40, None), (True, None)])
def test_an_invalid_signal_number_is_ignored(number: int, known: int | None, tmp_path: Path) -> None:
    Writer(tmp_path / "run.modtrace", stacks_signal=number)

    assert read_rank_state(tmp_path / "run.modtrace").stacks_signal == known


def test_usual_duration_is_the_median_of_ended_calls_of_that_phase(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run.modtrace")
    for number, seconds in enumerate((1, 4, 2)):
        writer.call(10 * number, Kind.FORWARD_ENTER, "Net", number)
        writer.call(10 * number + seconds, Kind.FORWARD_EXIT, "Net", number)
    writer.call(30, Kind.RECOMPUTE_ENTER, "Net", 2)
    writer.call(39, Kind.RECOMPUTE_EXIT, "Net", 2)
    writer.call(40, Kind.FORWARD_ENTER, "Net", 3)

    assert read_rank_state(tmp_path / "run.modtrace").usual_ns == {("Net", "forward"): 2 * SECOND}


FETCH = range_text("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "data loading")
MINE, REDUCE = range_text("mine", "user"), range_text("gloo:all_reduce", "communication")


def write_range(writer: Writer, at: float, kind: Kind, text: str, number: int) -> None:
    writer.event(at, kind, writer.ring.names.text(text), number)


def test_a_thread_in_no_module_is_in_its_ranges(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run.modtrace")
    write_range(writer, 0, Kind.RANGE_BEGIN, MINE, 1)
    write_range(writer, 0, Kind.RANGE_BEGIN, '["torch", "ProfilerStep#1"]', 3)
    for number, seconds in enumerate((1, 4, 2)):
        write_range(writer, 10 * number, Kind.RANGE_BEGIN, FETCH, 2 * number)
        write_range(writer, 10 * number + seconds, Kind.RANGE_END, FETCH, 2 * number)
    write_range(writer, 30, Kind.RANGE_BEGIN, REDUCE, 6)
    write_range(writer, 31, Kind.RANGE_BEGIN, FETCH, 8)

    rank_state = read_rank_state(tmp_path / "run.modtrace")
    writer.enter(32, "Net")
    inside = read_rank_state(tmp_path / "run.modtrace")

    loader = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    assert seen(rank_state) == [("mine", "user", 31), (loader, "data loading", 0)]
    assert rank_state.usual_ns == {(loader, "data loading"): 2 * SECOND}
    assert [call | {"seconds": 0} for call in rank_state.to_dict()["threads"][0]["stack"][1:]] == [
        {
            "fqn": "",
            "class": "",
            "phase": "range",
            "category": "data loading",
            "name": loader,
            "seconds": 0,
            "usual_seconds": 2.0,
        }
    ]
    # A range around a module does not hide it.
    assert seen(inside) == [("Net", "forward", 0)]


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
    writer.event(21, Kind.NODE_END, origin, 13)
    for begin, end in ((30, 33), (40, 41), (50, 52)):  # of the loss: no call made them
        writer.event(begin, Kind.NODE_BEGIN, origin, 19)
        writer.event(end, Kind.NODE_END, origin, 19)
    writer.event(60, Kind.NODE_BEGIN, origin, 19)

    rank_state = read_rank_state(tmp_path / "run.modtrace")
    assert rank_state.usual_ns == {("", "backward"): 10 * SECOND}
    assert hung_sentences([rank_state._replace(state="running", now_ns=rank_state.now_ns + 110 * SECOND)], []) == [
        "run.modtrace seems hung: in backward, in a node outside all modules for 110.0 s (usually 10.0 s)"
    ]


def test_a_killed_process_of_those_that_read_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modtrace._pools._MIN_FILES_IN_PROCESSES", 1)
    kill: Any = os._exit
    statuses: Any = [1, 1]
    with ParallelReader() as reader, pytest.raises(ModtraceError, match="a process that read files was killed"):
        reader.read(kill, statuses)


def test_processors_are_those_of_this_process_where_the_system_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    assert processor_count() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    assert processor_count() == os.cpu_count()
