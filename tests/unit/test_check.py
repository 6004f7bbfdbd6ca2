"""`check` of files with one fault each, and of cut or changed files: exactly the faults of each file are reported."""

from __future__ import annotations

import functools
import gzip
import json
import os
import struct
import time
import zlib
from pathlib import Path

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as proto

from modtrace import ModtraceError
from modtrace.checking import Fault, check
from modtrace.ring.file_format import SLOTS_OFFSET
from modtrace.ring.slot_format import SLOT_BYTES
from tests.support.event_script import EventScript
from tests.support.json_mutations import mutations
from tests.support.python_process import run_python

DATA = Path(__file__).parents[1] / "data" / "check"

FAULTS: dict[str, list[str]] = {
    "a-number.json": [
        "not-a-trace: neither Chrome JSON nor a Perfetto trace: it starts with b'42\\n'",
    ],
    "after-the-end.json": [
        "unreadable: byte 3: broken JSON: unexpected content after document; `merge` may repair it",
    ],
    "bad-utf-8.json": [
        "unreadable: byte 24: broken JSON: str is not valid UTF-8: surrogates not allowed; `merge` may repair it",
    ],
    "begin-without-end.json": [
        "begin-without-end: event 0: 'open' is never ended",
    ],
    "blank.json": [
        "not-a-trace: it is empty",
    ],
    "bound-flows-dangling.json": [
        "flow-without-end: event 0: flow 7 starts and never ends",
        "flow-without-start: event 1: flow 8 ends and has not started",
        "flow-without-start: event 2: flow 9 ends and has not started",
        "duplicate-flow: event 4: flow 10 has already started at event 3",
    ],
    "bound-flows.json": [],
    "byte-order-mark.json": [
        "unreadable: byte 0: a byte order mark, which JSON forbids",
    ],
    "control-character.json": [
        "unreadable: byte 23: broken JSON: unexpected control character in string; `merge` may repair it",
    ],
    "crossed-pairs.json": [
        "end-without-begin: event 3: 'b' ends, but no such slice is open",
        "begin-without-end: event 1: 'b' is never ended",
    ],
    "dangling-flows.textproto": [
        "flow-without-end: event 0: flow 1 starts and never ends",
        "flow-without-start: event 1: flow 2 ends and has not started",
    ],
    "depth-512.json": [],
    "depth-513.json": [
        "too-deep: event 512: 'm512' has depth 513 on track 1/2; viewers draw 512",
    ],
    "duplicate-metadata.json": [
        "duplicate-metadata: event 2: thread_name of (1, 2) is {'name': 'autograd'}, and was {'name': 'main'}",
        "duplicate-metadata: event 4: process_name of 1 is {'name': 'q'}, and was {'name': 'p'}",
    ],
    "empty.json": [
        "not-a-trace: it is empty",
    ],
    "end-without-begin.json": [
        "end-without-begin: event 0: 'never' ends, but no such slice is open",
        "end-without-begin: event 1: an end, but no such slice is open",
    ],
    "events-that-are-none.json": [
        "not-an-event: event 1: NoneType instead of an object",
        "not-an-event: event 2: int instead of an object",
        "not-an-event: event 3: str instead of an object",
    ],
    "fault-behind-umlauts.json": [
        "unreadable: byte 17: broken JSON: unexpected character, expected ',' or '}'; `merge` may repair it",
    ],
    "flow-ends-before-it-starts.json": [
        "flow-without-end: event 2: flow 7 starts and never ends",
        "flow-without-start: event 1: flow 7 ends and has not started",
    ],
    "flow-outside-slice.json": [
        "flow-outside-slice: event 2: the f of flow 7 touches no slice on track 1/2",
    ],
    "flow-started-twice.json": [
        "duplicate-flow: event 2: flow 7 has already started at event 1",
    ],
    "flow-to-next-slice.json": [],
    "flow-to-no-next-slice.json": [
        "flow-outside-slice: event 2: the f of flow 7 touches no slice on track 1/2",
    ],
    "flow-without-end.json": [
        "flow-without-end: event 1: flow 7 starts and never ends",
    ],
    "flow-without-id.json": [
        "missing-field: event 1: a flow's s without id",
    ],
    "flow-without-start.json": [
        "flow-without-start: event 1: flow 7 ends and has not started",
    ],
    "good.json": [],
    "good.textproto": [],
    "huge-ts.json": [
        "time-out-of-range: event 0: ts 1e+30 is negative or beyond 2^63 ns",
    ],
    "main-thread-zero.json": [
        "partial-overlap: event 1: 'b' begins in 'a' (event 0) on track 5/5 and ends 5000 ns after it",
    ],
    "missing-dur.json": [
        "missing-field: event 0: X without dur",
    ],
    "missing-fields.textproto": [
        "missing-field: event 0: a track event without trusted_packet_sequence_id",
        "missing-field: event 1: a track event without timestamp",
        "time-out-of-range: event 2: 9223372036854775808 ns is negative or beyond 2^63 ns",
    ],
    "missing-ph.json": [
        "missing-field: event 0: there is no ph",
    ],
    "missing-ts.json": [
        "missing-field: event 0: X without ts",
        "missing-field: event 1: B without ts",
    ],
    "nan.json": [
        "unreadable: byte 32: broken JSON: unexpected character, expected a JSON value; `merge` may repair it",
    ],
    "negative-dur.json": [
        "time-out-of-range: event 0: dur -0.001 is negative or beyond 2^63 ns",
    ],
    "negative-ts.json": [
        "time-out-of-range: event 0: ts -5 is negative or beyond 2^63 ns",
    ],
    "not-a-trace.json": [
        'unreadable: byte 13: not a profiler trace: it has no "traceEvents" that is a list',
    ],
    "null-dur.json": [
        "null-time: event 1: dur is null; viewers lose the events after it",
        "null-time: event 3: dur is null; viewers lose the events after it",
    ],
    "null-ts.json": [
        "null-time: event 0: ts is null; viewers lose the events after it",
    ],
    "odd-types.json": [
        "missing-field: event 1: there is no ph",
        "missing-field: event 2: a flow's s with {} as id",
    ],
    "open-array.json": [
        "unreadable: byte 45: it is cut off within or after the event that begins here; export it again",
    ],
    "partial-overlap-by-1-ns.json": [
        "partial-overlap: event 1: 'second' begins in 'first' (event 0) on track 1/2 and ends 4999 ns after it",
    ],
    "partial-overlap-of-pairs.json": [
        "partial-overlap: event 2: 'whole' begins in 'pair' (event 0) on track 1/2 and ends 2000 ns after it",
    ],
    "pid-out-of-range.json": [
        "id-out-of-range: event 0: pid -1 is not within 0 to 4294967295",
    ],
    "sibling-threads.json": [],
    "state-cleared.textproto": [
        "undefined: event 1: event_names 1 is not interned in its sequence",
    ],
    "text-ts.json": [
        "not-a-number: event 1: ts is 'soon'",
        "not-a-number: event 2: ts is True",
    ],
    "text.json": [
        "not-a-trace: neither Chrome JSON nor a Perfetto trace: it starts with b'Tracebac'",
    ],
    "tid-out-of-range.json": [
        "id-out-of-range: event 0: tid 4294967296 is not within 0 to 4294967295",
        "id-out-of-range: event 2: tid 1.5 is not within 0 to 4294967295",
    ],
    "times-go-back.textproto": [
        "end-without-begin: event 2: an end, but no such slice is open",
        "begin-without-end: event 1: 'a' is never ended",
    ],
    "truncated-array.json": [
        "unreadable: byte 45: it is cut off within or after the event that begins here; export it again",
    ],
    "truncated-object.json": [
        "unreadable: byte 62: it is cut off within or after the event that begins here; export it again",
    ],
    "undefined.textproto": [
        "undefined: event 0: needs the state of its sequence, which no packet has opened",
        "undefined: event 1: event_names 5 is not interned in its sequence",
        "undefined: event 1: event_categories 6 is not interned in its sequence",
        "undefined: event 1: debug_annotation_names 7 is not interned in its sequence",
        "undefined: event 1: debug_annotation_string_values 8 is not interned in its sequence",
        "undefined: event 2: no snapshot before it sets clock 64",
        "undefined: event 3: track 99 has no descriptor",
    ],
    "unmatched.textproto": [
        "end-without-begin: event 1: an end, but no such slice is open",
        "begin-without-end: event 2: 'a' is never ended",
    ],
}


