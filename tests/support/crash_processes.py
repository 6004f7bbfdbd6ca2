"""Processes that record, log each call that is over, and die.

`CrashProcesses` starts one process that has torch loaded and forks a fresh one for each death, so that hundreds of
deaths take seconds. What such a process logs goes to a pipe, which outlives it.
"""

from __future__ import annotations

import json
import os
import select
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import modtrace
from tests.support.python_process import start_python

__all__ = ["DEATHS", "CrashProcesses", "Death", "Finished"]

DEATHS = ("SIGKILL", "SIGTERM", "SIGSEGV", "os._exit", "exception", "fork")
MODULES = ("Net", "Net.first", "Net.second", "Net.second.inner")

_ENTRY = struct.Struct("<ccHI")


class Finished(NamedTuple):
    """A call that was over when it was logged: `phase` "forward", or "backward", which is logged after all of it."""

    phase: str
    fqn: str
    call: int


class Death(NamedTuple):
    """The end of a process.

    Attributes:
        status: as of `os.waitpid`, turned into an exit code; negative for a signal.
        finished: what it had logged.
        errors: its stderr.
    """

    status: int
    finished: list[Finished]
    errors: str


class CrashProcesses:
    """Starts processes that die, one after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = start_python("-m", __name__, stdin=subprocess.PIPE)

    def close(self) -> None:
        """End the process that starts them."""
        self._process.communicate(timeout=60)

    def kill(self, **order: Any) -> Death:
        """Start one and wait for its death.

        Args:
            order: engine, death, ring, path (or None), calls (how many it logs before it dies or is killed),
                delay_us (how long a killer waits then).
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        errors = self._folder / "errors.txt"
        self._process.stdin.write(json.dumps(order | {"errors": str(errors)}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return Death(answer["status"], [Finished(*entry) for entry in answer["finished"]], errors.read_text())


def main() -> None:
    import torch

    torch.set_num_threads(1)
    for line in sys.stdin:
        order = json.loads(line)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            os.dup2(os.open(order["errors"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            _live(order, write)
            return
        os.close(write)
        log = _watch(order, child, read)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        entries = [_ENTRY.unpack_from(log, at) for at in range(0, len(log), _ENTRY.size)]
        phases = {b"f": "forward", b"b": "backward"}
        finished = [(phases[phase], MODULES[module], call) for phase, _, module, call in entries]
        print(json.dumps({"status": status, "finished": finished}), flush=True)


def _watch(order: dict[str, Any], child: int, read: int) -> bytes:
    """Read what it logs, and kill it once it has logged enough."""
    import signal

    log = b""
    killer = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "fork": signal.SIGKILL}.get(order["death"])
    alive = True
    while True:
        if alive and killer is not None and len(log) >= order["calls"] * _ENTRY.size:
            until = time.perf_counter_ns() + order["delay_us"] * 1000
            while time.perf_counter_ns() < until:
                # It must not wait for a full pipe.
                if select.select([read], [], [], 0)[0]:
                    log += os.read(read, 1 << 16)
            os.kill(child, killer)
            alive = False
        part = os.read(read, 1 << 16)
        if not part:
            os.close(read)
            return log
        log += part


def _live(order: dict[str, Any], pipe: int) -> None:
    import torch
    from torch import nn

    written = 0

    def note(phase: bytes, module: int, call: int) -> None:
        nonlocal written
        os.write(pipe, _ENTRY.pack(phase, b"\0", module, call))
        written += 1
        if written >= order["calls"]:
            _die(order["death"])

    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x)

    class Second(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor, call: int) -> torch.Tensor:
            x = self.inner(x)
            note(b"f", 3, call)
            return x + 1

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = Second()

        def forward(self, x: torch.Tensor, call: int) -> torch.Tensor:
            x = self.first(x)
            note(b"f", 1, call)
            x = self.second(x, call)
            note(b"f", 2, call)
            return x

    net = Net()
    recording = modtrace.record(order.get("path"), engine=order["engine"], capacity=1 << 14, ring=order["ring"])
    recording.start()
    if order["death"] == "fork":
        _fork_a_stranger(order, pipe)
    call = 0
    while True:
        loss = net(torch.ones(2, 4), call).sum()
        note(b"f", 0, call)
        loss.backward()
        for module in range(len(MODULES)):
            note(b"b", module, call)
        recording.step()
        call += 1


def _die(death: str) -> None:
    if death == "SIGSEGV":
        import ctypes

        ctypes.string_at(0)
    elif death == "os._exit":
        os._exit(7)
    elif death == "exception":
        raise RuntimeError("the process's own")


def _fork_a_stranger(order: dict[str, Any], pipe: int) -> None:
    """Leave a forked child behind that goes on running modules, and records itself, until its parent is dead."""
    import torch
    from torch import nn

    class Stranger(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    parent = os.getpid()
    ready, begun = os.pipe()
    if os.fork() == 0:
        os.close(pipe)
        stranger = Stranger()
        stranger(torch.ones(1))
        own = modtrace.record(engine=order["engine"], capacity=1 << 10, ring=f"{order['ring']}.stranger")
        with own:
            stranger(torch.ones(1))
            os.write(begun, b".")
            while os.getppid() == parent:
                stranger(torch.ones(1))
        os._exit(0)
    os.read(ready, 1)


if __name__ == "__main__":
    main()
