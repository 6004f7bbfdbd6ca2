"""Drawing on the page: colours, rows, counters, marks, patterns, and the text on losses or without a timeline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from modtrace import Timeline
from modtrace.timeline import Name, Stats
from modtrace.timeline.slices import Slices
from tests.support.browser import visit
from tests.support.gpt_timeline import BASE, gpt_timeline
from tests.support.viewer_page import (
    BACKWARD,
    FORWARD,
    GPU,
    US,
    Open,
    click,
    color_of,
    details,
    one_step,
    pixels,
    position_of,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser


ROOT = Path(__file__).parents[3]
PAGE = ROOT / "src/modtrace/view/viewer.html"


def test_class_on_every_track_has_one_colour(open_page: Open) -> None:
    page = open_page(one_step()).page

    colors = {
        color_of(page, FORWARD, 1, 250 * US),
        color_of(page, FORWARD, 1, 700 * US),
        color_of(page, BACKWARD, 1, 1400 * US),
    }
    assert len(colors) == 1
    models = {color_of(page, FORWARD, 0, 500 * US), color_of(page, BACKWARD, 0, 1600 * US)}
    assert len(models) == 1
    assert len(colors | models | {color_of(page, GPU, 0, 250 * US)}) == 3


def test_rows_of_a_process_are_forward_backward_device_counters(open_page: Open) -> None:
    page = open_page(one_step()).page

    tops = page.eval_on_selector_all(
        "[data-kind]", "rows => rows.map(row => [row.getBoundingClientRect().top, row.dataset.kind])"
    )
    assert [kind for _, kind in sorted(tops)] == ["process", "forward", "backward", "gpu", "counter"]
    assert page.locator("[data-kind=process]").inner_text() == "rank 0 · python"
    assert "up to 4 GiB" in page.locator("[data-kind=counter]").inner_text()


def test_tracks_between_spans_are_empty(open_page: Open) -> None:
    page = open_page(one_step()).page

    for row, depth, at in ((FORWARD, 1, 450), (FORWARD, 0, 1110), (BACKWARD, 0, 1110), (GPU, 0, 850)):
        assert color_of(page, row, depth, at * US) == "#000000"


def test_counter_at_a_time_is_as_high_as_its_value(open_page: Open) -> None:
    page = open_page(one_step()).page
    label = page.locator("[data-kind=counter]").bounding_box()
    assert label is not None

    def height(us: int) -> int:
        x, _ = position_of(page, FORWARD, 0, us * US)
        column = pixels(page, x, label["y"] + 1, 1, round(label["height"]) - 2)
        return sum(alpha > 0 for *_, alpha in column)

    quarter, full, half = height(500), height(1250), height(1850)
    assert full == pytest.approx(4 * quarter, abs=5)
    assert full == pytest.approx(2 * half, abs=3)


def test_marks_of_many_steps_each_have_a_line(open_page: Open) -> None:
    timeline = gpt_timeline(60, 1)
    page = open_page(timeline).page
    lines = {round(position_of(page, FORWARD, 0, mark.time_ns - BASE)[0]) for mark in timeline.marks}
    assert len(lines) == 60
    left, right = min(lines) - 3, max(lines) + 4
    label = page.locator("[data-kind=counter]").bounding_box()
    assert label is not None
    # Nothing else is drawn above the counter's highest value.
    row = pixels(page, left, label["y"] + 2, right - left, 1)
    drawn = {left + x for x, (red, green, blue, alpha) in enumerate(row) if alpha and red > green > blue}
    assert len(drawn) == 60
    assert all(min(abs(line - x) for x in drawn) <= 1 for line in lines)


def test_class_in_two_recordings_has_the_same_colour(open_page: Open) -> None:
    alone = one_step()
    others = [Name(f"m{i}", f"GPT.m{i}", f"Class{i}") for i in range(200)]
    beside = replace(alone, names=[*alone.names, *others])
    shown = [color_of(open_page(timeline).page, FORWARD, 1, 250 * US) for timeline in (alone, beside)]
    assert shown[0] == shown[1]


def test_spans_of_recompute_and_incomplete_have_patterns(open_page: Open) -> None:
    whole = one_step()
    columns = whole.columns
    complete = columns.complete.copy()
    complete[3] = False
    page = open_page(
        replace(whole, slices=replace(columns, complete=complete), stats=Stats(recorded=15, unfinished=1))
    ).page

    def shades(row: str, us: int) -> int:
        x, y = position_of(page, row, 1, us * US)
        return len(set(pixels(page, x - 8, y - 8, 16, 4)))

    assert shades(FORWARD, 150) == 1
    assert shades(FORWARD, 550) > 1
    assert shades(BACKWARD, 1290) == 1
    assert shades(BACKWARD, 1780) > 1

    click(page, FORWARD, 1, 550 * US)
    assert "incomplete" in page.locator("#details h2").inner_text()
    page.get_by_role("button", name="1 incomplete").click()
    assert "1 span never ended" in page.locator("#details").inner_text()


def test_recording_with_lost_events_says_how_many(open_page: Open) -> None:
    page = open_page(replace(one_step(), stats=Stats(recorded=5000, overwritten=1200, torn=3))).page

    page.get_by_role("button", name="1,203 events lost").click()
    text = page.locator("#details").inner_text()
    assert "1,200 of 5,000 events were overwritten" in text
    assert "3 events cannot be read" in text


def test_recording_without_losses_says_so(open_page: Open) -> None:
    page = open_page(one_step()).page

    assert page.locator(".loss-badge").count() == 0
    page.get_by_role("tab", name="Recording").click()
    assert "Nothing was lost" in page.locator("#details").inner_text()
    assert details(page)["torch"] == "2.13.0"


def test_recording_without_spans_opens(open_page: Open) -> None:
    page = open_page(Timeline(Slices.empty())).page

    assert page.get_by_text("This recording holds no spans.").is_visible()
    for name in ("Modules", "Flame graph", "Recording"):
        page.get_by_role("tab", name=name).click()


def test_page_without_a_timeline_says_what_to_do(browser: Browser) -> None:
    with visit(browser) as seen:
        seen.page.goto(PAGE.as_uri())
        seen.page.get_by_role("alert").wait_for()

        assert "holds no timeline" in seen.page.get_by_role("alert").inner_text()
        assert seen.problems == []