def as_trace(source: Path, folder: Path) -> Path:
    """The file itself, or the trace that a text of packets describes."""
    if source.suffix != ".textproto":
        return source
    trace = folder / f"{source.stem}.pftrace"
    trace.write_bytes(text_format.Parse(source.read_text(), proto.Trace()).SerializeToString())
    return trace


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_exactly_the_fault_of_each_file_is_reported(name: str, tmp_path: Path) -> None:
    assert [str(violation) for violation in check(as_trace(DATA / name, tmp_path)).faults] == FAULTS[name]


def test_every_file_has_its_expectation() -> None:
    assert {path.name for path in DATA.iterdir()} == set(FAULTS)


@pytest.mark.parametrize("name", ["good.json", "negative-ts.json", "good.textproto", "unmatched.textproto"])
def test_zipped_traces_are_the_same(name: str, tmp_path: Path) -> None:
    plain = as_trace(DATA / name, tmp_path)
    zipped = tmp_path / "trace.gz"
    half = len(plain.read_bytes()) // 2
    # Two members, like two concatenated gzip files.
    zipped.write_bytes(gzip.compress(plain.read_bytes()[:half]) + gzip.compress(plain.read_bytes()[half:]))

    assert check(zipped).faults == check(plain).faults


def test_a_cut_gzip_stream_is_reported(tmp_path: Path) -> None:
    stream = gzip.compress((DATA / "truncated-array.json").read_bytes())
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(stream[:-4])

    assert [str(violation) for violation in check(cut).faults] == [
        f"unreadable: the gzip data ends early, at byte {len(stream) - 4}"
    ]


