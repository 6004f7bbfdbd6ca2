"""Files that a ring does not replace."""

from __future__ import annotations

from pathlib import Path

import pytest

import modtrace


def test_a_file_that_is_not_a_ring_is_not_replaced(tmp_path: Path) -> None:
    checkpoint = tmp_path / "model.pt"
    checkpoint.write_bytes(b"PK\x03\x04 weights")

    with pytest.raises(modtrace.ModtraceError, match=r"model\.pt: this file is not a ring"):
        modtrace.record(ring=checkpoint).start()

    assert checkpoint.read_bytes() == b"PK\x03\x04 weights"
    assert list(tmp_path.iterdir()) == [checkpoint]


@pytest.mark.parametrize("first", [b"", None])
def test_an_empty_file_and_a_ring_are_replaced(first: bytes | None, tmp_path: Path) -> None:
    ring = tmp_path / "run.modtrace"
    if first is None:
        with modtrace.record(ring=ring, capacity=64):
            pass
    else:
        ring.write_bytes(first)

    with modtrace.record(ring=ring, capacity=64):
        pass

    assert len(modtrace.load(ring).spans) == 0
