"""SIGTERM under `modtrace run --save-on-term` and `MODTRACE=`, and Ctrl-C while a trace is saved.

All is saved, and the process ends as it would have.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

import modtrace
from modtrace._interrupts import hold_ctrl_c
from tests.support.forked_python import start_forked
from tests.support.python_process import HANGS_AFTER_S, python_environment, start_python

STEP = """
import multiprocessing, os, signal, sys, torch
from torch import nn

def step():
    nn.Linear(2, 2)(torch.ones(1, 2))

step()
"""
# One call into C, which Python's handlers cannot interrupt: it goes on after a signal.
HANG = 'pipe, _ = os.pipe()\nprint("ready", flush=True)\nos.read(pipe, 1)'
# Not `signal.pause()`: it waits forever if the signal comes just before it.
OWN = """
def end(number, frame):
    os.write(1, b"the program's own\\n")  # the signal may come while "ready" is being printed
    step()
    sys.exit(3)

signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
while True: pass
"""
# Each worker gets the signal at once, most of them before Python has run there and removed the handler.
WORKERS = """
for _ in range(30):
    worker = multiprocessing.get_context("fork").Process(target=signal.pause)
    worker.start()
    worker.terminate()
    worker.join(60)
    assert worker.exitcode == -signal.SIGTERM
"""
WAITS = """
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("ready", flush=True)
signal.sigwait({signal.SIGTERM})
sys.exit(4)
"""
CHAINED = """
before = signal.signal(signal.SIGTERM, lambda *of: (before(*of) if callable(before) else None, sys.exit(5)))
print("ready", flush=True)
while True: pass
"""
CLOSED = """
os.closerange(3, 1 << 12)
print("ready", flush=True)
while True: pass
"""
STOPPED = """
import threading
sys.path.insert(0, "")
import modtrace
stopping = threading.Thread(target=modtrace.current().stop)
stopping.start()
stopping.join()
step()
"""


@pytest.mark.parametrize(
    ("script", "options", "said", "status", "spans"),
    [
        (HANG, (), "ready\n", -signal.SIGTERM, 1),
        (HANG, ("--on-signal", "SIGUSR1"), "ready\n", -signal.SIGTERM, 1),
        (HANG, ("--no-save-on-term",), "ready\n", -signal.SIGTERM, None),
        (WORKERS + HANG, (), "ready\n", -signal.SIGTERM, 1),
        (WAITS, (), "ready\n", 4, 1),
        (OWN, (), "ready\nthe program's own\n", 3, 2),
        (CHAINED, (), "ready\n", 5, 1),
        (CLOSED, (), "ready\n", -signal.SIGTERM, None),
        (STOPPED + HANG, (), "ready\n", -signal.SIGTERM, 1),
    ],
    ids=[
        "hung",
        "with another signal",
        "not wanted",
        "sent to children at once",
        "waited for",
        "handled by the program",
        "handled and handed on",
        "descriptors closed",
        "stopped by a thread",
    ],
)
def test_on_sigterm_a_run_is_saved_and_ends_as_before(
    script: str, options: tuple[str, ...], said: str, status: int, spans: int | None, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(STEP + script)
    command = (
        "-m",
        "modtrace",
        "run",
        "-o",
        "out.pftrace",
        "--engine",
        "python",
        "--save-on-term",
        *options,
        "train.py",
    )
    # One case needs a process that ends as a whole interpreter does.
    start = start_python if script == HANG and not options else start_forked
    with start(*command, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines = ""
        while not lines.endswith("ready\n"):
            lines += process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        lines += process.stdout.read()

    assert (lines, process.returncode) == (said, status)
    out = tmp_path / "out.pftrace"
    assert (len(modtrace.load(out).spans) if out.exists() else None) == spans


@pytest.mark.parametrize(("text", "spans"), [("path=out.pftrace,save_on_term=true", 1), ("out.pftrace", None)])
def test_on_sigterm_a_recording_by_the_variable_is_saved(text: str, spans: int | None, tmp_path: Path) -> None:
    job = f"import modtrace\n{STEP}{HANG}"
    with start_forked("-c", job, cwd=tmp_path, env=python_environment(MODTRACE=text)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
    assert process.returncode == -signal.SIGTERM
    out = tmp_path / "out.pftrace"
    assert (len(modtrace.load(out).spans) if out.exists() else None) == spans


def test_on_sigterm_a_launcher_that_calls_no_module_saves_nothing(tmp_path: Path) -> None:
    with start_python(
        "-c",
        f"import modtrace, os, torch\n{HANG}",
        cwd=tmp_path,
        env=python_environment(MODTRACE="path=out.pftrace,save_on_term=true"),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
    assert process.returncode == -signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


PRESSED = """
import os, signal, sys
import modtrace, torch
from modtrace import _interrupts

