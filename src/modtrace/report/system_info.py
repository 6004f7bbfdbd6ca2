"""The machine on which a report is made: versions and hardware, line by line from an allow-list."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

from .._version import __version__

__all__ = ["PATIENCE", "environment", "filtered"]

PATIENCE = 30.0
"""Seconds that torch's own report may take."""
_OURS = ("numpy", "orjson", "perfetto", "protobuf", "click", "rich")
_VERSION = re.compile(r"\d[\w.+!-]{0,40}", re.ASCII)

_PLAIN = r"[\w .,+()/-]{1,80}"
_KEYS = {
    **dict.fromkeys(
        (
            *("PyTorch version", "CUDA used to build PyTorch", "ROCM used to build PyTorch", "CUDA runtime version"),
            *("Nvidia driver version", "HIP runtime version", "MIOpen runtime version", "Libc version"),
            *("CMake version", "Clang version", "GCC version", "OS", "cuDNN version"),
        ),
        re.compile(_PLAIN, re.ASCII),
    ),
    **dict.fromkeys(
        ("Is debug build", "Is CUDA available", "Is XPU available", "Is XNNPACK available"), re.compile("True|False")
    ),
    "Python version": re.compile(r"\d+\.\d+\.\d+\w*"),
    "GPU models and configuration": re.compile(r"Could not collect|GPU \d+: [\w .-]{1,60}", re.ASCII),
    **dict.fromkeys(
        ("CPU(s)", "Thread(s) per core", "Core(s) per socket", "Socket(s)", "NUMA node(s)"), re.compile(r"\d+")
    ),
    **dict.fromkeys(("Architecture", "Model name"), re.compile(r"[\w .()@/-]{1,80}", re.ASCII)),
}
"""The lines of torch.utils.collect_env that may be told: `key: value`, as much of the value as matches."""
_GPU = re.compile(r"GPU \d+: [\w .-]{1,60}", re.ASCII)
_CUDNN = re.compile(r"/\S*/(libcudnn\w*\.so\.[\d.]+)")
_PACKAGE = re.compile(
    r"\[(?:pip3?|conda)\] ((?:numpy|optree|functorch|onnx\w*|triton|nvidia-[a-z0-9-]+|intel-[a-z-]+"
    r"|pytorch-triton(?:-rocm|-xpu)?|(?:py)?torch|torch(?:vision|audio|text|data|rec|ao|tune|metrics|elastic)|pytorch-lightning|lightning))"
    r"(?:==|\s+)(\d[\w.+!-]{0,40})(?=\s|$)",
    re.ASCII,
)


def environment(redact: Callable[[str], str], patience: float = PATIENCE) -> str:
    """Return the text of `environment.txt`.

    It has no values of environment variables, no paths and no names of the user or the machine. torch's part comes
    from a process of its own, which may fail, or take more than `patience` seconds; then it says so.
    """
    said = [
        f"modtrace {__version__}",
        f"{platform.python_implementation()} {platform.python_version()}",
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        *(f"{package} {_version(package)}" for package in _OURS),
    ]
    torch = _of_torch(patience) if importlib.util.find_spec("torch") else ("torch is not installed here",)
    lines = ["The environment in which this report was made:", "", *said, "", *torch]
    return "".join(f"{redact(line)}\n" for line in lines)


def filtered(text: str) -> Iterator[str]:
    """Yield what may be told of the output of `torch.utils.collect_env`."""
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        known = _KEYS.get(key)
        package = _PACKAGE.match(line)
        if package:
            yield f"{package[1]} {package[2]}"
        elif colon and known is not None:
            if found := known.match(value.strip()):
                yield f"{key}: {found[0].rstrip()}"
        elif found := _GPU.match(line) or _CUDNN.fullmatch(line):
            yield found[found.lastindex or 0].rstrip()


def _version(package: str) -> str:
    try:
        found = _VERSION.fullmatch(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return "is not installed"
    return found[0] if found else "of an unknown version"


@functools.cache
def _of_torch(patience: float) -> tuple[str, ...]:
    # Not with -m, which warns; and the folder in which the user stands has no say in what torch is.
    command = [sys.executable, "-c", "from torch.utils.collect_env import main; main()"]
    environ = {**os.environ, "PYTHONSAFEPATH": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, env=environ
    )
    try:
        text, _ = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        _end(process)
        return (f"torch.utils.collect_env took more than {patience:g} s and was stopped",)
    except BaseException:
        _end(process)
        raise
    if process.returncode != 0:
        return (f"torch.utils.collect_env failed ({process.returncode})",)
    return tuple(filtered(text.decode(errors="replace")))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it with all that it started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
