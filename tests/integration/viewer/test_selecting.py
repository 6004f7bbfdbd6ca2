"""Clicks, search and tooltips of the page: what they select, show and scroll into view."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.support.gpt_timeline import BASE, gpt_timeline
from tests.support.merged_rows import recorded
from tests.support.viewer_page import (
    BACKWARD,
    FORWARD,
    LEVEL_PX,
    MS,
    US,
    Open,
    click,
    cut_off,
    details,
    one_step,
    pixels,
    position_of,
    settle,
    viewport,
)

if TYPE_CHECKING:
    from playwright.sync_api import Page


FLOW = (194, 24, 91)
"""The colour of flows on a light ground."""


def test_click_on_a_span_shows_its_details(open_page: Open) -> None:
    page = open_page(one_step()).page
    click(page, FORWARD, 1, 250 * US)

    assert page.locator("#details h2").inner_text() == "h.0: Block"
    assert page.locator("#details nav").inner_text().split() == ["GPT", "GPT.h.0"]
    shown = details(page)
    assert shown["Class"] == "Block"
    assert shown["Phase"] == "forward"
    assert shown["Duration"] == shown["Self"] == "300 µs"
    assert shown["Start"] == "100 µs"
    assert shown["Unix time"] == f"{BASE + 100 * US} ns"
    assert (shown["Call"], shown["Step"]) == ("0", "0")
    assert shown["Track"] == "forward · MainThread"
    assert shown["Process"] == "rank 0 · python · pid 4242"
    assert shown["shapes"] == "float32[2, 8]"
    assert page.locator(".visually-hidden").inner_text() == "h.0: Block, forward, 300 µs"


def test_self_time_of_a_span_leaves_out_its_children(open_page: Open) -> None:
    page = open_page(one_step()).page
    click(page, FORWARD, 0, 50 * US)

    assert details(page)["Duration"] == "1 ms"
    assert details(page)["Self"] == "300 µs"


def test_click_beside_all_spans_selects_nothing(open_page: Open) -> None:
    page = open_page(one_step()).page
    click(page, FORWARD, 1, 250 * US)
    click(page, FORWARD, 1, 1100 * US)

    assert page.locator("#details dl").count() == 0


def flow_pixels(page: Page, x: float, y: float, width: int, height: int) -> int:
    """The number of pixels in the colour of flows, including half-covered ones at the line's edges."""
    return sum(
        alpha > 60 and all(abs(part - wanted) < 24 for part, wanted in zip(color, FLOW, strict=True))
        for *color, alpha in pixels(page, x, y, width, height)
    )


def test_flows_of_a_selected_forward_lead_to_every_span_of_its_backward(open_page: Open) -> None:
    page = open_page(one_step()).page
    # Between the end of all forward spans and the start of all backward spans.
    left, _ = position_of(page, FORWARD, 0, 1020 * US)
    right, _ = position_of(page, FORWARD, 0, 1180 * US)
    top = position_of(page, FORWARD, 0, 0)[1]
    gap = (left, top, round(right - left), 8 * LEVEL_PX)
    assert flow_pixels(page, *gap) == 0

    click(page, FORWARD, 1, 250 * US)
    assert flow_pixels(page, *gap) > 2 * (right - left)
    for us in (1600, 1750):
        x, y = position_of(page, BACKWARD, 1, us * US)
        assert flow_pixels(page, x - 6, y - 2, 4, 4) >= 8, "an arrow head ends at the span"
    x, y = position_of(page, BACKWARD, 1, 1250 * US)
    assert flow_pixels(page, x - 6, y - 2, 4, 4) == 0, "the other layer has no flow"

    page.keyboard.press("Escape")
    settle(page)
    assert flow_pixels(page, *gap) == 0


def test_linked_spans_of_a_backward_lead_to_its_forward_and_back(open_page: Open) -> None:
    page = open_page(one_step()).page
    click(page, BACKWARD, 1, 1400 * US)
    page.get_by_role("button", name="forward at 500 µs").click()
    assert details(page)["Phase"] == "forward"

    page.keyboard.press("l")
    assert details(page)["Phase"] == "backward"


def test_search_in_names_and_paths_goes_through_the_matches(open_page: Open) -> None:
    page = open_page(one_step()).page
    search = page.get_by_role("searchbox")
    matches = page.locator(".match-count")

    search.fill("BLOCK")
    assert matches.inner_text() == "5 found"
    search.fill("gpt.h.1")
    assert matches.inner_text() == "2 found"
    search.press("Enter")
    assert matches.inner_text() == "1 of 2"
    assert details(page)["Start"] == "500 µs"
    page.get_by_role("button", name="Next match").click()
    assert details(page)["Start"] == "1.25 ms"
    page.keyboard.press("n")
    assert details(page)["Start"] == "500 µs"
    page.keyboard.press("Shift+N")
    assert details(page)["Start"] == "1.25 ms"
    search.fill("nothing of the kind")
    assert matches.inner_text() == "no match"
    assert page.get_by_role("button", name="Next match").is_disabled()


def test_search_distinguishes_spans_from_backward_passes_and_communication(open_page: Open) -> None:
    page = open_page(recorded()).page
    matches = page.locator(".match-count")
    assert page.locator(".summary").inner_text() == "3 spans · 5.7 µs"
    assert "Timeline of 3 spans." in (page.locator("#timeline").get_attribute("aria-label") or "")

    search = page.get_by_role("searchbox")
    search.fill(">300ns")
    assert matches.inner_text() == "3 spans, 1 backward pass, 1 communication call"
    search.press("Enter")
    assert matches.inner_text() == "1 of 5: 3 spans, 1 backward pass, 1 communication call"
    search.fill("backward")
    assert matches.inner_text() == "3 backward passes"
    search.fill("phase:backward")
    assert matches.inner_text() == "1 found"
    page.get_by_role("button", name="2 incomplete").click()
    sentence = "1 backward pass, 1 communication call of this timeline are incomplete, drawn with stripes."
    assert sentence in page.locator("#details").inner_text()


