"""Building the native engine into the user's cache: when it is asked for, or once where it can be had."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ..._errors import EngineError
from ...record_options import EngineName
from .compile import WORK_PREFIX, compile_library, missing_compiler
from .library import FAILURE, HINT, find_library, forget_loaded, is_built, native_path, why_distrusted

__all__ = ["build", "build_if_missing"]


def build(force: bool = False) -> Path:
    """Return the engine for the installed torch; compile it into the user's cache where there is none.

    Of several processes that do at once, one compiles, and the others wait for it.

    Args:
        force: compile it again.

    Raises:
        EngineError: there is no compiler, the build failed, or the cache cannot be written or is open to others.
    """
    if not force and is_built():
        return find_library()
    if (missing := missing_compiler()) is not None:
        raise EngineError(f"{missing}. {HINT}")
    path = native_path()
    try:
        with _alone(path.parent):
            if force or not is_built():
                _compile(path)
    except EngineError as error:
        raise EngineError(f"the native engine: {error}. {HINT}") from error
    except OSError as error:
        raise EngineError(f"{path.parent}: {error.strerror}; name a writable folder in MODTRACE_CACHE") from error
    return path


def build_if_missing(wanted: EngineName, say: Callable[[str], object]) -> None:
    """Build the engine where a recording would take it, a compiler is there, and it was not tried before.

    Where that fails, the reason is what `why_unavailable` tells from then on. `MODTRACE_BUILD=0` keeps it from trying.

    Args:
        wanted: the engine that is asked for; "python" builds none.
        say: called with a line before the compiler runs, by the one process that runs it.
    """
    if wanted == "python" or os.environ.get("MODTRACE_BUILD") == "0" or is_built() or missing_compiler() is not None:
        return
    # A cache that cannot be used is told by who loads from it.
    with contextlib.suppress(EngineError, OSError):
        path = native_path()
        with _alone(path.parent):
            # Another rank may have built it, or failed, meanwhile.
            if not is_built() and not (path.parent / FAILURE).exists():
                say(f"compiling the native engine for torch {torch.__version__}, once; about 25 seconds")
                try:
                    _compile(path)
                except OSError as error:  # not kept as what compiling came to: it may be gone the next time
                    say(f"the native engine is not compiled: {path.parent}: {error.strerror}")
    forget_loaded()


def _compile(path: Path) -> None:
    """Compile; no other process does."""
    failure = path.parent / FAILURE
    for left in path.parent.glob(f"{WORK_PREFIX}*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    try:
        compile_library(path)
    except EngineError as error:
        failure.write_text(" ".join(str(error).split()), "utf-8")
        raise
    failure.unlink(missing_ok=True)
    forget_loaded()


def _make_folders(path: Path) -> None:
    for folder in (path.parent.parent, path.parent):
        # Whatever the umask lets others do.
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o755, exist_ok=True)
        if (distrust := why_distrusted(folder)) is not None:
            raise EngineError(distrust)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Run the block while no other process runs it for the same folder."""
    import fcntl  # of POSIX, where alone there is a compiler

    _make_folders(folder / "library")
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
