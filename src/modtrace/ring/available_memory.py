"""How much memory this process can have: what the machine has left, and what its control groups let it take."""

from __future__ import annotations

import contextlib
from pathlib import Path

__all__ = ["available_memory_bytes"]

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def available_memory_bytes() -> int | None:
    """Return the bytes that can be had without anyone being killed for it; None where the system does not say."""
    found = [bytes_left for bytes_left in (_left_on_machine(), *_left_in_groups()) if bytes_left is not None]
    return min(found, default=None)


def _left_on_machine() -> int | None:
    """Return what is free, can be freed, or swapped out."""
    try:
        lines = _MEMINFO.read_text("utf-8").splitlines()
        kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        return 1024 * (kilobytes["MemAvailable"] + kilobytes.get("SwapFree", 0))
    except (OSError, ValueError, IndexError, KeyError):
        return None


def _left_in_groups() -> list[int | None]:
    """Return what is left in each control group, of either version, that this process is in."""
    left = []
    with contextlib.suppress(OSError, ValueError):
        for line in _OWN_GROUPS.read_text("utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                root, limit, used = _GROUPS, "memory.max", "memory.current"
            elif "memory" in controllers.split(","):
                root, limit, used = _GROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            else:
                continue
            group = root / path.lstrip("/")
            # A group can have no more than those around it. Inside a container the path may not be there: then its
            # root is what the process sees of its own group.
            for folder in (group, *group.parents):
                left.append(_left_in_group(folder, limit, used))
                if folder == root:
                    break
    return left


def _left_in_group(folder: Path, limit: str, used: str) -> int | None:
    try:
        bytes_left = int((folder / limit).read_text("utf-8")) - int((folder / used).read_text("utf-8"))
    except (OSError, ValueError):  # no such group, or its limit is the word "max"
        return None
    with contextlib.suppress(OSError, ValueError, IndexError):
        # Pages of files are given back when memory is asked for.
        for line in (folder / "memory.stat").read_text("utf-8").splitlines():
            if line.startswith(("inactive_file ", "total_inactive_file ")):
                return bytes_left + int(line.split()[1])
    return bytes_left
