"""`run_forked`: what runs in a fork is what runs in a new process, but for the import of torch."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.forked_python import run_forked
from tests.support.python_process import run_python

_FRESH = """
import os, sys, threading
print("torch" in sys.modules, [name for name in sys.modules if name.partition(".")[0] == "modtrace"])
print(threading.active_count(), sys.argv, __name__, os.getcwd(), os.environ.get("ONLY"), sys.stdin.read() == "")
"""
_ENDINGS = {
    "pass": 0,
    "import sys; sys.exit(5)": 5,
    "raise SystemExit('gone')": 1,
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": -9,
    "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()": 0,
    "import atexit; atexit.register(print, 'bye'); print('first')": 0,
    "def fail():\n    1 / 0\nfail()": 1,
}


def test_torch_is_imported_and_no_module_of_modtrace(tmp_path: Path) -> None:
    done = run_forked(_FRESH, 3, cwd=tmp_path, env={"ONLY": "this"})

    assert done.stdout == f"True []\n1 ['-c', '3'] __main__ {tmp_path} this True\n"


@pytest.mark.parametrize("code", _ENDINGS)
def test_it_prints_and_ends_as_a_new_process(code: str) -> None:
    forked, new = (
        run(*arguments, status=None) for run, arguments in ((run_forked, (code,)), (run_python, ("-c", code)))
    )

    assert (forked.stdout, forked.stderr, forked.returncode) == (new.stdout, new.stderr, _ENDINGS[code])


def test_a_program_that_hangs_is_killed_and_the_next_one_runs() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_forked("import time; time.sleep(60)", timeout_s=0.2)
    assert run_forked("print(1)").stdout == "1\n"
