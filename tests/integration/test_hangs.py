"""Hangs of four ranks on gloo: `modtrace where` names the collective, the waiting ranks, and the cause."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from modtrace._pools import ParallelReader
from modtrace.cli.group import group as commands
from modtrace.live.where import Hang, read_job
from modtrace.record_options import EngineName
from tests.support.forked_python import start_forked
from tests.support.hang_job import FIRST_STEPS, HANGS, RANKS
from tests.support.python_process import HANGS_AFTER_S
from tests.support.test_scale import PYTHON_IN_FULL

TERMINAL = pytest.mark.parametrize("last", ["other", "dead"])


@pytest.fixture
def job(engine: EngineName, last: str, tmp_path: Path) -> Iterator[Path]:
    """The folder of a job, where its ranks record."""
    processes = [
        start_forked(
            *("-W", "ignore", "-m", "tests.support.hang_job", rank, tmp_path, engine, last), stderr=subprocess.DEVNULL
        )
        for rank in range(RANKS)
    ]
    yield tmp_path
    (tmp_path / "end").touch()
    for process in processes:
        process.kill()
        process.communicate()


def wait_for_hang(folder: Path, is_meant: Callable[[Hang], bool]) -> Hang:
    deadline = time.monotonic() + HANGS_AFTER_S
    with ParallelReader() as reader:
        while time.monotonic() < deadline:
            for hang in read_job(reader, folder, sorted(folder.glob("trace_[0-9]"))).hangs:
                if is_meant(hang):
                    return hang
            time.sleep(0.1)
    raise AssertionError("no such hang was told")


def waits_all_but(culprit: int, counter: int) -> Callable[[Hang], bool]:
    return lambda hang: (
        (hang.operator, hang.counter, hang.group.description) == ("all_reduce", counter, "default_pg")
        and hang.waiting == tuple(rank for rank in range(RANKS) if rank != culprit)
    )


@PYTHON_IN_FULL
@pytest.mark.timeout(3 * HANGS_AFTER_S)
@TERMINAL
def test_each_hang_is_reported_with_its_collective_and_its_cause(job: Path, last: str, engine: EngineName) -> None:
    for number, (kind, culprit) in enumerate(HANGS):
        counter = FIRST_STEPS + number
        if kind in ("not called", "forward", "backward"):
            hang = wait_for_hang(job, waits_all_but(culprit, counter))
            place = {
                "not called": "in no module for ",
                "forward": "in forward Net › slow for ",
                "backward": "in backward Net › slow for ",
            }[kind]
            assert hang.not_called == (culprit,)
            assert f"rank {culprit} has not called it: {place}" in hang.text
            assert ("(usually " in hang.text) == (kind != "not called")
        elif kind == "not sent":
            hang = wait_for_hang(job, lambda hang: hang.operator == "recv")
            assert (hang.waiting, hang.not_called, hang.is_cause) == ((culprit + 1,), (culprit,), True)
            assert f"rank {culprit + 1} waits in recv #0 from rank {culprit} for " in hang.text
            assert f"rank {culprit} has not called send: in no module for " in hang.text
        else:
            hang = wait_for_hang(job, lambda hang: hang.operator == "barrier")
            assert (hang.group.description, hang.group.ranks) == ("mesh_tp", (2, 3))
            assert (hang.waiting, hang.not_called, hang.is_cause) == ((2,), (culprit,), True)
            # The first two ranks are ahead: they wait for the other two, one of which waits itself.
            behind = wait_for_hang(job, lambda hang: hang.waiting == (0, 1))
            assert (behind.operator, behind.not_called) == ("all_reduce", (2, 3))
            assert "rank 2 has not called it: it waits in barrier #" in behind.text
        (job / f"release-{number}").touch()

    counter = FIRST_STEPS + len(HANGS)
    if last == "other":
        hang = wait_for_hang(job, lambda hang: hang.counter == counter and len(hang.waiting) == 3)
        assert (hang.operator, hang.called_other, hang.not_called) == ("all_reduce", ((2, "broadcast"),), ())
        said = f"rank 2 called broadcast #{counter} instead"
    else:
        hang = wait_for_hang(job, lambda hang: bool(hang.dead) and len(hang.waiting) == 3)
        assert (hang.operator, hang.counter, hang.dead, hang.not_called) == ("all_reduce", counter, (1,), ())
        said = "rank 1 died before calling it, in forward Net › slow"
    assert hang.text.endswith(said)

    if torch.__version__ < "2.9":
        return  # its flight recorder only knows NCCL
    # torch's flight recorder counts from 1, from the start of the group on, and knows the line.
    (job / "dump").touch()
    of_recorder = f"; the flight recorder has all_reduce #{counter + 1}, Float[8], called at hang_job.py:"
    # Each rank writes its dump when it gets there; until all waiting ranks have, the text names the rank of a dump.
    wait_for_hang(job, lambda hang: hang.counter == counter and of_recorder in hang.text)

    arguments = ["where", *map(str, sorted(job.glob("*.modtrace"))), "--flight-recorder", str(job)]
    printed = " ".join(CliRunner().invoke(commands, arguments).output.split())
    assert re.search(rf"all_reduce #{counter} for .*{re.escape(said)}; the flight recorder has", printed)
