"""Whether a process still runs."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from .._rank import host_hash
from .._system.process_stat import read_process_stat

__all__ = ["is_alive", "is_this_host"]

_CLOCK_TOLERANCE_NS = 10_000_000_000
"""What a wall clock may have been set by between the start of a process and now."""


def is_this_host(metadata: Mapping[str, object]) -> bool:
    """Whether a recording with this metadata was made on this host; its process id means nothing elsewhere."""
    return metadata.get("host") in (socket.gethostname(), host_hash())


def is_alive(pid: int, unix_ns: int) -> bool:
    """Whether the process that had this id at a moment (Unix nanoseconds) still runs on this host."""
    if pid < 1:
        return False
    if os.name != "posix":
        return True  # nobody can tell, and what only asks on Linux interrupts a process on Windows
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    try:
        state, start_unix_ns = read_process_stat(pid)
    except OSError:
        return True
    # A killed process whose parent has not waited for it yet is still listed, and ids are given again.
    return state not in "ZX" and start_unix_ns <= unix_ns + _CLOCK_TOLERANCE_NS
