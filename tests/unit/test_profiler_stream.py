"""Reading a profiler's trace: every byte of it where it is sound, and what was meant where an event is broken."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modtrace import TraceError
from modtrace.formats import event_stream as stream
from modtrace.formats import trace_file as source
from modtrace.formats.event_stream import EventStream
from modtrace.formats.trace_file import TraceFile
from tests.support.kineto import GPU_TRACES, trace, x
from tests.support.test_scale import scaled


def read(path: Path) -> tuple[EventStream, list[Any], bytes]:
    """The stream, its events, and the bytes that a merge without anything to add would write."""
    with TraceFile(path) as opened:
        read = EventStream(opened)
        chunks = list(read.chunks())
    return read, [e for c in chunks for e in c.events], read.head + b",".join(c.raw for c in chunks) + read.tail


def read_bytes(tmp_path: Path, data: bytes) -> tuple[EventStream, list[Any], bytes]:
    path = tmp_path / "trace.json"
    path.write_bytes(data)
    result = read(path)
    assert path.read_bytes() == data
    return result


def names(events: list[Any]) -> list[str]:
    return [event["name"] for event in events]


@pytest.mark.usefixtures("gpu_traces")
@pytest.mark.parametrize("path", GPU_TRACES, ids=lambda path: path.name)
def test_a_real_trace_is_read_byte_for_byte(path: Path) -> None:
    whole = gzip.decompress(path.read_bytes())
    stream, events, again = read(path)
    assert again == whole
    assert events == json.loads(whole)["traceEvents"]
    assert stream.keys == {key: value for key, value in json.loads(whole).items() if key != "traceEvents"}


@pytest.mark.parametrize("block", [1, 7, 64, 1000])
def test_blocks_of_any_size_give_the_same_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    nested = {"ph": "X", "name": "},{", "args": {"list": [{"a": 1}, {"b": ["]", "}, {"]}]}}
    data = trace(*(nested | {"ts": i} for i in range(30)), INFO=["a], {", "b"])
    monkeypatch.setattr(source, "BLOCK_BYTES", block)
    _, events, again = read_bytes(tmp_path, data)
    assert json.loads(again) == json.loads(data)
    assert events == json.loads(data)["traceEvents"]


@settings(max_examples=scaled(25, 60, 1000))
@given(
    st.lists(
        st.fixed_dictionaries(
            {"ph": st.just("X"), "name": st.text(max_size=6)},
            optional={
                "args": st.recursive(
                    st.integers(-9, 9) | st.text('{}[],"\\ ', max_size=6),
                    lambda inner: (
                        st.lists(inner, max_size=3) | st.dictionaries(st.text('{}",', max_size=3), inner, max_size=3)
                    ),
                    max_leaves=6,
                )
            },
        ),
        max_size=12,
    ),
    st.integers(1, 200),
    st.sampled_from([None, 0, 1]),
)
def test_any_events_survive_any_cutting(
    tmp_path_factory: Any, events: list[Any], block: int, indent: int | None
) -> None:
    path = tmp_path_factory.mktemp("any") / "trace.json"
    path.write_bytes(json.dumps({"a": [1], "traceEvents": events, "b": [[2]]}, indent=indent).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "BLOCK_BYTES", block)
        stream, read_events, again = read(path)
    assert json.loads(again) == json.loads(path.read_bytes())
    assert read_events == events
    assert stream.keys == {"a": [1], "b": [[2]]}


def test_a_bare_array_and_an_empty_one(tmp_path: Path) -> None:
    stream, events, _ = read_bytes(tmp_path, b'[{"ph":"X","name":"a"},\n{"ph":"X","name":"b"}]\n')
    assert (stream.bare, names(events)) == (True, ["a", "b"])
    stream, events, again = read_bytes(tmp_path, b'{"traceEvents":[],"x":1}')
    assert (events, again, stream.keys) == ([], b'{"traceEvents":[],"x":1}', {"x": 1})


GOOD = b'{"ph":"X","name":"good","ts":1,"dur":2}'


def refused(tmp_path: Path, data: bytes) -> TraceError:
    with pytest.raises(TraceError) as error:
        read_bytes(tmp_path, data)
    return error.value


def slice_of(name: bytes, args: bytes = b"{}") -> bytes:
    """An event as Kineto lays it out, with a name that is not escaped."""
    return (
        b'{"ph": "X", "cat": "python_function", "name": "'
        + name
        + b'", "pid": 1, "ts": 1, "dur": 2, "args": '
        + args
        + b"}"
    )


BROKEN = [
    (slice_of(b'{"device": "cpu", "dtype": "float"}(1): f'), '{"device": "cpu", "dtype": "float"}(1): f', {}),
    (slice_of(b'a"b'), 'a"b', {}),
    (slice_of(b'"'), '"', {}),
    (slice_of(b"op", b'{"Call stack": "nn.Module: A"B_0;<module>", "Input Dims": [[2]]}'), "op",
     {"Call stack": 'nn.Module: A"B_0;<module>', "Input Dims": [[2]]}),
    (slice_of(b"op", b'{"Ev Idx": 1, "Call stack": "f("x"); g"}'), "op", {"Ev Idx": 1, "Call stack": 'f("x"); g'}),
    (slice_of(b'x"}]'), 'x"}]', {}),
    (slice_of(b'x"}]}'), 'x"}]}', {}),
    (slice_of(b'"}],"x":[{'), '"}],"x":[{', {}),
    (slice_of(b'x"}],"y'), 'x"}],"y', {}),
    (slice_of(b'[{"name": "a"}, {"name": "b"}]'), '[{"name": "a"}, {"name": "b"}]', {}),
    (slice_of(b'[{"ph":"X"},{"cat":"c"}], "a": {}}'), '[{"ph":"X"},{"cat":"c"}], "a": {}}', {}),
    (slice_of(b"op", b'{"Call stack": "a"b", "Module Hierarchy": "c"d"}'), "op",
     {"Call stack": 'a"b', "Module Hierarchy": 'c"d'}),
    (slice_of(b"new\nline\x01"), "new␊line␁", {}),
    (slice_of(b"C:\\path \\u12"), "C:＼path ＼u12", {}),
    (slice_of(b"half \\ud83d pair"), "half ＼ud83d pair", {}),
    (slice_of(b"bad \xff byte"), "bad \ufffd byte", {}),
    (slice_of(b"nan", b'{"GB/s": NaN, "x": -Infinity, "l": [{"a": 1}, {"b": 2}]}'), "nan",
     {"GB/s": None, "x": None, "l": [{"a": 1}, {"b": 2}]}),
]  # fmt: skip


@pytest.mark.parametrize(("broken", "name", "args"), BROKEN)
@pytest.mark.parametrize("after", [0, 1, 6_250])
@pytest.mark.parametrize("bare", [False, True])
def test_a_broken_event_is_repaired_and_the_others_stay(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    broken: bytes,
    name: str,
    args: dict[str, Any],
    after: int,
    bare: bool,
) -> None:
    if after > 1:  # four times as much as one event may have, in 250 blocks
        limits = [
            (source, "BLOCK_BYTES"),
            (stream, "MAX_EVENT_BYTES"),
            (stream, "_NEAR_BYTES"),
            (stream, "_MAX_SEARCHED"),
        ]
        for module, limit in limits:
            monkeypatch.setattr(module, limit, getattr(module, limit) // 64)
    umlaut = '{"ph":"X","name":"ümlaut"}'.encode()
    head, tail = (b"[", b"]") if bare else (b'{"traceEvents":[', b'],"x":7}')
    read, events, again = read_bytes(tmp_path, head + b",\n".join([GOOD, umlaut, broken, *[GOOD] * after]) + tail)
    assert names(events)[:3] == ["good", "ümlaut", name]
    assert len(events) == 3 + after
    assert (read.count, read.repaired, read.dropped) == (3 + after, 1, 0)
    assert events[2] == {"ph": "X", "cat": "python_function", "name": name, "pid": 1, "ts": 1, "dur": 2, "args": args}
    assert again.count(GOOD) == 1 + after
    document = json.loads(again)
    assert (document if bare else document["traceEvents"]) == events
    assert read.keys == ({} if bare else {"x": 7})
    with pytest.raises(TraceError, match="byte"), source.TraceFile(tmp_path / "trace.json") as file:
        list(EventStream(file, strict=True).chunks())


@pytest.mark.parametrize("lost", [b'{"ph":"X","name":"a" "b"}', b'{"name":"else","x":1 1}'])
def test_an_event_beyond_repair_is_left_out(tmp_path: Path, lost: bytes) -> None:
    stream, events, again = read_bytes(tmp_path, b'{"traceEvents":[' + b",\n".join([GOOD, lost, GOOD]) + b"]}")
    assert names(events) == ["good", "good"]
    assert (stream.repaired, stream.dropped) == (0, 1)
    assert stream.notes() == ["of the profiler's events 0 were repaired and 1 left out: they are broken JSON"]
    assert json.loads(again)["traceEvents"] == events


def test_a_trace_of_which_no_event_can_be_read_is_refused(tmp_path: Path) -> None:
    assert "none of its events can be read" in refused(tmp_path, b'{"traceEvents":[{"ph":"X" 1}]}').message


@settings(max_examples=scaled(25, 60, 1000))
@given(st.lists(st.binary(max_size=5), max_size=12), st.integers(1, 200))
def test_names_of_any_bytes_lose_no_event(tmp_path_factory: Any, some: list[bytes], block: int) -> None:
    path = tmp_path_factory.mktemp("any") / "trace.json"
    path.write_bytes(b'{"traceEvents":[' + b",\n".join(map(slice_of, some)) + b"]}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "BLOCK_BYTES", block)
        stream, events, again = read(path)
    assert (len(events), stream.dropped) == (len(some), 0)
    assert json.loads(again)["traceEvents"] == events


@pytest.mark.parametrize("block", [1, 64, 1 << 16])
def test_lists_of_objects_after_the_events_are_no_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(source, "BLOCK_BYTES", block)
    groups = [{"name": "0"}, {"name": "1"}, {"name": "2"}]
    data = b'{"traceEvents":[' + GOOD + b"," + GOOD + b'],"groups":' + json.dumps(groups).encode() + b"}"
    stream, events, again = read_bytes(tmp_path, data)
    assert (names(events), stream.keys, again) == (["good", "good"], {"groups": groups}, data)
    assert (stream.repaired, stream.dropped) == (0, 0)
    with TraceFile(tmp_path / "trace.json") as file:
        assert names([e for chunk in EventStream(file, strict=True).chunks() for e in chunk.events]) == names(events)


def test_duplicate_keys_keep_their_bytes_and_the_last_counts(tmp_path: Path) -> None:
    data = b'{"a":1,"a":2,"traceEvents":[{"ph":"X","ts":1,"ts":5,"name":"n"}],"b":1,"b":3}'
    stream, events, again = read_bytes(tmp_path, data)
    assert again == data
    assert events[0]["ts"] == 5
    assert stream.keys == {"a": 2, "b": 3}


@pytest.mark.parametrize("cut", [-1, 1, 30, 100])
def test_a_cut_off_trace_is_refused_at_its_last_event(tmp_path: Path, cut: int) -> None:
    data = trace(*(x("cpu_op", f"op{i}", i, i + 1) for i in range(1, 9)), base=None)
    data = data[: data.rindex(b"}\n") - cut]
    error = refused(tmp_path, data)
    assert "it is cut off within or after the event that begins here" in error.message
    assert error.offset is not None
    assert data[error.offset :].strip().startswith(b"{")
    assert data[error.offset :].count(b'"ph"') == 1


def test_a_broken_tail_is_refused(tmp_path: Path) -> None:
    start = b'{"traceEvents":[' + GOOD + b"," + GOOD
    assert "it is cut off" in refused(tmp_path, start + b'], "baseTimeNanoseconds": 12, "x": "un').message
    assert refused(tmp_path, start + b'], "x": tru, "y": 1}').offset == len(start + b'], "x": ')


def test_cut_off_and_broken_gzip_are_refused(tmp_path: Path) -> None:
    data = trace(*(x("cpu_op", f"op{i}", i, i + 1, noise=zlib.crc32(b"%d" % i)) for i in range(1, 4000)))
    packed = gzip.compress(data)
    middle = len(packed) // 2
    assert f"the gzip data ends early, at byte {middle}" in refused(tmp_path, packed[:middle]).message
    broken = packed[:middle] + bytes(40) + packed[middle + 40 :]
    assert "the gzip data is broken" in refused(tmp_path, broken).message
    assert "the gzip data ends early" in refused(tmp_path, packed[:-4]).message


def test_gzip_members_after_one_another_are_one_file(tmp_path: Path) -> None:
    data = trace(*(x("cpu_op", f"op{i}", i, i + 1) for i in range(1, 9)))
    path = tmp_path / "trace.json"
    path.write_bytes(gzip.compress(data[:300]) + gzip.compress(data[300:]))
    assert read(path)[2] == data


@pytest.mark.parametrize(
    ("data", "offset", "said"),
    [
        (b"", 0, "empty"),
        (b"PK\x03\x04 zip", 0, "not a profiler trace"),
        (b'{"events":[]}', 12, 'no "traceEvents"'),
        (b'{"traceEvents":{}}', 17, "that is a list"),
        (b'{"a": tru, "traceEvents":[]}', 6, "broken JSON before the events"),
        (b'{"traceEvents":[', 16, "none of its events can be read"),
        (b'{"traceEvents":[{"ph":"X","na', 16, "none of its events can be read"),
        (b"[1 2]", 1, "none of its events can be read"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_file_and_byte(
    tmp_path: Path, data: bytes, offset: int, said: str
) -> None:
    path = tmp_path / "not.json"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=said) as error:
        read(path)
    assert (error.value.path, error.value.offset) == (str(path), offset)
    assert path.read_bytes() == data


def test_a_missing_file_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read(tmp_path / "none.json")


def test_a_giant_event_is_refused_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_EVENT_BYTES", 1 << 12)
    monkeypatch.setattr(source, "BLOCK_BYTES", 1 << 10)
    giant = b'{"ph":"X","name":"' + b"a" * (1 << 15) + b'"}'
    data = b'{"traceEvents":[' + b",".join([GOOD, giant, GOOD]) + b"]}"
    with pytest.raises(TraceError, match="an event of more than 0 MiB") as error:
        read_bytes(tmp_path, data)
    assert error.value.offset == data.index(giant)


EVENTS = [
    {
        "ph": "X",
        "cat": "cpu_op",
        "name": f"op{i}",
        "pid": 100,
        "tid": 7,
        "ts": 1000 + 10 * i,
        "dur": 5,
        "args": {"id": i},
    }
    for i in range(400)
]


def laid_out(layout: str) -> tuple[list[bytes], bytes]:
    """The 400 events as some writer lays them out, and what it puts between two."""
    if layout == "Kineto's":
        # The args, of some only, have a line each.
        texts = [json.dumps(e).replace(', "ts"', ',\n    "ts"').replace('{"id"', '{\n      "id"') for e in EVENTS]
        return [text.encode() for text in texts], b",\n  "
    indent = 2 if layout == "indented" else None
    return [json.dumps(e, indent=indent).encode() for e in EVENTS], b"," if indent is None else b",\n  "


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "an opening quote of a key": lambda e: e.replace(b'"tid"', b'tid"'),
    "a closing quote of a key": lambda e: e.replace(b'"tid"', b'"tid'),
    "an opening quote of a text": lambda e: e.replace(b'"op', b"op"),
    "a closing quote of a text": lambda e: e.replace(b'", "pid', b', "pid').replace(b'",\n  "pid', b',\n  "pid'),
    "a colon": lambda e: e.replace(b'"pid":', b'"pid"'),
    "a comma": lambda e: e.replace(b"100,", b"100"),
    "the opening brace": lambda e: e[1:],
    "the closing brace": lambda e: e[:-1],
    "both closing braces": lambda e: e.rstrip(b"} \n"),
    "the end": lambda e: e[: len(e) // 2],
    "the begin": lambda e: e[len(e) // 2 :],
    "the middle": lambda e: e[: e.index(b"cat")] + e[e.index(b"100") :],
    "a quote too many": lambda e: e.replace(b"cpu_op", b'cpu"op'),
    "a brace too many": lambda e: e + b"}",
    "no value": lambda e: e.replace(b"100", b""),
    "no number": lambda e: e.replace(b'"dur": 5', b'"dur": NaN'),
    "all": lambda e: b"\x00" * len(e),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("layout", ["Kineto's", "one line", "indented"])
@pytest.mark.parametrize("at", [0, 200, 399])
def test_damage_costs_the_damaged_event_alone(tmp_path: Path, layout: str, damage: str, at: int) -> None:
    texts, comma = laid_out(layout)
    damaged = DAMAGE[damage](texts[at])
    assert damaged != texts[at]
    with pytest.raises(orjson.JSONDecodeError):
        orjson.loads(damaged)
    texts[at] = damaged
    stream, events, again = read_bytes(tmp_path, b'{"traceEvents": [' + comma.join(texts) + b'], "traceName": "t"}')
    kept = {event["name"] for event in events}
    others = [event["name"] for index, event in enumerate(EVENTS) if index != at]
    assert [name for name in others if name not in kept] == []
    assert len(events) + stream.dropped == 400
    assert stream.dropped <= 1
    assert stream.notes()
    assert json.loads(again)["traceEvents"] == events


@pytest.mark.parametrize(("between", "said"), [(b"", 1), (b"][", 1), (b",,", 1), (b"]\n[", 1), (b" , ]\n,[", 1)])
@pytest.mark.parametrize("at", [0, 1, 200])
def test_other_bytes_between_events_lose_no_event(tmp_path: Path, between: bytes, said: int, at: int) -> None:
    texts, _ = laid_out("one line")
    data = b"[" + b", ".join(texts[:at]) + (between or b" ") + b", ".join(texts[at:]) + b"]"
    stream, events, _ = read_bytes(tmp_path, data)
    assert events == EVENTS
    assert (stream.repaired, stream.dropped) == (0, 0)
    assert stream.strays == (said if at or between else 0)
    if stream.strays:
        with pytest.raises(TraceError, match="byte"), TraceFile(tmp_path / "trace.json") as file:
            list(EventStream(file, strict=True).chunks())
