"""What is installed, told without importing it."""

from __future__ import annotations

from .._errors import EngineError

__all__ = ["engine_line", "installed"]


def installed(distribution: str) -> str | None:
    """Return the installed version of a distribution, None where it is not installed."""
    from importlib import metadata  # which is a tenth of what --help imports, and is not needed there

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def engine_line() -> str:
    """Say whether the cache has a native engine for the installed torch, without importing torch to load it."""
    from ..track.native.cache_folder import engines_for

    torch = installed("torch")
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
