"""A clock for processes of which only durations are asked: it stands while the machine does something else."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from .python_process import python_environment

__all__ = ["with_preloaded", "with_pretended_clock"]


def with_pretended_clock(folder: Path) -> dict[str, str]:
    """Return the environment of a Python whose clocks go on by its processor time, and by what it sleeps at once.

    Args:
        folder: where the library is made that does that.
    """
    return with_preloaded(Path(__file__).with_suffix(".c"), folder)


def with_preloaded(source: Path, folder: Path) -> dict[str, str]:
    """Return the environment of a Python that a library is loaded into first, compiled from C into the folder."""
    library = folder / f"{source.stem}.so"
    if not library.exists():
        compiler = shutil.which("gcc") or shutil.which("cc") or "g++"
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-x", "c", source, "-o", library, "-ldl"], check=True)
    return python_environment(LD_PRELOAD=str(library))
