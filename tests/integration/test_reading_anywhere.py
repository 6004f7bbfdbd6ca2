"""Commands that read, without torch and without the features that only Linux has."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import click
import pytest

import modtrace
from modtrace.cli.group import group
from modtrace.track.native.build import missing_compiler
from tests.support.absent_names import Platform
from tests.support.forked_python import run_forked
from tests.support.made_job import Culprit, MadeJob
from tests.support.python_process import python_environment, run_python, start_python
from tests.support.slow_ranks import make_template
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
    "merge profile.json -o merged.json",
    "report trace.pftrace -o bug.zip",
    "mcp --guide",
    "diff run.modtrace trace.pftrace -o changes.html",
    "diff run.modtrace trace.pftrace -o changes.pftrace",
    "diff --save-baseline baseline.json run.modtrace trace.pftrace",
    "diff baseline.json run.modtrace -o changes.md",
    "ranks timeline ranks -o ranks.pftrace",
    "ranks timeline job -o job.pftrace --steps 1:3",
    "ranks slow job -o late.html",
    "ranks pack job -o packed --processes 1",
    "ranks slow dataset",
    "ranks query dataset 'select fqn, count(*) as n from spans group by fqn order by fqn'",
    "where run.modtrace",
    "where run.modtrace --format json",
    "top run.modtrace",
    "watch run.modtrace --keep-when 'step > 1ns' --pause 0s -o kept",
]
HELP = [f"{name} -h" for name in ["ranks slow", *group.list_commands(click.Context(group))]]
RUN_COMMANDS = """
import json, os, shlex
from click.testing import CliRunner
from modtrace.cli.group import group

def run(command, number):
    os.chdir(str(number))
    result = CliRunner().invoke(group, shlex.split(command))
    os.chdir("..")
    return [result.exit_code, result.output if result.exit_code == 0 else repr(result)]

if __name__ == "__main__":  # and not in the processes that commands start
    with open("commands.json", encoding="utf-8") as file:
        commands = json.load(file)
    print(json.dumps({command: run(command, number) for number, command in enumerate(commands)}))
"""
PLATFORMS: tuple[Platform, ...] = ("win32", "darwin")
RECORDING = ["run train.py", "demo", "build"]
NO_TORCH = "torch is not installed, and without it nothing is recorded: pip install 'modtrace[torch]'"


def elsewhere(platform: Platform) -> list[str]:
    """Arguments of Python to run a script as on that platform, without torch, naming each file's encoding."""
    return [
        "-X",
        "warn_default_encoding",
        "-W",
        "error::EncodingWarning",
        "-m",
        "tests.support.other_platform",
        platform,
    ]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a profiler's trace, a recording, its ring, a baseline, and a job of ranks and its dataset."""
    folder = tmp_path_factory.mktemp("files")
    run_forked("-c", MAKE_FILES, cwd=folder)
    one_rank = tmp_path_factory.mktemp("rank") / "one.modtrace"
    (folder / "job").mkdir()
    culprit = Culprit(2, "Net.second", "backward", 2_000_000)
    MadeJob(make_template(one_rank), 4, 12, [culprit]).write(folder / "job")
    for command in ("diff --save-baseline baseline.json run.modtrace", "ranks pack job -o dataset --processes 1"):
        run_python("-m", "modtrace", *command.split(), cwd=folder)
    return folder


Outcomes = dict[str, list[object]]
"""Exit code and output of each command."""


def run_in(folder: Path, files: Path, *arguments: str) -> tuple[Path, Outcomes]:
    """Run each command in its own folder, by Python with these arguments; return the folder of all."""
    for number in range(len(COMMANDS + HELP)):
        shutil.copytree(files, folder / str(number))
    (folder / "commands.json").write_text(json.dumps(COMMANDS + HELP))
    (folder / "script.py").write_text(RUN_COMMANDS)
    return folder, json.loads(run_python(*arguments, "script.py", cwd=folder).stdout)


@pytest.fixture(scope="module")
def at_home(files: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcomes]:
    return run_in(tmp_path_factory.mktemp("home"), files)


@pytest.fixture(scope="module", params=PLATFORMS)
def outcomes(
    request: pytest.FixtureRequest, files: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Outcomes]:
    return run_in(tmp_path_factory.mktemp("elsewhere"), files, *elsewhere(request.param))


