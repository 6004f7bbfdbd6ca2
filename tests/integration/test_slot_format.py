"""The format of a slot in Python and in C++: the same constants with the same values."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import modtrace.track.native.library as library
from modtrace.ring import Kind, slot_format

HEADER = Path(library.__file__).parent / "cpp" / "slot_format.h"

PYTHON_ONLY = {
    "ABANDONED_BIT",
    "CALL_KEY_BITS",
    "CALL_KEY_MASK",
    "DEVICE_TIME_MASK",
    "KIND_MASK",
    "NAME_MASK",
    "RECOMPUTE_BIT",
    "SLOT_BYTES",
    "STREAM_NUMBER_MASK",
    "THREAD_MASK",
    "WORDS_PER_SLOT",
    Kind.CALL_BACKWARD.name,
    Kind.MARK.name,
    Kind.COUNTER.name,
    Kind.SHAPES.name,
}
"""What only the reader, the portable engine and the recording need."""


def python_constants() -> dict[str, int]:
    numbers = {name: value for name in slot_format.__all__ if isinstance(value := getattr(slot_format, name), int)}
    return numbers | {kind.name: kind.value for kind in Kind}


@pytest.mark.usefixtures("native_engine")
def test_the_built_engine_has_the_constants_of_python() -> None:
    compiled = library.load().slot_format()

    expected = python_constants()
    assert compiled == {name: value for name, value in expected.items() if name not in PYTHON_ONLY}
    assert expected.keys() - compiled.keys() == PYTHON_ONLY


@pytest.mark.usefixtures("native_engine")
def test_the_built_engine_tells_each_constant_of_its_header() -> None:
    source = HEADER.read_text()
    declared = re.findall(r"^constexpr \w+ k(\w+) =", source, re.MULTILINE) + re.findall(
        r"^  k(\w+) = \d+,$", source, re.MULTILINE
    )

    snake_case = {re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper() for name in declared}
    assert snake_case == set(library.load().slot_format())


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
