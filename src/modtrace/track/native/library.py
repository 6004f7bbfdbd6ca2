"""Build the native engine against the installed torch, and load what was built."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from ..._errors import EngineError

__all__ = ["build", "is_built", "load", "native_path"]

_MODULE = "modtrace_native"
_FOLDER = Path(__file__).parent
_SOURCES = sorted(_FOLDER.glob("*.cpp"))
_HEADERS = sorted(_FOLDER.glob("*.h"))
_BUILD_SCRIPT = """
import sys
from torch.utils.cpp_extension import load
name, folder, *sources = sys.argv[1:]
flags = ["-O3", "-fno-plt", "-ftls-model=initial-exec", "-fvisibility=hidden"]
load(name, sources, build_directory=folder, extra_cflags=flags, is_python_module=False)
"""
_HINT = "The portable engine needs no build: engine='python', or 'auto'."


def native_path() -> Path:
    """Return the path that the engine for this torch, Python and source has once it is built.

    The cache is `$MODTRACE_CACHE`, else `modtrace` in `$XDG_CACHE_HOME` or `~/.cache`.
    """
    cache_home = os.environ.get("MODTRACE_CACHE")
    home = Path(cache_home) if cache_home else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "modtrace"
    parts = (
        torch.__version__,
        str(torch.version.git_version),
        str(torch.compiled_with_cxx11_abi()),
        str(sysconfig.get_config_var("SOABI")),
        platform.machine(),
        *(hashlib.sha256(source.read_bytes()).hexdigest() for source in (*_SOURCES, *_HEADERS)),
    )
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
    return home.expanduser() / f"torch-{torch.__version__}-{sys.implementation.cache_tag}-{key}" / f"{_MODULE}.so"


def is_built() -> bool:
    """Return whether the engine for this torch is built."""
    return native_path().is_file()


@cache
def load() -> ModuleType:
    """Load the built engine's extension module.

    Raises:
        EngineError: it is not built for this torch, or does not load.
    """
    path = native_path()
    if not path.is_file():
        raise EngineError(
            f"the native engine is not built for torch {torch.__version__}; run `modtrace build`. {_HINT}"
        )
    loader = importlib.machinery.ExtensionFileLoader(_MODULE, str(path))
    spec = importlib.util.spec_from_loader(_MODULE, loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise EngineError(f"{path}: cannot be loaded: {error}. Run `modtrace build --force`. {_HINT}") from error
    return module


def build(force: bool = False) -> Path:
    """Compile the engine against the installed torch, unless that was done before, and return its path.

    Args:
        force: build it again.

    Raises:
        EngineError: there is no compiler or no ninja, the build failed, or the cache cannot be written.
    """
    path = native_path()
    if path.is_file() and not force:
        return path
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise EngineError(f"there is no C++ compiler ({compiler}); install one (g++), or name it in CXX. {_HINT}")
    environment = dict(os.environ)
    # The script ninja of a virtual environment is found even where that is not activated.
    environment["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), environment.get("PATH", "")])
    if shutil.which("ninja", path=environment["PATH"]) is None:
        raise EngineError(f"there is no ninja; run `pip install ninja`. {_HINT}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as work:
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", _BUILD_SCRIPT, _MODULE, work, *map(str, _SOURCES)],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            built = Path(work) / f"{_MODULE}.so"
            if done.returncode != 0 or not built.is_file():
                raise EngineError(
                    f"the native engine could not be built. {_HINT}\n{_first_errors(done.stdout + done.stderr)}"
                )
            # Several ranks may build at once; each moves a whole file into place.
            os.replace(built, path)
    except OSError as error:
        raise EngineError(f"{path.parent}: {error.strerror}; name a writable folder in MODTRACE_CACHE") from error
    load.cache_clear()
    return path


def _first_errors(output: str) -> str:
    lines = [line for line in output.splitlines() if "error" in line.lower()] or output.splitlines()
    return "\n".join(lines[:8])
