"""The table that a written trace carries: read as it was written, or known to be of a trace that was changed since."""

from __future__ import annotations

import base64
import gzip
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

import modtrace
from modtrace import ModtraceError, Timeline, TraceError, load
from modtrace.formats import own_table, table_bytes
from modtrace.timeline import Name, Slices, Track
from modtrace.timeline import Timeline as TimelineData
from modtrace.timeline.slices import DTYPES
from tests.support.kineto import recording, trace, x
from tests.support.small_timelines import call_of_net
from tests.support.timelines import gpt2_timeline, slice_args, timeline_of, timelines

FORMATS = (".json", ".json.gz", ".pftrace", ".pftrace.gz", ".html")
CHANGED = "another program has changed or cut it"


def columns_of(timeline: TimelineData) -> dict[str, list[Any]]:
    columns = {name: getattr(timeline.slices, name).tolist() for name in DTYPES}
    # Only names that a slice has are kept.
    columns["name"] = [timeline.names[name] if name >= 0 else None for name in columns["name"]]
    return columns | {"args": timeline.span_args}


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(timeline=timelines(), rows=st.integers(1, 9))
def test_a_table_of_many_blocks_comes_back_as_it_was(timeline: Timeline, rows: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_bytes, "_BLOCK_ROWS", rows)
        back = table_bytes.unpack_table(table_bytes.pack_table(timeline), 1 << 20)
    assert columns_of(back) == columns_of(timeline)
    assert (back.tracks, back.stats, back.begin_ns) == (timeline.tracks, timeline.stats, timeline.begin_ns)
    assert list(back.marks) == list(timeline.marks)
    assert back.metadata == timeline.metadata


def test_each_column_is_packed_in_the_bytes_that_it_needs() -> None:
    # 1000 slices whose starts differ by 300 ns, or by 301 after each tenth: one plane, of 0 and 1.
    start = np.cumsum(np.where(np.arange(1000) % 10, 300, 301)) + 10**18
    planes: list[bytes] = []
    assert table_bytes._pack_column("start", start, planes) == [1000, 10**18 + 301, 300, [len(planes[0])]]
    assert list(zlib.decompress(planes[0])[:12]) == [*[0] * 10, 1, 0]


def test_extremes_of_64_bits_come_back() -> None:
    low, high = -(2**63), 2**63 - 1
    values = np.array([0, low, high, -1, high, low, 5], np.int64)
    for name in ("start", "value"):
        planes: list[bytes] = []
        packed = table_bytes._pack_column(name, values, planes)
        back, place = table_bytes._unpack_column(name, packed, memoryview(b"".join(planes)), 0, 100)
        assert back.tolist() == values.tolist()
        assert place == sum(map(len, planes))


def test_slices_left_out_of_a_timeline_are_not_in_its_table() -> None:
    timeline = Timeline(
        Slices.of(
            slice_args({0: {"shapes": "secret shape"}, 1: {"shapes": "plain"}}),
            start=[0, 10], end=[5, 15], track=[0, 0], name=[0, 1],
        ),
        [Name("Secret", "Secret", "Secret"), Name("Net", "Net", "Net")],
        [Track("forward", "MainThread", 1, modtrace.timeline.Process(1))],
    )  # fmt: skip
    kept = timeline.only("Net")
    assert len(kept.slices) == 1
    table = table_bytes.pack_table(kept)
    head_size, _ = struct.unpack_from("<II", table)
    blocks = zlib.decompress(table[8 : 8 + head_size]) + b"".join(
        zlib.decompress(table[at : at + size]) for at, size in _heads(table)
    )
    assert b"Net" in blocks
    assert b"plain" in blocks
    assert b"ecret" not in blocks


def _heads(table: bytes) -> list[tuple[int, int]]:
    heads, at = [], 0
    while at < len(table):
        size, body = struct.unpack_from("<II", table, at)
        heads.append((at + 8, size))
        at += 8 + size + body
    return heads


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_saved_trace_is_read_as_it_was(tmp_path: Path, suffix: str) -> None:
    timeline = call_of_net()
    timeline.save(tmp_path / f"trace{suffix}")
    assert columns_of(load(tmp_path / f"trace{suffix}")) == columns_of(timeline)


def _reformatted(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()), indent=1))


def _with_an_event_less(path: Path) -> None:
    trace = Trace.FromString(path.read_bytes())
    del trace.packet[5]
    path.write_bytes(trace.SerializeToString())


def _twice(path: Path) -> None:
    path.write_bytes(path.read_bytes() * 2)


def _with_another_title(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"<title>", b"<title>my "))


@pytest.mark.parametrize(
    ("suffix", "change"),
    [(".pftrace", _with_an_event_less), (".pftrace", _twice), (".html", _with_another_title)],
)
def test_a_changed_trace_that_only_modtrace_could_read_is_refused(
    tmp_path: Path, suffix: str, change: Callable[[Path], None]
) -> None:
    path = tmp_path / f"trace{suffix}"
    call_of_net().save(path)
    change(path)
    with pytest.raises(TraceError, match=f"^{path}: {CHANGED}; load"):
        load(path)


