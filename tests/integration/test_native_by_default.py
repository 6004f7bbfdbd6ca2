"""`modtrace run` and `modtrace demo` build the native engine by themselves if they can; `record` never does."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

import modtrace
from modtrace._files import LIBRARY_NAME
from modtrace.track.native.build import CUDA_UNIT, UNITS, WORK_PREFIX, units
from modtrace.track.native.library import find_library, native_folder
from tests.support.forked_python import run_forked
from tests.support.python_process import python_environment
from tests.support.quick_compiler import write_compiler

TRAIN = """
import torch
torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
"""
COMPILES_AND_LINKS = len(units()) + 1


class Home(NamedTuple):
    """A folder with a script and a fast compiler, and an environment with an empty cache."""

    folder: Path
    environment: Mapping[str, str]

    def times_compiled(self) -> int:
        log = self.folder / "compiled.log"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def set_compiler(self, *, error: str | None = None) -> None:
        write_compiler(self.folder / "c++", self.folder / "compiled.log", find_library(), error=error)

    def run(self, *arguments: str, **variables: str) -> tuple[str, str]:
        """Run a command; return the engine that recorded, and the output on stderr before the line on the trace."""
        environment = {**self.environment, **variables}
        said = run_forked("-m", "modtrace", *arguments, cwd=self.folder, env=environment).stderr
        (trace,) = self.folder.glob("*.pftrace")
        engine = str(modtrace.load(trace).metadata["engine"])
        trace.unlink()
        return engine, "".join(line for line in said.splitlines(keepends=True) if " spans of " not in line)


@pytest.fixture
def home(native_engine: None, tmp_path: Path) -> Home:
    environment = python_environment(
        MODTRACE_CACHE=str(tmp_path / "cache"), CXX=str(tmp_path / "c++"), MODTRACE_BUILD="1", PATH="/usr/bin:/bin"
    )
    home = Home(tmp_path, environment)
    home.set_compiler()
    (tmp_path / "train.py").write_text(TRAIN)
    return home


@pytest.mark.parametrize(
    "arguments",
    [("run", "train.py"), pytest.param(("demo", "-o", "demo.pftrace"), marks=pytest.mark.full)],
)
def test_the_engine_is_built_once(arguments: tuple[str, ...], home: Home) -> None:
    first = home.run(*arguments)
    second = home.run(*arguments)

    assert [engine for engine, _ in (first, second)] == ["native", "native"]
    assert first[1].count("modtrace: compiling the native engine for torch ") == 1
    assert "compiling" not in second[1]
    assert home.times_compiled() == COMPILES_AND_LINKS


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (("run", "--engine", "python", "train.py"), {}),
        (("run", "train.py"), {"MODTRACE_BUILD": "0"}),
        pytest.param(("demo", "-o", "demo.pftrace", "--engine", "python"), {}, marks=pytest.mark.full),
    ],
)
def test_the_engine_is_not_built_if_it_is_not_wanted(
    arguments: tuple[str, ...], variables: dict[str, str], home: Home
) -> None:
    engine, said = home.run(*arguments, **variables)

    assert engine == "python"
    assert "compiling" not in said
    assert home.times_compiled() == 0


def test_a_build_that_fails_is_reported_in_one_line_and_not_tried_again(home: Home) -> None:
    home.set_compiler(error="calls.cpp:1: error: no such header")

    first = home.run("run", "train.py")
    second = home.run("run", "train.py")

    assert (first[0], second[0]) == ("python", "python")
    progress, reason, *_ = first[1].splitlines()
    assert progress.startswith("modtrace: compiling the native engine for torch ")
    assert "it could not be built: calls.cpp:1: error: no such header; `modtrace build` tries again" in reason
    assert second[1].splitlines()[0] == reason
    assert home.times_compiled() == len(units())

    home.set_compiler()
    run_forked("-m", "modtrace", "build", env=home.environment)

    assert home.run("run", "train.py") == ("native", home.run("run", "train.py")[1])


def test_a_build_on_a_full_disk_is_reported_and_tried_again(home: Home) -> None:
    home.set_compiler(error="final link failed: No space left on device")

    engine, said = home.run("run", "train.py")

    assert engine == "python"
    progress, reason, *_ = said.splitlines()
    assert progress.startswith("modtrace: compiling the native engine for torch ")
    folder = home.folder / "cache" / native_folder()
    assert reason == f"modtrace: the native engine is not compiled: {folder}: No space left on device"

    home.set_compiler()

    assert home.run("run", "train.py")[0] == "native"


def test_without_a_compiler_nothing_is_tried(home: Home) -> None:
    engine, said = home.run("run", "train.py", CXX="absent-compiler")

    assert engine == "python"
    assert "it is not built for torch" in said
    assert "compiling" not in said


def test_ranks_build_it_together_once(home: Home) -> None:
    script = """
