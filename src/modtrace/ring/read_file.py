"""A ring → what it holds: its slots, dead or alive, and of a file the name table and the metadata too."""

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
"""Slots that are looked at together: 512 KiB, which a processor's cache holds."""
_NO_SLOTS = (np.zeros(0, np.int64),) * 4
_IS_KNOWN = np.isin(np.arange(KIND_MASK + 1), [*Kind])
_NAMED_KINDS = [kind for kind in Kind if kind.name_field.startswith("module")]
_TEXT_KINDS = [kind for kind in Kind if kind.name_field.startswith("text")]
_PERHAPS_NAMED_KINDS = [kind for kind in Kind if kind.name_field.endswith("?")]
_STAMP = struct.Struct("<q")
_BEYOND_ALL = 1 << 62
_MAX_REREADS = 20
_BYTES_PER_BLOCK = 512
"""The unit of `st_blocks` on every system."""
_MIN_HOLLOW_BYTES = 1 << 32
"""Holes of a smaller file are read as empty slots."""
_SLOTS_AHEAD = 1 << 10
"""Slots after the newest event that are read with it: the writer goes on meanwhile."""
_SLOTS_WITH_NEXT = 64
"""The next event is in one of so many slots after the newest, also if a thread was killed while it wrote."""

_SlotRange = tuple[int, int]
"""The number of the first slot, and the number after that of the last one."""


class SlotSnapshot(NamedTuple):
    """The slots that a ring held when it was read, and how many it had lost."""

    events: Events  # the whole events, in serial order
    recorded: int  # number of events written since the ring was made
    overwritten: int  # of these, those whose slots were used again, or that were not asked for
    torn: int  # of these, those whose slots were half written, or damaged


class RingSnapshot(NamedTuple):
    """The content of a ring when it was read."""

    slots: SlotSnapshot  # the events, and how many were lost
    records: list[Record]  # the name table's records, in the order in which they were noted
    metadata: Mapping[str, Any]  # about the recording, from the header
    writer: WriterState = "unknown"  # whether the process that writes the file lives; "unknown" for a ring in memory
    known_pid: bool = False  # whether it lives, and is the one that the metadata's `pid` names here
    missing_bytes: int = 0  # what was cut off the end of the file

    @property
    def has_stopped(self) -> bool:
        """Whether the recording ended in good order."""
        return any(record["kind"] == "stop" for record in self.records)

    @property
    def unsaved(self) -> str:
        """The data that are lost as the process died before it saved, in words; else empty."""
        ended = self.writer != "dead" or any(record["kind"] in ("stop", "saved") for record in self.records)
        return "" if ended or not self.metadata.get(WORKERS) else "what the workers of its DataLoaders did"


def ring_serials(path: str | os.PathLike[str]) -> range:
    """Return the serial numbers of the events in a ring file by its ends alone; none if only all slots show them.

    A process that goes on writing overwrites the oldest before they are read, so these are left out.
    """
    with _opened(path) as (file, header):
        is_whole = os.fstat(file.fileno()).st_size >= header.log_start
        newest = _find_newest(file.fileno(), header.capacity, header.capacity) if is_whole else None
        left_out = header.capacity // 16 if writer_state(file.fileno(), header) == "running" else 0
    return range(0) if newest is None else range(max(0, newest + 1 - header.capacity + left_out), newest + 1)


def read_ring(
    path: str | os.PathLike[str],
    last_events: int | None = None,
    serials: range | None = None,
    without: Collection[Kind] = (),
    log: "RingLog | None" = None,
) -> RingSnapshot:
    """Read a ring file: of a running, a stopped or a killed process, or a part of one.

    A file that was cut gives the events of the slots that are there. What is damaged is left out; a name that is lost
    with it becomes a number.

    Args:
        path: the file.
        last_events: read no more than about so many, the last ones, and count the others as overwritten; None: all.
        serials: read the events with these numbers alone; what is before them counts as overwritten.
        without: of `serials`, leave out the events of these kinds, but for the first and the last.
        log: what was read of the file's log before; the rest is added. None: nothing was.

    Raises:
        RingError: it cannot be read, is no ring file, or its header is damaged.
    """
    with _opened(path) as (file, header):
        status = os.fstat(file.fileno())
        size = status.st_size
        # The file of a new ring is reserved. Windows has no `st_blocks`, and a copied file has no holes there.
        if size >= _MIN_HOLLOW_BYTES and getattr(status, "st_blocks", size) * _BYTES_PER_BLOCK < size // 2:
            raise RingError(f"{file.name}: most of its {size:,} bytes are a hole; copy the ring again, whole")
        # Looked at first: a process that is gone by now has written all that it ever will.
        writer = writer_state(file.fileno(), header)
        if serials is None:
            slots = _read_file_slots(file.fileno(), size, header.capacity, last_events)
        else:
            ranges = _slots_of(serials.start, serials.stop, header.capacity, header.capacity)
            slots = read_slots(_slot_blocks(file.fileno(), ranges), header.capacity, serials, without)
        # The log is read after the slots: a name is noted before its number is used.
        records, id_counts = (log or RingLog()).read(file, header.log_start)
    missing_bytes = max(0, header.log_start + LOG_CHUNK_BYTES - size)
    slots, records = _validate(slots, records, id_counts)
    return RingSnapshot(slots, records, header.metadata, writer, has_known_pid(header), missing_bytes)


