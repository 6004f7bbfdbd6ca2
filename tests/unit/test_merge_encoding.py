"""A merged trace is UTF-8 and JSON that readers accept, whatever bytes another program's trace has."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from modtrace import TraceError, load, merge
from modtrace.checking import check
from tests.support.kineto import recording, trace, x

MARK = b"\xef\xbb\xbf"
NET = recording(("Net", 900, 6000, 0))


def merged(folder: Path, data: bytes) -> tuple[bytes, list[str]]:
    """Merge, assert that all readers accept the result, and return it and the warnings."""
    source, out = folder / "profile.json", folder / "out.json"
    source.write_bytes(data)
    result = merge(source, NET, out)
    assert check(out).faults == []
    assert [span.name for span in load(out).spans] == ["Net"]
    json.loads(out.read_text())
    return out.read_bytes(), list(result.notes)


def named(name: bytes) -> bytes:
    return trace(x("cpu_op", "NAME", 1000, 5000), host="HOST").replace(b"NAME", name)


@pytest.mark.parametrize("bare", [False, True])
def test_a_byte_order_mark_is_left_out(tmp_path: Path, bare: bool) -> None:
    data = named(b"op")
    if bare:
        data = json.dumps([x("cpu_op", "op", 1000, 5000), x("cpu_op", "op", 5500, 5600)]).encode()
        net = recording(("Net", 900, 6000, 0), base=0)
        (tmp_path / "bare.json").write_bytes(MARK + data)
        merge(tmp_path / "bare.json", net, tmp_path / "bare-out.json")
        after = json.loads((tmp_path / "bare-out.json").read_text())["traceEvents"]
        assert after[:2] == json.loads(data)
        return
    plain, _ = merged(tmp_path, data)
    marked, _ = merged(tmp_path, MARK + data)
    assert marked == plain


@pytest.mark.parametrize("name", [b"\\ud83d\\ude00", "é".encode()])
def test_escaped_characters_are_kept_as_they_are(tmp_path: Path, name: bytes) -> None:
    after, _ = merged(tmp_path, named(name))
    assert b'"name": "' + name + b'"' in after


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        (b"\\ud800x", "＼ud800x"),
        (b"x\\udc00", "x＼udc00"),
        (b"\xff", "\ufffd"),
        (b"\xed\xa0\x80", "\ufffd" * 3),
        (b"\xc0\xaf", "\ufffd" * 2),
        (b"\xc3", "\ufffd"),
        (b'"', '"'),
    ],
)
def test_names_that_are_not_json_are_repaired(tmp_path: Path, name: bytes, meant: str) -> None:
    after, notes = merged(tmp_path, named(b"a" + name + b"b"))
    assert json.loads(after)["traceEvents"][0]["name"] == f"a{meant}b"
    assert "of the profiler's events 1 were repaired and 0 left out: they are broken JSON" in notes


def test_invalid_utf_8_around_the_events_is_replaced(tmp_path: Path) -> None:
    data = named(b"op").replace(b"HOST", b"h\xff")[:-1] + b', "last\xfe": "\xed\xa0\x80"}'
    after, _ = merged(tmp_path, data)
    assert json.loads(after)["host"] == "h�"
    assert json.loads(after)["last�"] == "���"


@pytest.mark.parametrize("packed", [False, True])
def test_faults_of_the_profiler_are_reported_as_its_own(tmp_path: Path, packed: bool) -> None:
    overlapping = [x("kernel", f"k{n}", 1000 + 10 * n, 2005 + 10 * n, pid=0, tid=7) for n in range(30)]
    source, out = tmp_path / f"profile.json{'.gz' * packed}", tmp_path / "out.json"
    data = trace(x("cpu_op", "aten::op", 1000, 5000), *overlapping)
    source.write_bytes(gzip.compress(data) if packed else data)
    result = merge(source, NET, out)
    assert result.metadata["profiler_events"] == 31
    overlaps = check(out).faults
    assert len(overlaps) == 29
    assert all(violation.of_profiler for violation in overlaps)


def test_slices_before_time_0_are_left_as_they_are(tmp_path: Path) -> None:
    source = tmp_path / "profile.json"
    source.write_bytes(trace(x("cpu_op", "before", -9000, -8000), x("cpu_op", "op", 1000, 5000)))
    result = merge(source, NET, tmp_path / "out.json")
    assert result.notes == []
    assert json.loads((tmp_path / "out.json").read_text())["traceEvents"][0]["ts"] == -9


@pytest.mark.parametrize("suffix", [".json", ".pftrace"])
def test_a_trace_that_lies_before_time_0_is_refused(tmp_path: Path, suffix: str) -> None:
    source = tmp_path / "profile.json"
    source.write_bytes(trace(x("cpu_op", "a", -9000, -8000), x("kernel", "b", -7000, -6000, pid=0, tid=7)))
    with pytest.raises(TraceError, match=r"none of its 2 events can be used: .* and a ts above 0"):
        merge(source, NET, tmp_path / f"out{suffix}")
    assert not (tmp_path / f"out{suffix}").exists()
