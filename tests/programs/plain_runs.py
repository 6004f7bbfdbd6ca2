"""Runs programs one after another, each in a fork of a process that has torch imported; that saves its import.

It reads a path per line and answers with a line of JSON: exit code, stdout and stderr.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import traceback

import torch
import torch._dynamo

assert torch._dynamo


def main() -> None:
    for line in sys.stdin:
        path = line.rstrip("\n")
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            child = os.fork()
            if child == 0:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                os._exit(_run(path))
            _, status = os.waitpid(child, 0)
            out.seek(0)
            err.seek(0)
            answer = {"exit_code": os.waitstatus_to_exitcode(status), "stdout": out.read(), "stderr": err.read()}
        print(json.dumps(answer), flush=True)


def _run(path: str) -> int:
    sys.argv = [path]
    sys.path[0] = os.path.dirname(path)
    exit_code = 1
    try:
        runpy.run_path(path, run_name="__main__")
        exit_code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return exit_code


if __name__ == "__main__":
    main()
