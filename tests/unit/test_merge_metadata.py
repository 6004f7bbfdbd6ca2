"""The metadata of a merge are found whatever bytes are around them."""

from __future__ import annotations

from pathlib import Path

import pytest

from modtrace.formats.trace_file import read_merge_metadata


@pytest.mark.parametrize("length", [b"\xaa{", b"{", b"\xaa|"])
def test_a_length_that_looks_like_a_brace_does_not_hide_the_metadata(tmp_path: Path, length: bytes) -> None:
    path = tmp_path / "merged.pftrace"
    path.write_bytes(b"\n\x20*\x0emodtrace_merge\x12" + length + b'{"version":"1"}' + bytes(8))

    assert read_merge_metadata(path) == {"version": "1"}
