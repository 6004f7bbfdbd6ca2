"""Each program runs plainly, and recorded: it prints the same, and the recordings say what it says of itself."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from modtrace.record_options import EngineName
from tests.programs.recorded import RECORDED, find_faults, told_by, without_pids
from tests.support.forked_python import run_forked
from tests.support.python_process import LAZY_IMPORTS_WORK, python_environment, run_python

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class _Output:
    exit_code: int
    stdout: str
    stderr: str


# By name how many processes train or evaluate. The engines see the same of these.
_ALIKE = {
    "import_after_find_spec": 1,
    "import_in_function": 1,
    "import_in_thread": 1,
    "import_lazily": 1,
    "import_transformers_first": 1,
    "data_loader": 1,
    "elastic": 2,
    "elastic_function": 2,
    "fork": 3,
    "forkserver": 2,
    "hogwild": 3,
    "spawn_ddp": 2,
    "moving_average": 1,
    "own_optimizer": 1,
    "sampling": 1,
    "gan": 1,
}
_DIFFERENT = {
    "actor_critic": 1,
    "adjoint": 1,
    "checkpointing": 1,
    "ensemble": 1,
    "exchanged_part": 1,
    "gradient_penalty": 1,
    "lbfgs": 1,
    "maml": 1,
    "nested_tensors": 1,
    "parametrizations": 1,
    "scripted": 1,
    "sgd_by_hand": 1,
    "sgd_by_returned_gradients": 1,
    "torch_func": 1,
    "gevent_server": 1,
    "training_threads": 1,
}
_PROCESSES = _ALIKE | _DIFFERENT
_CASES = [
    pytest.param(name, engine, marks=[pytest.mark.full] if name in _ALIKE and engine == "python" else [])
    for name in _PROCESSES
    for engine in ("native", "python")
]


@cache
def _run_plainly(name: str) -> _Output:
    """Run a program without modtrace, by its name; in a fork, if it can."""
    path = _FOLDER / f"{name}.py"
    return _output_of(run_forked(path, status=None)) if _needs_no_process(name) else _run(path)


def _run_by_command(name: str, *options: object) -> _Output:
    command = ("run", *options, _FOLDER / f"{name}.py")
    return (
        _output_of(run_forked("-m", "modtrace", *command, status=None))
        if _needs_no_process(name)
        else _run("-m", "modtrace", *command)
    )


def _needs_no_process(name: str) -> bool:
    """Imports are counted in a new process, and what starts processes ends as it does for users."""
    return not name.startswith("import_") and name != "data_loader" and _PROCESSES[name] == 1


def _run(*arguments: object, **variables: str) -> _Output:
    return _output_of(run_python(*arguments, env=python_environment(**variables)))


def _output_of(done: subprocess.CompletedProcess[str]) -> _Output:
    return _Output(done.returncode, done.stdout, done.stderr)


def _skip_without(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            if os.environ.get("CI") == "true":
                pytest.fail(f"{package} is not installed")
            pytest.skip(f"{package} is not installed")


def _complaints(stderr: str) -> list[str]:
    """Return the lines with warnings and errors, but those with a time of torch's launcher."""
    return [line for line in stderr.splitlines() if re.search("Warning|[Ee]rror", line) and not line.startswith("W")]


@pytest.mark.usefixtures("native_engine")
@pytest.mark.parametrize(("name", "engine"), _CASES)
def test_a_program_is_recorded_as_it_tells(name: str, engine: EngineName, tmp_path: Path) -> None:
    if name == "import_transformers_first":
        _skip_without("transformers")
    if name == "import_lazily" and not LAZY_IMPORTS_WORK:
        pytest.skip("this Python cannot import this torch lazily")
    plain = _run_plainly(name)
    assert plain.exit_code == 0, plain.stderr

    recorded = _run_by_command(name, "--engine", engine, "-o", tmp_path / "trace.json")

    told = told_by(recorded.stdout)
    assert without_pids(told) == without_pids(told_by(plain.stdout))
    assert len(told) == _PROCESSES[name]
    assert _complaints(recorded.stderr) == _complaints(plain.stderr)
    assert recorded.stderr.count("Next: ") == 1
    assert find_faults(tmp_path, told) == []


_IMPORTING_MODTRACE = """
import os, runpy, sys
import modtrace
sys.path.insert(0, os.path.dirname(sys.argv[1]))
runpy.run_path(sys.argv[1], run_name="__main__")
"""
_ENGINES = ["native", pytest.param("python", marks=pytest.mark.full)]


@pytest.mark.usefixtures("native_engine")
@pytest.mark.parametrize("engine", _ENGINES)
@pytest.mark.parametrize("name", ["gan", "maml"])
def test_a_program_is_recorded_by_three_lines(name: str, engine: str, tmp_path: Path) -> None:
    plain = _run_plainly(name)

    recorded = run_forked("-c", RECORDED, _FOLDER / f"{name}.py", tmp_path / "trace.pftrace", engine)

    told = told_by(recorded.stdout)
    assert without_pids(told) == without_pids(told_by(plain.stdout))
    assert find_faults(tmp_path, told) == []


@pytest.mark.usefixtures("native_engine")
@pytest.mark.parametrize("engine", _ENGINES)
@pytest.mark.parametrize("name", ["gan", "fork", pytest.param("spawn_ddp", marks=pytest.mark.full)])
def test_a_program_is_recorded_by_the_variable(name: str, engine: str, tmp_path: Path) -> None:
    plain = _run_plainly(name)

    variable = f"path={tmp_path / 'trace.json'},engine={engine}"
    recorded = _run("-c", _IMPORTING_MODTRACE, _FOLDER / f"{name}.py", MODTRACE=variable)

    told = told_by(recorded.stdout)
    assert without_pids(told) == without_pids(told_by(plain.stdout))
    assert find_faults(tmp_path, told) == []


@pytest.mark.usefixtures("native_engine")
@pytest.mark.parametrize("engine", _ENGINES)
def test_ranks_that_torchrun_starts_under_modtrace_are_recorded(engine: str, tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    record = [sys.executable, "-m", "modtrace", "run", "--engine", engine, "-o", tmp_path / "trace.json"]

    recorded = _run(*launch, *record, _FOLDER / "elastic.py")

    told = told_by(recorded.stdout)
    assert without_pids(told) == without_pids(told_by(_run_plainly("elastic").stdout))
    assert {path.name for path in tmp_path.iterdir()} == {"trace.rank0.json", "trace.rank1.json"}
    assert find_faults(tmp_path, told) == []


@pytest.mark.usefixtures("native_engine")
@pytest.mark.parametrize("engine", _ENGINES)
def test_a_cell_that_records_and_runs_twice_has_a_file_of_its_second_run(engine: str, tmp_path: Path) -> None:
    _skip_without("nbclient", "nbformat", "ipykernel")
    notebook = _FOLDER / "notebook.py"
    plain = _run(notebook)

    recorded = _run(notebook, "--record", tmp_path, engine)

    told = told_by(recorded.stdout)
    assert len(told) == 2
    assert without_pids(told) == without_pids(told_by(plain.stdout))
    assert find_faults(tmp_path, told[1:]) == []
