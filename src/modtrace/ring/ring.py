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
"""Bytes reserved for the records that end a recording, so that it ends in good order even if the disk became full."""
_ANCHOR_READINGS = 5
_MAX_PREFAULT_BYTES = 1 << 28
_MADV_POPULATE_WRITE = 23


class WriteSlot(Protocol):
    """The function that writes an event."""

    def __call__(self, meta: int, value: int, time_ns: int | None = None, /) -> None:
        """Write an event: `meta` packs its kind, thread and name. Without a time, the clock is read."""


class Ring:
    """The slots and the name table of one recording.

    Args:
        capacity: maximum number of events; the oldest are overwritten.
        path: the file of the ring, which survives the process; None keeps the ring in memory.
        metadata: JSON values about the recording (versions, pid, rank), written to the file's header.
        keep: number of files of ended processes with this name to keep, under numbers.

    Raises:
        RingError: the capacity is out of range or exceeds the available memory, or the file cannot be made.
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
        self._is_closed = False
        # The file's path, numbered if a running process uses the plain name; None without a file.
        self.path: str | None = None
        self.folder: Folder | None = None  # the folder of the file; None without a file
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
        """Return the function that writes an event from Python, on any thread; it counts serials, so make only one."""
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
        """Read the content of the ring while other threads may write. For `serials` and `without` see `read_slots`."""
        blocks = slot_blocks(self.slots(), serials)
        slots = read_slots(blocks, self.capacity, *(() if serials is None else (serials, without)))
        return RingSnapshot(slots, list(self.names.records), self.metadata)

    def serials(self) -> range:
        """Return the serial numbers of the events that the ring holds now."""
        recorded = int(self.slots()[:, -1].max())
        return range(max(0, recorded - self.capacity), recorded)

    def slots(self) -> Int64Array:
        """Return a view of the slots, int64[capacity, 4]; other threads may still write to them."""
        words = np.frombuffer(self.buffer, np.int64, self.capacity * WORDS_PER_SLOT, self.offset)
        return words.reshape(-1, WORDS_PER_SLOT)

    def close(self) -> None:
        """Note that the recording ended in good order, and close the file; the ring stays readable."""
        if not self._is_closed:
            self.names.stop()
        self._is_closed = True
        file, self._file = self._file, None
        if file is not None:
            file.close()


class NameTable:
    """Gives ids (small numbers from 0) to names, texts and threads, and notes a record for each. Thread-safe.

    Records are only added. They are not in the slots, so none is overwritten.

    Args:
        sink: called with each new record, before an event uses its id; it must be thread-safe. If it raises (OSError:
            the disk is full), the record is not noted, and the method that noted it raises the same.
    """

    def __init__(self, sink: Callable[[Record], None] | None = None) -> None:
        # All records so far. The ids of threads that note new names at the same time may be in any order.
        self.records: list[Record] = []
        self._sink = sink
        self._names: dict[str, int] = {}
        self._texts: dict[str, int] = {}
        # No lock: a finalizer, which can run anywhere in this class, may wait for another thread that is in it too.
        # Each counter gives out a number only once.
        self._next_name = itertools.count().__next__
        self._next_text = itertools.count().__next__
        self._next_thread = itertools.count().__next__

    def name(self, label: str, fqn: str, module_class: str) -> int:
        """Return the id of a module's name, or `NO_NAME` if the table is full."""
        # The key is a string: a new tuple would make the garbage collector run earlier.
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
            # If another thread was first, its record counts and this record stays unused.
            name_id = self._names.setdefault(key, name_id)
        return name_id

    def text(self, text: str) -> int:
        """Return the id of a text (a mark, a counter, the shapes of a call), or `NO_NAME` if the table is full."""
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
        """Note a thread and return its id; if all ids are used, further threads share the last id."""
        thread_id = min(self._next_thread(), THREAD_MASK)
        self.note(
            {"kind": "thread", "id": thread_id, "name": _clean(name), "tid": tid, "torch_thread_id": torch_thread_id}
        )
        return thread_id

    def compiled(self, name_id: int, modules: str, graph: Mapping[str, Any] | None = None) -> None:
        """Note all known modules that torch.compile put into the calls of a name, and one more graph."""
        record: dict[str, Any] = {"kind": "compiled", "name": name_id, "modules": _clean(modules)}
        if graph is not None:
            record["graph"] = {**graph, "work": [[_clean(name), *counts] for name, *counts in graph["work"]]}
        self.note(record)

    def group(self, name: str, ranks: str, description: str) -> None:
        """Note a process group; `ranks` is a text of `event_text.rank_list`."""
        self.note({"kind": "group", "name": _clean(name), "ranks": _clean(ranks), "description": _clean(description)})

    def operator(self, number: int, name: str, device: str, dtype: str, flops: int, nbytes: int) -> None:
        """Note the cost of an operator (`aten::addmm`) with certain inputs under a number; -1 for an unknown cost.

        `device` and `dtype` describe its first tensor; `nbytes` is the size of its inputs and outputs.
        """
        record = {"kind": "operator", "number": number, "name": _clean(name), "device": _clean(device)}
        self.note(record | {"dtype": dtype, "flops": flops, "bytes": nbytes})

    def anchor(self) -> None:
        """Note the times of the monotonic and the wall clock at one moment."""
        # The thread can lose its CPU for milliseconds between the clocks, so the quickest reading counts.
        readings = [(time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(_ANCHOR_READINGS)]
        start_ns, wall_ns, end_ns = min(readings, key=lambda reading: reading[2] - reading[0])
        self.note({"kind": "anchor", "monotonic": (start_ns + end_ns) // 2, "wall": wall_ns})

    def stop(self) -> None:
        """Note that the recording ends in good order."""
        self.anchor()
        self.note({"kind": "stop"})

    def note(self, record: Record) -> None:
        """Note a record; callers outside this class note only records without an id."""
        if self._sink is not None:
            self._sink(record)
        self.records.append(record)

    def forget(self, record: Record) -> None:
        """Forget a record without an id after a later record replaced it; a ring's file keeps it."""
        self.records.remove(record)


def _clean(text: str) -> str:
    """Return a text that UTF-8 can hold, cut to a maximum length; lone surrogates become escapes."""
    if text.isascii() and len(text) <= _MAX_TEXT_CHARS:
        return text
    if len(text) > _MAX_TEXT_CHARS:
        text = text[:_MAX_TEXT_CHARS] + "…"
    return text.encode("utf-8", "backslashreplace").decode()


class _RingFile:
    """A new ring file that this process writes through a mapping; its content outlives the process.

    Raises RingError if the file cannot be made, its space cannot be reserved, or the metadata does not fit the header.
    """

    def __init__(self, path: str | os.PathLike[str], capacity: int, metadata: Mapping[str, object], keep: int) -> None:
        self.path = os.fspath(path)  # the path that the file got
        self._log_start = SLOTS_OFFSET + capacity * SLOT_BYTES
        self._file_bytes = self._log_start + LOG_CHUNK_BYTES
        pack_header(self.path, capacity, metadata, {})
        if not hasattr(os, "posix_fallocate"):
            raise RingError(f"{self.path}: a file behind the ring needs Linux; without one the ring is in memory")
        name = os.path.basename(self.path)
        try:
            self.folder = Folder(os.path.dirname(self.path))  # the folder of the file
            path = f"{self.folder.path}/{name}"
            _refuse_special(self.path, path)
            # The name cannot be guessed, so another user cannot have put a file or a link there.
            partial = f"{path}.{os.getpid()}.{secrets.token_hex(8)}.new"
            fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            self._descriptor: _Descriptor | None = _Descriptor(fd)
            try:
                self._lock = WriterLock(partial)
                os.posix_fallocate(fd, 0, self._file_bytes)
                os.pwrite(fd, pack_header(self.path, capacity, metadata, describe_writer(self._lock, self.path)), 0)
                os.lseek(fd, self._log_start, os.SEEK_SET)
                # The mapping of the header and the slots; the first slot starts at byte `SLOTS_OFFSET`.
                self.buffer = mmap.mmap(fd, self._log_start)
                _prefault(self.buffer)
                name = os.path.basename(take_name(partial, path, keep))
                self.path = os.path.join(os.path.dirname(self.path), name)
            except BaseException:
                self._descriptor = None
                with contextlib.suppress(FileNotFoundError):  # an interrupt can come after the file was moved
                    os.unlink(partial)
                raise
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
            advice = "Free some space, choose another path, or lower capacity." if is_full else "Choose another path."
            raise RingError(
                f"{self.path}: cannot reserve {self._file_bytes:,} bytes for a ring of {capacity:,} events: "
                f"{error.strerror}. {advice}"
            ) from error

    def append(self, record: Record) -> None:
        """Append one record to the log; thread-safe: the system keeps the log's end, and writes one record at a time.

        Does nothing once the file is closed, when another thread may still be noting a name. Raises OSError if the disk
        is full.
        """
        descriptor = self._descriptor
        if descriptor is None:
            return
        text = orjson.dumps(dict(record))
        if len(text) > MAX_RECORD_BYTES:  # readers would lose all records after it
            return
        framed = RECORD.pack(len(text), zlib.crc32(text)) + text
        closing_bytes = 0 if record["kind"] in _CLOSING_KINDS else _CLOSING_BYTES
        fd, file_bytes = descriptor.fd, self._file_bytes
        if os.lseek(fd, 0, os.SEEK_CUR) + len(framed) + RECORD.size + closing_bytes > file_bytes:
            os.posix_fallocate(fd, file_bytes, LOG_CHUNK_BYTES)
            self._file_bytes = file_bytes + LOG_CHUNK_BYTES
        os.write(fd, framed)

    def close(self) -> None:
        """Close the file once no thread appends to it; the mapping is freed with its last user."""
        self._descriptor = None
        self._lock.release()


class _Descriptor:
    """Closes a file descriptor with its last user: after that, another file can get its number."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


def _refuse_special(name: str, path: str) -> None:
    """Raise if a path leads to a file that is neither a ring nor empty; `name` is its name in the error."""
    magic = b""
    with contextlib.suppress(OSError):  # making the file will report the error
        if is_regular := stat.S_ISREG(os.stat(path).st_mode):
            with open_regular(path) as file:
                magic = file.read(len(MAGIC))
        if not is_regular or (magic and magic != MAGIC):
            raise RingError(f"{name}: this file is not a ring and is not overwritten. Choose another path.")


def _allocate(capacity: int) -> mmap.mmap:
    """Allocate a ring of `capacity` events that is private to this process (a fork gets a copy).

    Raises RingError if less memory is available: the system would give the addresses nevertheless, and kill the
    training when the ring fills.
    """
    available = _available_memory_bytes()
    if available is not None and capacity * SLOT_BYTES > available:
        raise RingError(
            f"a ring of {capacity:,} events needs {capacity * SLOT_BYTES:,} bytes, but only {available:,} bytes of "
            "memory are available; lower capacity"
        )
    try:
        # On Windows mmap takes no flags.
        flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        buffer = mmap.mmap(-1, capacity * SLOT_BYTES, **flags)
    except OSError as error:  # such as a limit of `ulimit -v`
        raise RingError(
            f"a ring of {capacity:,} events needs {capacity * SLOT_BYTES:,} bytes, which this process cannot get: "
            f"{error.strerror}; lower capacity"
        ) from error
    _prefault(buffer)
    return buffer


def _available_memory_bytes() -> int | None:
    """Return the bytes of available memory and free swap; None if the system does not report them."""
    try:
        lines = _MEMINFO.read_text("utf-8").splitlines()
        kilobytes = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
        return 1024 * (kilobytes["MemAvailable"] + kilobytes.get("SwapFree", 0))
    except (OSError, ValueError, IndexError, KeyError):
        return None


def _prefault(buffer: mmap.mmap) -> None:
    """Map the pages of a new buffer, up to 256 MiB, before events are written.

    The first touch of a page costs as much as many events, a cost that the training should not have. A kernel before
    Linux 5.14, or another system, cannot map pages without writing, so the training has it there.
    """
    with contextlib.suppress(AttributeError, OSError):
        buffer.madvise(_MADV_POPULATE_WRITE, 0, min(len(buffer), _MAX_PREFAULT_BYTES))
