"""What a recording says about itself: versions and numbers, nothing that names a person, a machine or a script."""

from __future__ import annotations

import hashlib
import os
import platform
import socket

import torch

from .._rank import rank_in
from .._version import __version__

__all__ = ["recording_metadata"]


def recording_metadata(engine: str, capacity: int, host_name: bool) -> dict[str, object]:
    """Return the metadata for a ring's header.

    Args:
        engine: "native" or "python".
        capacity: events kept.
        host_name: True for the host's name, False for a hash of it, which tells hosts apart and no more.
    """
    host = socket.gethostname()
    return {
        "modtrace": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "engine": engine,
        "capacity": capacity,
        "pid": os.getpid(),
        "rank": _rank(),
        "program": "python",
        "host": host if host_name else hashlib.sha256(f"modtrace {host}".encode()).hexdigest()[:12],
    }


def _rank() -> int | None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return rank_in(os.environ)