def train():
    model = torch.nn.Sequential(*(torch.nn.Identity() for _ in range(3)))
    for _ in range(1000):
        model(torch.ones(1))

_interrupts._MIN_PRESS_GAP_NS = {again_ns}
"""
SAVES = {
    "run": "train()\nos.kill(os.getpid(), signal.SIGINT)",
    "run to the end": "train()",
    "a block": "with modtrace.record('out.json'):\n    train()\n    os.kill(os.getpid(), signal.SIGINT)",
    "stop": "recording = modtrace.record('out.json').start()\ntrain()\nrecording.stop()",
    "exit": "modtrace.record('out.json').start()\ntrain()",
}


def press_while_it_saves(way: str, again_ns: int, folder: Path) -> tuple[int, str, bytes]:
    """Press Ctrl-C twice while the trace is written into a full pipe; return status, stderr and the pipe's content."""
    (folder / "train.py").write_text(PRESSED.format(again_ns=again_ns) + SAVES[way])
    os.mkfifo(folder / "out.json")
    run = ("-m", "modtrace", "run", "-o", "out.json") if way.startswith("run") else ()
    start = start_python if way == "exit" else start_forked
    process = start(*run, "train.py", cwd=folder, stderr=subprocess.PIPE)
    assert process.stderr is not None
    with open(folder / "out.json", "rb") as pipe:  # waits until the program opens it to write
        process.send_signal(signal.SIGINT)
        said = process.stderr.readline()
        while "press Ctrl-C again" not in said:
            said += process.stderr.readline()
        process.send_signal(signal.SIGINT)
        # Once the second Ctrl-C has ended it, nothing more comes.
        status = process.wait(HANGS_AFTER_S) if not again_ns else None
        written = pipe.read()
    _, rest = process.communicate(timeout=HANGS_AFTER_S)
    return process.returncode if status is None else status, said + rest, written


@pytest.mark.parametrize("way", SAVES)
def test_ctrl_c_pressed_twice_while_it_saves_leaves_the_trace_whole(way: str, tmp_path: Path) -> None:
    status, said, written = press_while_it_saves(way, 1 << 62, tmp_path)

    (tmp_path / "whole.json").write_bytes(written)
    timeline = modtrace.load(tmp_path / "whole.json")
    # Python ignores an exception of an exit handler, and says so.
    assert status == {"exit": 0, "run to the end": 1}.get(way, -signal.SIGINT), said
    assert sum(span.fqn == "Sequential" for span in timeline.spans) == 1000
    assert said.count("press Ctrl-C again") == 1


@pytest.mark.parametrize("way", ["run", "stop"])
def test_ctrl_c_pressed_again_later_ends_the_saving(way: str, tmp_path: Path) -> None:
    status, _, written = press_while_it_saves(way, 0, tmp_path)

    assert status == -signal.SIGINT
    assert len(written) <= 1 << 16


@pytest.mark.parametrize("error", [BrokenPipeError(), RuntimeError("reentrant call"), ValueError("closed file")])
def test_ctrl_c_that_cannot_be_reported_waits_all_the_same(error: Exception) -> None:
    saved: list[str] = []

    def tell() -> None:
        raise error

    def save() -> None:
        signal.raise_signal(signal.SIGINT)
        saved.append("whole")

    with pytest.raises(KeyboardInterrupt):
        hold_ctrl_c(save, tell)

    assert saved == ["whole"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
