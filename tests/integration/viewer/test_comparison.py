"""Two sides above each other on the page: two steps of a recording, and a comparison that modtrace wrote."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import modtrace
from modtrace import Timeline
from modtrace.timeline import BACKWARD, Mark, Name, Process, Slices, Stats, Track
from modtrace.timeline.slices import DTYPES
from tests.support.browser import visit
from tests.support.compared_runs import recording
from tests.support.gpt_timeline import BASE, gpt_timeline
from tests.support.viewer_page import US, Open, click, color_of, details, pixels, position_of, settle, table, viewport

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SLOWER, FASTER, SAME, RAN_TWICE = "#c2410c", "#1f6fd6", "#a9b4bf", "#0f8b8d"
SHIFT = 400 * US


def slower_in_step_2() -> Timeline:
    """Four equal steps of a GPT of one block, except that in step 2 `h.0.mlp.act` takes 400 µs more in forward."""
    timeline = gpt_timeline(4, 1)
    columns = timeline.columns
    act = next(index for index, name in enumerate(timeline.names) if name.fqn.endswith("h.0.mlp.act"))
    row = int(np.flatnonzero((columns.name == act) & (columns.step == 2) & (columns.phase == 0))[0])
    until = int(columns.end[row])
    later = {field: getattr(columns, field) + SHIFT * (getattr(columns, field) >= until) for field in ("start", "end")}
    fields = {field: getattr(columns, field) for field in DTYPES}
    marks = [mark._replace(time_ns=mark.time_ns + SHIFT * (mark.time_ns >= until)) for mark in timeline.marks]
    return Timeline(Slices(**(fields | later)), timeline.names, timeline.tracks, timeline.stats, marks)


def compare_steps(page: Page) -> None:
    page.get_by_role("tab", name="Steps").click()
    page.get_by_role("button", name=re.compile("^Compare step")).click()
    page.get_by_role("tab", name="Changes").wait_for()
    settle(page)


def headers(page: Page) -> list[str]:
    return page.locator("[data-kind=process]").all_inner_texts()


def test_steps_have_a_table_that_zooms_to_them(open_page: Open) -> None:
    page = open_page(slower_in_step_2()).page
    page.get_by_role("tab", name="Steps").click()
    rows = table(page)
    usual = rows["step 0"][0]
    assert list(rows) == ["step 0", "step 1", "step 2", "step 3"]
    assert [cells[:2] for cells in rows.values()][:2] == [[usual, "100.0 %"]] * 2
    assert rows["step 2"][0] != usual
    page.get_by_role("columnheader", name="Duration").get_by_role("button").click()
    assert next(iter(table(page))) == "step 2"
    before = viewport(page)
    page.get_by_role("button", name="step 2", exact=True).first.click()
    start, end = viewport(page)
    assert end - start < (before[1] - before[0]) / 3
    assert page.get_by_role("button", name="Compare step 0 with step 2").count() == 1, "a usual one and the slowest"


@pytest.mark.parametrize("width", [900, 1100, 1600])
def test_steps_past_the_tenth_take_one_line_as_the_others_do(open_page: Open, width: int) -> None:
    page = open_page(gpt_timeline(12, 1), viewport={"width": width, "height": 900}).page
    page.get_by_role("tab", name="Steps").click()
    settle(page)
    heights = page.locator("tbody tr").evaluate_all("rows => rows.map(row => row.getBoundingClientRect().height)")
    assert len(heights) == 12
    assert len(set(heights)) == 1


MARK = (0x9A, 0x6A, 0x00, 0xFF)


def two_processes(*processes: Process) -> Timeline:
    """A module's calls in two processes, in µs; the marks are in the first process, as for all ranks of a job.

    ```
    first    0 net 100  150 net 250  | 300   320 net 400  | 500
    second      50 net 290   310 net 490   520 net 600
    ```
    """
    rows = [(0, 100, 0), (50, 290, 1), (150, 250, 0), (310, 490, 1), (320, 400, 0), (520, 600, 1)]
    start, end, track = np.array(rows, np.int64).T
    zeros = np.zeros(len(rows))
    columns = Slices.of(
        start=BASE + start * US,
        end=BASE + end * US,
        name=zeros,
        phase=zeros,
        track=track,
        depth=zeros,
        parent=zeros - 1,
        call=zeros,
        step=[0, 0, 0, 1, 1, 2],
        link=zeros - 1,
        complete=zeros + 1,
    )
    tracks = [Track("forward", "MainThread", 1, process) for process in processes]
    marks = [Mark(BASE + 300 * US, "step", "step 0"), Mark(BASE + 500 * US, "step", "step 1")]
    return Timeline(columns, [Name("net", "net", "Net")], tracks, Stats(recorded=12), marks)


@pytest.mark.parametrize(
    ("processes", "note"),
    [
        ((Process(7, 0), Process(8, 1)), "steps of rank 0; modtrace ranks slow compares ranks"),
        ((Process(7, program="trainer"), Process(8, program="loader")), "steps of trainer"),
    ],
)
def test_steps_of_several_processes_are_those_of_the_first(
    open_page: Open, processes: tuple[Process, ...], note: str
) -> None:
    page = open_page(two_processes(*processes)).page
    # All calls of both processes; the steps of the first take 500 µs, those of the other 550.
    assert table(page)["net"] == ["Net", "6", "74.3 %", "780 µs", "780 µs", "780 µs", "–", "74.3 %"]

    page.get_by_role("tab", name="Steps").click()
    assert page.locator("#details .scope p").all_inner_texts() == ["2 steps, median 250 µs", note]
    # Columns: duration, its share, forward, backward, before, between, after; and the choice of two.
    assert table(page) == {
        "step 0": ["300 µs", "120.0 %", "200 µs", "–", "–", "50 µs", "50 µs", "", ""],
        "step 1": ["200 µs", "80.0 %", "80 µs", "–", "20 µs", "–", "100 µs", "", ""],
    }
    compare_steps(page)
    first = processes[0].name
    assert headers(page) == [f"step 0 · {first}", f"step 1 · {first}"]
    assert table(page)["net"][1:3] == ["0.200", "0.080"]
    # The line at the end of step 1 crosses only its own rows.
    lines = []
    for track in ("track 0", "track 1"):
        x, y = position_of(page, track, 0, 200 * US)
        lines.append(MARK in pixels(page, x - 1, y, width=3))
    assert lines == [False, True]


def test_steps_of_one_process_say_how_many_are_whole_and_whose_they_are_not(open_page: Open) -> None:
    timeline = gpt_timeline(3, 1)
    page = open_page(replace(timeline, marks=timeline.marks[:2])).page
    page.get_by_role("tab", name="Steps").click()
    (line,) = page.locator("#details .scope p").all_inner_texts()
    assert re.fullmatch(r"3 steps, 2 whole, median [\d.]+ ms", line)
    assert list(table(page)) == ["step 0", "step 1", "step 2, not ended"]


def test_two_steps_side_by_side_begin_together_and_show_what_differs(open_page: Open) -> None:
    timeline = slower_in_step_2()
    page = open_page(timeline).page
    compare_steps(page)

    assert headers(page) == ["step 0 · rank 0 · python", "step 2 · rank 0 · python"]
    rows = page.locator("tbody tr").all()
    cells = rows[0].locator("th, td").all_inner_texts()
    fqn = "GPT2LMHeadModel.transformer.h.0.mlp.act"
    assert cells[:2] == [fqn, "forward"]
    assert [float(cell) for cell in cells[2:4]] == [0.06, 0.46]
    assert cells[4:] == ["+0.400", "+666.7 %", "longer"]
    assert {row.locator("td").last.inner_text() for row in rows[1:]} == {"same"}
    notes = page.locator(".notes").inner_text()
    assert re.search(r"step 0 took 2\.\d+ ms, step 2 .* more\.", notes)

    # The span is drawn at its distance from the start of its step in the data, on both sides.
    columns, steps = timeline.columns, [BASE, *(mark.time_ns for mark in timeline.marks)]
    for track, step in (("track 0", 0), ("track 1", 2)):
        span = next(
            i for i, one in enumerate(timeline.spans) if one.fqn == fqn and one.step == step and one.phase == "forward"
        )
        at = int(columns.start[span]) - steps[step]
        assert color_of(page, track, int(columns.depth[span]), at + 30 * US) == SLOWER
        assert color_of(page, track, 0, at) == SAME
        click(page, track, int(columns.depth[span]), at + 30 * US)
        shown = details(page)
        assert (shown["Process"].split(" · ")[0], shown["Step"]) == (f"step {step}", str(step))
        assert "Unix time" not in shown

    page.wait_for_function("() => location.hash.includes('compare=0,2')")
    page.get_by_role("button", name="Back to the recording").click()
    page.wait_for_function("() => !location.hash.includes('compare')")
    assert headers(page) == ["rank 0 · python"]
    page.go_back()
    page.get_by_role("tab", name="Changes").wait_for()
    assert headers(page)[1] == "step 2 · rank 0 · python"
    page.reload()
    page.get_by_role("tab", name="Changes").wait_for()
    assert headers(page)[1] == "step 2 · rank 0 · python"


def test_picked_change_is_highlighted_on_both_sides_and_copied(open_page: Open) -> None:
    page = open_page(slower_in_step_2(), permissions=["clipboard-read", "clipboard-write"]).page
    compare_steps(page)
    page.get_by_role("button", name="GPT2LMHeadModel.transformer.h.0.mlp.act", exact=True).first.click()
    assert page.locator(".match-count").inner_text() == "2 found"
    page.get_by_role("searchbox").fill("attn phase:backward")
    assert all(".attn" in fqn for fqn in table(page))
    page.get_by_role("searchbox").fill("")
    page.get_by_role("button", name="Colour by class").click()
    settle(page)
    assert color_of(page, "track 0", 0, 500 * US) != SAME
    page.get_by_role("button", name="Copy table").click()
    page.get_by_role("button", name="Copied").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()").split("\n")
    assert copied[0].split("\t")[:5] == ["module", "phase", "step 0 ns", "step 2 ns", "difference ns"]
    assert copied[1].split("\t")[1:5] == ["forward", "60000", "460000", "400000"]


def test_page_of_a_diff_shows_both_sides_coloured_by_verdict(browser: Browser, tmp_path: Path) -> None:
    changed = recording(1, {("Net.h.3", BACKWARD): 1.5, ("Net.h.5", BACKWARD): 0.6}, twice=("Net.h.6",))
    comparison = modtrace.diff(recording(0), changed)
    assert [change.outcome for change in comparison.changes[:2]] == ["ran 2 times a step instead of 1"] * 2
    comparison.save(tmp_path / "d.html")
    with visit(browser) as seen:
        page = seen.page
        page.goto((tmp_path / "d.html").as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        assert page.title() == "before · after – modtrace"
        assert headers(page) == ["before · python", "after · python"]
        rows = [row.locator("th, td").all_inner_texts() for row in page.locator("tbody tr").all()]
        assert len(rows) == len(comparison.changes)
        for cells, change in zip(rows, comparison.changes, strict=True):
            assert (cells[0], cells[1], cells[-1]) == (change.fqn, change.phase, change.outcome)
            assert cells[2:4] == [f"{ns / 1e6:.3f}" for ns in (change.base_ns, change.new_ns)]
        notes = page.locator(".notes p").all_inner_texts()
        assert notes[0].startswith("1. Net.h.6 · ran 2 times a step instead of 1: ")
        assert notes[notes.index(comparison.findings_lines[-1]) + 1 :] == comparison.header
        assert comparison._sides is not None
        for fqn, color in (("Net.h.3", SLOWER), ("Net.h.5", FASTER), ("Net.h.6", RAN_TWICE)):
            for side, track in ((0, "track 1"), (1, "track 3")):
                spans = comparison._sides[side].step
                span = next(one for one in spans.spans if (one.fqn, one.phase) == (fqn, "backward"))
                # A recording's first moment is that of its first span, which starts the step.
                at = (span.start_ns + span.end_ns) // 2 - comparison._sides[side].start_ns
                assert color_of(page, track, 1, at) == color
        assert page.get_by_role("button", name="Back to the recording").count() == 0
        page.get_by_role("tab", name="Recording").click()
        assert list(details(page)) == ["processes"], "statistics would be of neither side"
        assert "Nothing was lost" not in page.locator("#details").inner_text()
        assert (seen.problems, set(seen.requests)) == ([], {(tmp_path / "d.html").as_uri()})
