"""The format of a file follows from its first bytes, for us as for every other reader."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as proto

from modtrace import TraceError, load
from modtrace.checking import check
from modtrace.formats.trace_file import format_of
from modtrace.read import FileKind, file_kind
from modtrace.view.server import ensure_viewable

JSON = b'{"traceEvents": []}'


@pytest.mark.parametrize(
    ("head", "format_"),
    [
        (JSON, "chrome"),
        (b"[", "chrome"),
        (b"\xef\xbb\xbf" + JSON, "chrome"),
        (b"\n\r\n\t [" + JSON, "chrome"),
        (b"\n" * 100 + JSON, "chrome"),
        (b'{"\x01', "chrome"),
        (b"\n[\x08\x01", "perfetto"),
        (b"\n{\x08\x01", "perfetto"),
        (b"\n\x02\x08\x01", "perfetto"),
        (b"\n", "perfetto"),
        (b"", None),
        (b" ", None),
        (b"42", None),
        (b"\xef\xbb\xbf", None),
    ],
)
def test_the_first_bytes_of_a_file_determine_its_format(head: bytes, format_: str | None) -> None:
    assert format_of(head) == format_


@pytest.mark.parametrize("length", b"[{ ")
@pytest.mark.parametrize("zipped", [False, True])
def test_a_packet_as_long_as_a_bracket_is_a_packet_to_every_reader(tmp_path: Path, length: int, zipped: bool) -> None:
    packet = proto.TracePacket(trusted_packet_sequence_id=1, sequence_flags=1)
    packet.interned_data.event_names.add(iid=1, name="")
    packet.interned_data.event_names[0].name = "a" * (length - packet.ByteSize())
    data = proto.Trace(packet=[packet]).SerializeToString()
    assert data[:2] == bytes([0x0A, length])
    trace = tmp_path / "trace"
    trace.write_bytes(gzip.compress(data) if zipped else data)

    with pytest.raises(TraceError, match="it has no table of modtrace"):
        load(trace)
    assert check(trace).faults == []
    assert file_kind(trace) is FileKind.PERFETTO
    assert ensure_viewable(trace, tmp_path) == (trace, [])


def test_json_after_many_empty_lines_is_json_to_every_reader(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_bytes(b"\n" * 100 + JSON)

    assert len(load(trace).spans) == 0
    assert check(trace).faults == []
    assert file_kind(trace) is FileKind.PROFILE
