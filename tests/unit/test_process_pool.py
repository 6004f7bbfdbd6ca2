"""Work in processes: each item once, and an end at the first error or interrupt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from modtrace import ModtraceError
from modtrace._errors import TraceError
from modtrace._pools import map_in_processes
from tests.support.pool_worker import ITEMS, take_up
from tests.support.python_process import python_environment


def cube(number: int) -> int:
    return number**3


def refuse_three(folder: str, number: int) -> int:
    take_up(folder, number)
    if number == 3:
        raise TraceError("trace.json", "it is three", 7)
    return number


def kill_own_process(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("processes", [1, 2])
def test_each_item_is_yielded_with_what_became_of_it(processes: int) -> None:
    assert sorted(map_in_processes(cube, range(5), processes)) == [(0, 0), (1, 1), (2, 8), (3, 27), (4, 64)]
    assert list(map_in_processes(cube, [], processes)) == []


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_comes_out_as_it_was_and_ends_the_work(tmp_path: Path, processes: int) -> None:
    with pytest.raises(TraceError) as caught:
        list(map_in_processes(partial(refuse_three, str(tmp_path)), range(ITEMS), processes))

    assert isinstance(caught.value, ModtraceError)
    assert str(caught.value) == "trace.json, byte 7: it is three"
    assert (caught.value.path, caught.value.message, caught.value.offset) == ("trace.json", "it is three", 7)
    assert len(list(tmp_path.iterdir())) < ITEMS // 2


def test_an_interrupt_ends_what_was_begun_and_all_else(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.pool_worker", str(tmp_path)],
        env=python_environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == -signal.SIGINT, done.stderr
    # No process has more to say of it than this one.
    assert done.stderr.count("KeyboardInterrupt") == 1
    assert len(list(tmp_path.iterdir())) < ITEMS // 2


def test_a_process_that_is_killed_is_told() -> None:
    with pytest.raises(ModtraceError, match="a worker process was killed, most often because memory ran out"):
        list(map_in_processes(kill_own_process, range(4), 2))
