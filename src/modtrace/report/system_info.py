"""Describe the machine on which a report is made: versions and hardware, line by line from an allow-list."""

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

__all__ = ["COLLECT_ENV_TIMEOUT_S", "allowed_lines", "environment"]

COLLECT_ENV_TIMEOUT_S = 30.0
_PACKAGES = ("numpy", "orjson", "perfetto", "protobuf", "click", "rich")
_VERSION = re.compile(r"\d[\w.+!-]{0,40}", re.ASCII)

_PLAIN = r"[\w .,+()/-]{1,80}"
_ALLOWED_KEYS = {
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
"""Lines `key: value` of torch.utils.collect_env that are allowed, with as much of the value as matches."""
_GPU_LINE = re.compile(r"GPU \d+: [\w .-]{1,60}", re.ASCII)
_CUDNN_LINE = re.compile(r"/\S*/(libcudnn\w*\.so\.[\d.]+)")
_PACKAGE_LINE = re.compile(
    r"\[(?:pip3?|conda)\] ((?:numpy|optree|functorch|onnx\w*|triton|nvidia-[a-z0-9-]+|intel-[a-z-]+"
    r"|pytorch-triton(?:-rocm|-xpu)?|(?:py)?torch|torch(?:vision|audio|text|data|rec|ao|tune|metrics|elastic)|pytorch-lightning|lightning))"
    r"(?:==|\s+)(\d[\w.+!-]{0,40})(?=\s|$)",
    re.ASCII,
)


def environment(redact: Callable[[str], str], timeout_s: float = COLLECT_ENV_TIMEOUT_S) -> str:
    """Return the text of `environment.txt`.

    It has no values of environment variables, no paths and no names of the user or the machine. torch's part comes from
    a process of its own; if that fails, or takes longer than `timeout_s`, the text says so.

    Args:
        redact: replaces what identifies a person or a machine.
        timeout_s: seconds that torch's own report may take.
    """
    lines = [
        f"modtrace {__version__}",
        f"{platform.python_implementation()} {platform.python_version()}",
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        *(f"{package} {_version(package)}" for package in _PACKAGES),
    ]
    torch_lines = (
        _collect_torch_env(timeout_s) if importlib.util.find_spec("torch") else ("torch is not installed here",)
    )
    text = ["The environment in which this report was made:", "", *lines, "", *torch_lines]
    return "".join(f"{redact(line)}\n" for line in text)


def allowed_lines(text: str) -> Iterator[str]:
    """Yield what is allowed of the output of `torch.utils.collect_env`."""
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        allowed = _ALLOWED_KEYS.get(key)
        package = _PACKAGE_LINE.match(line)
        if package:
            yield f"{package[1]} {package[2]}"
        elif colon and allowed is not None:
            if found := allowed.match(value.strip()):
                yield f"{key}: {found[0].rstrip()}"
        elif found := _GPU_LINE.match(line) or _CUDNN_LINE.fullmatch(line):
            yield found[found.lastindex or 0].rstrip()


def _version(package: str) -> str:
    try:
        found = _VERSION.fullmatch(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return "is not installed"
    return found[0] if found else "of an unknown version"


@functools.cache
def _collect_torch_env(timeout_s: float) -> tuple[str, ...]:
    # Not with -m, which warns. PYTHONSAFEPATH: a torch.py in the current folder must not be run.
    command = [sys.executable, "-c", "from torch.utils.collect_env import main; main()"]
    environ = {**os.environ, "PYTHONSAFEPATH": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, env=environ
    )
    try:
        text, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _kill(process)
        return (f"torch.utils.collect_env took more than {timeout_s:g} s and was stopped",)
    except BaseException:
        _kill(process)
        raise
    if process.returncode != 0:
        return (f"torch.utils.collect_env failed ({process.returncode})",)
    return tuple(allowed_lines(text.decode(errors="replace")))


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill it with all that it started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
