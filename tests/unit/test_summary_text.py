"""The exact text and JSON of a summary, also in a notebook, and its width in a terminal."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from modtrace import Timeline
from modtrace.timeline import Mark, StepTimes, Track
from modtrace.timeline.contents import LEFT_OUT, MISSING_BYTES
from modtrace.timeline.summary import ModuleTimes, Summary
from modtrace.timeline.summary.step_times import Steps
from tests.support.timelines import gpt2_timeline
from tests.support.training_timeline import MAIN, MS, NAMES, training


def test_header_says_what_was_recorded_and_what_checkpointing_costs() -> None:
    assert str(training(marks=(100,)).summary()).splitlines()[:5] == [
        "Net · rank 0 · python · native engine, torch 2.13.0",
        "1 whole step, median 90.000 ms",
        "9 spans of 3 modules; nothing was lost",
        "checkpointing costs 10.000 ms of a step (median; 11.1% of all), to run 1 module of Block again",
        "",
    ]


def test_a_loss_of_nothing_is_not_said() -> None:
    timeline = training(marks=(100,))
    said = str(replace(timeline, metadata={**timeline.metadata, LEFT_OUT: 0, MISSING_BYTES: 0}).summary())

    assert said.splitlines()[2] == "9 spans of 3 modules; nothing was lost"


def test_text_has_the_share_of_all_steps() -> None:
    assert [" ".join(line.split()) for line in training().summary().to_text().splitlines()[5:]] == [
        "module (in Net) class calls % step total ms self mean step p50 step p95 "
        "forward forward self backward backward self recompute recompute self",
        "Net Net 2 27.6 80.000 30.000 40.000 40.000 70.000 40.000 20.000 30.000 10.000 10.000 0.000",
        "b Block 1 17.2 50.000 26.000 50.000 50.000 50.000 20.000 10.000 20.000 10.000 10.000 6.000",
        "b.fc Block 1 8.3 24.000 24.000 24.000 24.000 24.000 10.000 10.000 10.000 10.000 4.000 4.000",
    ]


def test_text_says_why_a_share_is_above_100() -> None:
    note = "% step above 100: threads ran at once, and each counts"
    columns = training().columns.take(np.array([0, 8]))
    columns = replace(columns, track=np.array([0, 1], np.int32), step=np.zeros(2, np.int64))
    threads = [Track("forward", name, tid, MAIN) for tid, name in enumerate(("a", "b"))]

    def text(end: int, width: int | None = None) -> list[str]:
        """Summarize two threads in `Net` from 0 on: one until `end`, the other until the step ends at 30."""
        both = replace(columns, start=np.zeros(2, np.int64), end=np.array([end, 30]) * MS)
        timeline = Timeline(both, NAMES, threads, marks=[Mark(30 * MS, "step", "step 0")])
        return timeline.summary().to_text(width).splitlines()

    assert text(15)[-2].split()[:5] == ["Net", "Net", "2", "150.0", "45.000"]
    assert text(15)[-1] == note
    assert note in " ".join(text(15, 60))
    assert text(0)[-1].split()[:5] == ["Net", "Net", "2", "100.0", "30.000"]


def test_steps_text_is_slowest_first() -> None:
    assert training().summary().tables["steps"].to("text", 1).splitlines() == [
        "step  duration ms  forward    other",
        "   1      200.000   10.000  190.000",
        "1 more step",
    ]
    assert training().summary().tables["steps"].to("md", 1).splitlines()[2] == "| 1 | 200.000 | 10.000 | 190.000 |"


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_lines_fit_the_terminal_and_names_keep_their_ends(width: int) -> None:
    summary = gpt2_timeline(1000).summary()

    text = summary.to_text(width)
    assert max(map(len, text.splitlines())) <= width
    assert sum("h.4.mlp.act" in line for line in text.splitlines()) == 1
    assert max(map(len, summary.tables["steps"].to("text", 5, width).splitlines())) <= width
    # Of a name in a tree at least 8 characters are shown.
    assert max(map(len, summary.to_tree(width).splitlines())) <= max(width, 60)


def test_the_last_columns_are_left_out_too_where_names_would_have_no_room() -> None:
    times = ModuleTimes("GPT.blocks.0.mlp", "MLP", 20, 123_456_789_000, 123_456_789_000, in_steps_ns=123_456_789_000)
    summary = Summary([times], 1, steps=Steps(np.array([StepTimes(0, 246_913_578_000)]).T))

    # "% step" takes 6 cells, "total ms" and "self" 10 each here, gaps 2, and a name 12 at least: all of it 44.
    assert [line.split() for line in summary.to_text(44).splitlines()[:2]] == [
        ["module", "%", "step", "total", "ms", "self"],
        ["…locks.0.mlp", "50.0", "123456.789", "123456.789"],
    ]
    assert [line.split() for line in summary.to_text(43).splitlines()[:2]] == [
        ["module", "%", "step", "total", "ms"],
        ["GPT.blocks.0.mlp", "50.0", "123456.789"],
    ]
    assert summary.to_text(31).splitlines()[:2] == ["module            % step", "GPT.blocks.0.mlp    50.0"]
    assert summary.to_text(10).splitlines()[:2] == ["module", "…locks.0.mlp"]


def test_wide_and_combining_characters_of_names_leave_columns_below_their_headings() -> None:
    names = ("Net", "Net.模块", "Net.🚀", "Net.e\u0301")
    rows = [ModuleTimes(name, "N", 1, 1_000_000, 500_000) for name in names]

    # Of 30 cells 17 are for the other columns; a rocket takes two of the 13, and the heading is cut.
    lines = Summary([*rows, ModuleTimes("Net.🚀🚀🚀🚀🚀🚀", "N")], 5).to_text(30).splitlines()
    assert lines[:6] == [
        "module (in N…  total ms   self",
        "Net               1.000  0.500",
        "模块              1.000  0.500",
        "🚀                1.000  0.500",
        "e\u0301                 1.000  0.500",
        "🚀🚀🚀🚀🚀🚀      0.000  0.000",
    ]


def test_without_a_width_nothing_is_left_out() -> None:
    summary = gpt2_timeline(1000).summary()

    assert all(
        any(row.fqn.removeprefix("GPT2LMHeadModel.") in line for line in str(summary).splitlines())
        for row in summary.rows
    )
    assert "…" not in str(summary)
    assert "left out" not in str(summary)


def test_tree_shows_names_below_the_module_around_them() -> None:
    assert training().summary().sort_by("total").to_tree().splitlines()[5:] == [
        "% step  total ms    self  module",
        "  27.6    80.000  30.000  Net",
        "  17.2    50.000  26.000  └─ b: Block",
        "   8.3    24.000  24.000     └─ fc: Block",
    ]


def test_tree_draws_siblings_in_the_order_of_the_rows() -> None:
    rows = [ModuleTimes(fqn, fqn[-1].upper()) for fqn in ("N.b", "N.a.y", "N", "N.a.x", "N.a", "M")]

    branches = [line.split("0.000  0.000  ")[1] for line in Summary(rows, 6).to_tree().splitlines()[1:]]
    assert branches == ["N", "├─ b: B", "└─ a: A", "   ├─ y: Y", "   └─ x: X", "M"]


def test_json_has_steps_and_overview() -> None:
    document = json.loads(training().summary().to_json())

    assert document["steps"][1]["after_ns"] == 180 * MS
    assert document["overview"] == {
        "roots": ["Net"],
        "processes": ["rank 0 · python"],
        "engine": "native",
        "torch": "2.13.0",
        "spans": 9,
        "modules": 3,
        "losses": {},
        "recomputed": {"Block": 1},
        "communication": {},
        "compiled": {},
        "steps_of": "",
        "told_apart": {},
        "steps_end_with": "",
        "whole_run": None,
        "open_at_end": None,
        "unsaved": "",
        "step_by": "optimizer",
    }


def test_a_notebook_shows_header_modules_and_steps() -> None:
    html = training().summary()._repr_html_()

    assert html.startswith("<p>Net · rank 0 · python · native engine, torch 2.13.0<br>")
    assert html.count("<table>") == html.count("</table>") == 2
    assert '<td style="text-align: right">190.000</td>' in html


@pytest.mark.parametrize("width", [40, 60, 75])
def test_the_table_of_steps_fits_a_narrow_terminal(width: int) -> None:
    text = training().summary().tables["steps"].to("text", width=width)

    assert max(map(len, text.splitlines())) <= width
    assert text.splitlines()[0].split()[:4] == ["step", "duration", "ms", "forward"]
    if width == 40:
        assert text.splitlines() == [
            "step  duration ms  forward  backward",
            "   1      200.000   10.000     0.000",
            "   0       90.000   30.000    30.000",
            "hidden: other, loss, recompute (widen",
            "the terminal or pipe the output)",
        ]


def test_a_tree_leaves_out_numbers_where_a_terminal_is_narrow() -> None:
    assert training().summary().sort_by("total").to_tree(32).splitlines()[-6:] == [
        "% step  total ms  module",
        "  27.6    80.000  Net",
        "  17.2    50.000  └─ b: Block",
        "   8.3    24.000     └─ …: Block",
        "hidden: self (widen the terminal",
        "or pipe the output)",
    ]
