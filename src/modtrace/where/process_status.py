"""Whether a process still runs."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Mapping

__all__ = ["is_alive", "is_this_host"]

_CLOCK_TOLERANCE_NS = 10_000_000_000
"""What a wall clock may have been set by between the start of a process and now."""


def is_this_host(metadata: Mapping[str, object]) -> bool:
    """Whether a recording with this metadata was made on this host; its process id means nothing elsewhere."""
    host = socket.gethostname()
    return metadata.get("host") in (host, hashlib.sha256(f"modtrace {host}".encode()).hexdigest()[:12])


def is_alive(pid: int, unix_ns: int) -> bool:
    """Whether the process that had this id at a moment (Unix nanoseconds) still runs on this host."""
    if pid < 1:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return True
    state, start_ticks = fields[0], int(fields[19])
    # A killed process whose parent has not waited for it yet is still listed, and ids are given again.
    started_after_boot_ns = start_ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    started_unix_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME) + started_after_boot_ns
    return state not in "ZX" and started_unix_ns <= unix_ns + _CLOCK_TOLERANCE_NS