@pytest.mark.parametrize("suffix", [".json", ".pftrace", ".html"])
def test_no_change_of_a_byte_gives_another_timeline(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"trace{suffix}"
    timeline = timeline_of((0, 10, "a"), (2, 8, "b"))
    timeline.save(path)
    data, expected = path.read_bytes(), columns_of(load(path))
    mark = {".json": own_table._JSON_MARK, ".pftrace": own_table._PACKET_MARK, ".html": own_table.PAGE_ELEMENT}[suffix]
    table = data.index(mark)
    places = [*range(table - 200, table), *range(table, min(len(data), table + 1500))]
    refused = 0
    for place in places:
        changed = bytearray(data)
        changed[place] ^= 0x04
        path.write_bytes(changed)
        try:
            loaded = load(path)
        except ModtraceError as error:
            refused += str(path) in str(error)
        else:
            # Else it is read as a profiler's.
            notes = str(loaded.metadata.get("notes"))
            assert columns_of(loaded) == expected or "another program has changed" in notes
    assert refused


def crafted(change: Callable[[dict[str, Any]], None]) -> bytes:
    """A table of one block whose header was changed, and whose checksum fits."""
    table = table_bytes.pack_table(timeline_of((0, 10, "a"), (2, 8, "b")))
    (at, size), *_ = _heads(table)
    head = json.loads(zlib.decompress(table[at : at + size]))
    change(head)
    packed = zlib.compress(json.dumps(head).encode())
    return struct.pack("<I", len(packed)) + table[4:8] + packed + table[at + size :]


def _least(name: str, value: int) -> Callable[[dict[str, Any]], None]:
    """Change what the values of a column have in common."""
    return lambda head: head["columns"][name].__setitem__(2, value)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (_least("name", 7), "the name of a slice is missing"),
        (_least("track", -1), "the track of a slice is missing"),
        (_least("kind", 99), "the kind of a slice is missing"),
        (_least("parent", 5), "a slice comes before its parent"),
        (_least("end", -50), "a slice ends before it starts"),
        (lambda head: head["columns"].update(start=[10**12, 0, 0, []]), "a column has 1000000000000 values"),
        (lambda head: head.update(rows=10**12), "its table is incomplete"),
        (lambda head: head["args"].update(shapes=[[1, 9, 9, []], [1, 0, 0, []], ["x"]]), "the shapes of a slice"),
        (lambda head: head["args"].update(shapes=[[1, 0, 0, []], [1, 0, 3, []], ["x"]]), "the shapes of a slice"),
        (lambda head: head["args"].update(shapes=[[1, 0, 0, []], [1, 0, 0, []], [7]]), "7 is not a text"),
    ],
)
def test_a_crafted_table_is_refused(change: Callable[[dict[str, Any]], None], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        table_bytes.unpack_table(crafted(change), 1 << 10)


def test_a_crafted_table_that_unpacks_to_more_than_its_trace_is_refused(tmp_path: Path) -> None:
    bomb = zlib.compress(bytes(100 << 20), 9)
    head = zlib.compress(
        json.dumps({"rows": 8, "columns": {"start": [100 << 20, 0, 0, [len(bomb)]]}, "args": {}}).encode()
    )
    table = struct.pack("<II", len(head), len(bomb)) + head + bomb
    before = b'{"otherData":{"modtrace":{}},"traceEvents":[\n]'
    path = tmp_path / "bomb.json"
    path.write_bytes(before + own_table.json_table(table, zlib.crc32(before), b"}\n"))
    carried = own_table.read_table([path.read_bytes()], "chrome")
    assert carried.timeline is None
    assert carried.fault == f"a column has {100 << 20} values"


@pytest.mark.parametrize("suffix", [".json", ".json.gz", ".pftrace"])
def test_a_merged_trace_carries_the_recording_in_unix_time(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "profile.json").write_bytes(trace(x("cpu_op", "op", 1000, 2000)))
    told = recording(("Net", 900, 2100, 0))
    modtrace.merge(tmp_path / "profile.json", told, tmp_path / f"merged{suffix}")
    back = load(tmp_path / f"merged{suffix}")
    assert [(span.fqn, span.start_ns, span.end_ns) for span in back.spans] == [
        (span.fqn, span.start_ns, span.end_ns) for span in told.spans
    ]


def test_a_table_does_not_grow_with_what_it_does_not_hold(tmp_path: Path) -> None:
    timeline = gpt2_timeline(20_000)
    table = table_bytes.pack_table(timeline)
    assert len(table) < 7 * len(timeline.slices)
    timeline.save(tmp_path / "trace.json")
    text = json.loads((tmp_path / "trace.json").read_text())[own_table.JSON_KEY]
    assert base64.b64decode(text)[4:] == table
    assert gzip.compress(table)
