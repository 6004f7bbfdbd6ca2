"""Rings under one name: the name of a new ring, the old rings that are kept, and whether a ring's process lives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from modtrace.ring import Kind, Ring, newest_rings, read_ring
from modtrace.ring.slot_format import KIND_SHIFT, NO_NAME
from tests.support.python_process import start_python


def make(path: Path, value: int, keep: int = 3) -> Ring:
    """A ring of this process with one event; it counts as being written until it is closed."""
    ring = Ring(16, path, {"pid": os.getpid()}, keep)
    ring.make_writer()(Kind.STEP << KIND_SHIFT | NO_NAME, value)
    return ring


def values(folder: Path) -> dict[str, list[int]]:
    """The events of each ring in a folder, by the name of the file."""
    return {path.name: read_ring(path).slots.events.value.tolist() for path in sorted(folder.glob("*modtrace"))}


def test_rings_of_ended_runs_get_numbers_and_the_last_are_kept(tmp_path: Path) -> None:
    for run in range(5):
        make(tmp_path / "run.modtrace", run).close()

    assert values(tmp_path) == {
        "run.modtrace": [4],
        "run.2.modtrace": [1],
        "run.3.modtrace": [2],
        "run.4.modtrace": [3],
    }

    make(tmp_path / "run.modtrace", 5, keep=1).close()
    assert values(tmp_path) == {"run.modtrace": [5], "run.5.modtrace": [4]}
    make(tmp_path / "run.modtrace", 6, keep=0).close()
    assert values(tmp_path) == {"run.modtrace": [6]}


def test_a_ring_being_written_keeps_its_name_and_is_never_removed(tmp_path: Path) -> None:
    first = make(tmp_path / "run.modtrace", 1)
    second = make(tmp_path / "run.modtrace", 2)
    third = make(tmp_path / "run.modtrace", 3, keep=0)

    assert [os.path.basename(str(ring.path)) for ring in (first, second, third)] == [
        "run.modtrace",
        "run.1.modtrace",
        "run.2.modtrace",
    ]
    first.close()
    make(tmp_path / "run.modtrace", 4, keep=0).close()
    assert values(tmp_path) == {"run.modtrace": [4], "run.1.modtrace": [2], "run.2.modtrace": [3]}


def test_stacks_are_moved_and_removed_with_their_ring(tmp_path: Path) -> None:
    for run in range(3):
        make(tmp_path / "run.modtrace", run, keep=1).close()
        (tmp_path / "run.modtrace.stacks").write_text(f"stacks of {run}")
    make(tmp_path / "run.modtrace", 3, keep=1).close()

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "run.3.modtrace",
        "run.3.modtrace.stacks",
        "run.modtrace",
    ]
    assert (tmp_path / "run.3.modtrace.stacks").read_text() == "stacks of 2"


def test_files_not_recorded_under_the_name_are_not_removed(tmp_path: Path) -> None:
    make(tmp_path / "lr-0.1.modtrace", 1).close()
    (tmp_path / "lr-0.2.modtrace").write_bytes(b"MODTRACE notes")
    (tmp_path / "lr-0.modtrace.bak").touch()

    for run in range(3):
        make(tmp_path / "lr-0.modtrace", run, keep=0).close()

    assert {path.name for path in tmp_path.iterdir()} == {
        "lr-0.modtrace",
        "lr-0.1.modtrace",
        "lr-0.2.modtrace",
        "lr-0.modtrace.bak",
    }


def test_names_without_a_suffix_and_with_more_of_them(tmp_path: Path) -> None:
    for name in ("ring", "a.rank0.modtrace"):
        for run in range(2):
            make(tmp_path / name, run).close()

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.rank0.1.modtrace",
        "a.rank0.modtrace",
        "ring",
        "ring.1",
    ]


def test_a_file_system_without_hard_links_or_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "not supported")

    monkeypatch.setattr("os.link", refuse)
    make(tmp_path / "run.modtrace", 0).close()
    make(tmp_path / "run.modtrace", 1).close()
    assert values(tmp_path) == {"run.modtrace": [1], "run.1.modtrace": [0]}

    monkeypatch.setattr("fcntl.fcntl", refuse)
    make(tmp_path / "run.modtrace", 2).close()  # run.modtrace counts as written: its process lives
    assert values(tmp_path) == {"run.modtrace": [1], "run.1.modtrace": [0], "run.2.modtrace": [2]}


def test_a_link_to_nothing_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "run.modtrace").symlink_to("gone")
    make(tmp_path / "run.modtrace", 1).close()
    assert values(tmp_path) == {"run.modtrace": [1]}


def test_the_newest_ring_of_each_name_and_rank_counts_and_each_running_ring(tmp_path: Path) -> None:
    def ring(name: str, rank: int | None = None) -> Ring:
        return Ring(16, tmp_path / name, {"pid": os.getpid(), "rank": rank})

    for name in ("run.modtrace", "lr-0.modtrace", "lr-0.1.modtrace"):
        ring(name).close()
    ring("run.modtrace").close()
    runs = ring("live.modtrace")
    also_runs = ring("live.modtrace")
    for pid in (7, 8):
        ring(f"job.pid{pid}.rank0.modtrace", 0).close()
        ring(f"pool.pid{pid}.modtrace").close()

    newest, older = newest_rings(str(path) for path in sorted(tmp_path.iterdir()))

    assert [os.path.basename(path) for path in older] == ["job.pid7.rank0.modtrace", "run.1.modtrace"]
    assert len(newest) == len(os.listdir(tmp_path)) - 2
    runs.close()
    also_runs.close()


RECORD = """
import os, sys, time
from modtrace.ring import Kind, Ring
from modtrace.ring.slot_format import KIND_SHIFT, NO_NAME

