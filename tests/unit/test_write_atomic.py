"""Output files appear whole or not at all."""

from __future__ import annotations

import gzip
import os
import secrets
import stat
from pathlib import Path

import pytest

from modtrace import WriteError
from modtrace._files import atomic_writer
from modtrace.write import SUFFIXES, write
from tests.support.python_process import run_python
from tests.support.timelines import gpt2_timeline, timeline_of

FORMATS = (".json", ".json.gz", ".pftrace", ".pftrace.gz")


def test_an_old_file_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")
    with atomic_writer(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["out.json"]


def fail_halfway(path: Path, error: type[BaseException]) -> None:
    with atomic_writer(path) as file:
        file.write(b"half")
        raise error


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_block_that_raises_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")
    with pytest.raises(error):
        fail_halfway(path, error)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.json"]


def test_gz_is_compressed(tmp_path: Path) -> None:
    with atomic_writer(tmp_path / "out.json.gz") as file:
        file.write(b"a" * 1000)
        file.write(b"b")
    assert gzip.decompress((tmp_path / "out.json.gz").read_bytes()) == b"a" * 1000 + b"b"


def test_permissions_are_kept_and_new_files_follow_the_umask(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.touch()
    old.chmod(0o604)
    mask = os.umask(0o027)
    try:
        for path in (old, new):
            with atomic_writer(path) as file:
                file.write(b"x")
    finally:
        os.umask(mask)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (old, new)] == [0o604, 0o640]


@pytest.mark.parametrize(("owner", "permissions"), [(os.geteuid(), 0o777), (65534, 0o640)])
def test_no_saved_file_becomes_a_setuid_program(tmp_path: Path, owner: int, permissions: int) -> None:
    if owner != os.geteuid() != 0:
        pytest.skip("it takes two users")
    planted = tmp_path / "planted"
    planted.touch()
    os.chown(planted, owner, -1)
    planted.chmod(0o6777)  # with these permissions, a trace that anyone can write would run their program as root
    mask = os.umask(0o027)
    try:
        with atomic_writer(planted) as file:
            file.write(b"x")
    finally:
        os.umask(mask)
    assert stat.S_IMODE(planted.stat().st_mode) == permissions


def test_the_umask_of_the_process_is_never_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(mask: int) -> int:
        raise AssertionError(f"umask({mask:o}): other threads' files would get it too")

    monkeypatch.setattr(os, "umask", refuse)
    for path in (tmp_path / "new", tmp_path / "new"):
        with atomic_writer(path) as file:
            file.write(b"x")


def test_a_replacement_of_a_private_file_is_private_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "private"
    path.touch()
    path.chmod(0o600)
    with atomic_writer(path) as file:
        file.write(b"x")
        modes = {stat.S_IMODE(entry.stat().st_mode) for entry in tmp_path.iterdir()}
    assert modes == {0o600}


@pytest.mark.parametrize("planted", ["file", "link"])
def test_a_file_at_the_temporary_name_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    names = iter(["planted", "free"])
    monkeypatch.setattr(secrets, "token_hex", lambda _: next(names))
    trap = tmp_path / ".modtrace-planted.tmp"
    trap.symlink_to(victim) if planted == "link" else trap.touch(0o666)
    before = trap.lstat().st_mode

    with atomic_writer(tmp_path / "out") as file:
        file.write(b"x")

    assert victim.read_text() == "mine"
    assert trap.lstat().st_mode == before
    assert planted == "link" or trap.read_bytes() == b""
    assert (tmp_path / "out").read_bytes() == b"x"
    assert next(names, None) is None


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "target").touch()
    (tmp_path / "link").symlink_to("target")
    with atomic_writer(tmp_path / "link") as file:
        file.write(b"x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"x"


def test_a_device_is_written_and_not_replaced(tmp_path: Path) -> None:
    with atomic_writer(os.devnull) as file:
        file.write(b"x")
    assert Path(os.devnull).is_char_device()
    if Path("/dev/full").exists():
        with pytest.raises(WriteError, match="/dev/full: No space left"), atomic_writer("/dev/full") as file:
            file.write(b"x")


@pytest.mark.parametrize("suffix", FORMATS)
def test_errors_name_the_path(tmp_path: Path, suffix: str) -> None:
    for path in (tmp_path / "absent" / f"x{suffix}", tmp_path / f"dir{suffix}"):
        (tmp_path / f"dir{suffix}").mkdir(exist_ok=True)
        with pytest.raises(WriteError) as raised:
            write(timeline_of((0, 1, "a")), path)
        assert str(path) in str(raised.value)
    assert os.listdir(tmp_path) == [f"dir{suffix}"]


def test_an_unknown_suffix_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match=r"x\.txt: .*\.json, .*\.pftrace") as raised:
        write(timeline_of((0, 1, "a")), tmp_path / "x.txt")
    assert all(suffix in str(raised.value) for suffix in SUFFIXES)
    assert os.listdir(tmp_path) == []


def test_the_suffix_may_be_in_capitals(tmp_path: Path) -> None:
    write(timeline_of((0, 1, "a")), tmp_path / "X.JSON.GZ")
    assert gzip.decompress((tmp_path / "X.JSON.GZ").read_bytes()).startswith(b"{")


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_full_disk_is_an_error_and_leaves_the_old_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"trace{suffix}"
    gpt2_timeline(100).save(path)
    before = path.read_bytes()
    code = f"""
import resource
from modtrace import WriteError
from tests.support.timelines import gpt2_timeline
timeline = gpt2_timeline(20_000)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    timeline.save({str(path)!r})
except WriteError as error:
    print(error)
"""
    done = run_python("-B", "-c", code)  # without -B, compiled modules would be truncated too, and stay
    assert done.stdout == f"cannot write {path}: File too large\n"
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_write_permission_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(WriteError, match="Permission denied"), atomic_writer(tmp_path / "x"):
            pass
    finally:
        tmp_path.chmod(0o700)


def test_a_path_in_a_deleted_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    with pytest.raises(WriteError, match=r"cannot write out\.json: No such file"), atomic_writer("out.json"):
        pass
