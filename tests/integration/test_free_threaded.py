"""A CPython build without the GIL: nothing is recorded in it, and one line says why; files are read."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.gpt_timeline import gpt_timeline
from tests.support.python_process import python_environment, run_python

# The variable of such a build; modtrace asks for nothing else.
PRETEND = 'import sysconfig; sysconfig.get_config_vars()["Py_GIL_DISABLED"] = 1\n'
COMMAND = "from modtrace.cli import main; main()"
REASON = "this is a free-threaded build of CPython "
ADVICE = "; use the ordinary one, which has the GIL (files can be read with both)"


def run_command(folder: Path, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    return run_python("-c", PRETEND + COMMAND, *arguments, cwd=folder, status=status)


@pytest.mark.parametrize("command", ["run train.py", "demo", "build"])
def test_recording_is_refused_in_one_line(command: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('was run')")

    done = run_command(tmp_path, *command.split(), status=1)

    (line,) = done.stderr.splitlines()
    assert line.startswith(f"modtrace: {REASON}")
    assert line.endswith(ADVICE)
    assert done.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_script_that_the_environment_records_runs_without(tmp_path: Path) -> None:
    script = PRETEND + "import modtrace, torch\nprint(torch.nn.Linear(1, 1)(torch.ones(1, 1)).shape)"

    done = run_python("-c", script, cwd=tmp_path, env=python_environment(MODTRACE="trace.json"))

    assert done.stdout == "torch.Size([1, 1])\n"
    assert [REASON in line for line in done.stderr.splitlines()] == [True]
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_read_and_the_doctor_says_why_nothing_is_recorded(tmp_path: Path) -> None:
    gpt_timeline(1, 1).save(tmp_path / "trace.json")

    assert "span" in run_command(tmp_path, "summary", "trace.json").stdout
    assert "(CPython, free-threaded: nothing can be recorded)" in run_command(tmp_path, "doctor", status=1).stdout
