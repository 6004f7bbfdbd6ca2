from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.support.gpt_timeline import BASE, gpt_timeline
from tests.support.viewer_page import (
    BACKWARD,
    FORWARD,
    LANE,
    MS,
    US,
    Open,
    click,
    details,
    one_step,
    pixels,
    place,
    settle,
    window,
)

if TYPE_CHECKING:
    from playwright.sync_api import Page


FLOW = (194, 24, 91)
"""The colour of arrows on a light ground."""


def test_a_click_shows_the_slice(open_page: Open) -> None:
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
    assert page.locator(".spoken").inner_text() == "h.0: Block, forward, 300 µs"


def test_self_time_leaves_out_what_is_inside(open_page: Open) -> None:
    page = open_page(one_step()).page
    click(page, FORWARD, 0, 50 * US)

    assert details(page)["Duration"] == "1 ms"
    assert details(page)["Self"] == "300 µs"


def test_a_click_beside_all_slices_selects_nothing(open_page: Open) -> None:
    page = open_page(one_step()).page
    click(page, FORWARD, 1, 250 * US)
    click(page, FORWARD, 1, 1100 * US)

    assert page.locator("#details dl").count() == 0


def flow_pixels(page: Page, x: float, y: float, width: int, height: int) -> int:
    """How many pixels have the arrows' colour, half-covered ones at the line's edges too."""
    return sum(
        alpha > 60 and all(abs(part - wanted) < 24 for part, wanted in zip(color, FLOW, strict=True))
        for *color, alpha in pixels(page, x, y, width, height)
    )


def test_arrows_from_the_forward_to_every_slice_of_its_backward(open_page: Open) -> None:
    page = open_page(one_step()).page
    # Between the end of all forward slices and the begin of all backward slices.
    left, _ = place(page, FORWARD, 0, 1020 * US)
    right, _ = place(page, FORWARD, 0, 1180 * US)
    top = place(page, FORWARD, 0, 0)[1]
    gap = (left, top, round(right - left), 8 * LANE)
    assert flow_pixels(page, *gap) == 0

    click(page, FORWARD, 1, 250 * US)
    assert flow_pixels(page, *gap) > 2 * (right - left)
    for us in (1600, 1750):
        x, y = place(page, BACKWARD, 1, us * US)
        assert flow_pixels(page, x - 6, y - 2, 4, 4) >= 8, "an arrow's head ends at the slice"
    x, y = place(page, BACKWARD, 1, 1250 * US)
    assert flow_pixels(page, x - 6, y - 2, 4, 4) == 0, "the other layer has no arrow"

    page.keyboard.press("Escape")
    settle(page)
    assert flow_pixels(page, *gap) == 0


def test_from_the_backward_to_its_forward_and_back(open_page: Open) -> None:
    page = open_page(one_step()).page
    click(page, BACKWARD, 1, 1400 * US)
    page.get_by_role("button", name="forward at 500 µs").click()
    assert details(page)["Phase"] == "forward"

    page.keyboard.press("l")
    assert details(page)["Phase"] == "backward"


def test_search_over_names_and_paths(open_page: Open) -> None:
    page = open_page(one_step()).page
    search = page.get_by_role("searchbox")
    finds = page.locator(".finds")

    search.fill("BLOCK")
    assert finds.inner_text() == "5 found"
    search.fill("gpt.h.1")
    assert finds.inner_text() == "2 found"
    search.press("Enter")
    assert finds.inner_text() == "1 of 2"
    assert details(page)["Start"] == "500 µs"
    page.get_by_role("button", name="Next find").click()
    assert details(page)["Start"] == "1.25 ms"
    page.keyboard.press("n")
    assert details(page)["Start"] == "500 µs"
    page.keyboard.press("Shift+N")
    assert details(page)["Start"] == "1.25 ms"
    search.fill("nothing of the kind")
    assert finds.inner_text() == "no match"
    assert page.get_by_role("button", name="Next find").is_disabled()


def test_what_is_not_found_fades(open_page: Open) -> None:
    page = open_page(one_step()).page
    x, y = place(page, FORWARD, 1, 250 * US)
    other, _ = place(page, FORWARD, 1, 700 * US)
    page.get_by_role("searchbox").fill("h.0")
    settle(page)

    assert pixels(page, x, y - 7)[0][3] == 255
    assert pixels(page, other, y - 7)[0][3] < 128


def test_the_next_find_is_brought_into_sight(open_page: Open) -> None:
    page = open_page(gpt_timeline(50, 2)).page
    page.get_by_role("searchbox").fill("lm_head")
    page.keyboard.press("Shift+Enter")
    start, end = window(page)

    # The last lm_head of 50 steps ran backward in the last of them.
    assert page.locator(".finds").inner_text() == "100 of 100"
    assert end - start < 0.1 * gpt_timeline(50, 2).marks[-1].time_ns
    shown = re.fullmatch(r"([\d.]+) ms", details(page)["Start"])
    assert shown is not None
    assert start < float(shown[1]) * MS < end
