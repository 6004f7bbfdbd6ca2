"""Forks beside threads that start and stop recordings, train, and collect garbage: counts what hangs or ends wrongly.

    python -m tests.support.forking_process --engine native --forks 10000

A process inside does all that; this one waits outside of it, where no lock of it matters. `--engine none` does the same
without a recording, to tell torch's and Python's own hangs. The exit status is 0 where nothing was bad.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tests.support.forked_python import start_forked

__all__ = ["Outcome", "fork_and_count"]

_LIMIT_S = 120
"""A child that is not done by then hangs, and so does its parent that says nothing for so long after that."""
_FORKS_OF_A_PROCESS = 250
"""Then another process goes on, so that forks fall into the first recording of a process too."""


class Outcome(NamedTuple):
    """The outcome of the forks.

    Attributes:
        forks: how many there were.
        parent_hangs: how often the process that forks had to be killed.
        child_hangs: how many children had to be killed.
        wrong_exits: exit statuses of the parent and of children that are not 0, without killed ones.
    """

    forks: int
    parent_hangs: int
    child_hangs: int
    wrong_exits: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"{self.forks} forks, {self.parent_hangs} hangs of the parent, {self.child_hangs} of children, "
            f"{len(self.wrong_exits)} wrong exits {self.wrong_exits[:5] or ''}".rstrip()
        )


def fork_and_count(engine: str, count: int) -> Outcome:
    """Let processes inside fork `count` times in all, one after the other, and count."""
    outcome = Outcome(0, 0, 0, ())
    while outcome.forks < count:
        with TemporaryDirectory() as folder:
            forks = min(count - outcome.forks, _FORKS_OF_A_PROCESS)
            inside = ["--inside", folder, "--engine", engine, "--forks", str(forks)]
            with start_forked("-m", "tests.support.forking_process", *inside) as process:
                outcome = _watch(process, outcome)
    return outcome


def _watch(process: subprocess.Popen[str], outcome: Outcome) -> Outcome:
    """Count what one process inside tells: `+<pid>` of each child, and `-<status>` when that has ended."""
    assert process.stdout is not None
    forks, parent_hangs, child_hangs, wrong = outcome
    child, killed, rest = 0, False, b""
    while True:
        if not select.select([process.stdout], [], [], _LIMIT_S)[0]:
            if child and not killed:
                killed = True
                child_hangs += 1
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
                continue
            process.kill()
            return Outcome(forks + bool(child), parent_hangs + 1, child_hangs, wrong)
        told = os.read(process.stdout.fileno(), 1 << 16)
        if not told:
            status = process.wait()
            return Outcome(forks, parent_hangs, child_hangs, (*wrong, status) if status else wrong)
        *lines, rest = (rest + told).split(b"\n")
        for line in lines:
            if line.startswith(b"+"):
                child, killed = int(line[1:]), False
                continue
            forks += 1
            if int(line[1:]) and not killed:
                wrong = (*wrong, int(line[1:]))
            child = 0


def _fork_inside(engine: Any, count: int, folder: Path) -> None:
    """Be the process inside."""
    import torch
    from torch import nn
    from torch.optim.optimizer import register_optimizer_step_post_hook

    import modtrace

    def record(path: Path | None, ring: Path | None) -> Any:
        if engine == "none":
            return contextlib.nullcontext()
        return modtrace.record(path, engine=engine, capacity=64, ring=ring)

    def begin_together() -> None:
        # The first operator of a thread takes a lock of torch: a child that is forked meanwhile hangs without us too.
        nn.Identity()(torch.ones(1))
        ready.wait()

    def start_and_stop() -> None:
        begin_together()
        while not done.is_set():
            for name in ("parent.json", "parent.pftrace"):
                for ring in (None, folder / "parent.modtrace"):
                    with record(folder / name, ring):
                        nn.Identity()(torch.ones(1))

    def train() -> None:
        begin_together()
        while not done.is_set():
            # What dies with its thread's state is what CPython looks for in the states of all threads.
            local = threading.local()
            local.model = model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
            local.itself = local
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for _ in range(3):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            del local, model
            gc.collect()

    def in_child(number: int) -> int:
        if number % 3 == 0 or engine == "none":
            nn.Identity()(torch.ones(1))
            return 0
        path, ring = (folder / "child.json", folder / "child.modtrace") if number % 3 == 1 else (None, None)
        with record(path, ring) as recording:
            nn.Identity()(torch.ones(1))
        if engine != "none" and number % 4 == 0:
            with modtrace.ModuleTracker():
                nn.Identity()(torch.ones(1))
        return 0 if [span.fqn for span in recording.timeline().spans] == ["Identity"] else 3

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-4)
    done, ready = threading.Event(), threading.Barrier(4)
    hooks_called = []
    register_optimizer_step_post_hook(lambda *_: hooks_called.append(0))
    # What torch imports when it is first used, and what a name of modtrace imports, is imported before: a fork
    # meanwhile leaves Python's own lock held. The first recording is not: it imports nothing.
    torch.optim.SGD([torch.ones(1, requires_grad=True)]).step()
    _ = modtrace.record, modtrace.ModuleTracker
    # Else each collection goes through all that torch imported, and the threads do little else.
    gc.collect()
    gc.freeze()
    threads = [threading.Thread(target=work) for work in (start_and_stop, train, train)]
    for thread in threads:
        thread.start()
    begin_together()
    for number in range(count):
        pid = os.fork()
        if pid == 0:
            status = 4
            try:
                status = in_child(number)
            except BaseException as error:
                os.write(2, f"child {number}: {error!r}\n".encode())
            finally:
                os._exit(status)
        os.write(1, b"+%d\n" % pid)
        os.write(1, b"-%d\n" % os.waitpid(pid, 0)[1])
    done.set()
    for thread in threads:
        thread.join()
    if not hooks_called:
        sys.exit(5)


def main() -> None:
    """Run as the first line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=["native", "python", "none"], default="native")
    parser.add_argument("--forks", type=int, default=10_000)
    parser.add_argument("--inside", type=Path, metavar="FOLDER", help="be the process that forks")
    arguments = parser.parse_args()
    if arguments.inside is not None:
        _fork_inside(arguments.engine, arguments.forks, arguments.inside)
        return
    outcome = fork_and_count(arguments.engine, arguments.forks)
    print(f"{sys.version.split()[0]}, {arguments.engine}: {outcome}")
    sys.exit(bool(outcome.parent_hangs or outcome.child_hangs or outcome.wrong_exits))


if __name__ == "__main__":
    main()
