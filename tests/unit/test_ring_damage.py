"""Ring files cut and changed anywhere: the whole events stay, or an error names the damage."""

from __future__ import annotations

import contextlib
import random
import struct
import threading
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import modtrace
from modtrace import ModtraceError, RingError
from modtrace.demo import GPT
from modtrace.record_options import EngineName
from modtrace.ring import Events, read_ring
from modtrace.ring.file_format import SLOTS_OFFSET
from modtrace.ring.slot_format import SLOT_BYTES
from tests.support.test_scale import scaled
from tests.support.trace_processor import TraceProcessor

CAPACITY = 256
LOG = SLOTS_OFFSET + CAPACITY * SLOT_BYTES
MUTATIONS = scaled(200, 1_000, 100_000)

pytestmark = pytest.mark.timeout(scaled(900, 900, 7200))

Row = tuple[int, int, int, int]


@pytest.fixture(scope="module")
def good(engine: EngineName, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A ring that has wrapped, with all kinds of events, cut after the used part of its log."""
    path = tmp_path_factory.mktemp("good") / f"{engine}.modtrace"
    model = GPT(layers=2, width=16)
    tokens = torch.randint(0, 256, (1, 4))
    with modtrace.record(engine=engine, capacity=CAPACITY, ring=path, shapes=True, memory_interval=0) as recording:
        thread = threading.Thread(target=model, args=(tokens,))
        thread.start()
        thread.join()
        for _ in range(2):
            model(tokens).sum().backward()
            checkpoint(model.blocks[0], torch.ones(1, 4, 16), use_reentrant=False).sum().backward()
            recording.step()
        recording.mark("a mark")
    data = path.read_bytes()
    slots = read_ring(path).slots
    assert slots.overwritten > 0
    assert slots.torn == 0
    return data[: len(data.rstrip(b"\0")) + 9]


def rows(events: Events) -> list[Row]:
    columns = (events.serial, events.time_ns, events.kind, events.value)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def load(path: Path) -> None:
    """Use all columns and tables of the file."""
    timeline = modtrace.load(path)
    assert len(list(timeline.spans)) == len(timeline.columns)
    columns = timeline.columns
    starts, ends = columns.start, columns.end
    assert (starts <= ends).all()
    assert (np.diff(starts) >= 0).all()
    inner = np.flatnonzero(columns.parent >= 0)
    assert (starts[columns.parent[inner]] <= starts[inner]).all()
    assert (ends[inner] <= ends[columns.parent[inner]]).all()
    # Neighbours of one level follow each other.
    level = np.lexsort((np.arange(len(columns)), columns.depth, columns.track))
    here, following = level[:-1], level[1:]
    same = (columns.track[here] == columns.track[following]) & (columns.depth[here] == columns.depth[following])
    assert (ends[here] <= starts[following])[same].all()
    assert timeline.stats.recorded >= timeline.stats.overwritten >= 0
    assert timeline.stats.torn >= 0


def test_a_file_cut_anywhere_gives_the_events_before_the_cut(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.modtrace"
    path.write_bytes(good)
    whole = sorted(rows(read_ring(path).slots.events), key=lambda row: row[0] % CAPACITY)
    metadata_end = len(good[:SLOTS_OFFSET].rstrip(b"\0"))
    every = random.Random(0).sample(range(len(good)), scaled(120, 600, len(good)))

    for length in sorted(every, reverse=True):
        with path.open("r+b") as file:
            file.truncate(length)
        if length < metadata_end:
            with pytest.raises(ModtraceError):
                modtrace.load(path)
            continue
        slots = read_ring(path).slots
        there = max(0, min(CAPACITY, (length - SLOTS_OFFSET) // SLOT_BYTES))
        assert sorted(rows(slots.events), key=lambda row: row[0] % CAPACITY) == whole[:there]
        load(path)


def damaged(good: bytes, chance: random.Random) -> bytes:
    """Return the file with some bytes changed: mostly in the slots, where no checksum detects it."""
    data = bytearray(good)
    for _ in range(chance.choice([1, 1, 2, 4, 16, 200])):
        at = chance.randrange(*chance.choice([(0, len(data)), (SLOTS_OFFSET, LOG), (SLOTS_OFFSET, LOG)]))
        length = min(8, len(data) - at)
        match chance.randrange(4):
            case 0:
                data[at] ^= 1 << chance.randrange(8)
            case 1:
                data[at] = chance.randrange(256)
            case 2:
                word = chance.choice([b"\xff" * 8, b"\0" * 8, b"\xff" * 7 + b"\x7f", chance.randbytes(8)])
                data[at : at + length] = word[:length]
            case 3:
                source = chance.randrange(len(data) - length)
                data[at : at + length] = data[source : source + length]
    if chance.randrange(10) == 0:
        at = chance.randrange(64)
        data[at : at + 4] = chance.choice([chance.randbytes(4), good[:4], b"\xff" * 4])
    if chance.randrange(10) == 0:
        claim_capacity(data, chance.choice([1, CAPACITY - 1, CAPACITY + 1, 1 << 20, 1 << 34, 1 << 58]))
    if chance.randrange(4) == 0:
        change_a_record(data, good, chance)
    return bytes(data)


def claim_capacity(data: bytearray, capacity: int) -> None:
    """Set another capacity in the header, with the values that depend on it."""
    struct.pack_into("<QQQ", data, 16, capacity, SLOTS_OFFSET, SLOTS_OFFSET + capacity * SLOT_BYTES)


def change_a_record(data: bytearray, good: bytes, chance: random.Random) -> None:
    """Change the text of a log record, with a checksum that fits it."""
    at, places = LOG, []
    while length := int.from_bytes(good[at : at + 4], "little"):
        places.append((at + 8, length))
        at += 8 + length
    at, length = chance.choice(places)
    text = bytearray(good[at : at + length])
    digits = [place for place, letter in enumerate(text) if letter in b"0123456789"]
    if digits and chance.randrange(2):
        text[chance.choice(digits)] = chance.choice(b"0123456789-.e")
    else:
        text[chance.randrange(length)] = chance.randrange(256)
    struct.pack_into("<II", data, at - 8, length, zlib.crc32(text))
    data[at : at + length] = text


def test_mutations_give_whole_events_or_a_named_error(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "mutated.modtrace"
    chance = random.Random(1)
    errors = 0
    for _ in range(MUTATIONS):
        path.write_bytes(damaged(good, chance))
        try:
            load(path)
        except ModtraceError:
            errors += 1
    assert 0 < errors < MUTATIONS // 2


def test_a_damaged_file_saves_as_a_trace_without_a_fault(
    good: bytes, trace_processor: type[TraceProcessor], tmp_path: Path
) -> None:
    path = tmp_path / "mutated.modtrace"
    chance = random.Random(5)
    for _ in range(scaled(8, 40, 2000)):
        data = bytearray(good)
        for _ in range(chance.choice([1, 4, 50])):
            at = chance.randrange(SLOTS_OFFSET, len(data) - 8)
            data[at : at + 8] = chance.choice(
                [chance.randbytes(8), bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 : at + 8]]
            )
        path.write_bytes(data)
        trace = tmp_path / "trace.pftrace"  # JSON cannot hold the years that a damaged time can add

        modtrace.load(path).save(trace)

        assert trace_processor.open(trace).import_problems() == {}


def test_one_damaged_byte_costs_at_most_its_own_event(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "mutated.modtrace"
    path.write_bytes(good)
    whole = rows(read_ring(path).slots.events)
    chance = random.Random(2)
    for _ in range(scaled(80, 300, 8192)):
        data = bytearray(good)
        at = chance.randrange(SLOTS_OFFSET, LOG)
        data[at] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        slot = (at - SLOTS_OFFSET) // SLOT_BYTES

        left = {row for row in rows(read_ring(path).slots.events) if row[0] % CAPACITY != slot}

        others = {row for row in whole if row[0] % CAPACITY != slot}
        assert left <= others
        # If two times are in the wrong order, either one may be the damaged one.
        assert len(others - left) <= ((at - SLOTS_OFFSET) % SLOT_BYTES // 8 == 1)


def test_random_bytes_after_a_good_header_are_no_events(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "noise.modtrace"
    chance = random.Random(3)
    for _ in range(scaled(20, 50, 1000)):
        path.write_bytes(good[:SLOTS_OFFSET] + chance.randbytes(len(good) - SLOTS_OFFSET))
        load(path)


@pytest.mark.no_cover
def test_memory_use_follows_the_size_of_the_file_and_not_its_claims(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "mutated.modtrace"
    chance = random.Random(4)
    path.write_bytes(good)
    load(path)
    tracemalloc.start()
    try:
        for _ in range(scaled(15, 60, 5000)):
            data = bytearray(damaged(good, chance))
            for _ in range(chance.choice([0, 200])):
                # Names, threads, numbers: the words that give sizes.
                slot = chance.randrange(CAPACITY)
                word = SLOTS_OFFSET + slot * SLOT_BYTES + 8 * chance.choice([0, 1, 2])
                at = word + chance.randrange(5)
                data[at] = chance.randrange(256)
            path.write_bytes(data)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with contextlib.suppress(ModtraceError):
                load(path)
            assert tracemalloc.get_traced_memory()[1] - before < 40 * len(data)
    finally:
        tracemalloc.stop()


def test_a_file_that_is_not_a_ring_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    path.write_bytes(b"MODTRACE" + bytes(20))

    with pytest.raises(RingError, match=r"run\.modtrace: not a ring file"):
        modtrace.load(path)