def test_garbage_after_a_gzip_member_is_reported(tmp_path: Path) -> None:
    member = gzip.compress(b"[]")
    trace = tmp_path / "trace.json.gz"
    trace.write_bytes(member + b"garbage")

    (violation,) = check(trace).faults

    where = f"before byte {len(member) + 7} (Not a gzipped file (b'ga'))"
    assert str(violation) == f"unreadable: the gzip data is broken, or other data follows it, {where}"


def test_any_one_change_of_a_good_trace_gives_violations_or_none(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    for changed in mutations(json.loads((DATA / "good.json").read_text()), 1000):
        trace.write_text(json.dumps(changed))
        assert all(violation.rule for violation in check(trace).faults)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('[{"ts": %s}]', "byte 8: broken JSON: number is infinity when parsed as double"),
        ('[{"ts": NaN, "dur": %s}]', "byte 8: broken JSON: unexpected character, expected a JSON value"),
        ("[%s", "byte 1: broken JSON: number is infinity when parsed as double"),
    ],
)
def test_a_number_beyond_the_parser_is_reported(tmp_path: Path, text: str, fault: str) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(text % ("1" * 5000))

    assert [str(violation) for violation in check(trace).faults] == [f"unreadable: {fault}; `merge` may repair it"]


def test_nesting_beyond_the_parser_is_reported(tmp_path: Path) -> None:
    deep = tmp_path / "deep.json"
    deep.write_bytes(b"[" * 100_000)

    assert [str(violation) for violation in check(deep).faults] == [
        "unreadable: byte 1025: broken JSON: depth limit exceeded; `merge` may repair it"
    ]


@pytest.mark.parametrize(
    ("cut", "fault"),
    [
        (3, "byte 0: the packet that starts here is cut off"),
        (2, "byte 0: the packet that starts here is cut off"),
        (-1, "byte {last}: the packet that starts here is cut off"),
    ],
)
def test_a_perfetto_trace_cut_off(cut: int, fault: str, tmp_path: Path) -> None:
    packets = text_format.Parse((DATA / "good.textproto").read_text(), proto.Trace()).packet
    content = b"".join(proto.Trace(packet=[packet]).SerializeToString() for packet in packets)
    trace = tmp_path / "cut.pftrace"
    trace.write_bytes(content[:cut])

    last = len(content) - len(proto.Trace(packet=[packets[-1]]).SerializeToString())

    assert str(check(trace).faults[0]) == "unreadable: " + fault.format(last=last)


