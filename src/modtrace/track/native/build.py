"""Builds the native engine into the user's cache; it needs only a C++ compiler."""

import contextlib
import ctypes
import errno
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..._errors import EngineError
from ..._files import LIBRARY_NAME
from ...record_options import EngineName
from ...ring import Kind, slot_format
from .library import FAILURE, HINT, find_library, forget_loaded, is_built, native_path, why_distrusted

UNITS = {
    "calls": (
        "-O3",
        (
            *("backward.cpp", "engine.cpp", "flops.cpp", "greenlets.cpp"),
            *("memory.cpp", "module.cpp", "module_calls.cpp", "observers.cpp", "outside_operators.cpp", "ranges.cpp"),
        ),
    ),
    "collectives": ("-O2", ("collectives.cpp",)),
    "devices": ("-O2", ("device/reader.cpp", "device/times.cpp")),
}
"""Optimization level and sources of each compilation unit: torch's headers cost most, and each unit reads them once."""
CUDA_UNIT = {"cuda": ("-O2", ("device/cuda_memory.cpp",))}
"""The unit that is left out if torch has no CUDA, or CUDA's headers are not found."""
WORK_PREFIX = "work-"
"""Prefix of the temporary folder of a build, next to the library."""
_FOLDER = Path(__file__).parent / "cpp"
# NDEBUG like torch: without it, RecordFunction has another layout.
_FLAGS = ("-DNDEBUG", "-fPIC", "-fno-plt", "-ftls-model=initial-exec", "-fvisibility=hidden", "-w")
# Otherwise torch's headers include the headers of all operators, more than half of all headers.
_FEWER_HEADERS = "-DAT_PER_OPERATOR_HEADERS"
_LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")


def _compiler() -> list[str]:
    # $CXX may have arguments, such as in "ccache g++".
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


def missing_compiler() -> str | None:
    """Return why the engine cannot be compiled (no Linux, compiler or Python headers), and a remedy; None if it can."""
    if sys.platform != "linux":
        return "it is for Linux"
    try:
        command = _compiler()
    except ValueError as error:
        return f"CXX is not a command: {error}: {os.environ['CXX']}"
    is_found = shutil.which(command[0]) is not None
    if not is_found or subprocess.run([*command, "--version"], capture_output=True, check=False).returncode != 0:
        return f"there is no C++ compiler ({shlex.join(command)}); install one (g++), or name it in CXX"
    headers = sysconfig.get_path("include")
    if not Path(headers, "Python.h").is_file():
        return f"there is no Python.h in {headers}; install Python's headers (python3-dev)"
    return None


def units() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return the compilation units for the torch of this process, like `UNITS`."""
    return UNITS if _cuda_headers() is None else UNITS | CUDA_UNIT


def compile_library(path: Path) -> None:
    """Compile the engine for the torch of this process; an existing library is replaced atomically.

    Raises EngineError if it cannot be compiled or loaded, OSError if the folder cannot be written or a disk is full.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=WORK_PREFIX, ignore_cleanup_errors=True) as work:
        library = Path(work) / f"{LIBRARY_NAME}.so"
        Path(work, "slot_format.h").write_text(_slot_format_header(), "utf-8")
        flags = [*_FLAGS, _FEWER_HEADERS, f"-I{work}", *_flags_of_torch(), *_short_paths(work)]
        cuda = _cuda_headers()
        flags += [] if cuda is None else ["-isystem", str(cuda)]
        commands, objects = [], []
        for unit, (level, names) in units().items():
            source, object_file = Path(work) / f"{unit}.cpp", Path(work) / f"{unit}.o"
            source.write_text("".join(f'#include "{_FOLDER / name}"\n' for name in names), "utf-8")
            commands.append([*_compiler(), level, *flags, "-c", str(source), "-o", str(object_file)])
            objects.append(str(object_file))
        _run(commands)
        libraries = _LIBRARIES if cuda is None else ("c10_cuda", *_LIBRARIES)
        torch_libraries = [f"-L{_torch_folder() / 'lib'}", *(f"-l{name}" for name in libraries)]
        _run([[*_compiler(), "-shared", *objects, *torch_libraries, "-o", str(library)]])
        library.chmod(0o755)
        try:
            # Do not keep a library that does not load, such as one of a compiler with another ABI than torch's.
            ctypes.CDLL(str(library), os.RTLD_NOW)
        except OSError as error:
            raise EngineError(f"the library for torch {torch.__version__} does not load: {error}") from error
        # Several processes may build at once; each moves a complete file into place.
        os.replace(library, path)


def _slot_format_header() -> str:
    """Return `ring/slot_format.py` as C++: each number (`NAME_BITS` is `kNameBits`), and the kinds."""
    numbers = {name: value for name, value in vars(slot_format).items() if name[0] != "_" and isinstance(value, int)}
    constants = [
        f"constexpr {'uint64_t' if name.endswith('_MASK') else 'int64_t'} {_constant(name)} = {value};"
        for name, value in numbers.items()
    ]
    kinds = [f"  {_constant(kind.name)} = {kind.value}," for kind in Kind]
    lines = ["#pragma once", "#include <cstdint>", "namespace modtrace {", *constants, "enum Kind : int64_t {", *kinds]
    return "\n".join([*lines, "};", "}  // namespace modtrace", ""])


