"""Paths of a recording's files if several ranks run."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
from pathlib import Path

import pytest

import modtrace
from tests.support.forked_python import run_forked, start_forked
from tests.support.python_process import python_environment

RECORD = """
import sys, modtrace
from torch import nn
import torch

sys.stdin.readline()  # until it is told to go on
try:
    with modtrace.record(**{sys.argv[1]: sys.argv[2]}, engine="python"):
        nn.Linear(2, 2)(torch.ones(1, 2))
        print("recording", flush=True)
        sys.stdin.read()
    print("saved")
except modtrace.RecordingError as error:
    print("refused:", error)
"""


def test_rank_process_and_host_are_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    host = hashlib.sha256(f"modtrace {socket.gethostname()}".encode()).hexdigest()[:12]

    with modtrace.record(tmp_path / "%r-%p-%h-%%-%x.json", ring=tmp_path / "%r.modtrace", engine="python") as recording:
        pass

    name = f"3-{os.getpid()}-{host}-%-%x.json"
    assert {path.name for path in tmp_path.iterdir()} == {name, "3.modtrace"}
    assert recording.path == str(tmp_path / name)


@pytest.mark.parametrize(("option", "name"), [("path", "a.json"), ("ring", "a.modtrace")])
def test_the_second_of_two_ranks_with_one_file_is_refused(tmp_path: Path, option: str, name: str) -> None:
    (tmp_path / "train.py").write_text(RECORD)
    file = tmp_path / name

    def start(rank: int) -> subprocess.Popen[str]:
        environment = python_environment(RANK=str(rank), WORLD_SIZE="2")
        return start_forked(
            *("train.py", option, name), cwd=tmp_path, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    refused = f"refused: {name}: another rank writes this file too; put %r (the rank) in the path"
    with start(0) as first, start(1) as late:
        assert first.stdout is not None
        assert first.stdin is not None
        first.stdin.write("go\n")
        first.stdin.flush()
        assert first.stdout.readline() == "recording\n"
        with start(1) as second:
            assert second.communicate("go\n")[0].startswith(refused)
        assert first.communicate()[0] == "saved\n"
        assert file.exists()
        # This rank started before the file existed, and looks after its writer has ended.
        assert late.communicate("go\n")[0].startswith(refused)


@pytest.mark.parametrize(("option", "name"), [("path", "a.json"), ("ring", "a.modtrace")])
def test_a_rank_that_begins_after_another_one_ended_records_anew(tmp_path: Path, option: str, name: str) -> None:
    (tmp_path / "train.py").write_text(RECORD)

    for rank in (0, 1):
        environment = python_environment(RANK=str(rank), WORLD_SIZE="2")
        process = start_forked(
            *("train.py", option, name), cwd=tmp_path, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        with process:
            assert process.communicate("go\n")[0] == "recording\nsaved\n"


def test_one_rank_alone_may_write_a_file_without_its_rank_again_and_again(tmp_path: Path) -> None:
    script = """
import modtrace
for _ in range(2):
    with modtrace.record("a.json", engine="python"):
        pass
"""
    for _ in range(2):
        run_forked("-c", script, cwd=tmp_path, env=python_environment(RANK="0", WORLD_SIZE="2"))

    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
