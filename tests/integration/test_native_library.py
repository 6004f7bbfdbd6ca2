"""The built engine in the user's cache: when it is loaded, and which engine records if it must not or cannot be."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from modtrace.track.native.build import missing_compiler
from modtrace.track.native.library import find_library, native_path
from tests.support.forked_python import run_forked
from tests.support.python_process import python_environment, run_python
from tests.support.test_scale import PROMISED

RECORD = """
import os, sys
import modtrace
for cache in sys.argv[1:]:
    os.environ["MODTRACE_CACHE"] = cache
    for _ in range(2):
        with modtrace.record() as recording:
            pass
        print(recording.engine)
"""
STRANGER = 54321


def engine_with(cache: Path) -> tuple[set[str], str]:
    """Return the engines of two recordings with the default engine and this cache, and the log."""
    done = run_forked("-c", RECORD, cache)
    return set(done.stdout.split()), done.stderr


@pytest.fixture
def cache(native_engine: None, tmp_path: Path) -> Path:
    """A cache with a copy of the built engine."""
    built = native_path()
    folder = tmp_path / "cache" / built.parent.name
    folder.mkdir(parents=True)
    shutil.copy(built, folder)
    return folder.parent


def library_in(cache: Path) -> Path:
    return cache / native_path().relative_to(native_path().parents[1])


def give_to_a_stranger(cache: Path) -> None:
    os.chown(library_in(cache), STRANGER, -1)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "not built": (lambda cache: library_in(cache).unlink(), "it is not built for torch"),
    "empty": (lambda cache: library_in(cache).write_bytes(b""), "cannot be loaded"),
    "of a stranger": (give_to_a_stranger, f"belongs to another user ({STRANGER})"),
    "library open to all": (lambda cache: library_in(cache).chmod(0o757), "can be written by others; run `chmod go-w"),
    "folder open to a group": (lambda cache: library_in(cache).parent.chmod(0o775), "can be written by others"),
    "cache open to all": (lambda cache: cache.chmod(0o777), "cache can be written by others"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_library_that_must_not_be_loaded_is_reported_once_and_the_python_engine_records(
    damage: str, cache: Path
) -> None:
    spoil, says = DAMAGES[damage]
    if damage == "of a stranger" and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    spoil(cache)

    engines, log = engine_with(cache)

    assert engines == {"python"}
    assert log.count("the Python engine records") == 1
    assert says in log
    assert len(log.splitlines()) == 1


def test_the_users_own_folder_in_one_that_is_open_to_all_is_used(cache: Path) -> None:
    # Like /tmp: others can add files there, but not replace them.
    cache.chmod(0o1777)

    assert engine_with(cache) == ({"native"}, "")


def test_without_a_known_home_folder_the_python_engine_records() -> None:
    script = f"""
import os, pwd
def unknown(uid):
    raise KeyError(uid)
pwd.getpwuid = unknown
{RECORD.replace('os.environ["MODTRACE_CACHE"] = cache', "pass")}
"""
    environment = python_environment()
    for name in ("HOME", "XDG_CACHE_HOME", "MODTRACE_CACHE"):
        environment.pop(name, None)

    done = run_forked("-c", script, "once", env=environment)

    assert done.stdout == "python\npython\n"
    (line,) = done.stderr.splitlines()
    assert "the home folder is not known" in line
    assert "name a folder in MODTRACE_CACHE" in line


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("", None),
        ("env c++", None),
        ("absent-compiler -O1", "there is no C++ compiler (absent-compiler -O1)"),
        ("env absent-compiler", "there is no C++ compiler (env absent-compiler)"),
        ("c++ '-O1", "CXX is not a command: No closing quotation: c++ '-O1"),
    ],
)
def test_the_compiler_is_a_command_with_arguments(
    native_engine: None, command: str, missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", command)

    said = missing_compiler()

    assert said is None if missing is None else str(said).startswith(missing)


def test_a_library_names_no_folder_of_its_build_machine(native_engine: None) -> None:
    library = find_library().read_bytes()

    assert b"torch/ATen/core/ivalue.h" in library
    for folder in (Path(torch.__file__).parent, sysconfig.get_path("include"), find_library().parent):
        assert os.fsencode(folder) not in library


def test_a_cache_that_others_can_write_is_not_built_into(cache: Path) -> None:
    library_in(cache).unlink()
    cache.chmod(0o777)

    done = run_forked("-m", "modtrace", "build", status=1, env=python_environment(MODTRACE_CACHE=str(cache)))

    assert "can be written by others; run `chmod go-w" in done.stderr


@pytest.mark.skipif(not PROMISED, reason="compiles for a minute")
def test_a_library_from_a_compiler_with_arguments_is_loaded(native_engine: None, tmp_path: Path) -> None:
    environment = python_environment(MODTRACE_CACHE=str(tmp_path / "cache"), CXX="env c++")

    run_python(
        "-c",
        "import os, sys; os.umask(0); sys.argv[1:] = ['build']; from modtrace.cli import main; main()",
        env=environment,
    )

    assert engine_with(tmp_path / "cache") == ({"native"}, "")