def has_news(path: str | os.PathLike[str], last: RingSnapshot) -> bool:
    """Return whether a ring file holds events after those of a snapshot, or its writer has ended since."""
    with _opened(path) as (file, header):
        if writer_state(file.fileno(), header) != last.writer:
            return True
        recorded, capacity = last.slots.recorded, header.capacity
        for first, stop in _slots_of(recorded, recorded + min(_SLOTS_WITH_NEXT, capacity), capacity, capacity):
            words = read_at(file.fileno(), (stop - first) * SLOT_BYTES, SLOTS_OFFSET + first * SLOT_BYTES)
            whole = len(words) // SLOT_BYTES * WORDS_PER_SLOT  # the file may have been cut
            stamps = np.frombuffer(words, np.int64, whole)[WORDS_PER_SLOT - 1 :: WORDS_PER_SLOT]
            if (stamps > recorded).any():
                return True
    return False


def ring_state(descriptor: int) -> WriterState:
    """Return whether the process that writes an open ring file lives; it needs no further descriptor."""
    try:
        header = parse_header("", read_at(descriptor, SLOTS_OFFSET, 0))
    except (OSError, RingError):
        header = FileHeader(0, 0, {}, {})  # a running process may hold its lock all the same
    return writer_state(descriptor, header)


def read_ring_records(path: str | os.PathLike[str]) -> list[Record]:
    """Read the name table of a ring file alone: its records, in the order in which they were noted."""
    with _opened(path) as (file, header):
        return RingLog().read(file, header.log_start)[0]


def read_ring_place(path: str | os.PathLike[str]) -> tuple[str, int | None]:
    """Return the role and the rank that the header of a ring file says; empty and None if it says none.

    Raises RingError too if the log was cut off: no name is known then, and no clock.
    """
    with _opened(path) as (file, header):
        if os.fstat(file.fileno()).st_size <= header.log_start:
            raise RingError(f"{os.fspath(path)}: its end was cut off, with all names and clocks; copy it again")
        return header.metadata.get("role", ""), header.metadata.get("rank")


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[tuple[BinaryIO, FileHeader]]:
    """Open a ring file and read its header; what goes wrong while the block reads it is a RingError."""
    name = os.fspath(path)
    try:
        with BufferedReader(open_regular(name)) as file:
            # Not by the file, whose buffer would keep a log from before the slots were read.
            yield file, parse_header(name, read_at(file.fileno(), SLOTS_OFFSET, 0))
    except OSError as error:
        raise RingError(f"{name}: cannot be read: {error.strerror}") from error


class RingLog:
    """The log of a ring file, which is read on from where the last look at it ended."""

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._end: int | None = None
        self._valid = valid_records([])

    def read(self, file: BinaryIO, offset: int) -> tuple[list[Record], dict[str, int]]:
        """Return the valid records, and how many ids each kind has.

        Records are read one by one, so that memory follows them and not what the file claims: it may be cut, or say
        nonsense.
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
                # A record holds texts and numbers, and that of a compiled region its graph; all else is damage.
                kept = {key: value for key, value in record.items() if isinstance(value, str | int)}
                graph = record.get("graph")
                self._records.append(kept | {"graph": graph} if isinstance(graph, dict) else kept)
        if len(self._records) > count:
            self._valid = valid_records(self._records)
        return self._valid


def _read_file_slots(descriptor: int, size: int, capacity: int, last_events: int | None = None) -> SlotSnapshot:
    """Read the whole events of a ring file."""
    count = max(0, min(capacity, (size - SLOTS_OFFSET) // SLOT_BYTES))
    recorded = -1
    for _ in range(1 + _MAX_REREADS):
        # Read again if serials are missing: the writer overtook a reader that had to pause. What is missing still
        # when nothing was written since is missing in the file.
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
            ranges = _slots_of(oldest, newest + 1 + _SLOTS_AHEAD, count, capacity)
            return read_slots(_slot_blocks(descriptor, ranges), capacity, range(oldest, _BEYOND_ALL))
    return read_slots(_slot_blocks(descriptor, [(0, count)]), capacity)


def _find_newest(descriptor: int, count: int, capacity: int) -> int | None:
    """Return the serial number of the newest event by bisection: after it, slots are a lap older, or empty.

    None if no event is in the first slot, or where a slot says what it cannot: then only all slots together show it.
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


