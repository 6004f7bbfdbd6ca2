"""The built engine for the installed torch: which one it is, whether it may be loaded, and loading it."""

import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shlex
import stat
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from ..._errors import EngineError
from ..._files import LIBRARY_NAME, cache_home
from ..._interrupts import in_forked_child
from ...ring import slot_format

_FOLDER = Path(__file__).parent
_SOURCES = [*sorted((_FOLDER / "cpp").rglob("*.[ch]*")), _FOLDER / "build.py", Path(slot_format.__file__)]
"""The files that a library depends on: the code, and how it is compiled."""
_PACKAGE = "modtrace_engine"
"""Where a wheel has engines that are built already; see `scripts/wheels`."""
_PYTHON_ABI = str(sysconfig.get_config_var("SOABI"))  # here, as it imports a module
HINT = "The Python engine needs no build: engine='python', or 'auto'."
FAILURE = "failure.txt"
"""Beside where the library would be: why it could not be built."""


def native_path() -> Path:
    """Return the path in the cache that the engine for this torch, Python and source has once it is built."""
    return cache_home() / native_folder() / f"{LIBRARY_NAME}.so"


@cache
def native_folder() -> str:
    """Return the name of the folder of the engine for this torch, Python and source, in the cache or in the package."""
    parts = (
        torch.__version__,
        str(torch.version.git_version),
        *_torch_abi(),
        _PYTHON_ABI,
        platform.machine(),
        *(hashlib.sha256(source.read_bytes()).hexdigest() for source in _SOURCES),
    )
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
    return f"torch-{torch.__version__}-{sys.implementation.cache_tag}-{key}"


def _torch_abi() -> list[str]:
    """Return what differs between builds of one version of torch: their ABI, and the sizes of their libraries.

    `torch.__config__` knows their compilers, but to ask it starts CUDA's driver, which forked children then cannot use.
    """
    libraries = sorted(Path(torch.__file__).with_name("lib").glob("libtorch_*"))
    abi = torch.compiled_with_cxx11_abi(), getattr(torch._C, "_PYBIND11_BUILD_ABI", None)
    return [str(value) for value in (*abi, *(library.stat().st_size for library in libraries))]


def find_library() -> Path:
    """Return the engine of the cache, else of a wheel; raises EngineError if none is, or others may have changed it."""
    try:
        path = native_path()
        problem = _problem(path)
        if problem is None:
            return path
    except EngineError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename} cannot be read: {error.strerror}"
    # Whoever may write into the package may also change this code.
    package = importlib.util.find_spec(_PACKAGE)
    for folder in (package and package.submodule_search_locations) or ():
        packaged = Path(folder, native_folder(), f"{LIBRARY_NAME}.so")
        if packaged.is_file():
            return packaged
    raise EngineError(problem)


def is_built() -> bool:
    """Return whether the engine for this torch is there, and may be loaded."""
    try:
        find_library()
    except EngineError:
        return False
    return True


def _problem(path: Path) -> str | None:
    """Return why the library in the cache is not to be loaded, None if it may be."""
    if sys.platform != "linux":
        return "it is for Linux"
    if not path.is_file():
        if (path.parent / FAILURE).is_file():
            return f"{(path.parent / FAILURE).read_text('utf-8')}; `modtrace build` tries again"
        return f"it is not built for torch {torch.__version__}; run `modtrace build`"
    for place in (path.parent.parent, path.parent, path):
        if (distrust := why_distrusted(place)) is not None:
            return distrust
    return None


def why_distrusted(place: Path) -> str | None:
    """Return why another user may have changed this file or folder; None if no other user can have."""
    status, trusted = place.stat(), (0, os.geteuid())
    if status.st_uid not in trusted or place.lstat().st_uid not in trusted:  # the second one of the link, if it is one
        return f"{place} belongs to another user ({status.st_uid}); name a folder of your own in MODTRACE_CACHE"
    # In a folder as /tmp, others can add files and not replace them.
    sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky:
        return f"{place} can be written by others; run `chmod go-w {shlex.quote(str(place))}`"
    return None


@cache
def _load() -> ModuleType:
    path = find_library()
    try:
        loader = importlib.machinery.ExtensionFileLoader(LIBRARY_NAME, str(path))
        spec = importlib.util.spec_from_loader(LIBRARY_NAME, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise EngineError(f"{path} cannot be loaded: {error}; run `modtrace build --force`") from error
    # Whether or not a recording runs: threads that the child does not have may have held its locks.
    in_forked_child(module.after_fork)
    return module


def forget_loaded() -> None:
    """Look for the engine again when it is loaded next: it was built."""
    _load.cache_clear()


def why_unavailable() -> str | None:
    """Return why the native engine cannot be had in this process, and what to do; None if it can."""
    try:
        _load()
    except EngineError as error:
        return str(error)
    return None


def load() -> ModuleType:
    """Load the built engine's extension module.

    Raises:
        EngineError: it is not built for this torch, may have been changed by others, or does not load.
    """
    try:
        return _load()
    except EngineError as error:
        raise EngineError(f"no native engine: {error}. {HINT}") from error
