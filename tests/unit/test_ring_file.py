"""The ring's file: how it is made, shared, grown, replaced and read, and names and metadata that make no sense."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import struct
import zlib
from pathlib import Path
from typing import Any

import orjson
import pytest

import modtrace
from modtrace import RingError
from modtrace.ring import Kind, Ring, RingLog, read_file, read_ring, read_ring_records
from modtrace.ring.file_format import MAX_RECORD_BYTES, SLOTS_OFFSET, parse_object
from modtrace.ring.slot_format import (
    COLLECTED_BITS,
    GENERATION_BITS,
    KIND_SHIFT,
    NO_NAME,
    SEQUENCE_BITS,
    SLOT_BYTES,
    THREAD_SHIFT,
)

ENTER, EXIT = Kind.FORWARD_ENTER << KIND_SHIFT, Kind.FORWARD_EXIT << KIND_SHIFT
METADATA = {"pid": 42, "rank": 3, "program": "python", "engine": "python"}
CAPACITY = 16
LOG = SLOTS_OFFSET + CAPACITY * SLOT_BYTES


def make(path: Path, calls: int = 3) -> Ring:
    """A ring with `calls` finished calls of Net, on the thread main."""
    ring = Ring(CAPACITY, path, METADATA)
    start = ring.names.records[0]["monotonic"]
    times = iter(range(start, start + 100))
    write = ring.make_writer(lambda: next(times))
    name, thread = ring.names.name("Net", "Net", "Net"), ring.names.thread("main", 43)
    for number in range(calls):
        write(ENTER | thread << THREAD_SHIFT | name, number << SEQUENCE_BITS)
        write(EXIT | thread << THREAD_SHIFT | name, number << SEQUENCE_BITS)
    return ring


def append(path: Path, *records: object) -> None:
    """Add records to the log of a ring's file, valid in all but their content."""
    data = path.read_bytes()
    at = LOG
    while length := struct.unpack_from("<I", data, at)[0]:
        at += 8 + length
    with path.open("r+b") as file:
        file.seek(at)
        for record in records:
            text = record if isinstance(record, bytes) else orjson.dumps(record)
            file.write(struct.pack("<II", len(text), zlib.crc32(text)) + text)


def patch(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def test_a_file_is_read_beside_its_writer_and_after(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    ring = make(path)

    beside = read_ring(path)
    ring.close()
    after = read_ring(path)

    assert beside.metadata == after.metadata == METADATA
    assert [record["kind"] for record in beside.records] == ["anchor", "name", "thread"]
    assert [record["kind"] for record in after.records] == ["anchor", "name", "thread", "anchor", "stop"]
    assert beside.slots.events.value.tolist() == after.slots.events.value.tolist()
    assert [span.call for span in modtrace.load(path).spans] == [0, 1, 2]
    track = modtrace.load(path).tracks[0]
    assert (track.thread, track.tid, track.process.pid, track.process.rank) == ("main", 43, 42, 3)


def test_the_space_is_reserved_at_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"

    ring = Ring(1 << 16, path)
    status = path.stat()

    assert status.st_blocks * 512 >= (1 << 16) * SLOT_BYTES + (1 << 20)
    assert status.st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["run.modtrace"]
    ring.close()


def test_files_of_others_beside_a_ring_are_neither_followed_nor_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda _: "guessed")
    planted = tmp_path / f"run.modtrace.{os.getpid()}.guessed.new"
    victim = tmp_path / "victim"
    victim.write_text("precious")

    planted.symlink_to(victim)
    with pytest.raises(RingError, match="File exists"):
        Ring(16, tmp_path / "run.modtrace")
    assert victim.read_text() == "precious"
    assert planted.is_symlink()

    planted.unlink()
    planted.touch(0o666)
    with pytest.raises(RingError, match="File exists"):
        Ring(16, tmp_path / "run.modtrace")
    assert sorted(os.listdir(tmp_path)) == [planted.name, "victim"]


def test_a_file_that_is_not_regular_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(os.devnull)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))

    for path in (*(tmp_path / name for name in ("folder", "fifo", "socket", "link")), Path(os.devnull)):
        before = path.lstat()
        with pytest.raises(RingError) as raised:
            Ring(16, path)
        assert str(raised.value) == f"{path}: this file is not a ring and is not overwritten. Choose another path."
        assert path.lstat() == before
    assert sorted(os.listdir(tmp_path)) == ["fifo", "folder", "link", "socket"]