def _slots_of(oldest: int, end: int, count: int, capacity: int) -> list[_SlotRange]:
    """Return where the events of some serial numbers are, `oldest` to `end`, without those that a cut took away."""
    begin, stop = oldest % capacity, (end - 1) % capacity + 1
    ranges = [(begin, stop)] if begin < stop else [(0, stop), (begin, capacity)]
    return [(first, min(last, count)) for first, last in ranges if first < count]


def _slot_blocks(descriptor: int, ranges: list[_SlotRange]) -> "Iterator[_SlotBlock]":
    """Yield some slots of a file.

    Each block is mapped only while it is looked at. A mapping, not a read: beside a live writer the order in which the
    words are copied matters.
    """
    for begin, end in ranges:
        for first in range(begin, end, _BLOCK_SLOTS):
            length = min(_BLOCK_SLOTS, end - first)
            offset = SLOTS_OFFSET + first * SLOT_BYTES
            aligned = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            mapping = mmap.mmap(
                descriptor, offset - aligned + length * SLOT_BYTES, access=mmap.ACCESS_READ, offset=aligned
            )
            words = np.frombuffer(mapping, np.int64, length * WORDS_PER_SLOT, offset - aligned)
            del mapping  # so that it goes with the block
            yield _SlotBlock(first, words.reshape(-1, WORDS_PER_SLOT))


class _SlotBlock(NamedTuple):
    """Some slots of a ring."""

    first: int  # the number of the first one
    slots: Int64Array  # int64[n, 4], a view of the mapping; it may be written to meanwhile


def slot_blocks(slots: Int64Array, serials: range | None = None) -> Iterator[_SlotBlock]:
    """Yield the slots of a view: those of the events with some serial numbers, or all."""
    ranges = [(0, len(slots))]
    if serials is not None:
        ranges = _slots_of(serials.start, serials.stop, len(slots), len(slots))
    for begin, end in ranges:
        for first in range(begin, end, _BLOCK_SLOTS):
            yield _SlotBlock(first, slots[first : min(first + _BLOCK_SLOTS, end)])


