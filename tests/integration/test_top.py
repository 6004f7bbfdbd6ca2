"""`modtrace top` on a pseudo-terminal with real processes: its screen, its keys, and the terminal afterwards."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.python_process import HANGS_AFTER_S, python_environment, start_python

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A command on its own terminal, 80 columns by 24 lines."""

    def __init__(self, *arguments: object) -> None:
        self._master, self._slave = pty.openpty()
        self.resize(80, 24)
        self.before = termios.tcgetattr(self._slave)
        command = [sys.executable, "-W", "ignore", "-m", "modtrace", *map(str, arguments)]
        environment = python_environment(TERM="xterm-256color")
        for name in ("COLUMNS", "LINES"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            command,
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.raw = b""

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait_for(self, is_shown: Callable[[str], object]) -> list[str]:
        """Read until the screen, as one line, has the expected text; return its lines."""
        deadline = time.monotonic() + HANGS_AFTER_S
        while time.monotonic() < deadline:
            if select.select([self._master], [], [], 0.1)[0]:
                self.raw += os.read(self._master, 1 << 16)
                # Each update draws the whole screen, from its upper left corner on.
                screen = _ESCAPES.sub("", self.raw.rpartition(b"\x1b[H")[2].decode(errors="replace"))
                if is_shown(" ".join(screen.split())):
                    return screen.splitlines()
        raise AssertionError(f"not shown: {self.raw[-3000:]!r}")

    def wait_for_end(self) -> int:
        """Return the exit status, and check that the terminal is as it was."""
        deadline = time.monotonic() + HANGS_AFTER_S
        while self.process.poll() is None or select.select([self._master], [], [], 0)[0]:
            assert time.monotonic() < deadline
            if select.select([self._master], [], [], 0.1)[0]:
                self.raw += os.read(self._master, 1 << 16)
        assert self.raw.count(b"\x1b[?1049h") == self.raw.count(b"\x1b[?1049l") == 1
        assert self.raw.rindex(b"\x1b[?25h") > self.raw.rindex(b"\x1b[?25l")
        assert termios.tcgetattr(self._slave) == self.before
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self._slave)


class Jobs:
    """Trainings that a test starts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, list[subprocess.Popen[str]]()

    def train(self, name: str, ring: str = "0.modtrace") -> subprocess.Popen[str]:
        """Start a training; return once two steps have ended."""
        arguments = ("-W", "ignore", "-m", "tests.support.top_training", self.folder / ring, self.folder / "stop", name)
        process = start_python(*arguments)
        self.processes.append(process)
        assert process.stdout is not None
        for _ in range(2):
            assert process.stdout.readline() == "step\n"
        return process


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    jobs = Jobs(tmp_path)
    yield jobs
    for process in jobs.processes:
        process.kill()
        process.communicate()


@pytest.fixture
def open_terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_one(*arguments: object) -> Terminal:
        opened.append(Terminal(*arguments))
        return opened[-1]

    yield open_one
    for terminal in opened:
        terminal.close()


def test_it_follows_a_job_through_its_life(jobs: Jobs, tmp_path: Path, open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal("top", tmp_path, "--refresh", 0.2)
    terminal.wait_for(lambda text: "no recording in this folder" in text)  # the training starts later

    first = jobs.train("First")
    terminal.wait_for(lambda text: re.search(r"0\.modtrace running · step \d+ · [\d.]+ steps/s", text))
    terminal.wait_for(lambda text: "First.0" in text and "self %↓" in text)

    first.send_signal(signal.SIGKILL)
    first.wait()
    terminal.wait_for(lambda text: "0.modtrace died" in text)

    jobs.train("Second")  # a new ring in place of the old one
    terminal.wait_for(lambda text: "Second.0" in text and "First" not in text)

    terminal.press("s")
    terminal.wait_for(lambda text: "total %↓" in text)
    terminal.press("-")
    terminal.wait_for(lambda text: "1 level" in text and "q quit" in text and "Second.0" not in text)
    terminal.press("m")
    terminal.wait_for(lambda text: re.search(r"rank +state +step +steps/s", text))
    terminal.resize(60, 12)
    lines = terminal.wait_for(lambda text: text.endswith("[ ] …"))
    assert len(lines) == 12
    assert max(map(len, lines)) == 60
    terminal.press("p")
    terminal.wait_for(lambda text: "PAUSED" in text)
    terminal.press("q")
    assert terminal.wait_for_end() == 0


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_the_terminal_is_restored_by_what_ends_it(
    tmp_path: Path, open_terminal: Callable[..., Terminal], signal_number: int
) -> None:
    terminal = open_terminal("top", tmp_path / "none.modtrace", "--refresh", 0.2)
    terminal.wait_for(lambda text: "cannot be read" in text)
    terminal.process.send_signal(signal_number)
    assert terminal.wait_for_end() == 0


def test_it_runs_behind_the_training(tmp_path: Path, open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal("top", tmp_path / "none.modtrace", "--refresh", 0.2)
    terminal.wait_for(lambda text: "cannot be read" in text)

    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, terminal.process.pid) == min(own + 10, 19)


def test_ctrl_c_quits(tmp_path: Path, open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal("top", tmp_path / "none.modtrace")
    terminal.wait_for(lambda text: "cannot be read" in text)
    terminal.press("\x03")
    assert terminal.wait_for_end() == 0
