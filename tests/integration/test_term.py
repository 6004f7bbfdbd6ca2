"""SIGTERM under `modtrace run`: what was recorded is saved, and the process ends as it would have."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

import modtrace
from tests.support.python_process import start_python

STEP = """
import multiprocessing, os, signal, sys, torch
from torch import nn

def step():
    nn.Linear(2, 2)(torch.ones(1, 2))

step()
"""
# One call into C, which Python's handlers cannot interrupt: it goes on after a signal.
HANG = 'pipe, _ = os.pipe()\nprint("ready", flush=True)\nos.read(pipe, 1)'
OWN = """
def end(number, frame):
    print("the program's own", flush=True)
    step()
    sys.exit(3)

signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
signal.pause()
"""
WORKER = """
worker = multiprocessing.get_context("fork").Process(target=signal.pause)
worker.start()
worker.terminate()
worker.join()
print(worker.exitcode, flush=True)
"""


@pytest.mark.parametrize(
    ("script", "options", "said", "status", "spans"),
    [
        (HANG, ("--save-on-term",), "ready\n", -signal.SIGTERM, 1),
        (HANG, ("--save-on-term", "--on-signal", "SIGUSR1"), "ready\n", -signal.SIGTERM, 1),
        (WORKER + HANG, (), f"{-signal.SIGTERM}\nready\n", -signal.SIGTERM, None),
        (OWN, ("--save-on-term",), "ready\nthe program's own\n", 3, 2),
    ],
    ids=["hung", "with another signal", "not asked for", "handled by the program"],
)
def test_on_sigterm_a_run_is_saved_and_ends_as_before(
    script: str, options: tuple[str, ...], said: str, status: int, spans: int | None, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(STEP + script)
    command = ("-m", "modtrace", "run", "-o", "out.pftrace", "--engine", "python", *options, "train.py")
    with start_python(*command, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines = ""
        while not lines.endswith("ready\n"):
            lines += process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        lines += process.stdout.read()

    assert (lines, process.returncode) == (said, status)
    out = tmp_path / "out.pftrace"
    assert (len(modtrace.load(out).spans) if out.exists() else None) == spans
