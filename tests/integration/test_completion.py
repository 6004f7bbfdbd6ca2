"""Completions of the shell, from a real bash, by the function that it calls on a tab."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ASK = """
source /dev/stdin
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_modtrace_completion modtrace
printf '%s\\n' "${COMPREPLY[@]}"
"""


def offered(words: list[str], folder: Path) -> list[str]:
    """Return bash's completions of the last of the words."""
    (folder / "modtrace").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m modtrace "$@"\n')
    (folder / "modtrace").chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    source = subprocess.run(
        ["modtrace"], env={**environment, "_MODTRACE_COMPLETE": "bash_source"}, capture_output=True, check=True
    ).stdout
    asked = subprocess.run(
        ["bash", "--norc", "-c", ASK, "bash", *words], env=environment, input=source, capture_output=True, check=True
    )
    assert asked.stderr == b""
    return asked.stdout.decode().split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["modtrace", "su"], ["summary"]),
        (["modtrace", "ranks", "s"], ["slow"]),
        (["modtrace", "convert", "--max"], ["--max-depth"]),
        (["modtrace", "diff", "a.json", "b.json", "--format", "m"], ["markdown"]),
        (["modtrace", "summary", "--sort", "p"], ["p50", "p95"]),
        (["modtrace", "demo", "--engine", ""], ["auto", "native", "python"]),
        (["modtrace", "run", "--engine", ""], ["auto", "native", "python"]),
        (["modtrace", "run", "--on-signal", "SIG"], ["SIGUSR1", "SIGUSR2"]),
        (["modtrace", "run", "--model", "G"], []),
    ],
    ids=" ".join,
)
def test_bash_completes(line: list[str], expected: list[str], tmp_path: Path) -> None:
    assert offered(line, tmp_path) == expected


def test_bash_completes_files_itself_if_a_file_is_expected(tmp_path: Path) -> None:
    environment = {**os.environ, "_MODTRACE_COMPLETE": "bash_complete"}
    for words in ("modtrace run --engine native tr", "modtrace run --host-name train.py da", "modtrace run --ring "):
        asked = subprocess.run(
            [sys.executable, "-m", "modtrace"],
            env={**environment, "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))},
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=True,
        )
        assert asked.stdout == f"file,{words.rpartition(' ')[2]}\n"
