"""Reads a ring: its slots, whether or not its writer lives, and the name table and the metadata of a file."""

import mmap
import os
import struct
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedReader
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from .._arrays import AnyArray, BoolArray, Int32Array, Int64Array, is_any
from .._errors import RingError
from .._files import open_regular, read_at
from .file_format import (
    LOG_CHUNK_BYTES,
    MAX_RECORD_BYTES,
    MAX_TIME_NS,
    RECORD,
    SLOTS_OFFSET,
    WORKERS,
    FileHeader,
    Record,
    parse_header,
    parse_object,
    valid_records,
)
from .owner import WriterState, has_known_pid, writer_state
from .slot_format import (
    KIND_MASK,
    KIND_SHIFT,
    KINDS_OF_OTHER_THREADS,
    LAP_MASK,
    LAP_SHIFT,
    NAME_MASK,
    NO_NAME,
    SLOT_BYTES,
    THREAD_MASK,
    THREAD_SHIFT,
    WORDS_PER_SLOT,
    Events,
    Kind,
)

_BLOCK_SLOTS = 1 << 14
"""Number of slots that are read at once: 512 KiB, which fits a CPU's cache."""
_NO_SLOTS = (np.zeros(0, np.int64),) * 4
_IS_KNOWN_KIND = np.isin(np.arange(KIND_MASK + 1), [*Kind])
_NAMED_KINDS = [kind for kind in Kind if kind.name_field.startswith("module")]
_TEXT_KINDS = [kind for kind in Kind if kind.name_field.startswith("text")]
_OPTIONAL_NAME_KINDS = [kind for kind in Kind if kind.name_field.endswith("?")]
_STAMP = struct.Struct("<q")
_MAX_SERIAL = 1 << 62
_MAX_REREADS = 20
_BYTES_PER_BLOCK = 512
"""The unit of `st_blocks` on every system."""
_MIN_SPARSE_FILE_BYTES = 1 << 32
"""Minimum size of a file that is refused if it is mostly holes; holes of smaller files are read as empty slots."""
_SLOTS_AHEAD = 1 << 10
"""Number of slots after the newest event that are read with it: the writer fills them meanwhile."""
_SLOTS_WITH_NEXT = 64
"""Number of slots after the newest event of which one has the next event, even if a thread was killed while writing."""

_SlotRange = tuple[int, int]
"""The index of the first slot, and the index after the last slot."""


class SlotSnapshot(NamedTuple):
    """The events in a ring's slots when the ring was read, and the number of lost events."""

    events: Events  # the complete events, in serial order
    recorded: int  # number of events written since the ring was made
    overwritten: int  # number of recorded events whose slots were reused, or that the caller left out
    torn: int  # number of recorded events whose slots were half written or damaged


class RingSnapshot(NamedTuple):
    """The content of a ring when it was read."""

    slots: SlotSnapshot  # the events, and the number of lost events
    records: list[Record]  # the name table's records, in the order in which they were noted
    metadata: Mapping[str, Any]  # about the recording, from the header
    writer: WriterState = "unknown"  # whether the process that writes the file lives; "unknown" for a ring in memory
    known_pid: bool = False  # whether the writer lives, and has the metadata's `pid` in this PID namespace
    missing_bytes: int = 0  # number of bytes that were cut off the end of the file

    @property
    def has_stopped(self) -> bool:
        """Whether the recording ended in good order."""
        return any(record["kind"] == "stop" for record in self.records)

    @property
    def unsaved(self) -> str:
        """The data that is lost because the process died before it saved, in words; empty if nothing is lost."""
        can_be_saved = self.writer != "dead" or any(record["kind"] in ("stop", "saved") for record in self.records)
        return "" if can_be_saved or not self.metadata.get(WORKERS) else "the work of its DataLoader workers"


def ring_serials(path: str | os.PathLike[str]) -> range:
    """Return the serial numbers of the events in a ring file, by bisection; empty if that takes a read of all slots.

    The oldest events of a running process are left out: it overwrites them before they are read.
    """
    with _opened(path) as (file, header):
        has_all_slots = os.fstat(file.fileno()).st_size >= header.log_start
        newest = _find_newest(file.fileno(), header.capacity, header.capacity) if has_all_slots else None
        margin = header.capacity // 16 if writer_state(file.fileno(), header) == "running" else 0
    return range(0) if newest is None else range(max(0, newest + 1 - header.capacity + margin), newest + 1)


