"""Commands that read, where torch is not installed and nothing of a POSIX system is there."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import modtrace
from modtrace.cli.group import group
from tests.support.python_process import python_environment, run_python, start_python
from tests.support.view_process import see_page

MAKE_FILES = """
import os, shutil, torch, modtrace
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
cpu = torch.profiler.ProfilerActivity.CPU
with torch.profiler.profile(activities=[cpu]) as profiler:
    with modtrace.record("trace.pftrace", engine="python", ring="run.modtrace", capacity=4096):
        for _ in range(6):
            net(torch.randn(3, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
profiler.export_chrome_trace("profile.json")
os.mkdir("ranks")
shutil.copy("run.modtrace", "ranks/run-0.modtrace")
"""
COMMANDS = [
    "summary run.modtrace",
    "summary trace.pftrace --tree --max-depth 2",
    "summary trace.pftrace --by class --format csv",
    "convert run.modtrace a.json",
    "convert run.modtrace trace.pftrace",
    "convert trace.pftrace a.pftrace.gz --steps 1:3",
    "convert run.modtrace a.html",
    "convert run.modtrace a.folded",
    "convert run.modtrace a.speedscope.json",
    "check trace.pftrace",
    "merge profile.json run.modtrace -o merged.json",
    "merge profile.json run.modtrace -o merged.pftrace",
    "merge profile.json run.modtrace -o merged.json --no-attribute",
    "merge profile.json -o merged.json",
    "report trace.pftrace -o bug.zip",
    "diff run.modtrace trace.pftrace -o changes.html",
    "diff run.modtrace trace.pftrace -o changes.pftrace",
    "budget save run.modtrace trace.pftrace -o budget.json",
    "ranks timeline ranks -o ranks.pftrace",
    "where run.modtrace",
    "where run.modtrace --json",
    "top run.modtrace",
]
RUN_COMMANDS = """
import json, os
from click.testing import CliRunner
from modtrace.cli.group import group

with open("commands.json", encoding="utf-8") as file:
    commands = json.load(file)
outcomes = {}
for number, command in enumerate(commands):
    os.chdir(str(number))
    result = CliRunner().invoke(group, command.split())
    outcomes[command] = [result.exit_code, result.output if result.exit_code == 0 else repr(result)]
    os.chdir("..")
print(json.dumps(outcomes))
"""
ELSEWHERE = ["-X", "warn_default_encoding", "-W", "error::EncodingWarning", "-m", "tests.support.without_posix"]
"""Arguments of Python before a script that runs without torch and POSIX, and must say how each file is encoded."""
RECORDING = ["run train.py", "demo", "build"]
NO_TORCH = "torch is not installed, and without it nothing is recorded: pip install 'modtrace[torch]'"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a profiler's trace, a recording and its ring."""
    folder = tmp_path_factory.mktemp("files")
    run_python("-c", MAKE_FILES, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def outcomes(files: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[object]]]:
    """A folder with one for each command, numbered, in which it ran; exit code and output of each."""
    folder = tmp_path_factory.mktemp("elsewhere")
    for number in range(len(COMMANDS)):
        shutil.copytree(files, folder / str(number))
    (folder / "commands.json").write_text(json.dumps(COMMANDS))
    (folder / "script.py").write_text(RUN_COMMANDS)
    done = run_python(*ELSEWHERE, "script.py", cwd=folder)
    return folder, json.loads(done.stdout)


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_each_command_is_tried_here() -> None:
    tried = {command.split()[0] for command in [*COMMANDS, *RECORDING]} | {"view", "doctor"}

    assert sorted(tried) == group.list_commands(click.Context(group))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_does_the_same_without_torch_and_posix(
    command: str,
    outcomes: tuple[Path, dict[str, list[object]]],
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, there = tmp_path / "here", outcomes[0] / str(COMMANDS.index(command))
    shutil.copytree(files, here)

    monkeypatch.chdir(here)
    expected = CliRunner().invoke(group, command.split())

    assert outcomes[1][command] == [0, expected.output]
    assert files_in(there) == files_in(here)


@pytest.mark.parametrize("option", ["--offline", "--perfetto-url=https://localhost"])
def test_a_trace_is_shown_without_torch_and_posix(option: str, files: Path) -> None:
    arguments = (*ELSEWHERE, "modtrace", "view", "--no-browser", "--keep", option, files / "trace.pftrace")
    server = start_python(*arguments, env=python_environment(PYTHONUNBUFFERED="1"))

    said = see_page(server)
    assert server.returncode == 0, said


def test_what_a_job_does_is_followed_without_torch_and_posix(files: Path) -> None:
    # Rich takes it for a terminal.
    environment = python_environment(PYTHONUNBUFFERED="1", FORCE_COLOR="1", COLUMNS="80", LINES="24")
    screen = start_python(*ELSEWHERE, "modtrace", "top", files / "run.modtrace", env=environment)

    assert screen.stdout is not None
    with screen, screen.stdout as lines:
        for line in lines:
            if "Ctrl-C quits" in line:
                break
        screen.send_signal(signal.SIGINT)
        said = lines.read()

    assert screen.returncode == 0, said


def test_what_is_there_is_told_without_torch_and_posix() -> None:
    doctor = run_python(*ELSEWHERE, "modtrace", "doctor").stdout
    version = run_python(*ELSEWHERE, "modtrace", "--version").stdout

    # What is installed is asked of what pip noted, and torch is, here.
    assert "engine       none: torch cannot be imported" in doctor
    assert version.startswith(f"modtrace, version {modtrace.__version__}\n")


@pytest.mark.parametrize("command", RECORDING)
def test_without_torch_what_records_says_so_in_one_line(command: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('was run')")

    done = run_python(*ELSEWHERE, "modtrace", *command.split(), cwd=tmp_path, status=1)

    assert (done.stdout, done.stderr) == ("", f"modtrace: {NO_TORCH}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_without_torch_a_name_that_records_is_a_missing_import(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import modtrace
for name in ("record", "Recording", "ModuleTracker"):
    try:
        getattr(modtrace, name)
    except modtrace.ModtraceError as error:
        print(error)
try:
    from modtrace import record
except ImportError as error:
    print(error)
print(modtrace.load, modtrace.merge, modtrace.diff)
""")

    done = run_python("-m", "tests.support.without_posix", script)

    assert done.stdout.splitlines()[:-1] == [NO_TORCH] * 4


def test_the_portable_engine_records_in_memory_without_posix(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import modtrace, torch
net = torch.nn.Linear(2, 2)
with modtrace.record("out.json", engine="python", shapes=True, memory_interval=0) as recording:
    net(torch.ones(1, 2)).sum().backward()
print([(span.fqn, span.phase) for span in recording.timeline().spans], recording.timeline().counters)
try:
    modtrace.record(engine="python", ring="run.modtrace").start()
except modtrace.RingError as error:
    print(error)
""")

    done = run_python("-m", "tests.support.without_posix", "--torch", script, cwd=tmp_path)

    assert done.stdout.splitlines() == [
        "[('Linear', 'forward'), ('Linear', 'backward')] []",
        "run.modtrace: a file behind the ring needs Linux; without one the ring is in memory",
    ]
    assert done.stderr == ""
    assert len(modtrace.load(tmp_path / "out.json").spans) == 2


def test_what_an_output_cannot_encode_is_a_question_mark(files: Path) -> None:
    arguments = ["-m", "modtrace", "summary", "trace.pftrace", "--tree"]

    plain = run_python(*arguments, cwd=files, env=python_environment(PYTHONIOENCODING="utf-8")).stdout
    done = run_python(*arguments, cwd=files, env=python_environment(PYTHONIOENCODING="ascii")).stdout

    assert "├─" in plain
    assert done == plain.encode("ascii", "replace").decode()
