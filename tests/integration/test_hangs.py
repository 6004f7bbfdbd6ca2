"""Hangs of four ranks on gloo: `modtrace where` names the collective, who waits in it, and who keeps them waiting."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from modtrace import RingError
from modtrace.cli.group import group as commands
from modtrace.track.engine import EngineName
from modtrace.where import Hang, find_hangs, read_rank_state
from tests.support.python_process import start_python

RANKS = 4
TIMEOUT_S = 200


@pytest.fixture
def job(engine: EngineName, tmp_path: Path) -> Iterator[Path]:
    """The folder of a job whose ranks record there."""
    processes = [
        start_python(
            *("-W", "ignore", "-m", "tests.support.hang_job", rank, tmp_path, engine), stderr=subprocess.DEVNULL
        )
        for rank in range(RANKS)
    ]
    yield tmp_path
    for process in processes:
        process.kill()
        process.communicate()


def wait_for_hang(folder: Path, is_meant: Callable[[Hang], bool]) -> Hang:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            states = [read_rank_state(path) for path in sorted(folder.glob("*.modtrace"))]
        except RingError:
            continue
        for hang in find_hangs(states):
            if is_meant(hang):
                return hang
        time.sleep(0.1)
    raise AssertionError("no such hang was told")


def test_each_hang_is_told_with_its_collective_and_who_causes_it(job: Path) -> None:
    not_called = wait_for_hang(job, lambda hang: hang.counter == 3 and len(hang.waiting) == 3)
    assert (not_called.operator, not_called.waiting, not_called.not_called) == ("all_reduce", (0, 1, 2), (3,))
    assert "ranks 0-2 wait in all_reduce #3 for " in not_called.text
    assert "rank 3 has not called it: in no module for " in not_called.text

    (job / "release-0").touch()
    stuck = wait_for_hang(job, lambda hang: hang.counter == 4 and len(hang.waiting) == 3)
    assert (stuck.operator, stuck.waiting, stuck.not_called) == ("all_reduce", (0, 2, 3), (1,))
    assert "rank 1 has not called it: in forward Net › slow for " in stuck.text
    assert "(usually " in stuck.text

    (job / "release-1").touch()
    other = wait_for_hang(job, lambda hang: hang.counter == 5 and bool(hang.called_other))
    assert (other.operator, other.called_other, other.not_called) == ("all_reduce", ((2, "broadcast"),), ())
    assert "rank 2 called broadcast #5 instead" in other.text

    printed = CliRunner().invoke(commands, ["where", *map(str, sorted(job.glob("*.modtrace")))]).output
    assert "called broadcast #5 instead" in " ".join(printed.split())