def files_in(folder: Path) -> dict[Path, bytes]:
    """All files, with the name of the folder replaced by `/here`."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder): path.read_bytes().replace(bytes(folder), b"/here") for path in files}


def test_each_command_is_tried_here() -> None:
    tried = {command.split()[0] for command in [*COMMANDS, *RECORDING]} | {"view", "doctor"}

    assert sorted(tried) == sorted(group.list_commands(click.Context(group)))


@pytest.mark.parametrize("command", COMMANDS + HELP)
def test_a_command_does_the_same_without_torch_and_posix(
    command: str, outcomes: tuple[Path, Outcomes], at_home: tuple[Path, Outcomes]
) -> None:
    there, here = (folder / str((COMMANDS + HELP).index(command)) for folder, _ in (outcomes, at_home))

    assert outcomes[1][command] == [0, at_home[1][command][1]]
    assert files_in(there) == files_in(here)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("option", ["--offline", "--perfetto-url=https://localhost"])
def test_a_trace_is_shown_without_torch_and_posix(option: str, platform: Platform, files: Path) -> None:
    arguments = (*elsewhere(platform), "modtrace", "view", "--no-browser", "--keep", option, files / "trace.pftrace")
    server = start_python(*arguments, env=python_environment(PYTHONUNBUFFERED="1"))

    said = see_page(server)
    assert server.returncode == 0, said


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_job_is_followed_without_torch_and_posix(platform: Platform, files: Path) -> None:
    # Rich then assumes a terminal.
    environment = python_environment(PYTHONUNBUFFERED="1", FORCE_COLOR="1", COLUMNS="80", LINES="24")
    screen = start_python(*elsewhere(platform), "modtrace", "top", files / "run.modtrace", env=environment)

    assert screen.stdout is not None
    with screen, screen.stdout as lines:
        for line in lines:
            if "Ctrl-C quits" in line:
                break
        screen.send_signal(signal.SIGINT)
        said = lines.read()

    assert screen.returncode == 0, said


@pytest.mark.parametrize("platform", PLATFORMS)
def test_doctor_and_version_work_without_torch_and_posix(platform: Platform) -> None:
    doctor = run_python(*elsewhere(platform), "modtrace", "doctor", status=1).stdout
    version = run_python(*elsewhere(platform), "modtrace", "--version").stdout

    # Versions come from pip's records, where torch is installed.
    assert "engine       none: torch cannot be imported" in doctor
    assert version.startswith(f"modtrace, version {modtrace.__version__}\n")


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("command", RECORDING)
def test_without_torch_recording_fails_with_one_line(command: str, platform: Platform, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('was run')")

    done = run_python(*elsewhere(platform), "modtrace", *command.split(), cwd=tmp_path, status=1)

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

    done = run_python("-m", "tests.support.other_platform", "win32", script)

    assert done.stdout.splitlines()[:-1] == [NO_TORCH] * 4


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_python_engine_records_in_memory_without_posix(platform: Platform, tmp_path: Path) -> None:
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

    done = run_forked("-m", "tests.support.other_platform", platform, "--torch", script, cwd=tmp_path)

    assert done.stdout.splitlines() == [
        "[('Linear', 'forward'), ('Linear', 'backward')] []",
        "run.modtrace: a file behind the ring needs Linux; without one the ring is in memory",
    ]
    assert done.stderr == ""
    assert len(modtrace.load(tmp_path / "out.json").spans) == 2


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("command", ["run -o out.json train.py", "demo -o out.json"])
def test_recording_uses_the_python_engine_without_posix(command: str, platform: Platform, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\ntorch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()")
    # There is no engine and no compiler, as on a real machine of that platform.
    nothing = python_environment(MODTRACE_CACHE=str(tmp_path / "cache"), CXX="absent-compiler", MODTRACE_BUILD="1")
    arguments = ("-m", "tests.support.other_platform", platform, "--torch", "modtrace")

    run_forked(*arguments, *command.split(), cwd=tmp_path, env=nothing)

    assert modtrace.load(tmp_path / "out.json").metadata["engine"] == "python"


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_native_engine_is_compiled_on_linux_only(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", platform)

    assert missing_compiler() == "it is for Linux"


def test_characters_that_an_output_cannot_encode_are_question_marks(files: Path) -> None:
    arguments = ["-m", "modtrace", "summary", "trace.pftrace", "--tree"]

    plain = run_python(*arguments, cwd=files, env=python_environment(PYTHONIOENCODING="utf-8")).stdout
    done = run_python(*arguments, cwd=files, env=python_environment(PYTHONIOENCODING="ascii")).stdout

    assert "├─" in plain
    assert done == plain.encode("ascii", "replace").decode()
