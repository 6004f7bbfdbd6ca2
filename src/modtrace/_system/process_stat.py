"""What the kernel says of a process: its state, and when it began."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Literal, NamedTuple

__all__ = ["ProcessStat", "read_process_stat"]


class ProcessStat(NamedTuple):
    """A process as `/proc` has it.

    Attributes:
        state: one letter: R runs, S and D wait, Z and X are dead.
        start_unix_ns: when it began, in Unix nanoseconds, to the kernel's tick of 10 ms.
    """

    state: str
    start_unix_ns: int


def read_process_stat(pid: int | Literal["self"]) -> ProcessStat:
    """Read what the kernel says of a process of this host; "self" is this one.

    Raises:
        OSError: there is none with this id, or the system has no `/proc`.
    """
    # The second field, the command's name in brackets, may hold blanks and brackets.
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    start_ticks = int(fields[19])
    started_after_boot_ns = start_ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    boot_unix_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return ProcessStat(fields[0], boot_unix_ns + started_after_boot_ns)
