"""Names of ring files: the newest has the plain name, and those before it are kept under numbers.

A new ring takes the name that was asked for, `run.modtrace`. If a ring of an ended process has it, that becomes
`run.1.modtrace`, or the next number after the highest. If a running process has it, the new ring gets the number. So a
number once given stays, and the highest is the newest.

Nothing is overwritten: a name is given by a hard link, which fails if the name is there. Only who holds the lock on the
file of a name gives the name to another file.
"""

import contextlib
import os
import re
from collections.abc import Iterable

from .._errors import RingError
from .._files import RING_SUFFIXES, find_each, open_regular, read_at
from .file_format import SLOTS_OFFSET, FileHeader, parse_header
from .owner import WriterLock, name_digest, writer_state

_NUMBERED = re.compile(r"(.*)\.(\d{1,9})(\.[^./]*)?", re.DOTALL)
_PID = re.compile(r"\.pid\d+(?=\.)")


def stacks_path(ring: str) -> str:
    """Return the file beside a ring's, which its process appends Python stacks to when the signal comes."""
    return f"{ring}.stacks"


def whole_run_path(ring: str) -> str:
    """Return the file beside a ring's, in which a watcher writes what the whole run took."""
    return f"{ring}.whole.json"


def take_name(new: str, path: str, keep: int) -> str:
    """Move a new locked file to its name, and return that: `path`, or a numbered one if a process uses `path`.

    Under numbers so many rings of ended processes stay; older ones are removed. Raises OSError if no name can be given.
    """
    name = _replace_ended(new, path, keep) or give_number(new, path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    _drop_old(path, keep)
    return name


def _replace_ended(new: str, path: str, keep: int) -> str | None:
    """Give the file the name that is asked for, and return it; None if a running process has it."""
    while True:
        with contextlib.suppress(FileExistsError):
            _give(new, path)
            return path
        try:
            lock = WriterLock(path)
        except FileNotFoundError:
            if os.path.islink(path):  # to nothing
                os.replace(new, path)
                return path
            continue
        except PermissionError:  # another user's
            return None
        try:
            if not _has_ended(lock, path):
                return None
            if not _is_file(lock, path):
                continue  # another process was faster
            if keep and os.fstat(lock.fd).st_size:
                kept = give_number(path, path)
                for beside in (stacks_path, whole_run_path):
                    with contextlib.suppress(FileNotFoundError):
                        os.replace(beside(path), beside(kept))
            os.replace(new, path)
            return path
        finally:
            lock.release()


def _has_ended(lock: WriterLock, path: str) -> bool:
    """Whether no process writes the locked file; False if that cannot be known."""
    if lock.is_taken:
        return False
    try:
        header = _read_header(path, lock.fd)
    except RingError:
        return True
    return (lock.is_held and "inode" in header.writer) or writer_state(lock.fd, header) == "dead"


def _is_file(lock: WriterLock, path: str) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(lock.fd))
    except FileNotFoundError:
        return False


def _read_header(path: str, descriptor: int) -> FileHeader:
    return parse_header(path, read_at(descriptor, SLOTS_OFFSET, 0))


def _give(file: str, name: str) -> None:
    """Give a file another name; raises FileExistsError if a file has that."""
    try:
        os.link(file, name)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links, or another user's file
        if os.path.lexists(name):
            raise FileExistsError(name) from None
        os.rename(file, name)


def give_number(file: str, path: str) -> str:
    """Give a file the next number of a name, and return the numbered name."""
    number = max((number for number, _ in numbered_files(path)), default=0) + 1
    stem, suffix = os.path.splitext(path)
    while True:
        name = f"{stem}.{number}{suffix}"
        with contextlib.suppress(FileExistsError):
            _give(file, name)
            return name
        number += 1


def numbered_files(path: str) -> list[tuple[int, str]]:
    """Return the files that have a numbered form of a name, with their numbers, ascending."""
    folder = os.path.dirname(path)
    try:
        names = os.listdir(folder or os.curdir)
    except OSError:  # a folder that may be written and not read
        return []
    files = [(_NUMBERED.fullmatch(file), file) for file in (os.path.join(folder, name) for name in names)]
    return sorted((int(match[2]), file) for match, file in files if match and _plain_name(file) == path)


def _drop_old(path: str, keep: int) -> None:
    """Remove the oldest kept rings of a name, down to `keep`. Other files stay, and rings that may still be written."""
    kept = 0
    for _, file in reversed(numbered_files(path)):
        with contextlib.suppress(OSError, RingError):
            lock = WriterLock(file)
            try:
                header = _read_header(file, lock.fd)
                is_ours = header.writer.get("name") == name_digest(path) and writer_state(lock.fd, header) == "dead"
                kept += is_ours
                if is_ours and kept > keep:
                    for gone in (file, stacks_path(file), whole_run_path(file)):
                        with contextlib.suppress(FileNotFoundError):
                            os.unlink(gone)
            finally:
                lock.release()


def find_rings(paths: Iterable[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the rings that arguments mean (files, which all count, folders and patterns), older ones, and errors.

    The older ones are those of folders and patterns that do not count. The errors say what is wrong with arguments.
    """
    rings: dict[str, None] = {}
    older: set[str] = set()
    errors: list[str] = []
    for path in paths:
        files, wrong = find_each([path], RING_SUFFIXES)
        errors += wrong
        if files != [path]:
            files, left = newest_rings(files)
            older.update(left)
        rings |= dict.fromkeys(files)
    return list(rings), sorted(older - rings.keys()), errors


def newest_rings(paths: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the rings that count, and those of earlier runs: of each name and rank the newest counts, and what runs.

    Rings of child processes of one rank have one name, whatever their process ids are.
    """
    by_name: dict[str, list[str]] = {}
    for path in paths:
        by_name.setdefault(_PID.sub("", _plain_name(path)), []).append(path)
    older: set[str] = set()
    for files in by_name.values():
        if len(files) > 1:
            older.update(_older(files))
    return [path for files in by_name.values() for path in files if path not in older], sorted(older)


def _plain_name(path: str) -> str:
    match = _NUMBERED.fullmatch(path)
    return path if match is None else match[1] + (match[3] or "")


def _older(files: Iterable[str]) -> list[str]:
    ended: dict[str, list[tuple[int, str]]] = {}
    running: set[str] = set()
    for file in files:
        try:
            with open_regular(file) as opened:
                header = _read_header(file, opened.fileno())
                state = writer_state(opened.fileno(), header)
        except (OSError, RingError):
            continue  # who reads it says what is wrong
        rank, started = header.metadata.get("rank"), header.writer.get("started")
        is_child = rank is not None and _PID.search(file)
        process = str(rank if is_child else header.writer.get("name", _plain_name(file)))
        if state == "running":
            running.add(process)
        else:
            ended.setdefault(process, []).append((started if isinstance(started, int) else 0, file))
    return [file for process, rings in ended.items() for _, file in sorted(rings)[: None if process in running else -1]]
