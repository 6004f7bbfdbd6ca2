"""Ring: the slots and the name table of one recording, in memory or in a file."""

import contextlib
import errno
import itertools
import mmap
import os
import secrets
import stat
import struct
import time
import zlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson

from .._arrays import Int64Array
from .._errors import RingError
from .._files import Folder, open_regular
from ..record_options import check_capacity
from .file_format import LOG_CHUNK_BYTES, MAGIC, MAX_RECORD_BYTES, RECORD, SLOTS_OFFSET, Record, pack_header
from .owner import WriterLock, describe_writer, take_name
from .read_file import RingSnapshot, read_slots, slot_blocks
from .slot_format import LAP_MASK, LAP_SHIFT, NO_NAME, SLOT_BYTES, THREAD_MASK, WORDS_PER_SLOT, Kind

_MEMINFO = Path("/proc/meminfo")
_MAX_TEXT_CHARS = 1 << 14
_CLOSING_KINDS = ("anchor", "stop")
_CLOSING_BYTES = 256
"""Reserved for the records that end a recording, so that it ends in good order on a disk that became full."""
_ANCHOR_READINGS = 5
_MAX_PREFAULT_BYTES = 1 << 28
_MADV_POPULATE_WRITE = 23


class WriteSlot(Protocol):
    """The function that writes an event."""

    def __call__(self, meta: int, value: int, time_ns: int | None = None, /) -> None:
        """Write it: meta is kind, thread and name packed. Without a time, the clock is read."""


class Ring:
    """The slots and the name table of one recording.

    Args:
        capacity: events kept; the oldest are overwritten.
        path: a file behind the ring, which then survives the process; None keeps it in memory.
        metadata: about the recording (versions, pid, rank), JSON values; in the file's header.
        keep: how many files of ended processes with this name to keep, under numbers.

    Raises:
        RingError: the capacity is out of range or beyond the memory that can be had, or the file cannot be made.
    """

    def __init__(
        self,
        capacity: int,
        path: str | os.PathLike[str] | None = None,
        metadata: Mapping[str, object] | None = None,
        keep: int = 3,
    ) -> None:
        try:
            check_capacity(capacity)
        except ValueError as error:
            raise RingError(str(error)) from None
        self.capacity = capacity
        self.metadata = dict(metadata or {})
        self._file: _RingFile | None = None
        self._closed = False
        # The name that the file got: a numbered one if a running process has the name; None without a file.
        self.path: str | None = None
        self.folder: Folder | None = None  # the folder that the file was made in; None without a file
        if path is None:
            self.buffer = _allocate(capacity)
            self.offset = 0  # bytes before the first slot
            self.names = NameTable()
        else:
            self._file = _RingFile(path, capacity, self.metadata, keep)
            self.path, self.folder = self._file.path, self._file.folder
            self.buffer = self._file.buffer
            self.offset = SLOTS_OFFSET
            self.names = NameTable(self._file.append)
        self.names.anchor()

    def make_writer(self, clock: Callable[[], int] = time.monotonic_ns) -> WriteSlot:
        """Return the function that writes an event from Python, on any thread; one per ring, as it counts serials."""
        buffer, offset, capacity = self.buffer, self.offset, self.capacity
        serials = itertools.count().__next__
        pack = struct.Struct(f"{WORDS_PER_SLOT}q").pack_into

        def write(meta: int, value: int, time_ns: int | None = None, /) -> None:
            serial = serials()
            lap, index = divmod(serial, capacity)
            position = offset + index * SLOT_BYTES
            now = clock() if time_ns is None else time_ns
            # Native packing stores whole words in order: meta with the new lap first, the stamp last.
            pack(buffer, position, (lap & LAP_MASK) << LAP_SHIFT | meta, now, value, serial + 1)

        return write

    def read(self, serials: range | None = None, without: Collection[Kind] = ()) -> RingSnapshot:
        """Read what the ring holds now; others may go on writing. `serials` and `without` are as of `read_slots`."""
        blocks = slot_blocks(self.slots(), serials)
        slots = read_slots(blocks, self.capacity, *(() if serials is None else (serials, without)))
        return RingSnapshot(slots, list(self.names.records), self.metadata)

    def serials(self) -> range:
        """Return the serial numbers of the events that the ring holds now."""
        recorded = int(self.slots()[:, -1].max())
        return range(max(0, recorded - self.capacity), recorded)

    def slots(self) -> Int64Array:
        """Return a view of the slots, int64[capacity, 4]; other threads may go on writing."""
        words = np.frombuffer(self.buffer, np.int64, self.capacity * WORDS_PER_SLOT, self.offset)
        return words.reshape(-1, WORDS_PER_SLOT)

    def close(self) -> None:
        """Note that the recording ended in good order, and close the file; the ring stays readable."""
        if not self._closed:
            self.names.stop()
        self._closed = True
        file, self._file = self._file, None
        if file is not None:
            file.close()


