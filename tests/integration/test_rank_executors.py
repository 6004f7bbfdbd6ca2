"""Parts of a job's recordings that an executor reads and packs: the same results with any executor."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import modtrace
from modtrace import ModtraceError
from modtrace.cli.group import group as commands
from modtrace.ranks import find_rank_recordings
from tests.support.made_job import Culprit, MadeJob
from tests.support.python_process import HANGS_AFTER_S, python_environment
from tests.support.slow_ranks import MS, make_template

pytest.importorskip("pyarrow.parquet")
pytest.importorskip("duckdb")

from modtrace.ranks import pack as packing
from modtrace.ranks.dataset_tables import query_each_bucket

RANKS = 12
LATE = "SELECT rank, step, sum(self_ns) AS own FROM spans GROUP BY ALL ORDER BY ALL"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job with 12 ranks on two hosts, with a slow rank 3."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "run").mkdir()
    template = make_template(folder / "one.modtrace")
    MadeJob(template, RANKS, 25, [Culprit(3, "Net.second", "backward", 2 * MS)]).write(folder / "run")
    return folder / "run"


@pytest.fixture(autouse=True)
def _two_ranks_in_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_MAX_RANKS_PER_PART", 2)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    """Two processes with another working folder, like workers on other hosts."""
    folder = tmp_path_factory.mktemp("elsewhere")
    with ProcessPoolExecutor(2, get_context("spawn"), os.chdir, (folder,)) as pool:
        yield pool


class Cluster(ExitStack):
    """A Dask scheduler and two workers, which are processes of this machine and communicate by TCP.

    Attributes:
        address: address of the scheduler.
        workers: processes of the workers.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        contact = folder / "scheduler.json"
        self.scheduler = self._start(
            folder, "scheduler", "--port", "0", "--host", "127.0.0.1", "--scheduler-file", contact
        )
        self.workers = [
            self._start(folder, "worker", "--no-nanny", "--nthreads", "1", "--scheduler-file", contact)
            for _ in range(2)
        ]
        from distributed import Client

        with Client(scheduler_file=str(contact), timeout=HANGS_AFTER_S) as client:
            client.wait_for_workers(2, timeout=HANGS_AFTER_S)
            self.address: str = client.scheduler.address

    def _start(self, folder: Path, *arguments: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "dask", *map(str, arguments), "--no-dashboard"]
        process = subprocess.Popen(command, cwd=folder, env=python_environment(), stderr=subprocess.DEVNULL)
        self.enter_context(process)
        self.callback(process.kill)
        return process


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    pytest.importorskip("distributed")
    with Cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


def contents(dataset: Path) -> dict[str, bytes]:
    return {str(path.relative_to(dataset)): path.read_bytes() for path in dataset.rglob("*") if path.is_file()}


def test_an_executor_gives_the_same_results_as_this_machine(
    run: Path, elsewhere: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    files = find_rank_recordings("run")
    packing.pack(files, tmp_path / "here", processes=1)
    packed = packing.pack(files, tmp_path / "there", executor=elsewhere)
    assert packed.packed_count == RANKS
    assert contents(tmp_path / "there") == contents(tmp_path / "here")

    for source in ("run", tmp_path / "here"):
        there, here = modtrace.find_slow_ranks(source, executor=elsewhere), modtrace.find_slow_ranks(source)
        assert there.to_dict() == here.to_dict()
        assert there.late[0].rank == 3

    asked = [query_each_bucket(tmp_path / "here", LATE, executor=by) for by in (None, elsewhere)]
    assert asked[0].equals(asked[1])

    for name, executor in (("here", None), ("there", elsewhere)):
        modtrace.load_ranks("run", worst=2, executor=executor).save(tmp_path / f"{name}.pftrace")
    assert (tmp_path / "there.pftrace").read_bytes() == (tmp_path / "here.pftrace").read_bytes()


def kill_itself(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_executor_that_breaks_is_reported(run: Path, tmp_path: Path) -> None:
    with (
        ProcessPoolExecutor(1, get_context("spawn"), kill_itself) as pool,
        pytest.raises(ModtraceError, match="the executor lost a worker and accepts no more work"),
    ):
        packing.pack(find_rank_recordings(run), tmp_path / "dataset", executor=pool)


def test_workers_of_dask_pack_and_one_that_is_killed_costs_its_part_again(
    run: Path, cluster: Cluster, tmp_path: Path
) -> None:
    from distributed import Client

    files = find_rank_recordings(run)
    packing.pack(files, tmp_path / "here", processes=1)
    killed: list[Any] = []

    def kill_one(_: int) -> None:
        if not killed:
            cluster.workers[0].kill()
            killed.append(cluster.workers[0].wait())

    with Client(cluster.address) as client:
        packing.pack(files, tmp_path / "there", executor=client.get_executor(pure=False), progress=kill_one)
    assert killed == [-signal.SIGKILL]
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


def test_the_commands_run_on_dasks_workers(run: Path, cluster: Cluster, tmp_path: Path) -> None:
    from click.testing import CliRunner

    def invoke(*arguments: object) -> str:
        done = CliRunner().invoke(commands, ["ranks", *map(str, arguments)])
        assert done.exit_code == 0, done.output
        return done.stdout

    on = ("--executor", f"dask:{cluster.address}")
    invoke("pack", run, "-o", tmp_path / "here")
    invoke("pack", run, "-o", tmp_path / "there", *on)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    for source in (run, tmp_path / "there"):
        assert invoke("slow", source, *on) == invoke("slow", source)
    query = ("query", tmp_path / "there", LATE, "--each-bucket", "--format", "json")
    assert invoke(*query, *on) == invoke(*query)
    invoke("timeline", run, "-o", tmp_path / "here.json")
    invoke("timeline", run, "-o", tmp_path / "there.json", *on)
    assert (tmp_path / "there.json").read_bytes() == (tmp_path / "here.json").read_bytes()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("ray:auto", "'ray:auto' is not of the form dask:tcp://HOST:PORT"),
        ("dask:", "'dask:' is not of the form dask:tcp://HOST:PORT"),
    ],
)
def test_an_invalid_address_is_refused(run: Path, address: str, said: str) -> None:
    from click.testing import CliRunner

    done = CliRunner().invoke(commands, ["ranks", "slow", str(run), "--executor", address])

    assert done.exit_code == 2
    assert said in done.output


def test_a_web_server_is_not_mistaken_for_a_scheduler(run: Path) -> None:
    """Like the address of Dask's own status page, given by mistake."""
    pytest.importorskip("distributed")
    from click.testing import CliRunner

    def refuse() -> None:
        with server.accept()[0] as client:
            client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        answers = Thread(target=refuse)
        answers.start()
        address = f"dask:tcp://127.0.0.1:{server.getsockname()[1]}"
        done = CliRunner().invoke(commands, ["ranks", "slow", str(run), "--executor", address])
        answers.join()

    assert done.exit_code == 1
    assert "no Dask scheduler answers" in done.output
