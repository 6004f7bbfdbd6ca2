"""Totals, self times and order of the rows of a summary, in each form it is written."""

from __future__ import annotations

import csv
import io
import json
import tracemalloc
import unicodedata
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modtrace import ArgumentError, Timeline
from modtrace.timeline import Name, Process, Stats, Track
from modtrace.timeline.contents import COMPILED_CLASS
from modtrace.timeline.slices import BACKWARD, FORWARD, RECOMPUTE, Slices
from modtrace.timeline.summary import GpuTotals, ModuleTimes, SortKey, Summary, summarize
from tests.support.gpt_timeline import gpt_timeline
from tests.support.timelines import with_args

MAIN = Process(1)
TRACKS = (Track("forward", "MainThread", 1, MAIN), Track("backward", "MainThread", 1, MAIN))
NET, A, B = range(3)
NAMES = (Name("Net", "Net", "Net"), Name("a: Linear", "Net.a", "Linear"), Name("b: Block", "Net.b", "Block"))

SpanRow = tuple[int, int, int, int, int, int]


def timeline(*spans: SpanRow, names: tuple[Name, ...] = NAMES, **more: Any) -> Timeline:
    """Spans as (name, phase, start, end, parent, complete), each phase but forward on the backward track."""
    name, phase, start, end, parent, complete = zip(*spans, strict=True) if spans else ((),) * 6
    depth: list[int] = []
    for above in parent:
        depth.append(0 if above < 0 else depth[above] + 1)
    columns = Slices.of(
        start=start,
        end=end,
        name=name,
        phase=phase,
        track=[int(p != FORWARD) for p in phase],
        depth=depth,
        parent=parent,
        call=[0] * len(spans),
        step=[0] * len(spans),
        link=[-1] * len(spans),
        complete=complete,
    )
    return replace(Timeline(columns, names, TRACKS), **more)


def test_totals_and_self_times_of_a_step_with_recompute() -> None:
    # forward:   Net 1000──────────────2000      backward:  Net 2000───────────────────3000
    #              a 1100──1200                                b 2100──────────2900
    #              b   1300──1900                                recompute b 2200─2600
    #                a  1400─1450                                recompute a  2300─2400
    step = timeline(
        (NET, FORWARD, 1000, 2000, -1, True),
        (A, FORWARD, 1100, 1200, 0, True),
        (B, FORWARD, 1300, 1900, 0, True),
        (A, FORWARD, 1400, 1450, 2, True),
        (NET, BACKWARD, 2000, 3000, -1, True),
        (B, BACKWARD, 2100, 2900, 4, True),
        (B, RECOMPUTE, 2200, 2600, 5, True),
        (A, RECOMPUTE, 2300, 2400, 6, True),
    )

    summary = summarize(step)

    # Backward is without the recompute in it; recompute counts to Net too, which contains what runs again.
    assert summary.rows == [
        ModuleTimes("Net", "Net", 1, 1000, 300, 600, 200, 400, 0, 2000, 2000, in_steps_ns=2000),
        ModuleTimes("Net.a", "Linear", 2, 150, 150, 0, 0, 100, 100, 250, 250, in_steps_ns=250),
        ModuleTimes("Net.b", "Block", 1, 600, 550, 400, 400, 300, 300, 1300, 1300, in_steps_ns=1300),
    ]
    assert (summary.modules, summary.incomplete, summary.overwritten, summary.gpu) == (3, 0, 0, None)
    assert [row.self_ns for row in summary.rows] == [500, 250, 1250]
    assert [row.total_ns for row in summary.rows] == [2000, 250, 1300]
    assert [row.mean_ns for row in summary.rows] == [2000, 125, 1300]


def test_a_module_that_calls_itself_counts_its_time_once() -> None:
    recursion = timeline(
        (A, FORWARD, 0, 100, -1, True),
        (B, FORWARD, 10, 90, 0, True),
        (A, FORWARD, 20, 80, 1, True),  # not its direct child
        (A, FORWARD, 30, 40, 2, True),
    )

    assert summarize(recursion).rows == [
        ModuleTimes("Net.a", "Linear", 3, 100, 80, 0, 0, 0, 0, 100, 100, in_steps_ns=100),
        ModuleTimes("Net.b", "Block", 1, 80, 20, 0, 0, 0, 0, 80, 80, in_steps_ns=80),
    ]


