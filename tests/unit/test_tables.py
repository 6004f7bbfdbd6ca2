"""The single renderer: the content of each format of a table, and the columns that people see."""

from __future__ import annotations

import csv
import io
import json
import sys
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from modtrace import ModtraceError
from modtrace._tables import MODULE, MS, NUMBER, Column, Table
from tests.support.compared_runs import COMPARISON
from tests.support.training_timeline import training


class Took(NamedTuple):
    fqn: str
    total_ns: int
    self_ns: int | None
    zero: int = 0


COLUMNS = (
    Column("module", "fqn", MODULE),
    Column("total ms", "total_ns", MS),
    Column("self", "self_ns", MS, repeats=("total_ns",)),
    Column("zero", "zero", NUMBER, hidden_if="zero"),
)


def table(*rows: Took) -> Table:
    return Table(COLUMNS, rows, sentences=("above",), notes=("below",), noun="module")


TWO = table(Took("Net.a", 3_000_000, 1_000_000), Took("Net.b", 2_000_000, 2_000_000))


def test_each_format_has_the_same_rows() -> None:
    assert TWO.to("text").splitlines() == [
        "above",
        "module (in Net)  total ms   self",
        "a                   3.000  1.000",
        "b                   2.000  2.000",
        "below",
    ]
    assert TWO.to("md").splitlines() == [
        "above",
        "",
        "| module | total ms | self |",
        "| --- | ---: | ---: |",
        "| `Net.a` | 3.000 | 1.000 |",
        "| `Net.b` | 2.000 | 2.000 |",
        "",
        "below",
    ]
    assert TWO.to("html").startswith("<p>above</p>\n<table>\n")
    assert '<tfoot><tr><td colspan="3">below</td></tr></tfoot>' in TWO.to("html")
    expected = [row._asdict() for row in TWO.rows]
    assert json.loads(TWO.to("json")) == expected
    read = csv.DictReader(io.StringIO(TWO.to("csv")))
    assert list(read) == [{name: str(value) for name, value in row.items()} for row in expected]
    assert {name: values.tolist() for name, values in TWO.values().items()} == {
        name: [row[name] for row in expected] for name in Took._fields
    }


def test_a_limit_shortens_each_format_with_a_note_for_people() -> None:
    assert [line for line in TWO.to("text", 1).splitlines() if line.startswith(("Net", "1 more"))] == [
        "Net.a      3.000  1.000",
        "1 more module",
    ]
    assert TWO.to("md", 1).count("`Net.") == TWO.to("html", 1).count(">Net.") == 1
    assert "1 more module" in TWO.to("md", 1)
    assert "1 more module; below" in TWO.to("html", 1)
    assert len(json.loads(TWO.to("json", 1))) == 1
    assert TWO.to("csv", 1).count("\n") == 2


@pytest.mark.parametrize(
    ("rows", "headings"),
    [
        ((Took("a", 3, 3), Took("b", 2, 2)), ["module", "total ms"]),  # all rows agree
        ((Took("a", 3, 3), Took("b", 2, 1)), ["module", "total ms", "self"]),
        ((Took("a", 3, 3),), ["module", "total ms", "self"]),  # one row shows nothing about others
        ((Took("a", 3, None), Took("b", 2, None)), ["module", "total ms"]),  # unknown for all rows
        ((Took("a", 3, None, 1), Took("b", 2, 1)), ["module", "total ms", "self", "zero"]),
        ((), ["module", "total ms", "self"]),
    ],
)
def test_people_see_only_columns_with_information(rows: tuple[Took, ...], headings: list[str]) -> None:
    line = table(*rows).to("md").splitlines()[2]

    assert [heading.strip() for heading in line.split("|")[1:-1]] == headings
    assert table(*rows).to("csv").splitlines()[0] == "fqn,total_ns,self_ns,zero"


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (("Net", "Net.a", "Net.b.c"), ("Net", "a", "b.c")),
        (("other", "Net.a", "Net.b"), ("other", "a", "b")),
        (("Net.a", "Other.b"), ("Net.a", "Other.b")),
        (("Net", "Net.a"), ("Net", "Net.a")),  # a single name does not get shorter with the root in the heading
        (("a", "Net.a", "Net.b"), ("a", "Net.a", "Net.b")),  # a root with that name: both would be "a"
        (("Net#2.a", "Net.a", "Net.b"), ("Net#2.a", "Net.a", "Net.b")),
    ],
)
def test_the_root_of_all_names_is_in_the_heading(names: tuple[str, ...], shown: tuple[str, ...]) -> None:
    lines = table(*(Took(name, 1, 2) for name in names)).to("text").splitlines()[1:-1]

    assert tuple(line.split()[0] for line in lines[1:]) == shown
    assert lines[0].startswith("module (in Net)") == (names != shown)


def test_a_frame_is_of_the_library_that_the_program_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    for name in ("pandas", "polars"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModtraceError, match="needs pandas or polars"):
        TWO.to("frame")
    library = ModuleType("polars")
    library.DataFrame = made.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "polars", library)
    TWO.to("frame", 1)
    assert made[0]["total_ns"].tolist() == [3_000_000]


def test_summaries_and_diffs_have_their_tables_by_name() -> None:
    summary = training().summary()

    assert list(summary.tables) == ["modules", "findings", "parts", "steps"]
    assert summary.tables["modules"].to("csv") == summary.to_csv()
    steps = json.loads(summary.tables["steps"].to("json"))
    for step in steps:
        assert sum(ns for name, ns in step.items() if name.startswith("parts.")) == step["duration_ns"]
    assert list(COMPARISON.tables) == ["modules"]
    assert json.loads(COMPARISON.tables["modules"].to("json"))[0]["new_ns"] == 1_200_000