import os, sys
from modtrace.track.native.build import build_if_missing
from modtrace.track.native.library import is_built
children = []
for _ in range(3):
    child = os.fork()
    if child == 0:
        build_if_missing("auto", lambda line: print(line, flush=True))
        os._exit(0 if is_built() else 1)
    children.append(child)
print([os.waitpid(child, 0)[1] for child in children])
"""

    done = run_forked("-c", script, env=home.environment)

    said, ended = done.stdout.splitlines()
    assert said.startswith("compiling the native engine for torch ")
    assert ended == "[0, 0, 0]"
    assert home.times_compiled() == COMPILES_AND_LINKS


def test_one_of_several_builds_compiles_and_files_of_a_killed_one_are_removed(home: Home) -> None:
    left = home.folder / "cache" / native_folder() / f"{WORK_PREFIX}left"
    left.mkdir(parents=True)
    (left / "calls.o").write_text("a part")
    script = """
import os
from modtrace.track.native.build import build
children = []
for _ in range(3):
    child = os.fork()
    if child == 0:
        build()
        os._exit(0)
    children.append(child)
print([os.waitpid(child, 0)[1] for child in children])
"""

    done = run_forked("-c", script, env=home.environment)

    assert done.stdout == "[0, 0, 0]\n"
    assert home.times_compiled() == COMPILES_AND_LINKS
    assert {path.name for path in left.parent.iterdir()} == {f"{LIBRARY_NAME}.so", "lock"}


@pytest.mark.parametrize(
    ("arguments", "last_line"),
    [
        (["build"], "Aborted!"),
        (["run", "train.py"], "modtrace: nothing is recorded: the script was interrupted before the recording started"),
    ],
)
def test_ctrl_c_ends_the_compilers(arguments: list[str], last_line: str, home: Home) -> None:
    alive = home.folder / "alive"
    os.mkfifo(alive)
    compiler = home.folder / "c++"
    # The compiler holds the pipe open as long as it runs.
    compiler.write_text(
        f"#!/bin/sh\ncase $* in *--version*) exit 0 ;; esac\nexec 3>{alive}\necho compiling >&3\nexec sleep 300\n"
    )
    start = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    script = f"{start}; from modtrace.cli import main; import sys; sys.argv = ['modtrace', *{arguments}]; main()"
    building = subprocess.Popen(
        [sys.executable, "-c", script],
        env=home.environment,
        cwd=home.folder,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with open(alive, "rb", buffering=0) as pipe:
        said = b""
        while len(said.splitlines()) < len(units()) and (more := pipe.read(4096)):
            said += more

        # The signal goes to the whole process group, as from a terminal.
        os.killpg(building.pid, signal.SIGINT)

        # The end of the pipe comes once no process has it open.
        ended, _, _ = select.select([pipe], [], [], 60)
        assert ended
        assert pipe.read() == b""
    assert last_line in building.communicate()[1].splitlines()
    assert building.returncode != 0
    assert [path.name for path in (home.folder / "cache").rglob("*") if path.is_file()] == ["lock"]


def test_record_never_compiles(home: Home) -> None:
    script = "import modtrace\nwith modtrace.record() as recording:\n    pass\nprint(recording.engine)"

    done = run_forked("-c", script, env=home.environment)

    assert done.stdout == "python\n"
    assert "it is not built for torch" in done.stderr
    assert home.times_compiled() == 0


def test_every_source_is_compiled_once() -> None:
    folder = Path(modtrace.__file__).parent / "track/native/cpp"
    sources = [str(path.relative_to(folder)) for path in folder.rglob("*.cpp")]

    assert sorted(name for _, names in (UNITS | CUDA_UNIT).values() for name in names) == sorted(sources)


@pytest.mark.parametrize("engine", ["native", "python"])
def test_a_recording_does_not_start_the_driver_of_cuda(engine: str) -> None:
    """Forked children could not use CUDA then: `torch.__config__.show()` starts it, as was seen on a GPU."""
    code = f"""
import torch
del torch._C._show_config
import modtrace
with modtrace.record(engine={engine!r}) as recording:
    torch.nn.Linear(2, 2)(torch.ones(2))
print([span.fqn for span in recording.timeline().spans])
"""
    assert run_forked("-c", code).stdout == "['Linear']\n"
