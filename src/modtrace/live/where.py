"""The state of each rank of a run, now or when it died, from its ring file; and the Python stacks of a process."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._files import find_each
from .._interrupts import cached_property
from .._pools import ParallelReader
from .._processes import is_signal_caught, threads_with_signal
from .._tables import json_text
from ..ring import find_rings, stacks_path
from .flight_recorder import FlightRecord as FlightRecord
from .flight_recorder import rank_of_dump, read_flight_record
from .hangs import Hang as Hang
from .hangs import find_all_hangs, hung_sentences
from .places import RankGroup as RankGroup
from .places import group_ranks, headline, workers
from .rank_state import ProcessState as ProcessState
from .rank_state import RankState as RankState
from .rank_state import read_rank_state

_TIMEOUT_S = 20.0
_ANSWER_TIMEOUT_S = 5.0
_POLL_S = 0.002
NO_STACKS = (
    "Python stacks are read by py-spy, which is not installed: pip install py-spy. Without it, only processes that "
    "record with stacks_on_signal=signal.SIGUSR2 (modtrace run --stacks-on-signal SIGUSR2) can print their stacks."
)


def python_stacks(state: RankState) -> list[str] | None:
    """Return the lines of a process's stacks, or a line on why there are none; None if no tool can read them.

    If it waits for its DataLoader, the stacks of its child processes follow. py-spy stops a process for a few
    milliseconds. Without py-spy the process gets the signal that it registered for this purpose, and no other.
    """
    if state.state != "running" or not state.known_pid:
        return [f"pid {state.pid}: no stacks, because it does not run on this machine"]
    py_spy = shutil.which("py-spy")
    number, lines = state.stacks_signal, []
    for pid in (state.pid, *workers(state)):
        lines += ["", f"child process {pid}:"] if pid != state.pid else []
        if py_spy is not None:
            lines += _stacks_by_py_spy(py_spy, pid)
        elif number is not None:
            lines += _stacks_by_signal(pid, stacks_path(state.path), number)
        else:
            return None
    return lines


def _stacks_by_py_spy(py_spy: str, pid: int) -> list[str]:
    command = [py_spy, "dump", "--pid", str(pid)]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"pid {pid}: py-spy could not read its stacks: {error}"]
    if result.returncode:
        reason = " ".join(result.stderr.split()) or f"exit code {result.returncode}"
        return [f"pid {pid}: py-spy could not read its stacks: {reason}"]
    return result.stdout.splitlines()


def _stacks_by_signal(pid: int, path: str, number: int) -> list[str]:
    """Send the signal to the process, and return the stacks that it appends to the file."""
    try:
        # Opened first, so that the signal cannot reach another process that gets the same pid.
        process = os.pidfd_open(pid)
    except OSError as error:
        return [f"pid {pid}: no stacks: {error.strerror}"]
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, encoding="utf-8", errors="replace") as file:
            if not _has_registered(pid, number, os.fstat(descriptor)):
                return [f"pid {pid}: no stacks: it has not registered signal {number} for {path}"]
            old_size, blocking_threads = file.seek(0, os.SEEK_END), threads_with_signal(pid, number)
            signal.pidfd_send_signal(process, number)
            deadline = time.monotonic() + _ANSWER_TIMEOUT_S
            while os.fstat(descriptor).st_size == old_size or threads_with_signal(pid, number) - blocking_threads:
                if time.monotonic() > deadline:
                    return [f"pid {pid}: no stacks: no answer in {_ANSWER_TIMEOUT_S:.0f} s"]
                time.sleep(_POLL_S)
            return file.read().splitlines()
    except OSError as error:
        return [f"pid {pid}: no stacks: {error.filename or path}: {error.strerror}"]
    finally:
        os.close(process)


def _has_registered(pid: int, number: int, file: os.stat_result) -> bool:
    """Return whether the process registered the signal: it has this very file open, and a handler.

    The ring may be a copy, forged, or from a container with its own process ids.
    """
    if not stat.S_ISREG(file.st_mode) or file.st_uid != os.geteuid() or not is_signal_caught(pid, number):
        return False
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(f"{folder}/{name}"), file):
                return True
    return False


_Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class WhereResult:
    """The states of the ranks of a job, now or when they ended.

    Attributes:
        ranks: the state of each ring that could be read, in the order of the files.
        records: the contents of flight recorder dumps.
        errors: errors of files that could not be read.
        older: rings of earlier runs in the folders; only the newest ring of each rank is read.
    """

    ranks: list[RankState]
    records: list[FlightRecord]
    errors: list[str]
    older: Sequence[str] = ()

    @cached_property
    def worlds(self) -> list[WhereResult]:
        """The result itself, or one result per role, without dumps, if roles have ranks of their own."""
        ranks = [state.rank for state in self.ranks if state.rank is not None]
        roles = sorted({state.role for state in self.ranks})
        if len(roles) < 2 or len(set(ranks)) == len(ranks):
            return [self]
        return [WhereResult([state for state in self.ranks if state.role == role], [], []) for role in roles]

    @cached_property
    def groups(self) -> list[RankGroup]:
        """The groups of ranks that are in the same modules, smaller groups first."""
        return [group for world in self.worlds for group in group_ranks(world.ranks)]

    @cached_property
    def hangs(self) -> list[Hang]:
        """The collectives, sends and receives that ranks wait in, causes first."""
        return [hang for world in self.worlds for hang in find_all_hangs(world.ranks, world.records)]

    @property
    def sentence(self) -> str:
        """The hangs, the ranks that seem hung, and the places of all other ranks."""
        if len(self.worlds) > 1:
            worlds = [[state._replace(role="") for state in world.ranks] for world in self.worlds]
            sentences = [WhereResult(ranks, [], []).sentence for ranks in worlds]
            roles = [world.ranks[0].role or "others" for world in self.worlds]
            return "; ".join(map("{}: {}".format, roles, sentences))
        causes = [hang for hang in self.hangs if hang.is_cause]
        named_ranks = {rank for hang in causes for rank in (*hang.waiting, *hang.blamed)}
        in_hangs = {rank for hang in self.hangs for rank in (*hang.waiting, *hang.blamed)}
        unnamed = [state for state in self.ranks if state.rank not in named_ranks]
        unnamed = [state for state in unnamed if state.rank in in_hangs or not state.hung_threads]
        texts = [*(hang.text for hang in causes), *hung_sentences(self.ranks, self.hangs)]
        return "; ".join(filter(None, [*texts, headline(group_ranks(unnamed))]))

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values: `sentence`, `hangs`, `ranks` (see `RankState.to_dict`), `errors`."""
        return {
            "sentence": self.sentence,
            "hangs": [hang.to_dict() for hang in self.hangs],
            "ranks": [rank.to_dict() for rank in self.ranks],
            "errors": self.errors,
        }

    def to_json(self) -> str:
        """Return the values of `to_dict` as JSON text."""
        return json_text(self.to_dict())


