"""The packet that ends a merged `.pftrace`: without it, or with another content, the file is refused and says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TracePacket

from modtrace import ModtraceError, TraceError, load, merge
from tests.support.kineto import recording, trace, x

CUT_OFF = "it is cut off: the packet that ends it is missing"


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    (tmp_path / "profile.json").write_bytes(trace(x("cpu_op", "op", 1000, 2000)))
    merge(tmp_path / "profile.json", recording(("Net", 0, 3000, 0)), tmp_path / "merged.pftrace")
    return tmp_path / "merged.pftrace"


def entry_of(packet: TracePacket) -> Any:
    (entry,) = packet.chrome_events.metadata
    return entry


def as_number(packet: TracePacket) -> None:
    entry_of(packet).int_value = 1


def as_text(packet: TracePacket) -> None:
    entry_of(packet).string_value = "true"


def as_false(packet: TracePacket) -> None:
    entry_of(packet).bool_value = False


def without_value(packet: TracePacket) -> None:
    entry_of(packet).ClearField("bool_value")


def of_another_name(packet: TracePacket) -> None:
    entry_of(packet).name = "modtrace_ene"


def without_entry(packet: TracePacket) -> None:
    packet.chrome_events.ClearField("metadata")


def of_another_sequence(packet: TracePacket) -> None:
    packet.trusted_packet_sequence_id = 1


NOT_TRUE = "its packets are not as modtrace writes them: ValueError('modtrace_end is {} and not true')"


@pytest.mark.parametrize(
    ("mutate", "message"),
    [
        (as_number, NOT_TRUE.format("int_value")),
        (as_text, NOT_TRUE.format("string_value")),
        (as_false, NOT_TRUE.format("bool_value")),
        (without_value, NOT_TRUE.format("empty")),
        (of_another_name, CUT_OFF),
        (without_entry, CUT_OFF),
        (of_another_sequence, CUT_OFF),
    ],
)
def test_an_end_that_says_something_else_is_refused(
    merged: Path, mutate: Callable[[TracePacket], None], message: str
) -> None:
    read = Trace.FromString(merged.read_bytes())
    mutate(read.packet[-1])
    merged.write_bytes(read.SerializeToString())
    with pytest.raises(TraceError) as caught:
        load(merged)
    assert str(caught.value).startswith(f"{merged}: {message}")


def test_a_name_of_no_utf_8_is_no_end(merged: Path) -> None:
    data = merged.read_bytes()
    place = data.rindex(b"modtrace_end")
    merged.write_bytes(data[:place] + b"\xff" * 12 + data[place + 12 :])
    with pytest.raises(TraceError, match=CUT_OFF):
        load(merged)


def test_no_change_of_a_byte_of_it_makes_anything_but_a_clear_error(merged: Path) -> None:
    data, expected = merged.read_bytes(), list(load(merged).spans)
    length = Trace.FromString(data).packet[-1].ByteSize() + 2
    refused: list[str] = []
    for place in range(len(data) - length, len(data)):
        for flipped in (0x01, 0x02, 0x04, 0x80, 0xFF):
            changed = bytearray(data)
            changed[place] ^= flipped
            merged.write_bytes(changed)
            try:
                assert list(load(merged).spans) == expected
            except ModtraceError as error:
                refused.append(str(error))
    # What is taken changes a flag of the packet, or a field that nothing reads.
    assert len(refused) > 100
    assert all(message.startswith((f"{merged}: ", f"{merged}, byte ")) for message in refused)