def read_ring(
    path: str | os.PathLike[str],
    last_events: int | None = None,
    serials: range | None = None,
    without: Collection[Kind] = (),
    log: "RingLog | None" = None,
) -> RingSnapshot:
    """Read a ring file, or a part of it; its process may be running, stopped or killed.

    A file that was cut gives the events of its remaining slots. Damaged events are left out; a lost name becomes a
    number.

    Args:
        path: the file.
        last_events: the number of newest events to read, about; older ones count as overwritten. None: all events.
        serials: read only the events with these numbers; earlier events count as overwritten.
        without: leave out the events of these kinds, except the first and the last of `serials`.
        log: the log of this file from earlier reads; new records are added to it. None: read the whole log.

    Raises:
        RingError: the file cannot be read, is not a ring file, or its header is damaged.
    """
    with _opened(path) as (file, header):
        status = os.fstat(file.fileno())
        size = status.st_size
        # The file of a new ring is reserved. Windows has no `st_blocks`, and a copied file has no holes there.
        if size >= _MIN_SPARSE_FILE_BYTES and getattr(status, "st_blocks", size) * _BYTES_PER_BLOCK < size // 2:
            raise RingError(f"{file.name}: most of its {size:,} bytes are holes; copy the ring again with its data")
        # The state is read before the slots: a dead process has written all its events by then.
        writer = writer_state(file.fileno(), header)
        if serials is None:
            slots = _read_file_slots(file.fileno(), size, header.capacity, last_events)
        else:
            ranges = _slot_ranges(serials.start, serials.stop, header.capacity, header.capacity)
            slots = read_slots(_slot_blocks(file.fileno(), ranges), header.capacity, serials, without)
        # The log is read after the slots: a name is noted before its number is used.
        records, id_counts = (log or RingLog()).read(file, header.log_start)
    missing_bytes = max(0, header.log_start + LOG_CHUNK_BYTES - size)
    slots, records = _validate(slots, records, id_counts)
    return RingSnapshot(slots, records, header.metadata, writer, has_known_pid(header), missing_bytes)


def has_news(path: str | os.PathLike[str], last: RingSnapshot) -> bool:
    """Return whether a ring file has newer events than a snapshot, or its writer has ended since."""
    with _opened(path) as (file, header):
        if writer_state(file.fileno(), header) != last.writer:
            return True
        recorded, capacity = last.slots.recorded, header.capacity
        for first, stop in _slot_ranges(recorded, recorded + min(_SLOTS_WITH_NEXT, capacity), capacity, capacity):
            data = read_at(file.fileno(), (stop - first) * SLOT_BYTES, SLOTS_OFFSET + first * SLOT_BYTES)
            word_count = len(data) // SLOT_BYTES * WORDS_PER_SLOT  # the file may have been cut
            stamps = np.frombuffer(data, np.int64, word_count)[WORDS_PER_SLOT - 1 :: WORDS_PER_SLOT]
            if (stamps > recorded).any():
                return True
    return False


def ring_state(descriptor: int) -> WriterState:
    """Return the state of the process that writes an open ring file, without opening another descriptor."""
    try:
        header = parse_header("", read_at(descriptor, SLOTS_OFFSET, 0))
    except (OSError, RingError):
        header = FileHeader(0, 0, {}, {})  # a running process may hold its lock nevertheless
    return writer_state(descriptor, header)


def read_ring_records(path: str | os.PathLike[str]) -> list[Record]:
    """Read only the name table of a ring file: its records, in the order in which they were noted."""
    with _opened(path) as (file, header):
        return RingLog().read(file, header.log_start)[0]


def read_ring_role_and_rank(path: str | os.PathLike[str]) -> tuple[str, int | None]:
    """Return the role and the rank in the header of a ring file; "" and None if they are missing.

    Raises RingError too if the log was cut off: it has all names and clocks.
    """
    with _opened(path) as (file, header):
        if os.fstat(file.fileno()).st_size <= header.log_start:
            raise RingError(f"{os.fspath(path)}: its end was cut off, with all names and clocks; copy it again")
        return header.metadata.get("role", ""), header.metadata.get("rank")


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[tuple[BinaryIO, FileHeader]]:
    """Open a ring file and read its header; an OSError inside the block becomes a RingError."""
    name = os.fspath(path)
    try:
        with BufferedReader(open_regular(name)) as file:
            # The file's own buffer would keep a part of the log from before the slots are read.
            yield file, parse_header(name, read_at(file.fileno(), SLOTS_OFFSET, 0))
    except OSError as error:
        raise RingError(f"{name}: cannot be read: {error.strerror}") from error