@pytest.mark.parametrize("query", [">", ">1", ">1e3 us"])
def test_search_for_an_invalid_duration_shows_how_to_write_one(open_page: Open, query: str) -> None:
    page = open_page(one_step()).page
    page.get_by_role("searchbox").fill(query)
    term = query.split()[0]
    expected = f"{term} is no duration: >1.5ms, with ns, us, ms or s, without spaces"
    assert page.locator(".match-count").inner_text() == expected
    page.set_viewport_size({"width": 390, "height": 844})
    assert cut_off(page) == []
    page.get_by_role("searchbox").fill(">0.9e3us")
    assert page.locator(".match-count").inner_text() == "1 found"


def test_search_dims_spans_that_do_not_match(open_page: Open) -> None:
    page = open_page(one_step()).page
    x, y = position_of(page, FORWARD, 1, 250 * US)
    other, _ = position_of(page, FORWARD, 1, 700 * US)
    page.get_by_role("searchbox").fill("h.0")
    settle(page)

    assert pixels(page, x, y - 7)[0][3] == 255
    assert pixels(page, other, y - 7)[0][3] < 128


def test_search_of_a_span_out_of_sight_brings_it_into_sight(open_page: Open) -> None:
    page = open_page(gpt_timeline(50, 2)).page
    page.get_by_role("searchbox").fill("lm_head")
    page.keyboard.press("Shift+Enter")
    start, end = viewport(page)

    # The last lm_head of 50 steps is the backward call of the last step.
    assert page.locator(".match-count").inner_text() == "100 of 100"
    assert end - start < 0.1 * gpt_timeline(50, 2).marks[-1].time_ns
    shown = re.fullmatch(r"([\d.]+) ms", details(page)["Start"])
    assert shown is not None
    assert start < float(shown[1]) * MS < end


def test_tooltip_over_counters_and_marks_says_value_and_time(open_page: Open) -> None:
    page = open_page(one_step()).page
    tooltip = page.locator(".tooltip")
    x, _ = position_of(page, FORWARD, 0, 1300 * US)
    label = page.locator("[data-kind=counter]").bounding_box()
    assert label is not None
    page.mouse.move(x, label["y"] + 20)
    settle(page)
    assert tooltip.inner_text() == "RSS, 4 GiB at 1 ms"

    x, _ = position_of(page, FORWARD, 0, 2000 * US)
    axis = page.locator(".axis").bounding_box()
    assert axis is not None
    for y in (axis["y"] + 20, position_of(page, FORWARD, 1, 0)[1]):
        page.mouse.move(x + 1, y)
        settle(page)
        assert tooltip.inner_text() == "step 0, the end of a training step, at 2 ms"
    page.mouse.move(x - 20, axis["y"] + 20)
    settle(page)
    assert tooltip.count() == 0


@pytest.mark.parametrize("size", [(900, 600), (390, 844), (640, 360)])
def test_tooltip_of_a_name_of_4000_characters_is_in_the_window(open_page: Open, size: tuple[int, int]) -> None:
    plain = one_step()
    long = "漢" * 4000
    names = [name._replace(label=f"{long}END: Block", fqn=f"GPT.{long}.end") for name in plain.names]
    width, height = size
    page = open_page(replace(plain, names=names), viewport={"width": width, "height": height}).page
    for row, ns in [(FORWARD, 950), (BACKWARD, 1550)]:
        x, y = position_of(page, row, 0, ns * US)
        page.mouse.move(x, y)
        settle(page)
        box = page.locator(".tooltip").bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["y"] >= 0
        assert box["x"] + box["width"] <= width
        assert box["y"] + box["height"] <= height
        title, path = (page.locator(f".tooltip {part}").inner_text() for part in ("strong", "span"))
        assert title.startswith("…漢")
        assert title.endswith("漢END: Block, forward, 1 ms" if row == FORWARD else "漢END: Block, backward, 800 µs")
        assert (len(path), path[:2], path[-5:]) == (240, "…漢", "漢.end")


def test_tooltip_while_rows_scroll_names_the_span_under_the_pointer(open_page: Open) -> None:
    page = open_page(gpt_timeline(1, 2, ranks=8)).page
    x, y = position_of(page, FORWARD, 0, 300_000)
    page.mouse.move(x, y)
    settle(page)
    assert page.locator(".tooltip span").inner_text() == "GPT2LMHeadModel"
    page.mouse.wheel(0, LEVEL_PX)
    page.wait_for_function(
        "() => document.querySelector('.tooltip span').textContent === 'GPT2LMHeadModel.transformer'"
    )


def test_levels_chosen_fold_every_track_to_that_depth(open_page: Open) -> None:
    page = open_page(gpt_timeline(1, 2, ranks=2)).page
    choice = page.get_by_role("combobox", name="Depth levels shown")
    choice.select_option("2")
    settle(page)
    heights = page.eval_on_selector_all("[data-row^=track]", "rows => rows.map(row => row.clientHeight)")
    assert heights == [2 * LEVEL_PX + 6 - 1] * 4  # minus the line below
    # A match on a deeper level shows the levels that it needs.
    page.get_by_role("searchbox").fill("c_attn")
    page.keyboard.press("Enter")
    assert choice.input_value() == "5"
