"""A path that is not a regular file is refused at once, by each command that reads."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from modtrace._files import open_regular
from modtrace.cli.group import group
from modtrace.ranks import find_rank_recordings
from tests.support.event_script import EventScript

pytestmark = pytest.mark.timeout(20)  # a pipe that is opened to be read waits for a writer

REASON = "it is not a regular file; save its data to one first"
COMMANDS = [
    "check {}",
    "summary {}",
    "convert {} out.json",
    "merge {} -o out.json",
    "report {} -o out.zip",
    "diff {} {}",
    "diff --save-baseline baseline.json {}",
    "where {}",
    "where run.modtrace --flight-recorder {}",
    "top {}",
    "view {}",
    "view --offline {}",
]


@pytest.fixture(params=["pipe_rank_0", "/dev/zero"])
def odd(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe_rank_0")
    EventScript(64, tmp_path / "run.modtrace").close()
    return str(request.param)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_pipe_or_a_device_is_an_error_with_an_instruction(command: str, odd: str) -> None:
    result = CliRunner().invoke(group, command.format(odd, odd).split())

    assert result.exit_code != 0, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    assert odd in result.output


def test_the_error_has_the_reason(odd: str) -> None:
    with pytest.raises(OSError, match=REASON):
        open_regular(odd)

    assert REASON in " ".join(CliRunner().invoke(group, ["summary", odd]).output.split())


def test_a_folder_of_ranks_with_a_pipe_in_it_is_read(tmp_path: Path) -> None:
    EventScript(64, tmp_path / "run-0.modtrace", {"rank": 0}).close()
    os.mkfifo(tmp_path / "run-1.modtrace")

    assert [file.path.name for file in find_rank_recordings(tmp_path)] == ["run-0.modtrace"]


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Path]:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        yield tmp_path / "s"


def test_a_socket_is_refused_and_a_link_to_a_file_is_read(listening: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such device or address"):
        open_regular(listening)
    (tmp_path / "file").write_bytes(b"12")
    (tmp_path / "link").symlink_to("file")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"12"
