"""The last events of a ring file: the requested number, read without the others."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from modtrace.ring import Kind, Ring, read_file, read_ring
from modtrace.ring.file_format import SLOTS_OFFSET
from modtrace.ring.slot_format import KIND_SHIFT, LAP_SHIFT, NO_NAME, SLOT_BYTES

CAPACITY = 64


@pytest.fixture(autouse=True)
def few_slots_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_file, "_SLOTS_AHEAD", 4)


def make(path: Path, events: int) -> Ring:
    ring = Ring(CAPACITY, path)
    ring.names.thread("main", 1)
    write = ring.make_writer()
    for number in range(events):
        write(Kind.STEP << KIND_SHIFT | NO_NAME, number)
    return ring


def stamp(path: Path, slot: int, value: int) -> None:
    with path.open("r+b") as file:
        file.seek(SLOTS_OFFSET + slot * SLOT_BYTES + 24)
        file.write(struct.pack("<q", value))


@pytest.mark.parametrize("events", [0, 1, 30, 63, 64, 65, 70, 127, 128, 200])
@pytest.mark.parametrize("asked", [1, 10, 50])
def test_the_last_events_are_those_at_the_end_of_the_ring(tmp_path: Path, events: int, asked: int) -> None:
    path = tmp_path / "run.modtrace"
    make(path, events)
    slots = read_ring(path, asked).slots
    assert slots.events.value.tolist() == [*range(max(0, events - asked), events)]
    assert (slots.recorded, slots.overwritten, slots.torn) == (events, max(0, events - asked), 0)


def test_only_the_slots_asked_for_are_read(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    make(path, 100)
    for slot in range(45, 60):  # events 45 to 59; 100 events end in slot 35, and the last ten are in 26 to 35
        with path.open("r+b") as file:
            file.seek(SLOTS_OFFSET + slot * SLOT_BYTES)
            file.write(b"\xff" * 24)  # all except the stamp, which shows where the end is
    assert read_ring(path).slots.torn == 15
    assert read_ring(path, 10).slots.torn == 0


@pytest.mark.parametrize("damaged", [0, 16, 32, 48])
def test_the_whole_ring_is_read_if_a_slot_is_impossible(tmp_path: Path, damaged: int) -> None:
    path = tmp_path / "run.modtrace"
    make(path, 100)
    stamp(path, damaged, 12_345_678)
    assert read_ring(path, 10).slots.events.value[-1] == 99
    assert len(read_ring(path, 10).slots.events) in (10, 63)


def test_the_last_events_of_a_cut_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    make(path, 40)
    with path.open("r+b") as file:
        file.truncate(SLOTS_OFFSET + 30 * SLOT_BYTES)
    assert read_ring(path, 5).slots.events.value.tolist() == [25, 26, 27, 28, 29]


def test_events_written_during_the_search_for_the_end_are_read_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.modtrace"
    ring = make(path, 70)
    slots = np.frombuffer(ring.buffer, np.int64, 4 * CAPACITY, SLOTS_OFFSET).reshape(-1, 4)
    find_newest = read_file._find_newest

    def find_newest_and_go_on(descriptor: int, count: int, capacity: int) -> int | None:
        newest = find_newest(descriptor, count, capacity)
        for serial in range(70, 73):
            meta = serial // CAPACITY << LAP_SHIFT | Kind.STEP << KIND_SHIFT | NO_NAME
            slots[serial % CAPACITY] = (meta, slots[5, 1], serial, serial + 1)
        return newest

    monkeypatch.setattr(read_file, "_find_newest", find_newest_and_go_on)
    last_slots = read_ring(path, 10).slots
    assert last_slots.events.value.tolist() == [*range(60, 73)]
    assert (last_slots.recorded, last_slots.overwritten, last_slots.torn) == (73, 60, 0)
