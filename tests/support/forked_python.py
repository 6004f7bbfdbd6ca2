"""Python in forks of a process that has torch imported, which saves each the 3 s of its imports.

It is a process as a new one is, a child of this one, but that torch is there: modtrace is not imported, no thread has
begun, and in the end threads are waited for and what `atexit` has is called. What is tried about imports, the
interpreter's last moments, options of Python, or variables that it reads when it starts, needs `run_python`.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import importlib.machinery
import io
import json
import linecache
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NoReturn

from tests.support.guard_times import measure_no_guards
from tests.support.python_process import HANGS_AFTER_S, PythonProcess, python_environment

__all__ = ["run_forked", "start_forked"]

_PR_SET_CHILD_SUBREAPER = 36


def run_forked(
    *arguments: object,
    status: int | None = 0,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = HANGS_AFTER_S,
) -> subprocess.CompletedProcess[str]:
    """Run Python as `run_python` does, in a fork that has torch imported; of Python's options it knows -W."""
    with start_forked(*arguments, cwd=cwd, env=env, stderr=subprocess.PIPE) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert status in (None, process.returncode), f"exit status {process.returncode}\n{err}"
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def start_forked(
    *arguments: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: int | None = subprocess.DEVNULL,
    stdout: int | IO[bytes] | None = subprocess.PIPE,
    stderr: int | IO[bytes] | None = None,
) -> subprocess.Popen[str]:
    """Start Python as `start_python` does, in a fork that has torch imported."""
    return _Forked(
        [*map(str, arguments)],
        cwd=cwd or Path.cwd(),
        env=python_environment() if env is None else env,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        text=True,
    )


class _Forked(PythonProcess):
    """A process that `_server` forks. Its parent, which ends, hands it to this process."""

    pid: int

    def _execute_child(self, args: list[str], *others: Any) -> None:
        cwd, env, pipes = others[4], others[5], others[9:15]
        ends = [end if end >= 0 else number for number, end in enumerate(pipes[at] for at in (0, 3, 5))]
        server, prctl = _server(env.get("LD_PRELOAD", "")), ctypes.CDLL(None).prctl
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        socket.send_fds(server, [json.dumps((args, str(cwd), dict(env))).encode()], ends)
        self.pid = int(server.recv(20))
        server.recv(1)  # it is a child of this process
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


@cache
def _server(preloaded: str) -> socket.socket:
    """Return the socket of the process that forks; what is preloaded has to be when it starts."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        # Pipes, as what it has for its streams is not asked again, where they become others, whether it can seek.
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=python_environment(LD_PRELOAD=preloaded),
        )
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours


def _next_program(requests: socket.socket) -> list[str] | None:
    """Fork for each request; return in a fork the arguments of Python, and in this process None at the end."""
    while True:
        request, ends, _, _ = socket.recv_fds(requests, 1 << 20, 3)
        if not request:
            return None
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            requests.send(b"x")
            for end in ends:
                os.close(end)
            continue
        between = os.getpid()
        child = os.fork()
        if child:
            requests.send(str(child).encode())
            os._exit(0)
        while os.getppid() == between:
            time.sleep(1e-3)
        requests.close()
        arguments, cwd, environment = json.loads(request)
        for number, end in enumerate(ends):
            os.dup2(end, number)
            os.close(end)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None  # TMPDIR is this environment's
        return [*arguments]


def _run(arguments: list[str]) -> int:
    """Do what Python does with its arguments, and return its exit status, negative for a signal."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    sys.orig_argv = [sys.executable, *arguments]
    if os.environ.get("PYTHONUNBUFFERED") and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(write_through=True)
    while arguments[0] == "-W":
        warnings._processoptions([arguments[1]])  # type: ignore[attr-defined]
        del arguments[:2]
    what, *rest = arguments
    try:
        if what == "-m":
            sys.argv, sys.path[0] = rest, str(Path.cwd())
            runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
        elif what == "-c":
            code, *sys.argv[1:] = rest
            sys.argv[0], sys.path[0] = "-c", ""
            if sys.version_info >= (3, 13):  # whose tracebacks show the lines of `-c`
                linecache.cache["<string>"] = (len(code), None, code.splitlines(keepends=True), "<string>")
            exec(compile(code, "<string>", "exec"), vars(main))
        else:
            sys.argv, sys.path[0] = arguments, str(Path(what).resolve().parent)
            path = os.path.abspath(what)
            vars(main).update(__file__=path, __loader__=importlib.machinery.SourceFileLoader("__main__", path))
            exec(compile(Path(path).read_bytes(), path, "exec"), vars(main))
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
            return 1
        return error.code or 0
    except BaseException as error:
        # Without the frame of this function.
        behind = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(behind), behind)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _end(status: int) -> NoReturn:
    """End as Python does, but free nothing: 1.4 s for a copy of all that torch made."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    # With what modtrace and the optimizers of torch import, but not modtrace.
    for name in ("torch", "torch._dynamo", "numpy", "orjson", "perfetto.protos.perfetto.trace.perfetto_trace_pb2"):
        importlib.import_module(name)
    measure_no_guards()
    # What this file needed itself.
    for name in [name for name in sys.modules if name.partition(".")[0] in ("modtrace", "tests")]:
        del sys.modules[name]
    gc.freeze()  # so that no collection of a fork copies these pages
    program = _next_program(socket.socket(fileno=int(sys.argv[1])))
    if program is not None:
        _end(_run(program))
