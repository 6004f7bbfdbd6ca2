"""The spans that are drawn and hit at every scroll position, compared with the data and the screen.

Every level of every track spells its own number in binary: bit i is a span in time slot i. So a row of pixels shows
which level is drawn there, whatever its colours, and nothing here asks the page for its scroll position.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from modtrace.write.html import write_html
from tests.support.browser import launch
from tests.support.random_views import check_random_views, random_timeline
from tests.support.screenshots import Rgb, screen_colors
from tests.support.tracks_screen import BOXES, Screen, screen_of
from tests.support.viewer_page import HEADER_PX, LEVEL_PX, MARGIN_PX, Open, settle
from tests.support.viewer_positions import Numbered, numbered_timeline, visible_in, x_of, y_of

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser, Page


def look(page: Page) -> Screen:
    """Positions on the page, once all is drawn."""
    settle(page)
    screen = screen_of(*page.evaluate(BOXES))
    scroller = page.locator(".scroller").bounding_box()
    assert scroller is not None
    assert screen.y == scroller["y"], "the pane stays where it is"
    return screen


class ChromiumHands:
    """Random views in Chromium."""

    def __init__(self, page: Page, scale: float) -> None:
        self._page, self._scale = page, scale

    def look(self) -> Screen:
        return look(self._page)

    def show(self, start: float, end: float) -> None:
        self._page.evaluate("view => { location.hash = `view=${view}`; }", f"{start},{end}")

    def move(self, x: float, y: float) -> None:
        self._page.mouse.move(x, y)

    def wheel(self, pixels: int) -> None:
        self._page.mouse.wheel(0, pixels)

    def named(self) -> list[str]:
        return self._page.locator(".tooltip span").all_inner_texts()

    def colors(self, points: list[tuple[float, float]]) -> list[Rgb]:
        return screen_colors(self._page, points, self._scale)


def check_screen(page: Page, numbered: Numbered, scale: float, rng: random.Random) -> Screen:
    """Compare labels, pixels and hits with the data, in the current state."""
    levels, bits = numbered.levels, numbered.bits
    screen = look(page)
    labels = page.eval_on_selector_all(
        "[data-row^=track]",
        "rows => rows.map(row => [Number(row.dataset.row.slice(6)), row.getBoundingClientRect().top])",
    )
    tops = {level.track: y_of(screen, level) - MARGIN_PX for level in levels if level.depth == 0}
    assert dict(labels) == pytest.approx(tops, abs=0.6)

    visible = visible_in(screen, levels)
    points = [(x_of(screen, slot), y_of(screen, level) + 1.5) for level in visible for slot in range(bits)]
    page.mouse.move(1, 1)
    settle(page)
    colored = [max(color) - min(color) > 30 for color in screen_colors(page, points, scale)]
    drawn = [sum(1 << slot for slot in range(bits) if colored[index * bits + slot]) for index in range(len(visible))]
    assert drawn == [level.number for level in visible]

    for level in rng.sample(visible, min(4, len(visible))):
        for slot in range(bits):
            if rng.random() < 0.3:
                page.mouse.move(x_of(screen, slot), y_of(screen, level) + LEVEL_PX / 2)
                settle(page)
                texts = page.locator(".tooltip span").all_inner_texts()
                assert texts == ([level.fqn(slot)] if level.number >> slot & 1 else [])
    return screen


@pytest.mark.parametrize("scale", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("threads", "depths", "positions"), [(12, 8, 12), (1, 250, 6), pytest.param(12, 250, 6, marks=pytest.mark.full)]
)
def test_scrolled_tracks_at_every_position_show_and_hit_the_spans_of_the_data(
    open_page: Open, threads: int, depths: int, positions: int, scale: int
) -> None:
    numbered = numbered_timeline(threads, depths)
    levels = numbered.levels
    page = open_page(numbered.timeline, device_scale_factor=scale).page
    rng = random.Random(f"{threads} {depths} {scale}")
    seen: set[int] = set()
    screen = check_screen(page, numbered, scale, rng)
    height = levels[-1].y + LEVEL_PX - screen.height
    at_last = False
    for _ in range(200):
        seen.update(level.number for level in visible_in(screen, levels))
        at_last = levels[-1] in visible_in(screen, levels)
        if at_last:
            break
        page.mouse.move(screen.x + screen.width / 2, screen.y + screen.height / 2)
        page.mouse.wheel(0, max(screen.height - 3 * LEVEL_PX, height / positions))
        page.wait_for_function(
            "before => document.querySelector('[data-row=\"track 0\"]').getBoundingClientRect().top !== before",
            arg=screen.y - screen.scrolled + HEADER_PX,
        )
        screen = check_screen(page, numbered, scale, rng)
    assert at_last, "the last level is reached"
    if height / positions < screen.height - 3 * LEVEL_PX:
        assert len(seen) == len(levels), "every level was in sight once"


def test_selection_out_of_sight_is_scrolled_to_where_it_is_drawn(open_page: Open) -> None:
    numbered = numbered_timeline(12, 40)
    levels = numbered.levels
    page = open_page(numbered.timeline).page
    for level in (levels[700], levels[3], levels[-1]):
        slot = next(slot for slot in range(numbered.bits) if level.number >> slot & 1)
        page.get_by_role("searchbox").fill(level.fqn(slot))
        page.keyboard.press("Enter")
        screen = look(page)
        assert level in visible_in(screen, levels)
        for key in ("Escape", "Escape", "0"):
            page.keyboard.press(key)
        check_screen(page, numbered, 1, random.Random(0))


@pytest.mark.parametrize(
    ("seed", "scale"),
    [(1, 2), *(pytest.param(*other, marks=pytest.mark.full) for other in ((0, 1), (0, 2), (1, 1), (2, 1), (2, 2)))],
)
def test_random_timeline_at_any_scroll_and_zoom_draws_and_hits_the_span_of_the_data(
    open_page: Open, seed: int, scale: int
) -> None:
    rng = random.Random(seed)
    timeline = random_timeline(rng)
    page = open_page(timeline, device_scale_factor=scale).page
    assert check_random_views(timeline, ChromiumHands(page, scale), rng) > 40


def test_axis_beside_a_scrollbar_is_as_wide_as_the_tracks(browser: Browser, tmp_path: Path) -> None:
    write_html(numbered_timeline(12, 8).timeline, tmp_path / "t.html")
    with launch(browser.browser_type, ignore_default_args=["--hide-scrollbars"]) as with_scrollbars:
        page = with_scrollbars.new_page()
        page.goto((tmp_path / "t.html").as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        settle(page)
        left, width, scrollbar = page.evaluate(
            """() => {
                const boxes = [".axis", ".overview", "#timeline canvas"]
                    .map(part => document.querySelector(part).getBoundingClientRect());
                const scroller = document.querySelector(".scroller");
                const scrollbar = scroller.offsetWidth - scroller.clientWidth;
                return [boxes.map(box => box.left), boxes.map(box => box.width), scrollbar];
            }"""
        )
    assert scrollbar > 0
    assert len(set(left)) == 1
    assert len(set(width)) == 1
