"""The page in a stock Firefox: opening, selecting, scrolling."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from modtrace import Timeline
from modtrace.write.html import write_html
from tests.support.firefox import Firefox
from tests.support.gpt_timeline import gpt_timeline
from tests.support.random_views import check_random_views, random_timeline
from tests.support.screenshots import Rgb, colors_in
from tests.support.tracks_screen import BOXES, Screen, screen_of
from tests.support.viewer_page import HEADER_PX, LEVEL_PX, US, one_step
from tests.support.viewer_positions import numbered_timeline, visible_in, x_of, y_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def look(driver: Firefox) -> Screen:
    """Positions on the page, once all is drawn."""
    driver.settle()
    return screen_of(*driver("evaluate", BOXES))


class FirefoxHands:
    """Random views in Firefox; its screenshots are decoded in Chromium."""

    def __init__(self, driver: Firefox, decoder: Browser) -> None:
        self._driver, self._decoder = driver, decoder

    def look(self) -> Screen:
        return look(self._driver)

    def show(self, start: float, end: float) -> None:
        self._driver("evaluate", f"void (location.hash = 'view={start},{end}')")

    def move(self, x: float, y: float) -> None:
        self._driver("move", x, y)

    def wheel(self, pixels: int) -> None:
        self._driver("wheel", pixels)

    def named(self) -> list[str]:
        names: list[str] = self._driver(
            "evaluate", "[...document.querySelectorAll('.tooltip span')].map(span => span.textContent)"
        )
        return names

    def colors(self, points: list[tuple[float, float]]) -> list[Rgb]:
        return colors_in(self._decoder, self._driver("screenshot"), points)


def open_in(driver: Firefox, timeline: Timeline, folder: Path) -> None:
    write_html(timeline, folder / "t.html")
    driver("goto", (folder / "t.html").as_uri())
    driver("wait", "document.documentElement.dataset.ready !== undefined")
    driver.settle()


def test_firefox_opens_the_page_and_selects_a_span(firefox: Firefox, tmp_path: Path) -> None:
    open_in(firefox, one_step(), tmp_path)
    screen = look(firefox)
    x = screen.x + (250 * US - screen.start) / (screen.end - screen.start) * screen.width
    firefox("click", x, screen.y + 22 + 3 + 1.5 * LEVEL_PX)
    firefox.settle()
    assert firefox("evaluate", "document.querySelector('#details h2').textContent") == "h.0: Block"
    assert (
        firefox("evaluate", "document.querySelector('.visually-hidden').textContent") == "h.0: Block, forward, 300 µs"
    )
    assert firefox("errors") == []


@pytest.mark.full
def test_firefox_scrolled_draws_what_the_data_says(firefox: Firefox, browser: Browser, tmp_path: Path) -> None:
    numbered = numbered_timeline(1, 250)
    open_in(firefox, numbered.timeline, tmp_path)
    for _ in range(3):
        screen = look(firefox)
        firefox("move", screen.x + 50, screen.y + 50)
        firefox("wheel", 900)
        first = screen.y - screen.scrolled + HEADER_PX
        firefox("wait", f"document.querySelector('[data-row=\"track 0\"]').getBoundingClientRect().top < {first}")
        screen = look(firefox)
        visible = visible_in(screen, numbered.levels)
        assert len(visible) > 10
        bits = range(numbered.bits)
        points = [(x_of(screen, slot), y_of(screen, level) + 1.5) for level in visible for slot in bits]
        colored = [max(color) - min(color) > 30 for color in colors_in(browser, firefox("screenshot"), points)]
        drawn = [
            sum(1 << slot for slot in bits if colored[index * numbered.bits + slot]) for index in range(len(visible))
        ]
        assert drawn == [level.number for level in visible]
    assert screen.scrolled > 1000


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2))
def test_firefox_at_any_scroll_and_zoom_draws_and_hits_the_span_of_the_data(
    firefox: Firefox, browser: Browser, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(100 + seed)
    timeline = random_timeline(rng)
    open_in(firefox, timeline, tmp_path)
    assert check_random_views(timeline, FirefoxHands(firefox, browser), rng) > 40
    assert firefox("errors") == []


@pytest.mark.full
def test_firefox_opens_1_100_000_spans_and_selects_and_scrolls(firefox: Firefox, tmp_path: Path) -> None:
    open_in(firefox, gpt_timeline(500, 12, ranks=8), tmp_path)
    assert firefox("evaluate", "document.querySelector('.summary').textContent").startswith("1,104,000 spans")
    top = "document.querySelector('[data-row=\"track {}\"]').getBoundingClientRect().top"
    for rank, pixels in ((1, 0), (6, 1200)):
        screen = look(firefox)
        firefox("move", screen.x + 50, screen.y + 50)
        first = firefox("evaluate", top.format(0))
        firefox("wheel", pixels)
        # Firefox scrolls after it has answered.
        firefox("wait", f"{top.format(0)} < {first - pixels + 1}")
        assert round(look(firefox).scrolled) == pixels
        y = firefox("evaluate", top.format(2 * rank)) + 3 + LEVEL_PX / 2
        firefox("click", screen.x + screen.width * 0.3, y)
        firefox.settle()
        fields = firefox("evaluate", "document.querySelector('#details dl').textContent")
        assert "GPT2LMHeadModel" in fields
        assert f"rank {rank} · python" in fields
    assert firefox("errors") == []