def test_bytes_that_are_not_a_packet(tmp_path: Path) -> None:
    trace = tmp_path / "bad.pftrace"
    trace.write_bytes(b"\x0a\x02\x08\xff" + b"\x12\x00")

    assert [str(violation) for violation in check(trace).faults] == [
        "unreadable: byte 0: the packet that starts here is not a packet"
    ]
    trace.write_bytes(b"\x0a\x00\x12\x00")
    assert [str(violation) for violation in check(trace).faults] == ["unreadable: byte 2: no packet starts here"]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModtraceError, match=r"nowhere\.json: cannot be read: No such file"):
        check(tmp_path / "nowhere.json")


@given(st.binary(max_size=200))
def test_any_bytes_give_violations_or_none(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    trace = tmp_path_factory.getbasetemp() / "any"
    for prefix in (b"", b"[", b"\x0a", b"\x1f\x8b"):
        trace.write_bytes(prefix + data)
        assert all(violation.rule for violation in check(trace).faults)


@given(st.data())
def test_a_trace_cut_anywhere_is_reported(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    content = (DATA / "good.json").read_bytes().rstrip()
    trace = tmp_path_factory.getbasetemp() / "cut.json"
    trace.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])

    assert check(trace).faults[0].rule in ("unreadable", "not-a-trace")


@pytest.mark.parametrize(
    ("text", "rule"),
    [(b"[", "unreadable"), (b"\n", "not-a-trace"), (b'{"a": "', "unreadable"), (b"x", "not-a-trace")],
)
def test_a_small_file_that_unpacks_to_a_huge_one_takes_little_memory(tmp_path: Path, text: bytes, rule: str) -> None:
    packer = zlib.compressobj(wbits=-15)
    block = bytes([text[-1] if text == b"x" else 32]) * (1 << 20)
    # The block is compressed once, independent of the bytes before it, and written 400 times.
    first, packed = (packer.compress(part) + packer.flush(zlib.Z_FULL_FLUSH) for part in (text, block))
    checksum = functools.reduce(lambda before, _: zlib.crc32(block, before), range(400), zlib.crc32(text))
    trace = tmp_path / "bomb.gz"
    ends = packer.flush() + struct.pack("<II", checksum, len(text) + 400 * len(block))
    trace.write_bytes(gzip.compress(b"")[:10] + first + 400 * packed + ends)
    code = (
        "import resource, sys, modtrace.checking.perfetto_rules, modtrace.read\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "faults = modtrace.checking.check(sys.argv[1]).faults\n"
        "print(faults[0].rule, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )

    first_rule, kilobytes = run_python("-c", code, str(trace)).stdout.split()

    assert first_rule == rule
    assert int(kilobytes) < 300_000


def test_a_cut_or_damaged_ring_is_reported(tmp_path: Path) -> None:
    begin = time.monotonic_ns() + 1_000_000_000  # no event is before the recording
    script = EventScript(256, tmp_path / "run.modtrace", {"pid": os.getpid()}, lambda at: begin + at)
    net = script.name("Net")
    for number in range(100):
        script.enter(2 * number, net, number)
        script.exit(2 * number + 1, net, number)
    script.close()
    assert check(tmp_path / "run.modtrace").faults == []
    with (tmp_path / "run.modtrace").open("r+b") as file:
        file.seek(SLOTS_OFFSET + 50 * SLOT_BYTES)
        file.write(bytes(20 * SLOT_BYTES))

    assert check(tmp_path / "run.modtrace").faults == [Fault("damaged-ring", "20 events are damaged, and left out")]

    os.truncate(tmp_path / "run.modtrace", SLOTS_OFFSET + 256 * SLOT_BYTES)
    cut, _ = check(tmp_path / "run.modtrace").faults
    assert cut == Fault("damaged-ring", f"{1 << 20:,} bytes were cut off its end")
