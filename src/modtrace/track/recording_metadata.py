"""What a recording says about itself: versions and hardware, nothing that names a person, a machine or a script."""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
from pathlib import Path

import torch

from .._rank import host_hash, rank_in
from .._version import __version__

__all__ = ["recording_metadata"]

_CPU_INFO = Path("/proc/cpuinfo")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
_HEAD_BYTES = 2048
_MAX_TEXT = 80
_LIBRARIES = (
    *("numpy", "triton", "torchvision", "transformers", "accelerate", "deepspeed", "lightning", "pytorch_lightning"),
    *("flash_attn", "xformers", "peft", "megatron", "apex", "transformer_engine", "torchtitan"),
)
"""Libraries whose versions are noted where they are loaded."""


def recording_metadata(engine: str, capacity: int, host_name: bool) -> dict[str, object]:
    """Return the metadata for a ring's header.

    Args:
        engine: "native" or "python".
        capacity: events kept.
        host_name: True for the host's name, False for a hash of it, which tells hosts apart and no more.
    """
    return {
        "modtrace": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "engine": engine,
        "capacity": capacity,
        "pid": os.getpid(),
        "rank": rank_in(os.environ),
        "program": "python",
        **_system(),
        "host": socket.gethostname() if host_name else host_hash(),
    }


def _system() -> dict[str, object]:
    """Return the hardware and the libraries that are loaded; takes less than a millisecond and starts no GPU."""
    libraries = ((name, getattr(sys.modules[name], "__version__", None)) for name in _LIBRARIES if name in sys.modules)
    found: dict[str, object] = {
        "os": f"{platform.system()} {platform.machine()}",
        "cpu": _first_match(_CPU_INFO, r"model name\s*: (.+)"),
        "cpus": os.cpu_count(),
        "gpu": _gpus(),
        "gpu_driver": _first_match(_NVIDIA_DRIVER, r"Kernel Module[^\n]*?\s(\d+\.[\d.]+)\s"),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "libraries": ", ".join(f"{name} {version}" for name, version in libraries if isinstance(version, str)),
    }
    return {key: value for key, value in found.items() if value}


def _gpus() -> str | None:
    """Return number and model of the NVIDIA GPUs (`8 × NVIDIA A100-SXM4-80GB`), from their driver."""
    models = [_first_match(path, r"Model:\s*(.+)") for path in sorted(_NVIDIA_GPUS.glob("*/information"))]
    return f"{len(models)} × {models[0]}" if models and models[0] else None


def _first_match(path: Path, pattern: str) -> str | None:
    """Return what a pattern finds in the first bytes of a file; None where it does not, or there is no file."""
    try:
        with path.open(encoding="utf-8") as file:
            match = re.search(pattern, file.read(_HEAD_BYTES))
    except (OSError, UnicodeDecodeError):
        return None
    return match[1].strip()[:_MAX_TEXT] if match else None
