"""`run_forked` and `start_forked`: a fork behaves like a new process, except that torch is imported already."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.forked_python import run_forked, start_forked
from tests.support.python_process import python_environment, run_python, start_python

_FRESH = """
import os, sys, threading
print("torch" in sys.modules, [name for name in sys.modules if name.partition(".")[0] == "modtrace"])
print(threading.active_count(), sys.argv, __name__, os.getcwd(), os.environ.get("ONLY"), sys.stdin.read() == "")
"""
_TEMPORARY = "import tempfile; print(tempfile.gettempdir())"
_SEEN = """
import __main__, pickle, sys, warnings
class Local: pass
assert type(pickle.loads(pickle.dumps(Local()))) is Local and vars(__main__) is globals()
warnings.warn("not shown")
print(sys.argv, sys.orig_argv, sys.path[0])
print(globals().get("__file__"), __name__, __package__, __spec__ and __spec__.name)
"""
_ENDINGS = {
    "pass": 0,
    "import sys; sys.exit(5)": 5,
    "raise SystemExit('gone')": 1,
    "import os, signal; sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL)": -9,
    "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()": 0,
    "import atexit; atexit.register(print, 'bye'); print('first')": 0,
    "raise KeyboardInterrupt": -2,
    "def fail():\n    1 / 0\nfail()": 1,
}


def test_torch_is_imported_and_no_module_of_modtrace(tmp_path: Path) -> None:
    done = run_forked("-c", _FRESH, 3, cwd=tmp_path, env={"ONLY": "this"})

    assert done.stdout == f"True []\n1 ['-c', '3'] __main__ {tmp_path} this True\n"


def test_temporary_files_are_in_the_environments_folder(tmp_path: Path) -> None:
    assert run_forked("-c", _TEMPORARY, env=python_environment(TMPDIR=str(tmp_path))).stdout == f"{tmp_path}\n"


@pytest.mark.parametrize("how", ["-c", "-m", "script"])
@pytest.mark.parametrize("code", _ENDINGS)
def test_a_fork_prints_and_ends_like_a_new_process(how: str, code: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_SEEN + code)
    arguments = {"-c": ("-c", _SEEN + code), "-m": ("-m", "program"), "script": ("program.py",)}[how]
    forked, new = (run("-W", "ignore", *arguments, 7, status=None, cwd=tmp_path) for run in (run_forked, run_python))

    assert (forked.stdout, forked.stderr, forked.returncode) == (new.stdout, new.stderr, _ENDINGS[code])
    assert len(forked.stdout.splitlines()) >= 2


def test_a_started_fork_is_a_child_that_can_be_written_to_and_killed() -> None:
    code = "import os; print(os.getppid(), input(), flush=True); input()"
    with start_forked("-c", code, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("hello\n")
        process.stdin.flush()
        assert process.stdout.readline() == f"{os.getpid()} hello\n"
        assert process.poll() is None
        process.kill()
    assert process.returncode == -9


def test_a_program_that_hangs_is_killed_and_the_next_one_runs() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_forked("-c", "import time; time.sleep(60)", timeout_s=0.2)
    assert run_forked("-c", "print(1)").stdout == "1\n"


@pytest.mark.parametrize("start", [start_python, start_forked])
def test_a_failure_in_the_with_block_kills_the_fork(start: Callable[..., subprocess.Popen[str]]) -> None:
    with pytest.raises(ZeroDivisionError), start("-c", "import signal; signal.pause()") as process:
        raise ZeroDivisionError

    assert process.returncode == -signal.SIGKILL
