"""Which clock a process reads."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

__all__ = ["clock_id"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TIME_NAMESPACE = Path("/proc/self/ns/time")


def clock_id() -> str:
    """Return the id of this process's monotonic clock: the same for all that read the same one.

    It is a hash of the boot and the time namespace, which tells clocks apart and no more. Where the system does not say
    both, the clock is the process's own.
    """
    try:
        boot = _BOOT_ID.read_text("utf-8").strip()
        text = f"{boot} {os.readlink(_TIME_NAMESPACE)}"
    except OSError:
        text = f"{platform.uname()} {os.getpid()}"
    return hashlib.sha256(f"modtrace clock {text}".encode()).hexdigest()[:16]
