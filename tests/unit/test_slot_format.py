"""The format of a slot: its fields, and the C++ header that the build generates from it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from modtrace.ring import Kind, slot_format
from modtrace.track.native.build import _slot_format_header

PACKAGE = Path(slot_format.__file__).parents[1]


def test_the_header_has_each_number_and_kind_of_python() -> None:
    header = _slot_format_header()

    constants = dict(re.findall(r"^constexpr (u?int64_t k\w+) = (\d+);$", header, re.MULTILINE))
    source = Path(slot_format.__file__).read_text("utf-8")
    assigned = re.findall(r"^([A-Z][\w, ]*) = ", source, re.MULTILINE)
    numbers = [name for names in assigned for name in names.split(", ") if isinstance(getattr(slot_format, name), int)]
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


def mentions(paths: Iterable[Path], kind: Kind) -> bool:
    """Return true if Python names this kind or a set of kinds that holds it, or C++ names it."""
    sets = [name for name, value in vars(slot_format).items() if isinstance(value, tuple) and kind in value]
    pattern = "|".join((f"Kind.{kind.name}", "k" + kind.name.title().replace("_", ""), *sets))
    return any(re.search(rf"\b({pattern})\b", path.read_text("utf-8")) for path in paths)


@pytest.mark.parametrize("kind", Kind)
def test_a_kind_names_the_files_that_write_and_read_it(kind: Kind) -> None:
    for writer in kind.writers.split():
        assert mentions([path for room in ("track", "recording") for path in (PACKAGE / room).rglob(writer)], kind)
    assert kind.writers
    readers = [PACKAGE / room / f"{kind.reader}.py" for room in ("timeline/decode", "live")]
    assert mentions(filter(Path.exists, readers), kind)


def test_a_cpp_file_that_makes_an_event_is_a_writer_of_its_kind() -> None:
    kinds = {kind.name.title().replace("_", ""): kind for kind in Kind}
    made = [
        (source.name, name)
        for source in (PACKAGE / "track/native/cpp").rglob("*.*")
        for name in re.findall(r"\bk([A-Z]\w+)\}? << kKindShift", source.read_text("utf-8"))
    ]

    assert len(made) >= 20
    assert [(file, name) for file, name in made if file not in kinds[name].writers.split()] == []


def test_sets_of_kinds_match_the_table() -> None:
    assert [kind.value for kind in slot_format.COMMUNICATION_KINDS] == [20, 21, 22, 23, 24]
    assert [kind.value for kind in slot_format.DEVICE_KINDS] == [25, 26, 27, 28, 29]
    assert [kind.value for kind in slot_format.FLOP_KINDS] == [33, 34, 35, 39]
    assert [kind.value for kind in slot_format.MEMORY_KINDS] == [12, 36, 37, 38]
    assert [kind.value for kind in slot_format.RANGE_KINDS] == [40, 41]
    assert [kind.value for kind in slot_format.GREENLET_KINDS] == [42, 43]
    assert [kind.value for kind in slot_format.KINDS_OF_OTHER_THREADS] == [22, 26, 27, 28, 29, 31, 41]
    assert [kind.value for kind in Kind if kind.name_field == "module"] == [1, 2, 3, 4, 32]
    assert [kind.value for kind in Kind if kind.name_field == "module?"] == [8, 36, 37]
    assert [kind.value for kind in Kind if kind.name_field == "text"] == [11, 12, 13, 40, 41]
    assert [kind.value for kind in Kind if kind.name_field == "text?"] == [20, 21, 22, 23, 24]
