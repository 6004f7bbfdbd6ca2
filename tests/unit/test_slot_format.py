"""The format of a slot: its fields, and the C++ header that the build makes of it."""

from __future__ import annotations

import re
from pathlib import Path

from modtrace.ring import Kind, slot_format
from modtrace.track.native.build import _slot_format_header


def test_the_header_has_each_number_and_kind_of_python() -> None:
    header = _slot_format_header()

    constants = dict(re.findall(r"^constexpr (u?int64_t k\w+) = (\d+);$", header, re.MULTILINE))
    source = Path(slot_format.__file__).read_text("utf-8")
    assigned = re.findall(r"^([A-Z]\w*) = ", source, re.MULTILINE)
    numbers = [name for name in assigned if isinstance(getattr(slot_format, name), int)]
    assert len(constants) == len(numbers)
    assert constants["int64_t kNameBits"] == "24"
    assert constants["uint64_t kSequenceMask"] == str(2**38 - 1)
    assert constants["int64_t kNoName"] == str(2**24 - 1)
    assert constants["int64_t kNotAwaitedBit"] == str(2**62)
    kinds = {name: int(value) for name, value in re.findall(r"^  k(\w+) = (\d+),$", header, re.MULTILINE)}
    assert kinds == {kind.name.title().replace("_", ""): kind.value for kind in Kind}


def test_the_fields_of_meta_fill_63_bits_without_overlap() -> None:
    fields = [
        (0, slot_format.NAME_BITS),
        (slot_format.THREAD_SHIFT, slot_format.THREAD_BITS),
        (slot_format.KIND_SHIFT, slot_format.KIND_BITS),
        (slot_format.LAP_SHIFT, slot_format.LAP_BITS),
    ]
    assert fields == [(0, 24), (24, 16), (40, 8), (48, 15)]
    assert slot_format.SEQUENCE_BITS + slot_format.CALL_INDEX_BITS == 63
    assert slot_format.SEQUENCE_BITS + slot_format.BACKWARD_PASS_BITS == 63
    assert slot_format.FORWARD_THREAD_SHIFT + slot_format.FORWARD_THREAD_BITS == slot_format.NAME_BITS
