"""Scripts recorded by `MODTRACE=`, with their children and recordings of their own, and invalid values of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import modtrace
from modtrace.record_options import EngineName
from tests.support.python_process import python_environment, run_python
from tests.support.test_scale import PYTHON_IN_FULL

IMPORT_ONLY = "import sys, modtrace; assert 'torch' not in sys.modules"

TRAIN = """
import torch
from torch import nn
net = nn.Linear(2, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""

SCRIPTS = {
    "before torch": "import modtrace\n" + TRAIN,
    "after torch": "import torch, modtrace\n" + TRAIN,
    "by a name that needs torch": "import modtrace\nmodtrace.current()\n" + TRAIN,
}

SPAWNS = """
import modtrace, torch
import torch.multiprocessing as processes
from torch import nn

def work():
    nn.Identity()(torch.ones(1))

if __name__ == "__main__":
    nn.Linear(2, 2)(torch.ones(1, 2))
    process = processes.get_context("spawn").Process(target=work)
    process.start()
    process.join()
"""


def run(script: str, folder: Path, value: str) -> subprocess.CompletedProcess[str]:
    file = folder / "script.py"
    file.write_text(script)
    return run_python(file, status=None, cwd=folder, env=python_environment(MODTRACE=value))


def files_told(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The files that the recordings name, each once, with a line on how to view it."""
    lines = [line.partition(". Next: ") for line in done.stderr.splitlines()]
    assert all(f"modtrace view {line.removeprefix('modtrace: recorded to ')}" in hint for line, _, hint in lines)
    return sorted(line.removeprefix("modtrace: recorded to ") for line, _, _ in lines)


def spans(path: Path) -> list[tuple[str, str, int]]:
    return [(span.fqn, span.phase, span.step) for span in modtrace.load(path).spans]


THREE = [("Linear", phase, step) for step in range(3) for phase in ("forward", "backward")]


@PYTHON_IN_FULL
@pytest.mark.parametrize("order", SCRIPTS)
def test_a_script_that_imports_modtrace_is_recorded(engine: EngineName, order: str, tmp_path: Path) -> None:
    done = run(SCRIPTS[order], tmp_path, f"path=trace-%r.pftrace,ring=run-%p.modtrace,engine={engine}")

    assert (done.returncode, done.stdout) == (0, "")
    assert files_told(done) == [str(tmp_path / "trace-0.pftrace")]
    assert spans(tmp_path / "trace-0.pftrace") == THREE
    (ring,) = tmp_path.glob("run-*.modtrace")
    assert spans(ring) == THREE
    assert modtrace.load(ring).tracks[0].process.pid == int(ring.stem.removeprefix("run-"))


def test_a_ring_alone_is_reported_too(tmp_path: Path) -> None:
    assert files_told(run(SCRIPTS["before torch"], tmp_path, "run.modtrace")) == [str(tmp_path / "run.modtrace")]


def test_without_the_variable_and_without_torch_nothing_happens(tmp_path: Path) -> None:
    assert run(IMPORT_ONLY, tmp_path, "").returncode == 0
    assert run(IMPORT_ONLY, tmp_path, "trace.json").stderr == (
        "MODTRACE: the script ended before torch was imported; nothing is recorded\n"
    )
    assert sorted(os.listdir(tmp_path)) == ["script.py"]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("nonsense", "the suffix must be one of"),
        ("colour=red", "'colour=red' is not one of path=…, save_on_term=…, ring=…"),
        ("path=a.json,capacity=few", "'capacity=few' cannot be understood"),
        pytest.param("path=a.json,capacity=3", "capacity is 3", marks=pytest.mark.full),
        pytest.param("path=a.json,engine=fast", "engine is 'fast'", marks=pytest.mark.full),
        ("path=a.json,on_signal=SIGKILL", "SIGKILL cannot be listened to"),
        ("path=absent/a.json", "there is no directory"),
        pytest.param("ring=absent/a.modtrace", "No such file or directory", marks=pytest.mark.full),
    ],
)
def test_a_bad_value_is_one_logged_error_and_the_script_runs(value: str, says: str, tmp_path: Path) -> None:
    done = run(SCRIPTS["before torch"] + "print('done')", tmp_path, value)

    assert (done.returncode, done.stdout) == (0, "done\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith("MODTRACE: ")
    assert says in line
    assert line.endswith("; nothing is recorded")


def test_a_recording_of_the_script_goes_before_it(tmp_path: Path) -> None:
    own = f"{SCRIPTS['before torch']}\nwith modtrace.record('own.json'):\n    net(torch.ones(1, 2))\n"

    done = run(own, tmp_path, "path=trace.json,engine=python")

    assert (done.returncode, done.stderr.count("Error")) == (0, 0)
    assert spans(tmp_path / "trace.json") == THREE
    assert spans(tmp_path / "own.json") == [("Linear", "forward", 0)]


def test_a_child_does_not_replace_its_parents_file(tmp_path: Path) -> None:
    done = run(SPAWNS, tmp_path, "path=trace.json,engine=python")

    assert done.returncode == 0
    (child,) = tmp_path.glob("trace.pid*.json")
    own, children = done.stderr.splitlines()
    assert own.startswith(f"modtrace: recorded to {tmp_path / 'trace.json'}. Next: ")
    assert children == f"modtrace: 1 child process is in {child.name}"
    assert spans(tmp_path / "trace.json") == [("Linear", "forward", 0)]
    assert spans(child) == [("Identity", "forward", 0)]


def test_with_the_process_in_the_name_children_are_recorded_too(tmp_path: Path) -> None:
    done = run(SPAWNS, tmp_path, "path=trace-%p.json,engine=python")

    assert done.returncode == 0
    own, children = done.stderr.splitlines()
    assert own.startswith(f"modtrace: recorded to {tmp_path}/trace-")
    assert children.startswith("modtrace: 1 child process is in trace-")
    files = sorted(spans(file) for file in tmp_path.glob("trace-*.json"))
    assert files == [[("Identity", "forward", 0)], [("Linear", "forward", 0)]]


def test_the_command_line_does_not_record_itself(tmp_path: Path) -> None:
    environment = python_environment(MODTRACE="trace.json")

    done = run_python("-m", "modtrace", "demo", "-o", "demo.json", cwd=tmp_path, env=environment)

    assert done.stderr == "" or "MODTRACE" not in done.stderr
    assert os.listdir(tmp_path) == ["demo.json"]
