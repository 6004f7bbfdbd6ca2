"""Wheels with engines, installed without a compiler: the installed torch finds its own, any other skips them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import modtrace
from modtrace.track.native.build import units
from modtrace.track.native.library import find_library
from tests.support.python_process import STARTUP
from tests.support.quick_compiler import write_compiler

ROOT = Path(__file__).parents[2]
OTHER_TORCH = "import torch\ntorch.__version__ = torch.torch_version.TorchVersion('{version}')\n"
MINOR = ".".join(torch.__version__.split(".")[:2])
RECORD = """
import modtrace, torch
with modtrace.record("made.pftrace") as recording:
    torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
print(recording.engine, len(recording.timeline().spans), modtrace.__file__)
"""


class Installed(NamedTuple):
    """An environment that has the wheels, outside the checkout, without a compiler and with an empty cache."""

    folder: Path
    took_s: float

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.folder / "venv" / "bin"), "HOME": str(self.folder), **variables}
        python = self.folder / "venv" / "bin" / "python"
        return subprocess.run(
            [python, *arguments], cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )


def pretend(folder: Path, version: str) -> Path:
    """A folder for PYTHONPATH that makes torch report another version."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(OTHER_TORCH.format(version=version))
    return folder


def write_python_of(version: str, folder: Path) -> Path:
    """A Python whose torch reports another version."""
    python = folder / f"python-of-torch-{version}"
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH="{pretend(folder / version, version)}:$PYTHONPATH" exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return python


@pytest.fixture(scope="module")
def installed(native_engine: None, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheels of the installed torch, which is named twice, of a later patch, and of one that does not exist."""
    folder = tmp_path_factory.mktemp("wheels")
    others = [write_python_of(version, folder) for version in (f"{MINOR}.99", "2.99.0")]
    write_compiler(folder / "c++", folder / "compiled.log", find_library())
    pythons: list[str | Path] = [sys.executable, *others, sys.executable]
    subprocess.run(
        [ROOT / "scripts" / "wheels", "--out", folder / "dist", *pythons],
        env={**os.environ, "CXX": str(folder / "c++")},
        check=True,
    )
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    # torch and the other dependencies are those of the tests.
    (folder / "dependencies").mkdir()
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if "modtrace" not in package.name and package.suffix != ".pth":
            (folder / "dependencies" / package.name).symlink_to(package)
    (packages / "dependencies.pth").write_text(f"{folder / 'dependencies'}\n{STARTUP}")
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", venv / "bin" / "python", "install", "--no-index"]
    pip += ["--find-links", folder / "dist", f"modtrace[torch{MINOR.replace('.', '')}]"]
    before = os.times()
    subprocess.run(pip, env={**os.environ, "PIP_CONFIG_FILE": os.devnull}, check=True)  # a machine may cap torch
    after = os.times()
    took_s = after.children_user + after.children_system - before.children_user - before.children_system
    return Installed(folder, took_s)


def test_one_wheel_is_pure_and_each_minor_version_of_torch_has_one_with_its_engines(installed: Installed) -> None:
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheels = sorted((installed.folder / "dist").iterdir())

    engines = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            engines[wheel.name.rpartition("-")[0]] = sorted(
                name.split("/")[-2].rpartition("-")[0] for name in archive.namelist() if name.endswith(".so")
            )
    of_torch = sorted(f"torch-{version}-cpython-{python[2:]}" for version in (torch.__version__, f"{MINOR}.99"))
    assert engines == {
        f"modtrace-{modtrace.__version__}-py3-none": [],
        f"modtrace_engine-{MINOR}.{modtrace.__version__}-{python}-{python}": of_torch,
        f"modtrace_engine-2.99.{modtrace.__version__}-{python}-{python}": [f"torch-2.99.0-cpython-{python[2:]}"],
    }
    tags = {wheel.stem.rpartition("-")[2] for wheel in wheels}
    assert all(re.fullmatch(r"any|(manylinux_\d+_\d+_\w+\.?)+", tag) for tag in tags), tags


def test_the_engine_of_two_environments_with_one_torch_is_compiled_once(installed: Installed) -> None:
    compiled = (installed.folder / "compiled.log").read_text().splitlines()

    assert len(compiled) == 3 * (len(units()) + 1)


def test_pip_installs_both_in_seconds(installed: Installed) -> None:
    assert installed.took_s < 10
    assert "modtrace_engine" in installed.run("-c", "import modtrace_engine; print(modtrace_engine.__file__)").stdout


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--out"], 2, "scripts/wheels: --out needs a value"),
        (["--platform"], 2, "scripts/wheels: --platform needs a value"),
        (["--out", "/proc/none", "{python}"], 1, "mkdir: cannot create directory"),
        (["{folder}/none"], 1, "scripts/wheels: {folder}/none is not a Python interpreter; name one of an environment"),
        (["{folder}"], 1, "scripts/wheels: {folder} is not a Python interpreter; name one of an environment"),
        (["{python}", "{folder}/bare"], 1, "scripts/wheels: {folder}/bare has no torch, which its engine would be for"),
    ],
)
def test_arguments_that_give_no_wheel_are_refused_in_a_line(
    arguments: list[str], status: int, says: str, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    named = {"python": sys.executable, "folder": tmp_path}

    done = subprocess.run(
        [ROOT / "scripts" / "wheels", *(argument.format(**named) for argument in arguments)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == status
    (line,) = done.stderr.splitlines()
    assert line.startswith(says.format(**named))


def test_without_a_compiler_the_native_engine_records(installed: Installed) -> None:
    done = installed.run("-c", RECORD)

    assert done.stderr == ""
    assert done.stdout.split()[:2] == ["native", "2"]
    assert str(installed.folder) in done.stdout


def test_a_torch_that_no_wheel_knows_is_recorded_by_the_python_engine(installed: Installed) -> None:
    done = installed.run("-c", RECORD, PYTHONPATH=str(pretend(installed.folder / "2.98", "2.98.0")))

    assert done.stdout.split()[:2] == ["python", "2"]
    assert "it is not built for torch 2.98.0; run `modtrace build`" in done.stderr


@pytest.mark.parametrize(
    "command", ["summary made.pftrace", "convert made.pftrace made.json", "report made.pftrace -o bug.zip"]
)
def test_its_recording_is_read_without_torch(command: str, installed: Installed) -> None:
    assert installed.run("-c", RECORD).returncode == 0
    without_torch = "import sys; sys.modules['torch'] = None; from modtrace.cli import main; main()"

    done = installed.run("-c", without_torch, *command.split())

    assert done.returncode == 0, done.stderr
