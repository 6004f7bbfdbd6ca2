"""Build the native engine against the installed torch, and load what was built."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from ..._errors import EngineError
from .cache_folder import LIBRARY_NAME, cache_home, engine_folder

__all__ = ["build", "is_built", "load", "missing_compiler", "native_path", "why_unavailable"]

_FOLDER = Path(__file__).parent / "cpp"
_SOURCES = sorted(_FOLDER.glob("*.cpp"))
_HEADERS = sorted(_FOLDER.glob("*.h"))
# What does not load is not kept: a compiler whose ABI is not torch's leaves symbols that nobody has.
_BUILD_SCRIPT = """
import importlib.machinery, importlib.util, sys
import torch.distributed
from torch.utils.cpp_extension import load
name, folder, *sources = sys.argv[1:]
flags = ["-O3", "-fno-plt", "-ftls-model=initial-exec", "-fvisibility=hidden"]
if torch.distributed.is_available():
    flags.append("-DMODTRACE_DISTRIBUTED")
load(name, sources, build_directory=folder, extra_cflags=flags, is_python_module=False)
loader = importlib.machinery.ExtensionFileLoader(name, f"{folder}/{name}.so")
importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
"""
_HINT = "The portable engine needs no build: engine='python', or 'auto'."
# A library is followed by this and the SHA-256 of all before. The loader of the system does not look there, and may
# kill the process where a part of the file is missing.
_SEAL = b"modtrace library sha256 "


def native_path() -> Path:
    """Return the path that the engine for this torch, Python and source has once it is built.

    Raises:
        EngineError: nothing says where the user's folders are.
    """
    parts = (
        torch.__version__,
        str(torch.version.git_version),
        *_torch_abi(),
        str(sysconfig.get_config_var("SOABI")),
        platform.machine(),
        *(hashlib.sha256(source.read_bytes()).hexdigest() for source in (*_SOURCES, *_HEADERS)),
    )
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
    return cache_home() / engine_folder(torch.__version__, key) / f"{LIBRARY_NAME}.so"


def _torch_abi() -> list[str]:
    """Return what tells the ABI of the compiler that built torch: two builds of one version may differ in it."""
    compilers = [line.strip() for line in torch.__config__.show().splitlines()]
    return [
        str(torch.compiled_with_cxx11_abi()),
        str(getattr(torch._C, "_PYBIND11_BUILD_ABI", None)),
        *(line for line in compilers if line.startswith(("- GCC", "- clang", "- C++ Version"))),
    ]


def is_built() -> bool:
    """Return whether the engine for this torch is built, and may be loaded."""
    try:
        return _problem(native_path()) is None
    except OSError:
        return False


def _problem(path: Path) -> str | None:
    """Return why the library is not to be loaded, None where it may be."""
    if not path.is_file():
        return f"it is not built for torch {torch.__version__}; run `modtrace build`"
    for place in (path.parent.parent, path.parent, path):
        if (distrust := _why_distrusted(place)) is not None:
            return distrust
    content, seal, digest = path.read_bytes().rpartition(_SEAL)
    if not seal or hashlib.sha256(content).digest() != digest:
        return f"{path} is damaged; run `modtrace build`"
    return None


def _why_distrusted(place: Path) -> str | None:
    """Return why what lies there may be someone else's, None where it may not."""
    status = place.stat()
    if status.st_uid not in (0, os.geteuid()):
        return f"{place} belongs to another user ({status.st_uid}); name a folder of your own in MODTRACE_CACHE"
    # In a folder as /tmp, others can add files and not replace them.
    sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky:
        return f"{place} can be written by others; run `chmod go-w {shlex.quote(str(place))}`"
    return None


@cache
def _load() -> ModuleType:
    path = native_path()
    try:
        problem = _problem(path)
        if problem is not None:
            raise EngineError(problem)
        loader = importlib.machinery.ExtensionFileLoader(LIBRARY_NAME, str(path))
        spec = importlib.util.spec_from_loader(LIBRARY_NAME, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except (ImportError, OSError) as error:
        raise EngineError(f"{path} cannot be loaded: {error}; run `modtrace build --force`") from error
    return module


def why_unavailable() -> str | None:
    """Return why the native engine cannot be had in this process, and what to do; None where it can."""
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
        raise EngineError(f"no native engine: {error}. {_HINT}") from error


def _compiler() -> list[str]:
    # $CXX may have arguments, as in "ccache g++".
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


def missing_compiler() -> str | None:
    """Say that there is no C++ compiler, and what to do; None where there is one."""
    command = _compiler()
    found = shutil.which(command[0]) is not None
    if found and subprocess.run([*command, "--version"], capture_output=True, check=False).returncode == 0:
        return None
    return f"there is no C++ compiler ({shlex.join(command)}); install one (g++), or name it in CXX"


def build(force: bool = False) -> Path:
    """Compile the engine against the installed torch, unless that was done before, and return its path.

    Args:
        force: build it again.

    Raises:
        EngineError: there is no compiler or no ninja, the build failed, or the cache cannot be written or is open to
            others.
    """
    path = native_path()
    try:
        if not force and _problem(path) is None:
            return path
        if (missing := missing_compiler()) is not None:
            raise EngineError(f"{missing}. {_HINT}")
        environment = dict(os.environ)
        # The script ninja of a virtual environment is found even where that is not activated.
        environment["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), environment.get("PATH", "")])
        if shutil.which("ninja", path=environment["PATH"]) is None:
            raise EngineError(f"there is no ninja; run `pip install ninja`. {_HINT}")
        for folder in (path.parent.parent, path.parent):
            # Whatever the umask lets others do.
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o755, exist_ok=True)
            if (distrust := _why_distrusted(folder)) is not None:
                raise EngineError(f"{distrust}. {_HINT}")
        _compile(path, environment)
    except OSError as error:
        raise EngineError(f"{path.parent}: {error.strerror}; name a writable folder in MODTRACE_CACHE") from error
    _load.cache_clear()
    return path


def _compile(path: Path, environment: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        # Torch takes $CXX for the name of one program.
        compiler = Path(work) / "c++"
        compiler.write_text(f'#!/bin/sh\nexec {shlex.join(_compiler())} "$@"\n')
        compiler.chmod(0o755)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _BUILD_SCRIPT, LIBRARY_NAME, work, *map(str, _SOURCES)],
            env=environment | {"CXX": str(compiler)},
            capture_output=True,
            text=True,
            check=False,
        )
        built = Path(work) / f"{LIBRARY_NAME}.so"
        if done.returncode != 0 or not built.is_file():
            raise EngineError(
                f"the native engine could not be built. {_HINT}\n{_first_errors(done.stdout + done.stderr)}"
            )
        content = built.read_bytes()
        built.write_bytes(content + _SEAL + hashlib.sha256(content).digest())
        built.chmod(0o755)
        # Several ranks may build at once; each moves a whole file into place.
        os.replace(built, path)


def _first_errors(output: str) -> str:
    lines = [line for line in output.splitlines() if "error" in line.lower()] or output.splitlines()
    return "\n".join(lines[:8])
