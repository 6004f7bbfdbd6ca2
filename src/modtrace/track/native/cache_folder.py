"""Where built engines are kept; torch is not imported to look there."""

import os
import sys
from pathlib import Path

from ..._errors import EngineError

LIBRARY_NAME = "modtrace_native"


def cache_home() -> Path:
    """Return the cache: `$MODTRACE_CACHE`, else `modtrace` in `$XDG_CACHE_HOME` or `~/.cache`, or raise EngineError."""
    named = os.environ.get("MODTRACE_CACHE")
    home = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "modtrace"
    try:
        return home.expanduser()
    except RuntimeError as error:
        raise EngineError(
            f"{home}: the home folder is not known (HOME is not set, and the user has none); "
            "name a folder in MODTRACE_CACHE"
        ) from error


def engine_folder(torch_version: str, key: str) -> str:
    """Return the name of an engine's folder; builds of one version differ by `key`."""
    return f"torch-{torch_version}-{sys.implementation.cache_tag}-{key}"
