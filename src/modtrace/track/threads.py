"""The name of a thread."""

from __future__ import annotations

import threading

__all__ = ["describe_thread"]


def describe_thread() -> tuple[str, int]:
    """Return this thread's name and its id (tid) of the operating system.

    A thread that Python did not start (autograd's workers) has the name that the kernel knows.
    """
    tid = threading.get_native_id()
    thread = threading.current_thread()
    if isinstance(thread, threading._DummyThread):
        try:
            with open(f"/proc/self/task/{tid}/comm", encoding="utf-8", errors="replace") as comm:
                return comm.read().strip(), tid
        except OSError:
            return f"thread {tid}", tid
    return thread.name, tid
