"""Development scripts, with stand-ins for the programs that they call."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLD = 'case "$1" in -V) echo Python 3.8.1;; *) exit 1;; esac'
NEW = 'echo "$0 $*" >>"$LOG"; case "$2" in venv) exit 3;; *) exit 0;; esac'


@pytest.mark.parametrize(
    ("pythons", "taken"),
    [
        ({"python3": NEW, "python3.14": NEW}, "python3"),
        ({"python3": OLD, "python3.12": NEW, "python3.10": NEW}, "python3.12"),
        ({"python3": OLD, "python3.14": "exit 127", "python3.10": NEW}, "python3.10"),
        ({"python3.13": NEW}, "python3.13"),
        ({"python3": OLD}, None),
    ],
)
def test_the_environment_is_made_by_python3_or_a_newer_one_beside_it(
    pythons: Mapping[str, str], taken: str | None, tmp_path: Path
) -> None:
    commands, log = tmp_path / "bin", tmp_path / "log"
    commands.mkdir()
    for command in ("bash", "dirname", "flock", "cksum", "cat", "rm", "cp", "env"):
        (commands / command).symlink_to(shutil.which(command) or "")
    for name, text in pythons.items():
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(0o755)
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/venv", "scripts/constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)

    done = subprocess.run(
        [tmp_path / "scripts" / "venv"],
        env={"PATH": str(commands), "LOG": str(log), "HOME": os.environ["HOME"]},
        capture_output=True,
        text=True,
        check=False,
    )

    if taken is None:
        assert (done.returncode, done.stderr) == (1, "modtrace needs Python 3.10 or newer; python3 is Python 3.8.1\n")
        return
    assert done.returncode == 3, done.stderr
    assert log.read_text().splitlines()[-1] == f"{commands / taken} -m venv .venv"