class NameTable:
    """Gives ids (small numbers, from 0 on) to names, texts and threads, and notes a record for each. Thread-safe.

    Records are only added, and they are outside of the slots, so none is overwritten.

    Args:
        sink: called with each new record, before its id is used in the ring. What it raises (OSError: the disk is
            full) comes out of the method that noted the record, and the record is not noted. It must be thread-safe.
    """

    def __init__(self, sink: Callable[[Record], None] | None = None) -> None:
        # All records so far. Threads that find something new at once may note their ids in any order.
        self.records: list[Record] = []
        self._sink = sink
        self._names: dict[str, int] = {}
        self._texts: dict[str, int] = {}
        # No lock: a finalizer, which can run anywhere in here, may wait for another thread that is in here too. Each of
        # these gives out a number once.
        self._next_name = itertools.count().__next__
        self._next_text = itertools.count().__next__
        self._next_thread = itertools.count().__next__

    def name(self, label: str, fqn: str, module_class: str) -> int:
        """Return the id of a module's name, or `NO_NAME` where the table is full."""
        # One string, not a tuple, which would bring the next run of the garbage collector nearer.
        key = f"{len(label)},{len(fqn)},{label}{fqn}{module_class}"
        if _clean(key) is not key:
            label, fqn, module_class = _clean(label), _clean(fqn), _clean(module_class)
            key = f"{len(label)},{len(fqn)},{label}{fqn}{module_class}"
        name_id = self._names.get(key)
        if name_id is None:
            name_id = self._next_name()
            if name_id >= NO_NAME:
                return NO_NAME
            self.note({"kind": "name", "id": name_id, "label": label, "fqn": fqn, "class": module_class})
            # If another thread was first, its record counts, and this one is of no use.
            name_id = self._names.setdefault(key, name_id)
        return name_id

    def text(self, text: str) -> int:
        """Return the id of a text (a mark, a counter, the shapes of a call), or `NO_NAME` as `name` does."""
        text = _clean(text)
        text_id = self._texts.get(text)
        if text_id is None:
            text_id = self._next_text()
            if text_id >= NO_NAME:
                return NO_NAME
            self.note({"kind": "text", "id": text_id, "text": text})
            text_id = self._texts.setdefault(text, text_id)
        return text_id

    def thread(self, name: str, tid: int, torch_thread_id: int = -1) -> int:
        """Note a thread and return its id; all threads for which there is no id left share the last one."""
        thread_id = min(self._next_thread(), THREAD_MASK)
        self.note(
            {"kind": "thread", "id": thread_id, "name": _clean(name), "tid": tid, "torch_thread_id": torch_thread_id}
        )
        return thread_id

    def compiled(self, name_id: int, modules: str, graph: Mapping[str, Any] | None = None) -> None:
        """Note which modules torch.compile put into the calls of a name, all that are known, and one more graph."""
        record: dict[str, Any] = {"kind": "compiled", "name": name_id, "modules": _clean(modules)}
        if graph is not None:
            record["graph"] = {**graph, "work": [[_clean(name), *counts] for name, *counts in graph["work"]]}
        self.note(record)

    def group(self, name: str, ranks: str, description: str) -> None:
        """Note a process group, as `event_text.rank_list` writes its ranks."""
        self.note({"kind": "group", "name": _clean(name), "ranks": _clean(ranks), "description": _clean(description)})

    def operator(self, number: int, name: str, device: str, dtype: str, flops: int, nbytes: int) -> None:
        """Note what an operator (`aten::addmm`) with certain inputs costs, by its number; -1 if that is not known.

        Device and type of numbers are those of its first tensor; bytes are of its inputs and its outputs.
        """
        record = {"kind": "operator", "number": number, "name": _clean(name), "device": _clean(device)}
        self.note(record | {"dtype": dtype, "flops": flops, "bytes": nbytes})

    def anchor(self) -> None:
        """Note what the monotonic and the wall clock show at one moment."""
        # Where others have the processor in between, the two are milliseconds apart: the quickest reading counts.
        readings = [(time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(_ANCHOR_READINGS)]
        before, wall, after = min(readings, key=lambda reading: reading[2] - reading[0])
        self.note({"kind": "anchor", "monotonic": (before + after) // 2, "wall": wall})

    def stop(self) -> None:
        """Note that the recording ends in good order."""
        self.anchor()
        self.note({"kind": "stop"})

    def note(self, record: Record) -> None:
        """Note a record; from outside, one that gives no id."""
        if self._sink is not None:
            self._sink(record)
        self.records.append(record)

    def forget(self, record: Record) -> None:
        """Forget a record that gives no id, as a later one says more; a ring's file keeps it."""
        self.records.remove(record)


def _clean(text: str) -> str:
    """Make any Python string one that UTF-8 can hold and that stays small; lone surrogates become escapes."""
    if text.isascii() and len(text) <= _MAX_TEXT_CHARS:
        return text
    if len(text) > _MAX_TEXT_CHARS:
        text = text[:_MAX_TEXT_CHARS] + "…"
    return text.encode("utf-8", "backslashreplace").decode()


class _RingFile:
    """A new ring file that this process writes; its mapping outlives the process in the file.

    Raises RingError if the file cannot be made, its space cannot be reserved, or the metadata does not fit the header.
    """

    def __init__(self, path: str | os.PathLike[str], capacity: int, metadata: Mapping[str, object], keep: int) -> None:
        self.path = os.fspath(path)  # the name that the file got
        self._log_start = SLOTS_OFFSET + capacity * SLOT_BYTES
        self._reserved = self._log_start + LOG_CHUNK_BYTES
        pack_header(self.path, capacity, metadata, {})
        if not hasattr(os, "posix_fallocate"):
            raise RingError(f"{self.path}: a file behind the ring needs Linux; without one the ring is in memory")
        name = os.path.basename(self.path)
        try:
            self.folder = Folder(os.path.dirname(self.path))  # the folder that it was made in
            path = f"{self.folder.path}/{name}"
            _refuse_special(self.path, path)
            # The name cannot be guessed, so it is never what another user put there, nor the end of a link of theirs.
            partial = f"{path}.{os.getpid()}.{secrets.token_hex(8)}.new"
            fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            self._descriptor: _Descriptor | None = _Descriptor(fd)
            try:
                self._lock = WriterLock(partial)
                os.posix_fallocate(fd, 0, self._reserved)
                os.pwrite(fd, pack_header(self.path, capacity, metadata, describe_writer(self._lock, self.path)), 0)
                os.lseek(fd, self._log_start, os.SEEK_SET)
                # The mapping of header and slots; the first slot begins at byte `SLOTS_OFFSET`.
                self.buffer = mmap.mmap(fd, self._log_start)
                _prefault(self.buffer)
                name = os.path.basename(take_name(partial, path, keep))
                self.path = os.path.join(os.path.dirname(self.path), name)
            except BaseException:
                self._descriptor = None
                with contextlib.suppress(FileNotFoundError):  # an interrupt can come after it was moved
                    os.unlink(partial)
                raise
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
            advice = "Free some space, name another place, or lower capacity." if full else "Name another place."
            raise RingError(
                f"{self.path}: cannot reserve {self._reserved:,} bytes for a ring of {capacity:,} events: "
                f"{error.strerror}. {advice}"
            ) from error

    def append(self, record: Record) -> None:
        """Append one record to the log; thread-safe, as the system keeps the end of the log and writes one at a time.

        It does nothing when the file is closed: a thread may still be naming what it was called for. Raises OSError if
        the disk is full.
        """
        descriptor = self._descriptor
        if descriptor is None:
            return
        text = orjson.dumps(dict(record))
        if len(text) > MAX_RECORD_BYTES:  # readers would lose all that comes after it
            return
        framed = RECORD.pack(len(text), zlib.crc32(text)) + text
        kept = 0 if record["kind"] in _CLOSING_KINDS else _CLOSING_BYTES
        fd, reserved = descriptor.fd, self._reserved
        if os.lseek(fd, 0, os.SEEK_CUR) + len(framed) + RECORD.size + kept > reserved:
            os.posix_fallocate(fd, reserved, LOG_CHUNK_BYTES)
            self._reserved = reserved + LOG_CHUNK_BYTES
        os.write(fd, framed)

    def close(self) -> None:
        """Close the file, once no thread appends to it; the mapping goes with its last holder."""
        self._descriptor = None
        self._lock.release()


class _Descriptor:
    """Closes a file descriptor with its last user: its number may be another file's from then on."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


def _refuse_special(name: str, path: str) -> None:
    """Raise if a path leads to anything but a ring or an empty file; `name` is what the error calls it."""
    begin = b""
    with contextlib.suppress(OSError):  # making the file will say what is wrong with the path
        if is_regular := stat.S_ISREG(os.stat(path).st_mode):
            with open_regular(path) as file:
                begin = file.read(len(MAGIC))
        if not is_regular or (begin and begin != MAGIC):
            raise RingError(f"{name}: it is no ring, and a ring replaces nothing else. Name another place.")


def _allocate(capacity: int) -> mmap.mmap:
    """Reserve a ring of `capacity` events that belongs to this process alone (a fork gets a copy).

    Raises RingError if there is not so much memory: the system would give the addresses all the same, and kill the
    training when the ring fills.
    """
    available = _available_memory_bytes()
    if available is not None and capacity * SLOT_BYTES > available:
        raise RingError(
            f"a ring of {capacity:,} events takes {capacity * SLOT_BYTES:,} bytes, and {available:,} bytes of memory "
            "can be had; lower capacity"
        )
    try:
        # Windows has no flags.
        flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        buffer = mmap.mmap(-1, capacity * SLOT_BYTES, **flags)
    except OSError as error:  # as of `ulimit -v`
        raise RingError(
            f"a ring of {capacity:,} events takes {capacity * SLOT_BYTES:,} bytes, which this process does not get: "
            f"{error.strerror}; lower capacity"
        ) from error
    _prefault(buffer)
    return buffer


def _available_memory_bytes() -> int | None:
    """Return the bytes of memory that are free, can be freed, or swapped out; None if the system does not say."""
    try:
        lines = _MEMINFO.read_text("utf-8").splitlines()
        kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        return 1024 * (kilobytes["MemAvailable"] + kilobytes.get("SwapFree", 0))
    except (OSError, ValueError, IndexError, KeyError):
        return None


def _prefault(buffer: mmap.mmap) -> None:
    """Map the pages of a new buffer, up to 256 MiB, ahead of the writer.

    The first touch of a page costs as much as many events, and the training must not pay for it. A kernel before
    Linux 5.14, or another system, cannot do it without writing; there it does.
    """
    with contextlib.suppress(AttributeError, OSError):
        buffer.madvise(_MADV_POPULATE_WRITE, 0, min(len(buffer), _MAX_PREFAULT_BYTES))