def _constant(name: str) -> str:
    return "k" + name.title().replace("_", "")


def _run(commands: list[list[str]]) -> None:
    """Run commands in parallel; raises EngineError with the first errors that a command prints.

    Raises OSError if the error is a full disk, which does not depend on the code. A terminal sends Ctrl-C to the
    commands too.
    """
    disk_full = os.strerror(errno.ENOSPC)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    running = [subprocess.Popen(command, env={**os.environ, "LC_ALL": "C"}, **pipes) for command in commands]
    for process, output in [(process, process.communicate()[0]) for process in running]:
        if process.returncode != 0 and disk_full in output:
            raise OSError(errno.ENOSPC, disk_full)
        if process.returncode != 0:
            lines = [line for line in output.splitlines() if "error" in line.lower()] or output.splitlines()
            raise EngineError("it could not be built: " + "\n".join(lines[:8]))


def _flags_of_torch() -> Iterator[str]:
    """Yield the compiler flags of code that is linked with torch."""
    include = _torch_folder() / "include"
    folders = [include, include / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_path("include"))]
    for folder in folders:
        yield from ("-isystem", str(folder))
    yield "-std=c++2a"  # the headers of torch 2.13 need it, and those of 2.11 allow it
    yield f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    yield f"-DTORCH_EXTENSION_NAME={LIBRARY_NAME}"
    for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI"):  # of pybind11; torch before 2.9 has these values
        if value := getattr(torch._C, f"_PYBIND11_{name}", None):
            yield f'-DPYBIND11_{name}="{value}"'


def _cuda_headers() -> Path | None:
    """Return the folder of CUDA's headers: in Triton, which torch requires, or else in a toolkit."""
    if torch.version.cuda is None:
        return None
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
    folders = (_torch_folder().parent / "triton" / "backends" / "nvidia" / "include", toolkit)
    return next((folder for folder in folders if (folder / "cuda_runtime.h").is_file()), None)


def _short_paths(work: str) -> Iterator[str]:
    """Yield the flags that keep the paths of this machine out of the library, which a wheel may contain."""
    torch_include, python_include = _torch_folder() / "include", sysconfig.get_path("include")
    for folder, name in ((torch_include, "torch"), (python_include, "python"), (_FOLDER, "modtrace"), (work, "build")):
        # The compiler may follow links.
        for prefix in dict.fromkeys((str(folder), os.path.realpath(folder))):
            yield f"-ffile-prefix-map={prefix}={name}"


def _torch_folder() -> Path:
    return Path(torch.__file__).parent


def build(force: bool = False) -> Path:
    """Return the engine for the installed torch; compile it into the user's cache if there is none.

    If several processes call this at once, one compiles, and the others wait for it.

    Raises:
        EngineError: there is no compiler, the build failed, or the cache cannot be written or is open to others.
    """
    if not force and is_built():
        return find_library()
    if (missing := missing_compiler()) is not None:
        raise EngineError(f"{missing}. {HINT}")
    path = native_path()
    try:
        with _exclusive(path.parent):
            if force or not is_built():
                _compile(path)
    except EngineError as error:
        raise EngineError(f"the native engine: {error}. {HINT}") from error
    except OSError as error:
        raise EngineError(f"{path.parent}: {error.strerror}; name a writable folder in MODTRACE_CACHE") from error
    return path


def build_if_missing(engine: EngineName, say: Callable[[str], object]) -> None:
    """Build the engine if a recording would use it, there is a compiler, and no build failed before.

    After a failure, `why_unavailable` returns its reason. `MODTRACE_BUILD=0` prevents the build. The process that runs
    the compiler calls `say` first.
    """
    if engine == "python" or os.environ.get("MODTRACE_BUILD") == "0" or is_built() or missing_compiler() is not None:
        return
    # If the cache cannot be used, loading the engine reports it.
    with contextlib.suppress(EngineError, OSError):
        path = native_path()
        with _exclusive(path.parent):
            # Meanwhile another rank may have built it, or failed.
            if not is_built() and not (path.parent / FAILURE).exists():
                say(f"compiling the native engine for torch {torch.__version__}, once; about 25 seconds")
                try:
                    _compile(path)
                except OSError as error:  # not kept as a failed build: the reason may be gone the next time
                    say(f"the native engine is not compiled: {path.parent}: {error.strerror}")
    forget_loaded()


def _compile(path: Path) -> None:
    """Compile the engine, while the caller holds the lock; a failure is written next to the library."""
    failure = path.parent / FAILURE
    for old_folder in path.parent.glob(f"{WORK_PREFIX}*"):  # of a process that was killed
        shutil.rmtree(old_folder, ignore_errors=True)
    try:
        compile_library(path)
    except EngineError as error:
        failure.write_text(" ".join(str(error).split()), "utf-8")
        raise
    failure.unlink(missing_ok=True)
    forget_loaded()


def _make_folders(path: Path) -> None:
    for folder in (path.parent.parent, path.parent):
        # 0o755, whatever the umask allows others.
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o755, exist_ok=True)
        if (distrust := why_distrusted(folder)) is not None:
            raise EngineError(distrust)


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Run the block while no other process runs it for the same folder."""
    import fcntl  # only POSIX has it, and only there is the engine compiled

    _make_folders(folder / "library")
    with open(folder / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
