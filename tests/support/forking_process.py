"""Run as a script: forks while other threads start and stop recordings. Prints how many, and how many hung.

Arguments: the engine, the number of forks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import warnings
from typing import Any

import torch
from torch import nn

import modtrace

__all__ = ["main"]

_LIMIT_S = 60


def _start_and_stop(engine: Any, done: threading.Event) -> None:
    while not done.is_set():
        # Where the other thread's runs, it does not start.
        with contextlib.suppress(modtrace.RecordingError), modtrace.record(engine=engine, capacity=64):
            nn.Identity()(torch.ones(1))


def _in_child(engine: Any) -> int:
    faulthandler.dump_traceback_later(_LIMIT_S, exit=True)
    with modtrace.record(engine=engine, capacity=64) as recording:
        nn.Identity()(torch.ones(1))
    with modtrace.ModuleTracker():
        nn.Identity()(torch.ones(1))
    return 0 if [span.fqn for span in recording.timeline().spans] == ["Identity"] else 3


def main(engine: Any, count: int) -> None:
    """Fork `count` times; each child makes a recording of its own."""
    warnings.simplefilter("ignore")
    # What is imported when it is first used is imported before: a fork meanwhile leaves Python's own lock held.
    with modtrace.ModuleTracker(), modtrace.record(engine=engine, capacity=64) as recording:
        nn.Identity()(torch.ones(1))
    recording.timeline()
    done = threading.Event()
    threads = [threading.Thread(target=_start_and_stop, args=(engine, done)) for _ in range(2)]
    for thread in threads:
        thread.start()
    bad: list[int] = []
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            status = 4
            try:
                status = _in_child(engine)
            finally:
                os._exit(status)
        status = os.waitpid(pid, 0)[1]
        if status != 0:
            bad.append(status)
    done.set()
    for thread in threads:
        thread.join()
    print(f"{count} forks, {len(bad)} bad", *bad[:5])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
