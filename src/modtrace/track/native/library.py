"""The built engine for the installed torch: its path, whether it is safe to load, and loading it."""

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
"""The files that a library depends on: its code, and the script that compiles it."""
_PACKAGE = "modtrace_engine"
"""The package that has built engines in a wheel; see `scripts/wheels`."""
_PYTHON_ABI = str(sysconfig.get_config_var("SOABI"))  # here, as it imports a module
HINT = "The Python engine needs no build: engine='python', or 'auto'."
FAILURE = "failure.txt"
"""The file, in the folder of the library, with the reason of a failed build."""


def native_path() -> Path:
    """Return the path in the cache of the engine for this torch, Python and source, built or not."""
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
    """Return the values that differ between builds of one version of torch: the ABI, and the sizes of the libraries.

    `torch.__config__` knows the compiler, but reading it starts CUDA's driver, which forked children then cannot use.
    """
    libraries = sorted(Path(torch.__file__).with_name("lib").glob("libtorch_*"))
    abi = torch.compiled_with_cxx11_abi(), getattr(torch._C, "_PYBIND11_BUILD_ABI", None)
    return [str(value) for value in (*abi, *(library.stat().st_size for library in libraries))]


def find_library() -> Path:
    """Return the engine in the cache, else in a wheel; raises EngineError if there is none, or it is not safe."""
    try:
        path = native_path()
        problem = _problem(path)
        if problem is None:
            return path
    except EngineError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename} cannot be read: {error.strerror}"
    # No check: a user who can write into the package can also change this code.
    package = importlib.util.find_spec(_PACKAGE)
    for folder in (package and package.submodule_search_locations) or ():
        packaged = Path(folder, native_folder(), f"{LIBRARY_NAME}.so")
        if packaged.is_file():
            return packaged
    raise EngineError(problem)


def is_built() -> bool:
    """Return whether the engine for this torch is built, and is safe to load."""
    try:
        find_library()
    except EngineError:
        return False
    return True


def _problem(path: Path) -> str | None:
    """Return the reason not to load the library in the cache; None if it is safe."""
    if sys.platform != "linux":
        return "it is for Linux"
    if not path.is_file():
        if (path.parent / FAILURE).is_file():
            return f"{(path.parent / FAILURE).read_text('utf-8')}; `modtrace build` tries again"
        return f"it is not built for torch {torch.__version__}; run `modtrace build`"
    for checked_path in (path.parent.parent, path.parent, path):
        if (distrust := why_distrusted(checked_path)) is not None:
            return distrust
    return None


def why_distrusted(path: Path) -> str | None:
    """Return the reason why another user could have changed a file or folder; None if no other user could."""
    status, trusted_ids = path.stat(), (0, os.geteuid())
    if status.st_uid not in trusted_ids or path.lstat().st_uid not in trusted_ids:  # `lstat`: the owner of a link
        return f"{path} belongs to another user ({status.st_uid}); name a folder of your own in MODTRACE_CACHE"
    # In a folder such as /tmp, other users can add files, but cannot replace files.
    is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_sticky:
        return f"{path} can be written by others; run `chmod go-w {shlex.quote(str(path))}`"
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
    # Even if no recording runs: threads that the child does not have may have held the engine's locks.
    in_forked_child(module.after_fork)
    return module


def forget_loaded() -> None:
    """Search for the engine again at the next load, after a build."""
    _load.cache_clear()


def why_unavailable() -> str | None:
    """Return why the native engine cannot be loaded in this process, and a remedy; None if it can."""
    try:
        _load()
    except EngineError as error:
        return str(error)
    return None


def load() -> ModuleType:
    """Load the built engine's extension module.

    Raises:
        EngineError: it is not built for this torch, other users could have changed it, or it does not load.
    """
    try:
        return _load()
    except EngineError as error:
        raise EngineError(f"no native engine: {error}. {HINT}") from error
