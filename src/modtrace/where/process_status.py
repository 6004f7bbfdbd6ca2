"""Whether a process still runs."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Mapping

__all__ = ["is_alive", "is_this_host"]

_SLACK_NS = 10_000_000_000
"""What a wall clock may have been set by between the start of a process and now."""


def is_this_host(metadata: Mapping[str, object]) -> bool:
    """Whether a recording with this metadata was made on this host; its process number means nothing elsewhere."""
    host = socket.gethostname()
    return metadata.get("host") in (host, hashlib.sha256(f"modtrace {host}".encode()).hexdigest()[:12])


def is_alive(pid: int, wall_ns: int) -> bool:
    """Whether the process that had this number at a moment (Unix nanoseconds) still runs on this host."""
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
    state, ticks = fields[0], int(fields[19])
    # A killed process whose parent has not asked for it yet is still listed, and numbers are given again.
    since_boot = ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    began = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME) + since_boot
    return state not in "ZX" and began <= wall_ns + _SLACK_NS
