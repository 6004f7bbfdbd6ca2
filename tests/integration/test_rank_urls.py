"""Datasets and recordings behind URLs: packed host by host into S3, cut off and resumed, read by ranges."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from click.testing import CliRunner

import modtrace
from modtrace import ModtraceError
from modtrace.cli.group import group as commands
from modtrace.ranks import find_rank_recordings
from tests.support.made_job import RANKS_PER_HOST, Culprit, MadeJob
from tests.support.s3_server import S3Server, s3_server
from tests.support.slow_ranks import MS, make_template

pytest.importorskip("pyarrow.parquet")
pytest.importorskip("duckdb")

from modtrace.ranks import pack as packing
from modtrace.ranks.dataset_files import DatasetFiles, write_part
from modtrace.ranks.dataset_tables import TABLE_NAMES, query

HOSTS = 4
URL = "s3://bucket/run"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a job with 32 ranks, `run`, and a folder with the recordings of each of its four hosts."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "run").mkdir()
    culprit = Culprit(13, "Net.second", "backward", 2 * MS)
    MadeJob(make_template(folder / "one.modtrace"), HOSTS * RANKS_PER_HOST, 25, [culprit]).write(folder / "run")
    for file in find_rank_recordings(folder / "run"):
        host = folder / f"host{file.rank // RANKS_PER_HOST}"
        host.mkdir(exist_ok=True)
        os.link(file.path, host / file.path.name)
    return folder


@pytest.fixture(autouse=True)
def _no_processes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("dataset_tables", "slow.findings"):
        monkeypatch.setattr(f"modtrace.ranks.{module}.processor_count", lambda: 1)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with s3_server(monkeypatch) as server:
        yield server


def pack_host(job: Path, host: int, place: str | Path) -> packing.PackResult:
    return packing.pack(find_rank_recordings(job / f"host{host}"), place, processes=1, this_host=True)


def contents(url: str) -> dict[str, bytes]:
    files = DatasetFiles(url)
    names = [f"{folder}/{file.base_name}" for folder in ("parts", *TABLE_NAMES) for file in files.files(folder)]
    return {name: files.read(name) for name in ("dataset.json", *names)}


def invoke(*arguments: object, exit_code: int = 0) -> str:
    done = CliRunner().invoke(commands, ["ranks", *map(str, arguments)])
    assert done.exit_code == exit_code, done.output
    return done.output


@pytest.mark.parametrize("scheme", ["s3", "file"])
def test_hosts_that_pack_their_own_ranks_make_the_dataset_of_all(
    job: Path, s3: S3Server, scheme: str, tmp_path: Path
) -> None:
    url = URL if scheme == "s3" else f"file://{tmp_path}/union"
    packing.pack(find_rank_recordings(job / "run"), tmp_path / "whole", processes=1)
    for host in (2, 0, 3, 1):
        said = invoke("pack", job / f"host{host}", "-o", url, "--this-host", "--processes", 1)
    assert said.startswith("32 ranks (24 were there) and 4,800 spans")

    for table in (*TABLE_NAMES, "ranks"):
        sql = f"SELECT * FROM {table} ORDER BY ALL"
        assert query(url, sql).to_pylist() == query(tmp_path / "whole", sql).to_pylist()
    slow = modtrace.find_slow_ranks(url)
    assert slow.to_dict() == modtrace.find_slow_ranks(tmp_path / "whole").to_dict()
    assert [(one.rank, one.modules[0].fqn) for one in slow.late] == [(13, "Net.second")]
    counted = ("SELECT count(*) AS n FROM spans", "--each-bucket", "--format", "csv")
    assert invoke("query", url, *counted) == "n\n1920\n1920\n960\n"
    # Without the flag, the ranks of one host are a job of their own, with other times.
    assert packing.pack(find_rank_recordings(job / "host1"), url, processes=1)[:2] == (8, 0)


def test_packing_to_s3_that_is_cut_off_anywhere_goes_on(
    job: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_MAX_RANKS_PER_PART", 2)
    for host in range(HOSTS):
        pack_host(job, host, URL)
    chance, create, left = random.Random(3), DatasetFiles.create, 0

    @contextmanager
    def create_or_die(self: DatasetFiles, name: str) -> Iterator[BinaryIO]:
        nonlocal left
        with create(self, name) as file:
            yield file
            left -= 1
            if not left:
                file.write(b"half")
                raise KeyboardInterrupt

    monkeypatch.setattr(DatasetFiles, "create", create_or_die)
    for attempt in range(20):  # at most one of a host's four parts is completed each time
        left = chance.randint(1, 7)
        with pytest.raises(KeyboardInterrupt):
            pack_host(job, attempt % HOSTS, "s3://bucket/cut")
    monkeypatch.setattr(DatasetFiles, "create", create)
    for host in range(HOSTS):
        pack_host(job, host, "s3://bucket/cut")

    assert contents("s3://bucket/cut") == contents(URL)


@pytest.mark.parametrize("place", [URL, "folder"])
def test_parts_that_lost_files_are_packed_again_and_not_reported_as_present(
    job: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    monkeypatch.setattr(packing, "_MAX_RANKS_PER_PART", 4)
    url = f"file://{tmp_path}/run" if place == "folder" else place
    command = ("pack", job / "host0", "-o", url, "--processes", 1)
    whole, files = invoke(*command), DatasetFiles(url)
    assert whole.startswith("8 ranks and 1,200 spans")
    before = contents(url)

    def lose(*_: object) -> None:
        files.filesystem.delete_file(f"{files.root}/spans/000004-000007.000010.parquet")

    lose()
    assert invoke(*command).startswith("8 ranks (4 were there) and 1,200 spans")
    assert contents(url) == before

    def write_and_lose(*arguments: Any) -> None:
        write_part(*arguments)
        lose()

    lose()
    monkeypatch.setattr(packing, "write_part", write_and_lose)
    assert "files of 4 ranks are missing; pack again" in invoke(*command, exit_code=1)


def test_some_steps_of_a_dataset_are_read_without_the_others(job: Path, s3: S3Server) -> None:
    packing.pack(find_rank_recordings(job / "run"), URL, processes=1)
    whole = {step.step: step for step in modtrace.find_slow_ranks(URL).steps}
    s3.reads.clear()

    some = modtrace.find_slow_ranks(URL, steps=(10, 12))

    # Files of steps 10 to 19, and of step 9; there are no ranges, so one file has their columns.
    of_steps = {
        f"/bucket/run/{table}/000000-000031.{step:06}.parquet"
        for table in ("spans", "collectives", "steps")
        for step in (0, 10)
    }
    of_ranges = "/bucket/run/ranges/000000-000031.000000.parquet"
    reads = {path: count for path, count in s3.reads.items() if path.endswith(".parquet")}
    assert reads.keys() == of_steps | {of_ranges}
    assert {count for path, count in reads.items() if "/steps/" not in path} == {1}
    # The variation of ranks is that of these steps alone.
    assert [step[:4] for step in some.steps] == [whole[10][:4], whole[11][:4]]
    assert [step.step for step in modtrace.find_slow_ranks(URL, steps=(-3, None)).steps] == [22, 23, 24]


def test_recordings_behind_a_url_are_packed_and_read(job: Path, s3: S3Server, tmp_path: Path) -> None:
    from pyarrow.fs import FileSystem, copy_files

    filesystem, _ = FileSystem.from_uri(URL)
    copy_files(f"file://{job}/host1", "bucket/rings", destination_filesystem=filesystem)
    invoke("timeline", "s3://bucket/rings", "-o", tmp_path / "there.json")
    invoke("timeline", job / "host1", "-o", tmp_path / "here.json")
    assert (tmp_path / "there.json").read_bytes() == (tmp_path / "here.json").read_bytes()
    here, there = (modtrace.find_slow_ranks(source).to_dict() for source in (job / "host1", "s3://bucket/rings"))
    assert here == there

    packed = [invoke("pack", "s3://bucket/rings", "-o", tmp_path / "dataset", "--processes", 1) for _ in range(2)]
    assert [said.partition(" and ")[0] for said in packed] == ["8 ranks", "8 ranks (8 were there)"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("slow", "nowhere://bucket/run"), "nowhere://bucket/run: pyarrow cannot open it: "),
        (("slow", "s3://bucket/nothing"), "s3://bucket/nothing: cannot be read: "),
        (("query", "s3://bucket/nothing", "SELECT 1"), "not a dataset"),
    ],
)
def test_errors_of_a_url_are_reported(s3: S3Server, arguments: tuple[Any, ...], said: str) -> None:
    assert said in invoke(*arguments, exit_code=1)


def test_other_hosts_decide_how_many_steps_are_stored_together(job: Path, tmp_path: Path) -> None:
    pack_host(job, 0, tmp_path / "dataset")
    files = find_rank_recordings(job / "host1")
    with pytest.raises(ModtraceError, match="other hosts use --steps-per-bucket 10"):
        packing.pack(files, tmp_path / "dataset", steps_per_bucket=5, processes=1, this_host=True)
