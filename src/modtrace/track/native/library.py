"""Building the native engine against the installed torch, and finding what was built."""

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
_SOURCE = Path(__file__).with_name("module.cpp")
_SOURCES = (_SOURCE, *sorted(_SOURCE.parent.glob("*.h")))
_BUILD = """
import sys
from torch.utils.cpp_extension import load
flags = ["-O3", "-fno-plt", "-ftls-model=initial-exec"]
load(sys.argv[1], [sys.argv[2]], build_directory=sys.argv[3], extra_cflags=flags, is_python_module=False)
"""
_HINT = "The portable engine needs no build: engine='python', or 'auto'."


def native_path() -> Path:
    """Return where the engine for this torch, Python and source lies once it is built.

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
        *(hashlib.sha256(source.read_bytes()).hexdigest() for source in _SOURCES),
    )
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
    return home.expanduser() / f"torch-{torch.__version__}-{sys.implementation.cache_tag}-{key}" / f"{_MODULE}.so"


def is_built() -> bool:
    """Whether the engine for this torch is there."""
    return native_path().is_file()


@cache
def load() -> ModuleType:
    """Load the built engine.

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
    """Compile the engine against the installed torch, and return where it lies; nothing where it is built already.

    Args:
        force: build it again.

    Raises:
        EngineError: there is no compiler or no ninja, or the build failed.
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
                [sys.executable, "-W", "ignore", "-c", _BUILD, _MODULE, str(_SOURCE), work],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            built = Path(work) / f"{_MODULE}.so"
            if done.returncode != 0 or not built.is_file():
                raise EngineError(f"the native engine could not be built. {_HINT}\n{_why(done.stdout + done.stderr)}")
            # Several ranks may build at once; each moves a whole file into place.
            os.replace(built, path)
    except OSError as error:
        raise EngineError(f"{path.parent}: {error.strerror}; name a writable folder in MODTRACE_CACHE") from error
    load.cache_clear()
    return path


def _why(output: str) -> str:
    lines = [line for line in output.splitlines() if "error" in line.lower()] or output.splitlines()
    return "\n".join(lines[:8])
