"""Processes: how many processors there are, work on all of them, what the kernel says of one, and which rank it is."""

import ctypes
import hashlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from ._errors import ModtraceError, RecordingError

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


def processor_count() -> int:
    """Return how many processors this process may run on, or how many there are if the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_NICENESS = 10


def give_way() -> None:
    """Let other processes run before this one and its children, if the system can do that."""
    if hasattr(os, "nice"):  # not on Windows
        os.nice(_NICENESS)


T = TypeVar("T")
R = TypeVar("R")


def map_in_processes(
    function: Callable[[T], R], items: Iterable[T], processes: int, executor: Executor | None = None
) -> Iterator[tuple[T, R]]:
    """Yield each item with what a function returns for it, in the order in which they are done.

    Args:
        function: called with an item, in this process if one is enough; it, items and results can be pickled.
        items: what it is called with.
        processes: how many run at a time, where there is no executor.
        executor: runs them, where it likes; it stays open. None: processes of this machine.

    Raises:
        Exception: what the function raised for an item; what had not begun then is not done.
        ModtraceError: one of the processes was killed, or the executor can do no more.
    """
    todo = list(items)
    if executor is not None:
        yield from _map(executor, function, todo, "the executor can do no more, as one of its workers was lost")
    elif min(processes, len(todo)) <= 1:
        for item in todo:
            yield item, function(item)
    else:
        with ProcessPoolExecutor(min(processes, len(todo)), get_context("spawn"), _end_when_interrupted) as pool:
            killed = "a process was killed, most often because memory ran out; try with fewer"
            yield from _map(pool, function, todo, killed)


def _map(executor: Executor, function: Callable[[T], R], items: Iterable[T], lost: str) -> Iterator[tuple[T, R]]:
    tasks: dict[Future[R], T] = {}
    try:
        tasks |= {executor.submit(function, item): item for item in items}
        for done in as_completed(tasks):
            yield tasks.pop(done), done.result()
    except BrokenExecutor as error:
        raise ModtraceError(lost) from error
    finally:
        for task in tasks:
            task.cancel()


def _end_when_interrupted() -> None:
    # Ctrl-C goes to all processes of a terminal. A worker that handled it would report it as an error of its item, and
    # take the next one.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class ProcessStat(NamedTuple):
    """A process as `/proc` has it."""

    state: str  # one letter: R runs, S and D wait, Z and X are dead
    parent: int  # id of the process that it is a child of
    start_unix_ns: int  # when it began, in Unix nanoseconds, to the kernel's tick of 10 ms
    start_ticks: int  # the same in ticks since the kernel started


def read_process_stat(pid: int | Literal["self"]) -> ProcessStat:
    """Read what the kernel says of a process of this host, or of "self"; raises OSError if it says nothing."""
    # The second field, the command's name in brackets, may hold blanks and brackets.
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    start_ticks = int(fields[19])
    started_after_boot_ns = start_ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    boot_unix_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return ProcessStat(fields[0], int(fields[1]), boot_unix_ns + started_after_boot_ns, start_ticks)


def child_processes(pid: int) -> dict[int, str]:
    """Return what each child of a process of this host does: "running", "dead", "asleep" or "in" a kernel's function.

    It is empty if the system has no `/proc`.
    """
    children = {}
    for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda folder: int(folder.name)):
        with suppress(OSError):
            stat = read_process_stat(int(folder.name))
            if stat.parent == pid:
                function = (folder / "wchan").read_text().partition(".")[0].strip("0")
                asleep = f"in {function}" if function else "asleep"
                children[int(folder.name)] = {"R": "running", "Z": "dead"}.get(stat.state, asleep)
    return children


_MIN_FILES_IN_PROCESSES = 128
"""To start processes takes as long as to read so many files."""
_FILES_AT_ONCE = 32
_MAX_PROCESSES = 32


class ParallelReader(ExitStack):
    """Reads files, many of them in processes of its own, which end with the `with` block."""

    _processes: ProcessPoolExecutor | None = None

    def read(self, read: Callable[[str], T], paths: Sequence[str]) -> tuple[list[T], list[str]]:
        """Return what `read` returns for each file, and the ModtraceErrors; raises one if a process was killed."""
        if len(paths) < _MIN_FILES_IN_PROCESSES:
            results = [_result_or_error(read, path) for path in paths]
        else:
            if self._processes is None:
                count = min(processor_count(), _MAX_PROCESSES)
                self._processes = ProcessPoolExecutor(count, get_context("spawn"), _end_when_interrupted)
                self.callback(self._processes.shutdown, cancel_futures=True)
            try:
                results = list(self._processes.map(partial(_result_or_error, read), paths, chunksize=_FILES_AT_ONCE))
            except BrokenProcessPool as error:
                raise ModtraceError("a process that read files was killed, most often as memory ran out") from error
        return [r for r, error in results if error is None and r is not None], [e for _, e in results if e is not None]


def _result_or_error(read: Callable[[str], T], path: str) -> tuple[T | None, str | None]:
    try:
        return read(path), None
    except ModtraceError as error:
        return None, str(error)


def is_signal_caught(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, in Python or in C; a signal without one most often kills."""
    return _has(f"/proc/{pid}/status", "SigCgt", number)


def threads_with_signal(pid: int, number: int) -> set[str]:
    """Return the threads for which a signal waits, or that block it: as its handler does until it returns."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return set()
    fields = ("ShdPnd", "SigPnd", "SigBlk")
    return {tid for tid in threads if any(_has(f"/proc/{pid}/task/{tid}/status", field, number) for field in fields)}


def _has(status: str, field: str, number: int) -> bool:
    """Whether a signal is in a set of a process or thread (bit 0 is signal 1); False if that is gone."""
    try:
        with open(status) as lines:
            signals = next((int(line.split()[1], 16) for line in lines if line.startswith(f"{field}:")), 0)
    except OSError:
        return False
    return bool(signals >> (number - 1) & 1)


_CLONE_VM, _CLONE_VFORK, _WAIT_FOR_ALL = 0x100, 0x4000, 0x40000000
_STACK_BYTES = 1 << 18


def run_unseen(command: str) -> None:
    """Run a shell's command without a child that this process could see; raises OSError or AttributeError."""
    library = ctypes.CDLL(None, use_errno=True)
    stack = ctypes.create_string_buffer(_STACK_BYTES)
    top = ctypes.c_void_p((ctypes.addressof(stack) + _STACK_BYTES) & ~63)
    flags = _CLONE_VM | _CLONE_VFORK  # as posix_spawn does it: this thread goes on once the other process has ended
    # No Python may run in the process between, which has this one's memory; no handler of SIGCHLD either.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD,))
    try:
        child = library.clone(ctypes.cast(library.system, ctypes.c_void_p), top, flags, os.fsencode(command))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if child < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with suppress(ChildProcessError):
        os.waitpid(child, _WAIT_FOR_ALL)