class RingLog:
    """The log of a ring file; each read continues where the last one ended."""

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._end: int | None = None
        self._valid = valid_records([])

    def read(self, file: BinaryIO, offset: int) -> tuple[list[Record], dict[str, int]]:
        """Return the valid records, and the number of ids of each kind.

        Records are read one by one, so that memory use follows their sizes and not the claims of a damaged file.
        """
        size, count = os.fstat(file.fileno()).st_size, len(self._records)
        position = offset if self._end is None else self._end
        file.seek(min(position, size))
        while len(head := file.read(RECORD.size)) == RECORD.size:
            length, crc = RECORD.unpack(head)
            position += RECORD.size + length
            if not 0 < length <= MAX_RECORD_BYTES or position > size or zlib.crc32(text := file.read(length)) != crc:
                break
            self._end, record = position, parse_object(text)
            if record is not None:
                # A record holds texts and numbers, and a compiled region's record a graph; other values are damage.
                fields = {key: value for key, value in record.items() if isinstance(value, str | int)}
                graph = record.get("graph")
                self._records.append(fields | {"graph": graph} if isinstance(graph, dict) else fields)
        if len(self._records) > count:
            self._valid = valid_records(self._records)
        return self._valid


def _read_file_slots(descriptor: int, size: int, capacity: int, last_events: int | None = None) -> SlotSnapshot:
    """Read the complete events of a ring file."""
    count = max(0, min(capacity, (size - SLOTS_OFFSET) // SLOT_BYTES))
    recorded = -1
    for _ in range(1 + _MAX_REREADS):
        # Missing serials mean that the writer overtook the reader, which reads again. If nothing was written since,
        # they are missing in the file.
        slots = _read_once(descriptor, count, capacity, last_events)
        if slots.recorded == recorded or np.all(np.diff(slots.events.serial) == 1):
            break
        recorded = slots.recorded
    return slots


def _read_once(descriptor: int, count: int, capacity: int, last_events: int | None) -> SlotSnapshot:
    if last_events is not None and last_events + _SLOTS_AHEAD < count:
        newest = _find_newest(descriptor, count, capacity)
        if newest is not None:
            oldest = max(0, newest + 1 - last_events)
            ranges = _slot_ranges(oldest, newest + 1 + _SLOTS_AHEAD, count, capacity)
            return read_slots(_slot_blocks(descriptor, ranges), capacity, range(oldest, _MAX_SERIAL))
    return read_slots(_slot_blocks(descriptor, [(0, count)]), capacity)


def _find_newest(descriptor: int, count: int, capacity: int) -> int | None:
    """Return the serial number of the newest event by bisection: slots after it are a lap older, or empty.

    None if the first slot has no event, or a slot has an impossible serial number: only a read of all slots finds it.
    """

    def serial_in(slot: int) -> int:
        stamp = read_at(descriptor, _STAMP.size, SLOTS_OFFSET + (slot + 1) * SLOT_BYTES - _STAMP.size)
        return int(_STAMP.unpack(stamp)[0]) - 1

    first = serial_in(0)
    if first < 0 or first % capacity:
        return None
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        serial = serial_in(middle)
        if serial == first + middle:
            low = middle
        elif serial == first + middle - capacity or (serial == -1 and first == 0):
            high = middle
        else:
            return None
    return first + low


def _slot_ranges(oldest: int, end: int, count: int, capacity: int) -> list[_SlotRange]:
    """Return the slots of the events from `oldest` to before `end`; only the first `count` slots are in the file."""
    start, stop = oldest % capacity, (end - 1) % capacity + 1
    ranges = [(start, stop)] if start < stop else [(0, stop), (start, capacity)]
    return [(first, min(last, count)) for first, last in ranges if first < count]


def _slot_blocks(descriptor: int, ranges: list[_SlotRange]) -> "Iterator[_SlotBlock]":
    """Yield the slots of a file in `ranges`.

    Each block is mapped only while it is used. It is mapped and not read: while a writer runs, the order in which words
    are copied matters.
    """
    for start, end in ranges:
        for first in range(start, end, _BLOCK_SLOTS):
            length = min(_BLOCK_SLOTS, end - first)
            offset = SLOTS_OFFSET + first * SLOT_BYTES
            aligned = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            mapping = mmap.mmap(
                descriptor, offset - aligned + length * SLOT_BYTES, access=mmap.ACCESS_READ, offset=aligned
            )
            words = np.frombuffer(mapping, np.int64, length * WORDS_PER_SLOT, offset - aligned)
            del mapping  # it is unmapped with the block
            yield _SlotBlock(first, words.reshape(-1, WORDS_PER_SLOT))


class _SlotBlock(NamedTuple):
    """Consecutive slots of a ring."""

    first: int  # index of the first slot
    slots: Int64Array  # int64[n, 4], a view of the mapping; the writer may change it at any time


def slot_blocks(slots: Int64Array, serials: range | None = None) -> Iterator[_SlotBlock]:
    """Yield the slots of a view, all or only the slots of the events `serials`."""
    ranges = [(0, len(slots))]
    if serials is not None:
        ranges = _slot_ranges(serials.start, serials.stop, len(slots), len(slots))
    for start, end in ranges:
        for first in range(start, end, _BLOCK_SLOTS):
            yield _SlotBlock(first, slots[first : min(first + _BLOCK_SLOTS, end)])


def read_slots(
    blocks: Iterable[_SlotBlock], capacity: int, serials: range = range(_MAX_SERIAL), without: Collection[Kind] = ()
) -> SlotSnapshot:
    """Read the complete events of a ring, in memory that follows the number of events and not of slots.

    A file that was cut short has fewer slots than `capacity`. Events before `serials` count as overwritten, and events
    after them are left out. Events of kinds in `without` are left out, except the first and the last.
    """
    parts = [_complete_slots(block, capacity, serials, without) for block in blocks]
    columns = [np.concatenate(column) if len(column) > 1 else column[0] for column in zip(*parts, strict=True)]
    serial = columns[0] if columns else np.zeros(0, np.int64)
    if np.any(serial[1:] < serial[:-1]):
        order = np.argsort(serial, kind="stable")
        columns = [column[order] for column in columns]
        serial = columns[0]
    low, high = 0, len(serial)
    if high and serial[-1] >= capacity:
        # All serials of a ring lie within one capacity. A damaged serial must not make all others look overwritten.
        middle = int(serial[high // 2])
        low, high = np.searchsorted(serial, (middle - capacity + 1, middle + capacity)).tolist()
    recorded = int(serial[high - 1]) + 1 if high else 0
    oldest = max(min(serials.start, recorded), recorded - capacity)
    low = max(low, int(np.searchsorted(serial, oldest)))
    serial, time_ns, value, meta = (column[low:high] for column in columns or [serial] * 4)
    events = Events(
        serial=serial,
        time_ns=time_ns,
        kind=(meta >> KIND_SHIFT & KIND_MASK).astype(np.int8),
        thread=(meta >> THREAD_SHIFT & THREAD_MASK).astype(np.int32),
        name=(meta & NAME_MASK).astype(np.int32),
        value=value,
    )
    return SlotSnapshot(events, recorded, oldest, recorded - oldest - len(events))


def _complete_slots(
    block: _SlotBlock, capacity: int, serials: range, without: Collection[Kind]
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Return the serial, time, value and meta of the complete events of a block."""
    if not block.slots[:, 3].any():
        return _NO_SLOTS
    slots, slot = block.slots, np.arange(block.first, block.first + len(block.slots))
    rows: AnyArray | slice = slice(None)
    if without:
        # A slot that the writer changes meanwhile belongs to a later event.
        is_read_kind = _IS_KNOWN_KIND.copy()
        is_read_kind[[*without]] = False
        end_slots = [serial % capacity for serial in (serials.start, serials.stop - 1)]
        rows = np.flatnonzero(is_read_kind[slots[:, 0] >> KIND_SHIFT & KIND_MASK] | np.isin(slot, end_slots))
        slot = slot[rows]
    # The writer writes meta first and the stamp last, so the reader copies the stamp first and meta last.
    stamp, time_ns, value, meta = (np.array(slots[:, column][rows]) for column in (3, 1, 2, 0))
    # Python's struct clears a slot before it fills it, so a stamp can also vanish meanwhile.
    is_complete = slots[:, 3][rows] == stamp
    serial = stamp - 1
    lap = serial // capacity
    is_complete &= (stamp > 0) & (serial - lap * capacity == slot) & (serial < serials.stop)
    is_complete &= ((lap & LAP_MASK) == meta >> LAP_SHIFT) & _IS_KNOWN_KIND[meta >> KIND_SHIFT & KIND_MASK]
    columns = serial, time_ns, value, meta
    return columns if is_complete.all() else tuple(column[is_complete] for column in columns)


def _validate(
    slots: SlotSnapshot, records: Sequence[Record], id_counts: Mapping[str, int]
) -> tuple[SlotSnapshot, list[Record]]:
    """Return the slots of a ring without damaged events, and its records with a substitute for each lost record.

    An id whose record is lost gets the name "#id". So each id of an event has a record, each record has all its fields,
    and the times of a thread never go back.
    """
    all_records = [*records]
    slots = _drop_impossible_times(slots, records)
    events = slots.events
    has_id = (events.name != NO_NAME) | ~is_any(events.kind, _OPTIONAL_NAME_KINDS)
    has_name, has_text = (has_id & is_any(events.kind, kinds) for kinds in (_NAMED_KINDS, _TEXT_KINDS))
    name, thread = events.name, events.thread
    name, new_ids = _renumber_unknown(name, has_name, id_counts["name"])
    all_records += [{"kind": "name", "id": i, "label": f"#{old}", "fqn": f"#{old}", "class": "?"} for i, old in new_ids]
    name, new_ids = _renumber_unknown(name, has_text, id_counts["text"])
    all_records += [{"kind": "text", "id": i, "text": f"#{old}"} for i, old in new_ids]
    thread, new_ids = _renumber_unknown(thread, np.ones(len(events), np.bool_), id_counts["thread"])
    all_records += [
        {"kind": "thread", "id": i, "name": f"thread #{old}", "tid": old, "torch_thread_id": -1} for i, old in new_ids
    ]
    events = Events(events.serial, events.time_ns, events.kind, thread, name, events.value)
    return slots._replace(events=events), all_records


def _drop_impossible_times(slots: SlotSnapshot, records: Sequence[Record]) -> SlotSnapshot:
    """Count events as torn if their time is before the recording, too large, or out of order on their thread."""
    start_ns = next((record["monotonic"] for record in records if record["kind"] == "anchor"), 0)
    events = slots.events
    is_possible = (events.time_ns >= start_ns) & (events.time_ns < MAX_TIME_NS)
    # Another thread can write the end of an asynchronous call, so that event is not in the order of its thread.
    index = np.flatnonzero(is_possible & ~is_any(events.kind, KINDS_OF_OTHER_THREADS))
    if np.any(np.diff(events.time_ns[index]) < 0):
        index = index[np.argsort(events.thread[index], kind="stable")]
    goes_back = (np.diff(events.time_ns[index]) < 0) & (np.diff(events.thread[index]) == 0)
    for thread in np.unique(events.thread[index[1:][goes_back]]).tolist():
        rows = index[events.thread[index] == thread]
        time = events.time_ns[rows]
        # Keep the events that no earlier event exceeds, or those that no later event precedes: the larger set.
        in_order = np.maximum.accumulate(time) == time, np.minimum.accumulate(time[::-1])[::-1] == time
        is_possible[rows[~max(in_order, key=np.count_nonzero)]] = False
    if is_possible.all():
        return slots
    impossible_count = int(np.count_nonzero(~is_possible))
    return slots._replace(events=events.take(is_possible), torn=slots.torn + impossible_count)


def _renumber_unknown(
    ids: Int32Array, is_used: BoolArray, known_count: int
) -> tuple[Int32Array, list[tuple[int, int]]]:
    """Renumber used ids without a record from `known_count` on; return all ids, and the (new, old) pairs."""
    is_unknown = is_used & (ids >= known_count)
    unknown_ids = np.unique(ids[is_unknown])
    if not len(unknown_ids):
        return ids, []
    ids = ids.copy()
    ids[is_unknown] = known_count + np.searchsorted(unknown_ids, ids[is_unknown])
    return ids, list(enumerate(unknown_ids.tolist(), known_count))