def test_spans_of_one_module_under_two_labels_are_one_row() -> None:
    names = (Name("a: Linear", "Net.a", "Linear"), Name("b.a: Linear", "Net.a", "Linear"))
    both = timeline((0, FORWARD, 0, 5, -1, True), (1, FORWARD, 5, 12, -1, True), names=names)

    assert summarize(both).rows == [ModuleTimes("Net.a", "Linear", 2, 12, 12, 0, 0, 0, 0, 6, 7, in_steps_ns=12)]


def test_footer_of_a_lossy_timeline_counts_what_is_missing() -> None:
    lossy = timeline(
        (NET, FORWARD, 0, 5, -1, False),
        (A, FORWARD, 6, 9, -1, False),
        (A, FORWARD, 9, 10, -1, True),
        stats=Stats(recorded=20, overwritten=7),
    )

    summary = summarize(lossy).sort_by(limit=1)

    assert summary.footer == "1 more module, 2 spans incomplete, 7 events overwritten"
    assert str(summary).splitlines()[:3] == [
        "Net · python",
        "a step is an outermost call (--step-by chooses others): 1 × Net.a; 2 steps not recorded whole",
        "3 spans of 2 modules; lost: 7 events overwritten, 2 spans incomplete",
    ]
    assert str(summary).splitlines()[-1] == summary.note == "1 more module"
    assert summary.to_markdown().splitlines()[-1] == summary.footer


@pytest.mark.parametrize(
    ("key", "order"),
    [
        ("self", "bca"),
        ("forward", "acb"),
        ("backward", "bac"),
        ("recompute", "cab"),
        ("calls", "cab"),
        ("name", "abc"),
        ("total", "acb"),
        ("mean", "bac"),
        ("p50", "bca"),
        ("p95", "abc"),
    ],
)
def test_sort_by_each_key_orders_the_rows(key: SortKey, order: str) -> None:
    rows = [
        ModuleTimes("c", "C", 9, 20, 1, 1, 1, 3, 2, 5, 7),
        ModuleTimes("a", "A", 5, 30, 1, 2, 1, 2, 1, 4, 9),
        ModuleTimes("b", "B", 1, 10, 9, 3, 1, 1, 1, 6, 8),
    ]

    assert "".join(row.fqn for row in Summary(rows, 3).sort_by(key).rows) == order


def test_ties_keep_the_order_of_calls_and_an_unknown_key_is_refused() -> None:
    rows = [ModuleTimes(fqn, "L", 1, 5, 5, 0, 0, 0, 0) for fqn in ("z", "a", "m")]

    assert [row.fqn for row in Summary(rows, 3).sort_by().rows] == ["z", "a", "m"]
    with pytest.raises(ArgumentError, match="not by 'size'"):
        Summary(rows, 3).sort_by("size")  # type: ignore[arg-type]


EXAMPLE = Summary([ModuleTimes("Net.a", "Linear", 2, 1_234_567, 1_000_000, 2_000_500, 0, 0, 0, 3_000, 4_000)], 1)


def test_text_aligns_names_left_and_numbers_right() -> None:
    assert str(EXAMPLE) == (
        "module  class   calls  total ms   self   mean  step p50  step p95  "
        "forward  forward self  backward  backward self\n"
        "Net.a   Linear      2     3.235  1.000  1.618     0.003     0.004  "
        "  1.235         1.000     2.001          0.000"
    )


def test_markdown_is_a_github_table() -> None:
    assert EXAMPLE.to_markdown() == (
        "| module | class | calls | total ms | self | mean | step p50 | step p95 "
        "| forward | forward self | backward | backward self |\n"
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| `Net.a` | `Linear` | 2 | 3.235 | 1.000 | 1.618 | 0.003 | 0.004 | 1.235 | 1.000 | 2.001 | 0.000 |\n"
    )


def test_recompute_is_a_column_where_there_is_any() -> None:
    summary = Summary([*EXAMPLE.rows, ModuleTimes("Net.b", "B", 1, 0, 0, 0, 0, 7_000, 6_000)], 2)

    assert [line.split()[-2:] for line in str(summary).splitlines()] == [
        ["recompute", "self"],
        ["0.000", "0.000"],
        ["0.007", "0.006"],
    ]
    assert summary.to_markdown().splitlines()[-1].endswith("| 0.007 | 0.006 |")
    assert "recompute" not in str(EXAMPLE) + EXAMPLE.to_markdown()


