"""A ring in memory: wrapping, torn and lost slots, many threads, capacity, clocks."""

from __future__ import annotations

import errno
import mmap
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from modtrace import RingError
from modtrace.record_options import EngineName
from modtrace.recording.capture import choose_engine, make_engine
from modtrace.ring import Kind, Ring, read_ring, ring
from modtrace.ring.slot_format import KIND_SHIFT, LAP_SHIFT, WORDS_PER_SLOT
from modtrace.track.event_sink import EngineOptions

COUNT = Kind.COUNTER << KIND_SHIFT


def fail(error: BaseException) -> None:
    raise AssertionError from error


def slots(ring: Ring) -> np.ndarray:
    return np.frombuffer(ring.buffer, np.int64, ring.capacity * WORDS_PER_SLOT, ring.offset).reshape(-1, WORDS_PER_SLOT)


def written(capacity: int, count: int) -> Ring:
    """Return a ring with `count` events whose values are 0, 1, … and whose times are 10, 11, …."""
    ring = Ring(capacity)
    times = iter(range(10, 10 + count))
    write = ring.make_writer(lambda: next(times))
    for value in range(count):
        write(COUNT, value)
    return ring


def test_an_empty_ring_has_no_events() -> None:
    slots = Ring(16).read().slots

    assert len(slots.events) == 0
    assert slots[1:] == (0, 0, 0)


@pytest.mark.parametrize("seed", range(32))
def test_the_last_events_survive_wrapping(engine: EngineName, seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    capacity = chance.choice([16, 17, 64, 100, 255, 1024])
    count = chance.randrange(5 * capacity)
    ring = Ring(capacity, tmp_path / "ring.modtrace")
    texts = [ring.names.text(f"counter {number}") for number in range(10)]
    values = [chance.randrange(-(1 << 63), 1 << 63) for _ in range(count)]

    running = make_engine(choose_engine(engine), ring, fail, EngineOptions())
    running.start()
    for at, value in enumerate(values):
        running.write_event(Kind.COUNTER, texts[at % 10], value)
    running.stop()

    for snapshot in (ring.read(), read_ring(tmp_path / "ring.modtrace")):
        events, recorded, overwritten, torn = snapshot.slots
        gone = max(0, count - capacity)
        assert (recorded, overwritten, torn) == (count, gone, 0)
        assert events.serial.tolist() == list(range(gone, count))
        assert events.value.tolist() == values[gone:]
        assert events.name.tolist() == [at % 10 for at in range(gone, count)]
        assert (np.diff(events.time_ns) >= 0).all()
    ring.close()


def test_a_slot_that_is_being_written_is_torn() -> None:
    ring = written(16, 20)
    # The 20 events end in slot 3; the writer of event 20 has stored its meta and no more.
    slots(ring)[4, 0] = 1 << LAP_SHIFT | COUNT

    events, recorded, overwritten, torn = ring.read().slots

    assert (recorded, overwritten, torn) == (20, 4, 1)
    assert events.value.tolist() == [*range(5, 20)]


def test_a_slot_that_python_has_cleared_is_torn() -> None:
    ring = written(16, 12)
    slots(ring)[5] = 0

    events, recorded, overwritten, torn = ring.read().slots

    assert (recorded, overwritten, torn) == (12, 0, 1)
    assert events.value.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]


def test_a_slot_that_a_late_writer_took_back_is_lost() -> None:
    ring = written(16, 20)
    # Event 2 was taken out before it was written, and came after event 18.
    slots(ring)[2] = (COUNT, 12, 2, 3)

    events, recorded, overwritten, torn = ring.read().slots

    assert (recorded, overwritten, torn) == (20, 4, 1)
    assert events.value.tolist() == [*range(4, 18), 19]


@pytest.mark.parametrize("laps", [1, 100, 1 << 15, 1 << 40])
def test_one_damaged_stamp_does_not_make_all_others_look_overwritten(laps: int) -> None:
    ring = written(16, 40)
    # The lap that is 2**15 laps later looks the same in meta.
    slots(ring)[3, 3] += laps * 16
    slots(ring)[3, 0] += (laps & 0x7FFF) << LAP_SHIFT

    events, recorded, overwritten, torn = ring.read().slots

    assert (recorded, overwritten, torn) == (40, 24, 1)
    assert events.value.tolist() == [*range(24, 35), *range(36, 40)]


def test_laps_are_counted_beyond_their_bits() -> None:
    ring = Ring(16)
    write = ring.make_writer(lambda: 1)
    count = (1 << 15) * 16 + 40
    for value in range(count):
        write(COUNT, value)

    events, recorded, overwritten, torn = ring.read().slots

    assert (recorded, overwritten, torn) == (count, count - 16, 0)
    assert events.value.tolist() == [*range(count - 16, count)]


def test_each_event_of_many_threads_is_there_once(engine: EngineName) -> None:
    ring = Ring(1 << 12)
    ring.names.text("counter")
    running = make_engine(choose_engine(engine), ring, fail, EngineOptions())

    def note(first: int) -> None:
        for value in range(first, first + 500):
            running.write_event(Kind.COUNTER, 0, value)

    running.start()
    threads = [threading.Thread(target=note, args=(500 * at,)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    running.stop()
    events, recorded, overwritten, torn = ring.read().slots

    assert (recorded, overwritten, torn) == (4000, 0, 0)
    assert sorted(events.value.tolist()) == [*range(4000)]
    # The slots of threads that have ended keep their thread's number.
    assert all(len(set(events.thread[events.value // 500 == at].tolist())) == 1 for at in range(8))
    assert len(set(events.thread.tolist())) == 8


@pytest.mark.parametrize("capacity", [-1, 0, 15, (1 << 34) + 1])
def test_an_impossible_capacity_is_an_error(capacity: int) -> None:
    with pytest.raises(RingError, match="capacity is"):
        Ring(capacity)


def test_a_ring_in_memory_is_no_larger_than_the_available_memory() -> None:
    with pytest.raises(RingError, match=r"^a ring of 17,179,869,184 events needs 549,755,813,888 bytes, but only "):
        Ring(1 << 34)


def test_a_ring_for_which_the_process_gets_no_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(RingError, match=r"^a ring of 64 events needs 2,048 bytes, which .* Cannot allocate memory"):
        Ring(64)


MEMINFO = "MemTotal: 100 kB\nMemAvailable: 50 kB\nSwapFree: 7 kB\n"


def test_available_memory_is_what_the_machine_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    monkeypatch.setattr(ring, "_MEMINFO", tmp_path / "meminfo")
    assert ring._available_memory_bytes() == 57 * 1024


def test_a_system_without_memory_figures_sets_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "_MEMINFO", tmp_path / "absent")
    assert ring._available_memory_bytes() is None


def test_the_clocks_are_read_without_another_process_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """The delays come before readings in turn: monotonic, wall, monotonic, and so on."""
    now, wall_ahead = 1_000_000, 10**18
    delays = iter([0, 4_000_000, 0, 0, 30, 50, 9_000_000, 0, 100, 0, 0, 7_000_000, 0, 4_000_000, 0])

    def read(ahead: int) -> int:
        nonlocal now
        now += next(delays)
        return now + ahead

    monkeypatch.setattr(time, "monotonic_ns", lambda: read(0))
    monkeypatch.setattr(time, "time_ns", lambda: read(wall_ahead))
    anchors = [record for record in Ring(16).names.records if record["kind"] == "anchor"]
    monkeypatch.undo()

    assert anchors == [{"kind": "anchor", "monotonic": 5_000_040, "wall": wall_ahead + 5_000_030}]
    assert next(delays, None) is None
