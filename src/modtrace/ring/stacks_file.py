"""The file beside a ring's that a process appends its Python stacks to when a signal comes; who asks reads it there."""

from __future__ import annotations

import os

__all__ = ["STACKS_SIGNAL", "is_signal_caught", "is_signal_handled_now", "stacks_path"]

STACKS_SIGNAL = "stacks_signal"
"""The metadata of a ring have the signal's number under this key."""


def stacks_path(ring: str) -> str:
    """Return the file of stacks that belongs to a ring's file."""
    return f"{ring}.stacks"


def is_signal_caught(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, in Python or in C; a signal without one most often kills."""
    return _has(f"/proc/{pid}/status", "SigCgt", number)


def is_signal_handled_now(pid: int, number: int) -> bool:
    """Whether a signal waits for a process or its handler runs, which blocks it on that thread until it returns."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    statuses = [f"/proc/{pid}/task/{thread}/status" for thread in threads]
    return any(_has(status, field, number) for status in statuses for field in ("ShdPnd", "SigPnd", "SigBlk"))


def _has(status: str, field: str, number: int) -> bool:
    """Whether a signal is in a set of a process or thread, whose bit 0 is signal 1; in none of one that is gone."""
    try:
        with open(status) as lines:
            signals = next((int(line.split()[1], 16) for line in lines if line.startswith(f"{field}:")), 0)
    except OSError:
        return False
    return bool(signals >> (number - 1) & 1)