def where(paths: _Paths, *, flight_recorder: _Paths = ()) -> WhereResult:
    """Read the open modules of each process of a job, now or when it ended.

    Args:
        paths: ring files, folders or patterns. The processes may run, hang or be dead. In folders and patterns, only
            the newest ring of each rank and rings of running processes are read.
        flight_recorder: dumps of torch's flight recorder, folders or patterns.

    Returns:
        The state of each rank, and the hangs; `errors` lists the files that could not be read.

    Raises:
        ModtraceError: a process that reads files was killed.

    Example:
        >>> modtrace.where("/dev/shm/job").sentence  # doctest: +SKIP
        'rank 3 is in GPT.h.7.mlp, the other 63 in GPT.h.8.attn'
    """
    with ParallelReader() as reader:
        return read_job(reader, paths, flight_recorder)


def read_job(reader: ParallelReader, paths: _Paths, flight_recorder: _Paths = ()) -> WhereResult:
    """Return the result of `where`, with a reader that the caller can use again."""
    rings, older, no_rings = find_rings(_texts(paths))
    dumps, no_dumps = find_each(_texts(flight_recorder), lambda path: rank_of_dump(path) is not None)
    states, ring_errors = reader.read(read_rank_state, rings)
    records, dump_errors = reader.read(read_flight_record, dumps)
    return WhereResult(states, records, [*no_rings, *no_dumps, *ring_errors, *dump_errors], older)


def _texts(paths: _Paths) -> list[str]:
    return [os.fspath(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
