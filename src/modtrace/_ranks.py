"""Which rank of its job this process is, and paths of files that are named after that."""

import hashlib
import os
import re
import socket
import sys
from collections.abc import Mapping

from ._errors import RecordingError

ROLE = r"[\w.-]{1,40}"
"""A pattern that the name of a role matches as a whole."""


def rank_in(environment: Mapping[str, str]) -> int | None:
    """Return the rank in torch's process group, if there is one, else `RANK`; None if that is not a number."""
    group, text = _process_group(), environment.get("RANK", "")
    return group[0] if group is not None else int(text) if text.isdecimal() else None


def role_in(environment: Mapping[str, str]) -> str | None:
    """Return what this process does in its job, as torchrun's `--role` says it; None if nothing says it."""
    role = environment.get("ROLE_NAME", "default")
    return role if role != "default" and re.fullmatch(ROLE, role) else None


def world_size_in(environment: Mapping[str, str]) -> int:
    """Return the number of ranks in torch's process group, else `WORLD_SIZE`; 1 if that is not a number."""
    group, text = _process_group(), environment.get("WORLD_SIZE", "")
    return group[1] if group is not None else int(text) if text.isdecimal() else 1


def host_hash() -> str:
    """Return 12 hexadecimal digits that tell hosts apart and do not name them."""
    return hashlib.sha256(f"modtrace {socket.gethostname()}".encode()).hexdigest()[:12]


def is_shared(path: str, environment: Mapping[str, str]) -> bool:
    """Whether several ranks run, and a path that is not expanded yet does not tell them apart."""
    return world_size_in(environment) > 1 and not re.search("%[rp]", path.replace("%%", ""))


def add_rank(path: str, environment: Mapping[str, str]) -> str:
    """Return `path` with `.rank%r` before its suffixes if ranks would share it: for recordings without code.

    Example:
        >>> add_rank("a.json.gz", {"RANK": "3", "WORLD_SIZE": "4"})
        'a.rank%r.json.gz'
    """
    return insert_before_suffixes(path, "rank%r") if is_shared(path, environment) else path


def expand_path(path: str, environment: Mapping[str, str]) -> str:
    """Return `path` with the rank, the process id and the host's hash filled in.

    Args:
        path: may hold `%r`, `%p`, `%h` and `%%`; other percent signs stay as they are.
        environment: where `RANK` is looked up.

    Raises:
        RecordingError: there is a `%r`, and `RANK` is not a number.

    Example:
        >>> expand_path("a.%r.json", {"RANK": "3"})
        'a.3.json'
    """
    rank, text = rank_in(environment), environment.get("RANK", "")
    if "%r" in path.replace("%%", "") and rank is None and text:
        raise RecordingError(f"{path}: RANK is {text!r}; it must be a number to replace %r")
    values = {"%r": str(rank or 0), "%p": str(os.getpid()), "%h": host_hash(), "%%": "%"}
    return re.sub("%[rph%]", lambda match: values[match[0]], path)


def absolute_path(path: str) -> str:
    """Return a path that is not expanded yet as an absolute one; raises RecordingError without a working directory."""
    if os.path.isabs(path):
        return os.path.normpath(path)
    try:
        folder = os.getcwd()
    except OSError as error:
        message = f"{path}: the working directory is gone ({error.strerror}); give a path that begins with /"
        raise RecordingError(message) from error
    return os.path.normpath(os.path.join(folder.replace("%", "%%"), path))


def insert_before_suffixes(path: str, text: str) -> str:
    """Return `path` with a dot and `text` before its last suffix, or before two that are one (`.json.gz`).

    Example:
        >>> insert_before_suffixes("llama-3.2.json.gz", "x")
        'llama-3.2.x.json.gz'
    """
    folder, name = os.path.split(path)
    match = re.fullmatch(r"(.*?)((?:\.speedscope\.json|\.[^.]*)?(?:\.gz)?)", name, re.DOTALL | re.IGNORECASE)
    stem, suffixes = match.groups() if match else (name, "")
    return os.path.join(folder, f"{stem}.{text}{suffixes}")


def _process_group() -> tuple[int, int] | None:
    """Return rank and size of torch's default process group, where torch is imported and there is one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()
