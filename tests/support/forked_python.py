"""Python code in forks of a process that has torch imported, which saves each the 3 s of its imports.

It is a process as a new one is, but that torch is there: modtrace is not imported, no thread has begun, and in the end
threads are waited for and what `atexit` has is called. What is tried about imports, the interpreter's last moments,
arguments of Python, or variables that it reads when it starts, needs `run_python`.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import linecache
import os
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from tests.support.python_process import HANGS_AFTER_S, python_environment

__all__ = ["AS_SCRIPT", "COMMAND", "run_forked"]

AS_SCRIPT = """
import os, runpy, sys
del sys.argv[0]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script: its path, and its arguments."""
COMMAND = "from modtrace.cli import main; main()"
"""Runs modtrace's command: its arguments."""


def run_forked(
    code: str,
    *arguments: object,
    status: int | None = 0,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = HANGS_AFTER_S,
) -> subprocess.CompletedProcess[str]:
    """Run code as `run_python("-c", code, …)` does, in a fork that has torch imported."""
    environment = python_environment() if env is None else dict(env)
    server = _server(environment.get("LD_PRELOAD", ""))
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        request = (code, [*map(str, arguments)], str(cwd or Path.cwd()), environment, folder, timeout_s)
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        returned = json.loads(server.stdout.readline())
        out, err = ((Path(folder) / name).read_text("utf-8", "replace") for name in ("out", "err"))
    command = [sys.executable, "-c", code, *map(str, arguments)]
    if returned is None:
        raise subprocess.TimeoutExpired(command, timeout_s, out, err)
    assert status in (None, returned), f"exit status {returned}\n{err}"
    return subprocess.CompletedProcess(command, returned, out, err)


@cache
def _server(preloaded: str) -> subprocess.Popen[str]:
    """Return the process that forks; what is preloaded has to be when it starts."""
    pipe = subprocess.PIPE
    server = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=pipe,
        stdout=pipe,
        text=True,
        env=python_environment(LD_PRELOAD=preloaded),
    )
    atexit.register(server.communicate)
    return server


def _next_program() -> tuple[str, list[str]] | None:
    """Fork for each request; return in a fork the code and its arguments, and in this process None at the end."""
    for line in iter(sys.stdin.readline, ""):
        code, arguments, cwd, environment, folder, timeout_s = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(cwd, environment, Path(folder))
            return code, arguments
        descriptor = os.pidfd_open(child)
        ended, _, _ = select.select([descriptor], [], [], timeout_s)
        os.close(descriptor)
        if not ended:
            os.kill(child, 9)
        _, status = os.waitpid(child, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status) if ended else None), flush=True)
    return None


def _become(cwd: str, environment: Mapping[str, str], folder: Path) -> None:
    written = os.O_WRONLY | os.O_CREAT
    for number, (name, flags) in enumerate([(os.devnull, os.O_RDONLY), ("out", written), ("err", written)]):
        opened = os.open(folder / name, flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)


def _run(code: str, arguments: list[str]) -> int:
    main = sys.modules["__main__"] = ModuleType("__main__")
    sys.argv, sys.path[0] = ["-c", *arguments], ""
    status = 0
    if sys.version_info >= (3, 13):  # whose tracebacks show the lines of `-c`
        linecache.cache["<string>"] = (len(code), None, code.splitlines(keepends=True), "<string>")
    try:
        exec(compile(code, "<string>", "exec"), vars(main))
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        status = 1
        # Without the frame of this function.
        behind = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(behind), behind)
    return status


def _end(status: int) -> NoReturn:
    """End as Python does, but free nothing: 1.4 s for a copy of all that torch made."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    # With what modtrace and the optimizers of torch import, but not modtrace.
    for name in ("torch", "torch._dynamo", "numpy", "orjson", "perfetto.protos.perfetto.trace.perfetto_trace_pb2"):
        importlib.import_module(name)
    # What this file needed itself.
    for name in [name for name in sys.modules if name.partition(".")[0] in ("modtrace", "tests")]:
        del sys.modules[name]
    gc.freeze()  # so that no collection of a fork copies these pages
    program = _next_program()
    if program is not None:
        _end(_run(*program))
