"""The rank of this process in its job, and file paths that contain the rank."""

import hashlib
import os
import re
import socket
import sys
from collections.abc import Mapping

from ._errors import RecordingError

ROLE = r"[\w.-]{1,40}"
"""Pattern for the whole name of a role."""


def rank_in(environment: Mapping[str, str]) -> int | None:
    """Return the rank in torch's process group, or `RANK` without a group; None if `RANK` is not a number."""
    if (group := _process_group()) is not None:
        return group[0]
    rank = environment.get("RANK", "")
    return int(rank) if rank.isdecimal() else None


def role_in(environment: Mapping[str, str]) -> str | None:
    """Return the role of this process in its job from torchrun's `--role`; None if it is not set."""
    role = environment.get("ROLE_NAME", "default")
    return role if role != "default" and re.fullmatch(ROLE, role) else None


def world_size_in(environment: Mapping[str, str]) -> int:
    """Return the size of torch's process group, or `WORLD_SIZE` without a group; 1 if that is not a number."""
    if (group := _process_group()) is not None:
        return group[1]
    size = environment.get("WORLD_SIZE", "")
    return int(size) if size.isdecimal() else 1


def host_hash() -> str:
    """Return 12 hexadecimal digits that identify this host without its name."""
    return hashlib.sha256(f"modtrace {socket.gethostname()}".encode()).hexdigest()[:12]


def is_shared(path: str, environment: Mapping[str, str]) -> bool:
    """Return whether several ranks run and would share `path`, which is not expanded yet."""
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
        path: may contain `%r`, `%p`, `%h` and `%%`; other percent signs stay as they are.
        environment: contains `RANK`.

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
    """Return an absolute form of a path not expanded yet; raises RecordingError if there is no working directory."""
    if os.path.isabs(path):
        return os.path.normpath(path)
    try:
        folder = os.getcwd()
    except OSError as error:
        message = f"{path}: the working directory is gone ({error.strerror}); give a path that begins with /"
        raise RecordingError(message) from error
    return os.path.normpath(os.path.join(folder.replace("%", "%%"), path))


def insert_before_suffixes(path: str, text: str) -> str:
    """Return `path` with a dot and `text` before its last suffix, or before a double suffix such as `.json.gz`.

    Example:
        >>> insert_before_suffixes("llama-3.2.json.gz", "x")
        'llama-3.2.x.json.gz'
    """
    folder, name = os.path.split(path)
    match = re.fullmatch(r"(.*?)((?:\.speedscope\.json|\.[^.]*)?(?:\.gz)?)", name, re.DOTALL | re.IGNORECASE)
    stem, suffixes = match.groups() if match else (name, "")
    return os.path.join(folder, f"{stem}.{text}{suffixes}")


def _process_group() -> tuple[int, int] | None:
    """Return rank and size of torch's default process group; None if torch is not imported or has no group."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()
