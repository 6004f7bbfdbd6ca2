"""The `modtrace` command, or a script, without what Linux has and another platform lacks, as far as Linux can.

`python -m tests.support.other_platform win32|darwin [--torch] modtrace ARGUMENTS…`, or `SCRIPT ARGUMENTS…` in place of
`modtrace`. Without `--torch`, torch cannot be imported either.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import mmap
import os
import runpy
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from tests.support.absent_names import Platform, absent_modules, absent_names

BUILT_HERE = (
    "asyncio",  # pdb imports it from CPython 3.14 on, and click.testing that
    "numpy",
    "duckdb",
    "pyarrow.parquet",
    "multiprocessing.popen_spawn_posix",
    "multiprocessing.util",
)
"""Modules made for Linux, which need it when they are imported."""
KEPT = {"locale", "posix", "sys"}
"""Modules that Python itself asks while it runs: for encodings, for the parts of `os`, and for its build."""
O_BINARY = 0x8000
"""The flag of Windows, where a file opened without it changes the ends of lines; Linux ignores it."""


class _Mmap(mmap.mmap):
    def __new__(cls, fileno: int, length: int, **options: Any) -> _Mmap:
        if options.keys() - {"tagname", "access", "offset"}:
            raise TypeError(f"mmap() has no {options}")
        return super().__new__(cls, fileno, length, **options)

    def __getattribute__(self, name: str) -> Any:
        if name == "madvise":
            raise AttributeError(name)
        return super().__getattribute__(name)


class _CDLL(ctypes.CDLL):
    def __init__(self, name: str | None, *arguments: Any, **options: Any) -> None:
        if name is None:
            raise TypeError("LoadLibrary() argument 1 must be str, not None")
        super().__init__(name, *arguments, **options)


class _Status:
    """The result of `os.fstat` without the blocks."""

    def __init__(self, status: os.stat_result) -> None:
        self._status = status

    def __getattr__(self, name: str) -> Any:
        if name in ("st_blocks", "st_blksize"):
            raise AttributeError(name)
        return getattr(self._status, name)


def _refuse_proc(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith(("/proc/", "/sys/", "/dev/shm")):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])


def _be_windows() -> None:
    """Let functions that Windows has refuse what they refuse there."""
    import shutil

    # What ctypes keeps as `ctypes.pythonapi` was opened by its import.
    vars(ctypes)["CDLL"] = _CDLL
    vars(mmap)["mmap"] = _Mmap
    open_, fstat, statvfs = os.open, os.fstat, os.statvfs

    def open_binary(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        assert flags & O_BINARY, f"{path} is opened as text"
        return open_(path, flags, *arguments, **options)

    def disk_usage(path: Any) -> SimpleNamespace:
        return SimpleNamespace(free=statvfs(path).f_frsize * statvfs(path).f_bavail)

    vars(os).update(open=open_binary, fstat=lambda descriptor: _Status(fstat(descriptor)))
    vars(shutil)["disk_usage"] = disk_usage  # which asks Windows another way


def _take_away(platform: Platform, more_modules: set[str]) -> None:
    """Take away each name of the standard library that the platform lacks, `/proc`, and some modules."""
    for name in sys.stdlib_module_names - KEPT:
        module = sys.modules.get(name)
        if module is not None and not name.startswith("_"):  # with which Python starts processes on Linux
            for absent in absent_names(name, platform) & vars(module).keys():
                delattr(module, absent)
    gone = (absent_modules(platform) | more_modules) - KEPT
    for name in list(sys.modules):
        if name.partition(".")[0] in gone:
            del sys.modules[name]
    sys.modules.update(dict.fromkeys(gone))  # type: ignore[arg-type]  # None: there is no such module
    sys.addaudithook(_refuse_proc)


def main(arguments: Sequence[str]) -> None:
    """Take everything away, then run the command or the script."""
    platform = cast("Platform", arguments[0])
    with_torch = arguments[1] == "--torch"
    program, *rest = arguments[2:] if with_torch else arguments[1:]
    if platform == "win32":
        vars(os).update(O_BINARY=O_BINARY, supports_dir_fd=set(), supports_fd=set())
        for name in ("shutil", "tempfile"):  # look at these when they are imported
            sys.modules.pop(name, None)
    for name in [*BUILT_HERE, *(["torch.profiler"] if with_torch else [])]:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    if platform == "win32":
        _be_windows()
    _take_away(platform, set() if with_torch else {"torch"})
    sys.argv = [program, *rest]
    if program == "modtrace":
        runpy.run_module("modtrace", run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