def read_slots(
    blocks: Iterable[_SlotBlock], capacity: int, serials: range = range(_BEYOND_ALL), without: Collection[Kind] = ()
) -> SlotSnapshot:
    """Read the whole events of a ring, dead or alive, in memory that follows the number of events and not of slots.

    `capacity` is more than there are where the file was cut short. Left out are events before `serials`, which count as
    overwritten, those after them, and those of kinds in `without`, but for the first and the last.
    """
    parts = [_whole_slots(block, capacity, serials, without) for block in blocks]
    columns = [np.concatenate(column) if len(column) > 1 else column[0] for column in zip(*parts, strict=True)]
    serial = columns[0] if columns else np.zeros(0, np.int64)
    if np.any(serial[1:] < serial[:-1]):
        order = np.argsort(serial, kind="stable")
        columns = [column[order] for column in columns]
        serial = columns[0]
    low, high = 0, len(serial)
    if high and serial[-1] >= capacity:
        # All serials of a ring lie within one capacity. One that is damaged must not make all others look overwritten.
        middle = int(serial[high // 2])
        low, high = np.searchsorted(serial, (middle - capacity + 1, middle + capacity)).tolist()
    recorded = int(serial[high - 1]) + 1 if high else 0
    oldest = max(min(serials.start, recorded), recorded - capacity)
    low = max(low, int(np.searchsorted(serial, oldest)))
    serial, time_ns, value, meta = (column[low:high] for column in columns or [serial] * 4)
    events = Events(
        serial=serial,
        time=time_ns,
        kind=(meta >> KIND_SHIFT & KIND_MASK).astype(np.int8),
        thread=(meta >> THREAD_SHIFT & THREAD_MASK).astype(np.int32),
        name=(meta & NAME_MASK).astype(np.int32),
        value=value,
    )
    return SlotSnapshot(events, recorded, oldest, recorded - oldest - len(events))


def _whole_slots(
    block: _SlotBlock, capacity: int, serials: range, without: Collection[Kind]
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Return serial, time, value and meta of the whole events of a block."""
    if not block.slots[:, 3].any():
        return _NO_SLOTS
    slots, slot = block.slots, np.arange(block.first, block.first + len(block.slots))
    rows: AnyArray | slice = slice(None)
    if without:
        # A slot that is written to meanwhile belongs to a later event.
        is_wanted = _IS_KNOWN.copy()
        is_wanted[[*without]] = False
        ends = [serial % capacity for serial in (serials.start, serials.stop - 1)]
        rows = np.flatnonzero(is_wanted[slots[:, 0] >> KIND_SHIFT & KIND_MASK] | np.isin(slot, ends))
        slot = slot[rows]
    # The order matters beside a live writer: the stamp is written last and so copied first, meta the other way round.
    stamp, time_ns, value, meta = (np.array(slots[:, column][rows]) for column in (3, 1, 2, 0))
    # Python's struct clears a slot before it fills it, so a stamp can also vanish meanwhile.
    whole = slots[:, 3][rows] == stamp
    serial = stamp - 1
    lap = serial // capacity
    whole &= (stamp > 0) & (serial - lap * capacity == slot) & (serial < serials.stop)
    whole &= ((lap & LAP_MASK) == meta >> LAP_SHIFT) & _IS_KNOWN[meta >> KIND_SHIFT & KIND_MASK]
    columns = serial, time_ns, value, meta
    return columns if whole.all() else tuple(column[whole] for column in columns)


def _validate(
    slots: SlotSnapshot, records: Sequence[Record], id_counts: Mapping[str, int]
) -> tuple[SlotSnapshot, list[Record]]:
    """Return the slots of a ring without damaged ones, and its records with those that are lost.

    An id whose record is lost becomes the name "#id". So each id that an event uses has a record, each record has all
    its fields, and the times of a thread never go back.
    """
    valid = [*records]
    slots = _drop_impossible_times(slots, valid)
    events = slots.events
    is_given = (events.name != NO_NAME) | ~is_any(events.kind, _PERHAPS_NAMED_KINDS)
    has_name, has_text = (is_given & is_any(events.kind, kinds) for kinds in (_NAMED_KINDS, _TEXT_KINDS))
    name, thread = events.name, events.thread
    name, lost = _renumber_unknown(name, has_name, id_counts["name"])
    valid += [{"kind": "name", "id": i, "label": f"#{old}", "fqn": f"#{old}", "class": "?"} for i, old in lost]
    name, lost = _renumber_unknown(name, has_text, id_counts["text"])
    valid += [{"kind": "text", "id": i, "text": f"#{old}"} for i, old in lost]
    thread, lost = _renumber_unknown(thread, np.ones(len(events), np.bool_), id_counts["thread"])
    valid += [
        {"kind": "thread", "id": i, "name": f"thread #{old}", "tid": old, "torch_thread_id": -1} for i, old in lost
    ]
    events = Events(events.serial, events.time, events.kind, thread, name, events.value)
    return slots._replace(events=events), valid


def _drop_impossible_times(slots: SlotSnapshot, records: Sequence[Record]) -> SlotSnapshot:
    """Count events with an impossible time as torn: before the recording, beyond all time, or back on their thread."""
    begin = next((record["monotonic"] for record in records if record["kind"] == "anchor"), 0)
    events = slots.events
    possible = (events.time >= begin) & (events.time < MAX_TIME_NS)
    # The end of an asynchronous call is written by other threads than the one that it belongs to.
    index = np.flatnonzero(possible & ~is_any(events.kind, KINDS_OF_OTHER_THREADS))
    if np.any(np.diff(events.time[index]) < 0):
        index = index[np.argsort(events.thread[index], kind="stable")]
    goes_back = (np.diff(events.time[index]) < 0) & (np.diff(events.thread[index]) == 0)
    for thread in np.unique(events.thread[index[1:][goes_back]]).tolist():
        of_thread = index[events.thread[index] == thread]
        time = events.time[of_thread]
        # One that is too late does not follow the later ones, and one that is too early not the earlier ones.
        ways = np.maximum.accumulate(time) == time, np.minimum.accumulate(time[::-1])[::-1] == time
        possible[of_thread[~max(ways, key=np.count_nonzero)]] = False
    if possible.all():
        return slots
    dropped = int(np.count_nonzero(~possible))
    return slots._replace(events=events.take(possible), torn=slots.torn + dropped)


def _renumber_unknown(ids: Int32Array, used: BoolArray, known_count: int) -> tuple[Int32Array, list[tuple[int, int]]]:
    """Give used ids without a record new ones, after the known without gaps; return all, and (new, old) of these."""
    unknown = used & (ids >= known_count)
    lost = np.unique(ids[unknown])
    if not len(lost):
        return ids, []
    ids = ids.copy()
    ids[unknown] = known_count + np.searchsorted(lost, ids[unknown])
    return ids, list(enumerate(lost.tolist(), known_count))
