"""Runs programs one after another, each in a fork of a process that has torch imported; that saves its import.

It reads a line of JSON for each: the program's path, where to record it or null, the engine, and the
variables of its environment. It answers with a line of JSON: exit code, stdout and stderr.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import traceback
from collections.abc import Mapping
from contextlib import nullcontext

import torch
import torch._dynamo

import modtrace
from modtrace.record_options import EngineName

assert torch._dynamo


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            child = os.fork()
            if child == 0:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                os._exit(_run(*request))
            _, status = os.waitpid(child, 0)
            out.seek(0)
            err.seek(0)
            answer = {"exit_code": os.waitstatus_to_exitcode(status), "stdout": out.read(), "stderr": err.read()}
        print(json.dumps(answer), flush=True)


def _run(path: str, recorded_to: str | None, engine: EngineName, variables: Mapping[str, str]) -> int:
    os.environ.update(variables)
    sys.argv = [path]
    sys.path[0] = os.path.dirname(path)
    exit_code = 1
    try:
        with modtrace.record(recorded_to, engine=engine) if recorded_to else nullcontext():
            runpy.run_path(path, run_name="__main__")
        exit_code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return exit_code


if __name__ == "__main__":
    main()
