"""Takes items in two processes, and is interrupted like a command in a terminal once both run.

`python -m tests.support.pool_worker FOLDER`: each item that was taken up leaves a file there.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

from modtrace._pools import map_in_processes

ITEMS = 200


def take_up(folder: str, item: int) -> int:
    """Leave the file of an item, and return the process that took it up."""
    (Path(folder) / str(item)).touch()
    time.sleep(0.02)
    return os.getpid()


def main() -> None:
    running = set()
    for _, process in map_in_processes(partial(take_up, sys.argv[1]), range(ITEMS), 2):
        running.add(process)
        if len(running) == 2:
            os.killpg(0, signal.SIGINT)  # as a terminal does


if __name__ == "__main__":
    main()
