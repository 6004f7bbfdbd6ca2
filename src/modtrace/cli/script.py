"""Run a user's script as `python SCRIPT` and `python -m MODULE` do."""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import runpy
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType

import click

from .group import ScriptError

__all__ = ["run_file", "run_module"]


def run_file(path: str, arguments: Sequence[str]) -> None:
    """Run a script as `__main__` and wait for its threads.

    Raises:
        ScriptError: whatever the script raises, SystemExit and KeyboardInterrupt included.
    """
    absolute = os.path.abspath(path)
    main = ModuleType("__main__")
    vars(main).update(__file__=absolute, __builtins__=builtins, __loader__=SourceFileLoader("__main__", absolute))
    sys.argv = [path, *arguments]
    _set_first_search_path(os.path.dirname(os.path.realpath(path)))
    # Not restored afterwards: threads, exit handlers and pickles still look it up.
    sys.modules["__main__"] = main
    try:
        with io.open_code(absolute) as file:
            code = compile(file.read(), absolute, "exec", dont_inherit=True)
        exec(code, vars(main))  # noqa: S102 (what the command is for)
        _wait_for_threads()
    except BaseException as error:
        raise ScriptError(error, _strip_runner_frames(error.__traceback__)) from None


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Run a module or a package's `__main__` as `__main__` and wait for its threads.

    Raises:
        UsageError: there is no such module.
        ScriptError: whatever the module raises, SystemExit and KeyboardInterrupt included.
    """
    sys.argv = [name, *arguments]
    _set_first_search_path(os.getcwd())
    try:
        if importlib.util.find_spec(name) is None:
            raise click.UsageError(f"No module named {name!r}.")
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        _wait_for_threads()
    except click.UsageError:
        raise
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise click.UsageError(f"No module named {error.name!r}.") from None
        raise ScriptError(error, _strip_runner_frames(error.__traceback__)) from None


def _set_first_search_path(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):  # since Python 3.11; without it the first entry is the command's
        sys.path[0] = folder


def _wait_for_threads() -> None:
    """Wait for all non-daemon threads, as the interpreter does at its end, while the recording still runs.

    By the interpreter's own function: it first tells pools of `concurrent.futures` that they end, and threads that
    join the main thread that it has ended. These would never end where their threads are only joined.
    """
    threading._shutdown()  # type: ignore[attr-defined]


def _strip_runner_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Drop the frames of the code that started the script."""
    while traceback is not None and traceback.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        traceback = traceback.tb_next
    return traceback
