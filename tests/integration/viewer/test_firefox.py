"""The page in a stock Firefox: opening, selecting, scrolling."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from modtrace.timeline import Timeline
from modtrace.write.html import write_html
from tests.integration.viewer.test_scrolling import numbered_timeline, screen_of
from tests.support.browser import require
from tests.support.firefox import Firefox, firefox, missing
from tests.support.gpt_timeline import gpt_timeline
from tests.support.screenshots import colors_in
from tests.support.viewer_page import LEVEL_PX, US, one_step

if TYPE_CHECKING:
    from playwright.sync_api import Browser

WHERE = """(() => {
    const pane = document.querySelector("#timeline");
    const { x, y, width } = pane.getBoundingClientRect();
    const bottom = document.querySelector(".panel").getBoundingClientRect().top;
    const first = document.querySelector("[data-kind=process]").getBoundingClientRect().top;
    return [x, y, width, bottom - y, first, Number(pane.dataset.start), Number(pane.dataset.end)];
})()"""


@pytest.fixture(scope="module")
def running(packages: Path) -> Iterator[Firefox]:
    require(missing())
    assert packages.exists()
    with firefox() as driver:
        yield driver


def open_in(driver: Firefox, timeline: Timeline, folder: Path) -> None:
    write_html(timeline, folder / "t.html")
    driver("goto", (folder / "t.html").as_uri())
    driver("wait", "document.documentElement.dataset.ready !== undefined")
    driver.settle()


def test_firefox_opens_the_page_and_selects_a_span(running: Firefox, tmp_path: Path) -> None:
    open_in(running, one_step(), tmp_path)
    screen = screen_of(*running("evaluate", WHERE))
    x = screen.x + (250 * US - screen.start) / (screen.end - screen.start) * screen.width
    running("click", x, screen.y + 22 + 3 + 1.5 * LEVEL_PX)
    running.settle()
    assert running("evaluate", "document.querySelector('#details h2').textContent") == "h.0: Block"
    assert (
        running("evaluate", "document.querySelector('.visually-hidden').textContent") == "h.0: Block, forward, 300 µs"
    )
    assert running("errors") == []


def test_firefox_scrolled_draws_what_the_data_says(running: Firefox, browser: Browser, tmp_path: Path) -> None:
    numbered = numbered_timeline(1, 250)
    open_in(running, numbered.timeline, tmp_path)
    for _ in range(3):
        screen = screen_of(*running("evaluate", WHERE))
        running("wheel", screen.x + 50, screen.y + 50, 900)
        running(
            "wait",
            f"document.querySelector('[data-kind=process]').getBoundingClientRect().top < {screen.y - screen.scrolled}",
        )
        running.settle()
        screen = screen_of(*running("evaluate", WHERE))
        visible = screen.visible(numbered.levels)
        assert len(visible) > 10
        bits = range(numbered.bits)
        points = [(screen.x_of(slot), screen.y_of(level) + 1.5) for level in visible for slot in bits]
        colored = [max(color) - min(color) > 30 for color in colors_in(browser, running("screenshot"), points)]
        drawn = [
            sum(1 << slot for slot in bits if colored[index * numbered.bits + slot]) for index in range(len(visible))
        ]
        assert drawn == [level.number for level in visible]
    assert screen.scrolled > 1000


def test_firefox_opens_200_000_spans_in_10_seconds(running: Firefox, tmp_path: Path) -> None:
    open_in(running, gpt_timeline(725, 12), tmp_path)
    assert running("evaluate", "document.querySelector('.summary').textContent").startswith("200,100 spans")
    assert 0 < int(running("evaluate", "document.documentElement.dataset.ready")) < 10_000
    assert running("errors") == []