def test_csv_and_json_have_nanoseconds() -> None:
    assert EXAMPLE.to_csv() == (
        "fqn,module_class,calls,forward_ns,forward_self_ns,backward_ns,backward_self_ns,recompute_ns,recompute_self_ns,"
        "step_p50_ns,step_p95_ns,in_steps_ns,total_ns,self_ns,mean_ns\n"
        "Net.a,Linear,2,1234567,1000000,2000500,0,0,0,3000,4000,0,3235067,1000000,1617533\n"
    )
    assert json.loads(EXAMPLE.to_json()) == {
        "findings": [],
        "rows": [
            {
                "fqn": "Net.a",
                "module_class": "Linear",
                "calls": 2,
                "forward_ns": 1_234_567,
                "forward_self_ns": 1_000_000,
                "backward_ns": 2_000_500,
                "backward_self_ns": 0,
                "recompute_ns": 0,
                "recompute_self_ns": 0,
                "step_p50_ns": 3_000,
                "step_p95_ns": 4_000,
                "retained_bytes": None,
                "peak_bytes": None,
                "flops_forward": None,
                "flops_backward": None,
                "flops_recompute": None,
                "in_steps_ns": 0,
                "total_ns": 3_235_067,
                "self_ns": 1_000_000,
                "mean_ns": 1_617_533,
            }
        ],
        "modules": 1,
        "incomplete": 0,
        "overwritten": 0,
        "by": "module",
        "parts": [],
        "units": [],
        "ranges": [],
        "outside": {},
        "before": {},
        "after": {},
        "steps": [],
    }


def test_html_escapes_names_and_aligns_numbers() -> None:
    row = ModuleTimes("<b>a</b>", "L & M", 2, 1_234_567, 1_000_000, kernels=1)
    summary = Summary([row], modules=3, gpu=GpuTotals(7_000, 0, 0))

    assert summary.to_html() == summary._repr_html_() == HTML


HTML = (
    "<table>\n"
    '<thead><tr><th style="text-align: left">module</th><th style="text-align: left">class</th>'
    '<th style="text-align: right">calls</th><th style="text-align: right">forward ms</th>'
    '<th style="text-align: right">self ms</th><th style="text-align: right">kernels</th></tr></thead>\n'
    "<tbody>\n"
    '<tr><td style="text-align: left">&lt;b&gt;a&lt;/b&gt;</td><td style="text-align: left">L &amp; M</td>'
    '<td style="text-align: right">2</td><td style="text-align: right">1.235</td>'
    '<td style="text-align: right">1.000</td><td style="text-align: right">1</td></tr>\n'
    "</tbody>\n"
    '<tfoot><tr><td colspan="6">GPU: kernels 0.007 ms, memcpys 0.000 ms, memsets 0.000 ms; 2 more modules</td></tr>'
    "</tfoot>\n"
    "</table>\n"
)

PROFILED = Summary(
    [
        ModuleTimes("Net", "Net", 1, 9_000, 4_000, kernels=1, gpu_forward_ns=50_000, kernel_ns=20_000),
        ModuleTimes("Net.a", "L", 2, 5_000, 5_000, kernels=3, gpu_forward_ns=30_000, kernel_ns=25_000, memcpy_ns=5_000),
    ],
    modules=2,
    overwritten=4,
    gpu=GpuTotals(45_000, 5_000, 0),
)


def test_gpu_columns_stand_in_every_form_where_a_gpu_was_profiled() -> None:
    # What is 0 in every row has no column: backward, recompute and their GPU times.
    assert str(PROFILED) == (
        "module  class  calls  forward ms  self ms  kernels  GPU forward ms  GPU self ms\n"
        "Net     Net        1       0.009    0.004        1           0.050        0.020\n"
        "Net.a   L          2       0.005    0.005        3           0.030        0.030\n"
        "GPU: kernels 0.045 ms, memcpys 0.005 ms, memsets 0.000 ms; 4 events overwritten"
    )
    assert PROFILED.to_markdown().splitlines()[3] == "| `Net.a` | `L` | 2 | 0.005 | 0.005 | 3 | 0.030 | 0.030 |"
    header, first, _ = PROFILED.to_csv().splitlines()
    not_recorded = [field for field in ModuleTimes._fields if getattr(PROFILED.rows[0], field) is None]
    known = [field for field in ModuleTimes._fields if field not in not_recorded]
    assert header.split(",") == [*known, "total_ns", "self_ns", "mean_ns"]
    assert first == "Net,Net,1,9000,4000,0,0,0,0,0,0,0,1,50000,0,0,0,0,0,20000,0,0,0,0,0,9000,4000,9000"
    assert json.loads(PROFILED.to_json())["gpu"] == {
        "kernel_ns": 45_000,
        "memcpy_ns": 5_000,
        "memset_ns": 0,
        "communication_ns": 0,
        "communication_overlap_ns": 0,
    }
    assert json.loads(PROFILED.to_json())["rows"][1]["memcpy_ns"] == 5_000