ring = Ring(1024, sys.argv[1], {"pid": os.getpid()})
write = ring.make_writer()
for _ in range(100):
    write(Kind.STEP << KIND_SHIFT | NO_NAME, os.getpid())
"""


def test_a_ring_of_a_killed_process_is_dead_though_its_forked_child_lives(tmp_path: Path) -> None:
    script = f"{RECORD}\nif os.fork():\n    print(flush=True)\n    time.sleep(60)\nsys.stdin.read()\n"
    ring = tmp_path / "run.modtrace"
    process = start_python("-c", script, str(ring), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        while_it_runs = read_ring(ring).writer
        process.send_signal(signal.SIGKILL)
        process.wait()

        assert (while_it_runs, read_ring(ring).writer) == ("running", "dead")
        make(ring, 1).close()  # a new ring takes the name


STARTS = """
import os, sys
from modtrace.ring import Kind, Ring
from modtrace.ring.slot_format import KIND_SHIFT, NO_NAME

def record():
    ring = Ring(64, sys.argv[1], {"pid": os.getpid()}, keep=1_000_000)
    write = ring.make_writer()
    for _ in range(50):
        write(Kind.STEP << KIND_SHIFT | NO_NAME, os.getpid())
    os._exit(0)  # as if it was killed

pids = []
for _ in range(int(sys.argv[2])):
    pair = []
    for _ in range(2):
        pair.append(os.fork())
        if not pair[-1]:
            record()
    for pid in pair:
        os.waitpid(pid, 0)
    pids += pair
print(*pids)
"""


def test_two_processes_that_start_on_one_name_at_once_lose_no_event(tmp_path: Path) -> None:
    """The result is the same if `STARTS` gets 1,000 instead of 30."""
    done = subprocess.run(
        [sys.executable, "-c", STARTS, tmp_path / "run.modtrace", "30"], stdout=subprocess.PIPE, text=True, check=True
    )

    recorded = sorted(values(tmp_path).values())
    assert recorded == sorted([int(pid)] * 50 for pid in done.stdout.split())
    assert len(recorded) == 60
    assert len(os.listdir(tmp_path)) == 60