def test_the_log_grows_beyond_what_was_reserved(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    ring = make(path)
    texts = [f"{number:06} {'x' * 500}" for number in range(4000)]

    for text in texts:
        ring.names.text(text)

    assert [record["text"] for record in read_ring(path).records if record["kind"] == "text"] == texts
    ring.close()


def test_a_log_is_read_on_from_where_the_last_look_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, log, parsed = tmp_path / "run.modtrace", RingLog(), list[bytes]()
    ring = make(path)

    def parse(text: bytes) -> dict[str, Any] | None:
        parsed.append(text)
        return parse_object(text)

    monkeypatch.setattr(read_file, "parse_object", parse)
    first = read_ring(path, None, None, (), log)
    ring.names.text("later")
    second = read_ring(path, None, None, (), log)
    ring.close()

    assert [record["kind"] for record in first.records] == ["anchor", "name", "thread"]
    assert second.records == [*first.records, {"kind": "text", "id": 0, "text": "later"}]
    assert second.records == read_ring(path).records[:4]
    assert [*map(orjson.loads, parsed[:4])] == second.records


def test_a_log_without_room_for_another_name_has_room_for_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = make(tmp_path / "run.modtrace")

    def fail(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)

    def fill(length: int) -> None:
        for number in range(10_000):
            ring.names.text(f"{number}{'x' * length}")

    for length in (500, 1):
        with pytest.raises(OSError, match="No space left"):
            fill(length)
    ring.close()

    records = read_ring(tmp_path / "run.modtrace").records
    assert [record["kind"] for record in records[-3:]] == ["text", "anchor", "stop"]


def test_a_new_ring_takes_the_place_of_the_old_file_which_its_reader_keeps(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    make(path).close()
    with path.open("rb") as reader:
        make(path, calls=1).close()

        assert len(reader.read()) > LOG
    assert len(modtrace.load(path).spans) == 1


def test_text_that_utf_8_cannot_hold_is_kept_readable(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    ring = make(path)

    ring.names.name("a\udcff", "Ünï.\0\n", "x" * 100_000)
    record = read_ring(path).records[-1]

    assert (record["label"], record["fqn"]) == ("a\\udcff", "Ünï.\0\n")
    assert len(record["class"]) == (1 << 14) + 1
    ring.close()


@pytest.mark.parametrize(
    ("at", "data", "says"),
    [
        (0, b"XXXX", "does not begin with MODTRACE"),
        (8, struct.pack("<I", 9), "ring format 9; this modtrace reads 2"),
        (16, struct.pack("<Q", 0), "the header is damaged"),
        (16, struct.pack("<Q", 17), "the header is damaged"),
        (16, b"\xff" * 8, "the header is damaged"),
        (24, struct.pack("<Q", 64), "the header is damaged"),
        (32, b"\xff" * 8, "the header is damaged"),
        (40, b"\xff" * 4, "the header is damaged"),
        (44, b"\0" * 4, "the header is damaged"),
        (50, b"?", "the header is damaged"),
    ],
)
def test_a_damaged_header_is_an_error_that_names_the_file(tmp_path: Path, at: int, data: bytes, says: str) -> None:
    path = tmp_path / "run.modtrace"
    make(path).close()
    patch(path, at, data)

    with pytest.raises(RingError, match=says) as raised:
        read_ring(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("metadata", [[1, 2], "text", None])
def test_metadata_that_is_no_object_is_damage(tmp_path: Path, metadata: object) -> None:
    path = tmp_path / "run.modtrace"
    make(path).close()
    text = orjson.dumps(metadata)
    patch(path, 40, struct.pack("<II", len(text), zlib.crc32(text)) + text)

    with pytest.raises(RingError, match="the header is damaged"):
        read_ring(path)


def test_a_capacity_beyond_all_memory_reads_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    make(path).close()
    huge = 1 << 58
    patch(path, 16, struct.pack("<QQQ", huge, SLOTS_OFFSET, SLOTS_OFFSET + huge * SLOT_BYTES))
    assert read_ring_records(path) == []

    snapshot = read_ring(path)

    assert snapshot.records[0]["label"] == "#0"
    assert len(snapshot.slots.events) == 6


def test_a_missing_file_and_a_folder_are_errors(tmp_path: Path) -> None:
    with pytest.raises(RingError, match="cannot be read: No such file"):
        read_ring(tmp_path / "absent.modtrace")
    with pytest.raises(RingError, match="cannot be read: it is a folder; name one of its files, or "):
        read_ring(tmp_path)


def test_a_place_where_no_file_can_be_made_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RingError, match=r"absent/run.modtrace: cannot reserve .* No such file .* Choose another path"):
        Ring(16, tmp_path / "absent" / "run.modtrace")


def test_metadata_that_does_not_fit_the_header_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RingError, match="does not fit"):
        Ring(16, tmp_path / "run.modtrace", {"text": "x" * 4096})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "record",
    [
        b"not JSON",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[1]",
        b"7",
        {},
        {"kind": 7},
        {"kind": ["name"]},
        {"kind": "a kind of the future"},
        {"kind": "name"},
        {"kind": "name", "id": 1, "label": "a", "fqn": "a"},
        {"kind": "name", "id": 1, "label": 1, "fqn": "a", "class": "a"},
        {"kind": "name", "id": 100, "label": "a", "fqn": "a", "class": "a"},
        {"kind": "name", "id": 1 << 60, "label": "a", "fqn": "a", "class": "a"},
        {"kind": "name", "id": -1, "label": "a", "fqn": "a", "class": "a"},
        {"kind": "name", "id": True, "label": "a", "fqn": "a", "class": "a"},
        {"kind": "text", "id": 0, "text": None},
        {"kind": "thread", "id": 1, "name": "a", "tid": 1 << 40, "torch_thread_id": -1},
        {"kind": "thread", "id": 1, "name": "a", "tid": 7, "torch_thread_id": "x"},
        {"kind": "anchor", "monotonic": 1.5, "wall": 1},
        {"kind": "anchor", "monotonic": 1, "wall": 1 << 63},
    ],
)
def test_a_record_that_makes_no_sense_is_left_out(tmp_path: Path, record: Any) -> None:
    path = tmp_path / "run.modtrace"
    ring = make(path)
    before = read_ring(path).records
    append(path, record, {"kind": "text", "id": 0, "text": "behind it"})

    assert read_ring(path).records == [*before, {"kind": "text", "id": 0, "text": "behind it"}]
    assert len(modtrace.load(path).spans) == 3
    ring.close()


def test_metadata_of_the_wrong_type_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    ring = Ring(16, path, {"pid": "forty", "rank": [1], "program": 7, "torch": "2.13"})
    ring.close()

    assert read_ring(path).metadata == {"torch": "2.13"}
    assert len(modtrace.load(path).spans) == 0


def test_numbers_without_a_name_are_called_by_their_number(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    ring = make(path, calls=0)
    start = ring.names.records[0]["monotonic"]
    write = ring.make_writer(lambda: start)
    for kind in (ENTER, EXIT):
        write(kind | 65_000 << THREAD_SHIFT | (1 << 24) - 1, 0)
        write(kind | 65_000 << THREAD_SHIFT | 16_000_000, 0)
    write(Kind.MARK << KIND_SHIFT | 65_000 << THREAD_SHIFT | 9_000_000, 0)

    timeline = modtrace.load(path)

    assert sorted(name.label for name in timeline.names) == ["#16000000", "#16777215", "Net"]
    assert timeline.track_names == ["forward · thread #65000"]
    assert [mark.text for mark in timeline.marks] == ["#9000000"]
    ring.close()


def test_a_garbage_collection_may_be_written_late(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    ring = make(path, calls=0)
    start = ring.names.records[0]["monotonic"]
    write = ring.make_writer()
    name = ring.names.name("Net", "Net", "Net")
    write(ENTER | name, 0, start + 10)
    write(EXIT | name, 0, start + 50)
    write(Kind.COLLECTION << KIND_SHIFT | NO_NAME, 20 << COLLECTED_BITS + GENERATION_BITS, start + 40)
    ring.close()

    timeline = modtrace.load(path)

    assert timeline.stats.torn == 0
    (span,), (collection,) = timeline.spans, timeline.ranges
    assert (span.duration_ns, span.complete, collection.category) == (40, True, "gc")
    assert (collection.start_ns - span.start_ns, collection.end_ns - span.start_ns) == (10, 30)


@pytest.mark.parametrize("time", [-(1 << 63), -1, 0, 1 << 61, (1 << 63) - 1])
def test_an_event_beyond_all_time_is_torn(tmp_path: Path, time: int) -> None:
    path = tmp_path / "run.modtrace"
    make(path).close()
    # The enter of the second call.
    patch(path, SLOTS_OFFSET + 2 * SLOT_BYTES + 8, struct.pack("<q", time))

    timeline = modtrace.load(path)

    assert timeline.stats.torn == 1
    assert [(span.call, span.complete) for span in timeline.spans] == [(1, False), (0, True), (2, True)]


def test_notes_after_the_end_are_in_no_file(tmp_path: Path) -> None:
    ring, other = make(tmp_path / "run.modtrace"), tmp_path / "other"
    ring.close()
    size = (tmp_path / "run.modtrace").stat().st_size
    with other.open("wb"):  # has the number of the descriptor that was the ring's
        ring.names.name("late", "late", "Late")
        ring.names.anchor()

    assert other.read_bytes() == b""
    assert (tmp_path / "run.modtrace").stat().st_size == size
    assert [record["kind"] for record in read_ring(tmp_path / "run.modtrace").records][-1] == "stop"


def test_names_that_threads_note_at_once_may_come_in_any_order_and_with_one_missing(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    make(path)
    append(
        path,
        {"kind": "name", "id": 3, "label": "c", "fqn": "c", "class": "C"},
        {"kind": "name", "id": 1, "label": "a", "fqn": "a", "class": "A"},
        {"kind": "name", "id": 1 << 20, "label": "damaged", "fqn": "damaged", "class": "D"},
    )

    names = modtrace.load(path).names
    assert [name.fqn for name in names] == ["Net", "a", "#2", "c"]


def test_a_record_that_readers_would_take_for_damage_is_not_written(tmp_path: Path) -> None:
    ring = make(tmp_path / "run.modtrace")
    for length in (100, MAX_RECORD_BYTES):
        graph = {"graph": "0/0", "unknown": "x" * length, "work": [], "kernels": []}
        ring.names.compiled(0, "up: Linear", graph)
    ring.names.name("Behind", "Behind", "Behind")

    records = read_ring(tmp_path / "run.modtrace").records

    assert [record["graph"]["unknown"] for record in records if record["kind"] == "compiled"] == ["x" * 100]
    assert [record["fqn"] for record in records if record["kind"] == "name"] == ["Net", "Behind"]


def test_a_name_that_came_while_slots_were_read_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring, read_slots = make(tmp_path / "run.modtrace"), read_file._read_file_slots

    def write_and_read(*arguments: Any) -> Any:
        name, now = ring.names.name("Late", "Late", "Late"), ring.names.records[0]["monotonic"] + 100
        ring.make_writer(lambda: now)(ENTER | name, 0)
        return read_slots(*arguments)

    monkeypatch.setattr(read_file, "_read_file_slots", write_and_read)

    names = [record["fqn"] for record in read_ring(tmp_path / "run.modtrace").records if record["kind"] == "name"]
    assert names == ["Net", "Late"]
