"""What is installed, told without importing it."""

from __future__ import annotations

import re
from pathlib import Path

from .._errors import EngineError

__all__ = ["engine_line", "installed", "installed_torch"]


def installed(distribution: str) -> str | None:
    """Return the installed version of a distribution, None where it is not installed."""
    from importlib import metadata  # which is a tenth of what --help imports, and is not needed there

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def installed_torch() -> str | None:
    """Return the version that the installed torch gives itself, None where it is not installed.

    PyPI's is 2.13.0 to pip and 2.13.0+cu130 to itself, and an engine is for the latter.
    """
    from importlib import metadata

    known_to_pip = installed("torch")
    if known_to_pip is None:
        return None
    try:
        source = Path(str(metadata.distribution("torch").locate_file("torch/version.py"))).read_text("utf-8")
    except OSError:
        return known_to_pip
    found = re.search(r"^__version__ = '(.+)'$", source, re.MULTILINE)
    return found[1] if found else known_to_pip


def engine_line() -> str:
    """Say whether the cache has a native engine for the installed torch, without importing torch to load it."""
    from ..track.native.cache_folder import engines_for

    torch = installed_torch()
    if torch is None:
        return "native engine: none"
    try:
        is_there = bool(engines_for(torch))
    except EngineError as error:
        return f"native engine: none, as {error}"
    return (
        "native engine: built for this torch; `modtrace doctor` says whether it loads"
        if is_there
        else "native engine: not built for this torch; run `modtrace build`"
    )