def test_gpu_time_is_what_a_profiled_summary_is_sorted_by() -> None:
    assert [row.fqn for row in PROFILED.sort_by().rows] == ["Net.a", "Net"]
    assert [row.fqn for row in PROFILED.sort_by("forward").rows] == ["Net", "Net.a"]
    with pytest.raises(
        ValueError,
        match="sorts by self, total, forward, backward, recompute, mean, p50, p95, calls, name, not by 'gpu'",
    ):
        EXAMPLE.sort_by("gpu")


def test_summary_of_an_empty_timeline_has_no_rows() -> None:
    empty = summarize(Timeline(Slices.empty()))

    assert (empty.rows, empty.modules, [*empty.steps]) == ([], 0, [])
    assert empty.to_csv().count("\n") == empty.steps_csv().count("\n") == 1
    assert str(empty).splitlines() == [
        "no spans",
        "",
        "module  class  calls  total ms  self  mean  step p50  step p95  "
        "forward  forward self  backward  backward self",
    ]
    assert empty.to_tree().splitlines()[-1] == "% step  total ms  self  module"


@pytest.mark.parametrize(
    ("name", "markdown"),
    [
        ("h.0.c_attn: Linear", "`h.0.c_attn: Linear`"),
        ("a|b", "a&#124;b"),
        ("`a`", "&#96;a&#96;"),
        ("_a_!", "&#95;a&#95;&#33;"),
        ("<img onerror=x>", "&#60;img onerror&#61;x&#62;"),
        ("a\nb", "a&#92;nb"),
        ("\x1b[2J", "&#92;x1b&#91;2J"),
        ("\u202egnp", "&#92;u202egnp"),
        ("\ud800", "&#92;ud800"),
        ("", ""),
        ("größe", "größe"),
    ],
)
def test_hostile_names_in_markdown(name: str, markdown: str) -> None:
    summary = Summary([ModuleTimes(name, "L")], 1)

    assert summary.to_markdown().splitlines()[2].startswith(f"| {markdown} |")


@given(st.text())
def test_any_name_is_one_line_of_printable_utf8_everywhere(name: str) -> None:
    summary = Summary([ModuleTimes(name, name, 1, 2, 2, 0, 0, 0, 0)], 1)

    assert len(str(summary).splitlines()) == 2
    assert len(summary.to_markdown().splitlines()) == 3
    assert summary.to_markdown().splitlines()[2].count("|") == 13
    (row,) = csv.DictReader(io.StringIO(summary.to_csv(), newline=""))
    assert row["calls"] == "1"
    assert json.loads(summary.to_json())["rows"][0]["fqn"] == name
    for text in (str(summary), summary.to_markdown(), summary.to_csv()):
        assert not any(unicodedata.category(c) in {"Cc", "Cf", "Cs"} for c in text if c != "\n")


def test_the_header_names_compiled_functions_and_says_what_is_inside() -> None:
    columns = Slices.of(
        start=[5, 20, 40], end=[9, 30, 41], name=[0, 1, 2], phase=[0] * 3, track=[0] * 3, depth=[0] * 3,
        parent=[-1] * 3, call=[0] * 3, step=[0] * 3, link=[-1] * 3, complete=[1] * 3,
    )  # fmt: skip
    timeline = with_args(
        Timeline(
            columns,
            [
                Name(name, name, kind)
                for name, kind in (("train", COMPILED_CLASS), ("Net", "Net"), ("scale", COMPILED_CLASS))
            ],
            [Track("forward", "MainThread", 8, Process(7, None, "train.py"))],
        ),
        {
            0: {"compiled_modules": "net.a: Linear, net.b: Linear"},
            1: {"compiled_modules": "a: Linear"},
            2: {"compiled_modules": ""},
        },
    )

    lines = str(timeline.summary()).splitlines()

    assert lines[0] == "train, Net, scale · train.py"
    assert lines[3] == "compiled, each one span: Net with 1 module inside, scale, train with 2 modules inside"


def test_a_long_timeline_is_summed_up_in_the_memory_of_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    long = gpt_timeline(400, 2)
    monkeypatch.setattr("modtrace.timeline.step_pieces.PIECE_SPANS", 1000)
    tracemalloc.start()
    try:
        long.summary()
        assert tracemalloc.get_traced_memory()[1] < 2 * long.slices.nbytes  # 1.5 times; as a whole 2.9
    finally:
        tracemalloc.stop()
