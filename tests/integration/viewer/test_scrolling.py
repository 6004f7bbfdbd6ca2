"""What is drawn where, and what a click there hits, at every scroll position: compared with the data and the screen.

Every level of every track spells its own number in binary: bit i is a span in time slot i. So a row of pixels tells
which level is drawn there, whatever its colours, and nothing here asks the page for its scroll position.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import pytest

from modtrace.timeline import Name, Process, Timeline, Track
from modtrace.timeline.columns import DTYPES, Columns, in_start_order
from modtrace.write.html import write_html
from tests.support.browser import launch
from tests.support.gpt_timeline import BASE
from tests.support.screenshots import screen_colors
from tests.support.viewer_page import LEVEL_PX, MARGIN_PX, Open, settle

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser, Page

SLOT_NS = 1000
HEADER_PX = 22
GAP_PX = 6


@dataclass(frozen=True)
class Level:
    """One depth of one track: where it lies below the top of all rows, and the number that its spans spell."""

    track: int
    depth: int
    y: float
    number: int

    def fqn(self, slot: int) -> str:
        return f"t{self.track}.d{self.depth}.s{slot}"


@dataclass(frozen=True)
class Numbered:
    """A timeline whose levels spell their numbers, in so many bits."""

    timeline: Timeline
    levels: list[Level]
    bits: int


def numbered_timeline(threads: int, depths: int) -> Numbered:
    """A forward and a backward track per thread, each of so many levels that spell 1, 2, 3, …"""
    process = Process(7, 0)
    tracks = [
        Track(kind, f"thread {thread}", thread, process)
        for thread in range(threads)
        for kind in ("forward", "backward")
    ]
    levels = [
        Level(
            track,
            depth,
            HEADER_PX + track * (depths * LEVEL_PX + GAP_PX) + MARGIN_PX + depth * LEVEL_PX,
            track * depths + depth + 1,
        )
        for track in range(len(tracks))
        for depth in range(depths)
    ]
    bits = levels[-1].number.bit_length()
    rows: list[tuple[int, ...]] = []
    names: list[Name] = []
    for level in levels:
        for slot in range(bits):
            if level.number >> slot & 1:
                start = BASE + slot * SLOT_NS
                phase = level.track % 2
                rows.append((start, start + SLOT_NS - 50, len(names), phase, level.track, level.depth, -1, 0, 0, -1, 1))
                names.append(Name("span", level.fqn(slot), f"Class{level.number % 40}"))
    columns = Columns.of(**dict(zip(DTYPES, np.array(rows, np.int64).T, strict=True)))
    return Numbered(Timeline(in_start_order(columns), names, tracks), levels, bits)


@dataclass(frozen=True)
class Screen:
    """The tracks' visible part in CSS pixels, how far the rows are scrolled, and what time its width shows."""

    x: float
    y: float
    width: float
    height: float
    scrolled: float
    start: float
    end: float

    def x_of(self, slot: int) -> float:
        """The middle of a time slot."""
        return self.x + ((slot + 0.5) * SLOT_NS - self.start) / (self.end - self.start) * self.width

    def y_of(self, level: Level) -> float:
        """The upper edge of a level."""
        return self.y + level.y - self.scrolled

    def visible(self, levels: list[Level]) -> list[Level]:
        """The levels that are wholly in sight."""
        return [
            level
            for level in levels
            if self.y <= self.y_of(level) and self.y_of(level) + LEVEL_PX <= self.y + self.height
        ]


def screen_of(x: float, y: float, width: float, height: float, first: float, start: float, end: float) -> Screen:
    """What the boxes of the pane and of the first label (its top) say."""
    return Screen(x, y, width, height, y - first, start, end)


def look(page: Page) -> Screen:
    """Where things are, by the boxes of the pane and of the first label: no scroll position is asked for."""
    settle(page)
    x, y, width, height, first, start, end = page.evaluate(
        """() => {
            const pane = document.querySelector("#timeline");
            const { x, y, width } = pane.getBoundingClientRect();
            const bottom = document.querySelector(".panel").getBoundingClientRect().top;
            const first = document.querySelector("[data-kind=process]").getBoundingClientRect().top;
            return [x, y, width, bottom - y, first, Number(pane.dataset.start), Number(pane.dataset.end)];
        }"""
    )
    scroller = page.locator(".scroller").bounding_box()
    assert scroller is not None
    assert y == scroller["y"], "the pane stays where it is"
    return screen_of(x, y, width, height, first, start, end)


def check_screen(page: Page, numbered: Numbered, scale: float, rng: random.Random) -> Screen:
    """Compare labels, pixels and hits with the data, as things stand."""
    levels, bits = numbered.levels, numbered.bits
    screen = look(page)
    labels = page.eval_on_selector_all(
        "[data-row^=track]",
        "rows => rows.map(row => [Number(row.dataset.row.slice(6)), row.getBoundingClientRect().top])",
    )
    tops = {level.track: screen.y_of(level) - MARGIN_PX for level in levels if level.depth == 0}
    assert dict(labels) == pytest.approx(tops, abs=0.6)

    visible = screen.visible(levels)
    points = [(screen.x_of(slot), screen.y_of(level) + 1.5) for level in visible for slot in range(bits)]
    page.mouse.move(1, 1)
    settle(page)
    colored = [max(color) - min(color) > 30 for color in screen_colors(page, points, scale)]
    drawn = [sum(1 << slot for slot in range(bits) if colored[index * bits + slot]) for index in range(len(visible))]
    assert drawn == [level.number for level in visible]

    for level in rng.sample(visible, min(4, len(visible))):
        for slot in range(bits):
            if rng.random() < 0.3:
                page.mouse.move(screen.x_of(slot), screen.y_of(level) + LEVEL_PX / 2)
                settle(page)
                found = page.locator(".tooltip span").all_inner_texts()
                assert found == ([level.fqn(slot)] if level.number >> slot & 1 else [])
    return screen


@pytest.mark.parametrize("scale", [1, 2])
@pytest.mark.parametrize(("threads", "depths", "positions"), [(12, 8, 12), (1, 250, 12), (12, 250, 6)])
def test_scrolled_tracks_at_every_position_show_and_hit_what_the_data_says(
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
        seen.update(level.number for level in screen.visible(levels))
        at_last = levels[-1] in screen.visible(levels)
        if at_last:
            break
        page.mouse.move(screen.x + screen.width / 2, screen.y + screen.height / 2)
        page.mouse.wheel(0, max(screen.height - 3 * LEVEL_PX, height / positions))
        page.wait_for_function(
            "before => document.querySelector('[data-kind=process]').getBoundingClientRect().top !== before",
            arg=screen.y - screen.scrolled,
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
        assert level in screen.visible(levels)
        for key in ("Escape", "Escape", "0"):
            page.keyboard.press(key)
        check_screen(page, numbered, 1, random.Random(0))


def random_timeline(rng: random.Random) -> Timeline:
    """Some threads of calls in calls, of any length, with gaps and with none, in 1 ms."""
    process = Process(7, 0)
    tracks = [Track("forward", f"thread {thread}", thread, process) for thread in range(rng.randint(1, 8))]
    rows: list[tuple[int, ...]] = []
    names: list[Name] = []

    def fill(track: int, depth: int, parent: int, start: int, end: int) -> None:
        while start < end and depth < 30 and len(rows) < 500 * (track + 1):
            begin = start + rng.choice((0, 0, rng.randint(0, (end - start) // 2)))
            stop = rng.choice((end, rng.randint(begin, end)))
            rows.append((BASE + begin, BASE + stop, len(names), 0, track, depth, parent, 0, 0, -1, 1))
            names.append(Name("call", f"s{len(names)}", f"Class{rng.randint(0, 30)}"))
            fill(track, depth + 1, len(rows) - 1, begin, stop)
            start = stop + 1

    for track in range(len(tracks)):
        fill(track, 0, -1, 0, 1_000_000)
    columns = Columns.of(**dict(zip(DTYPES, np.array(rows, np.int64).T, strict=True)))
    return Timeline(in_start_order(columns), names, tracks)


@pytest.mark.parametrize("seed", range(3))
def test_random_timeline_at_any_scroll_and_zoom_hits_the_span_of_the_data(open_page: Open, seed: int) -> None:
    rng = random.Random(seed)
    timeline = random_timeline(rng)
    columns = timeline.columns
    height = [int(columns.depth[columns.track == track].max()) + 1 for track in range(len(timeline.tracks))]
    tops = list(accumulate((levels * LEVEL_PX + GAP_PX for levels in height), initial=HEADER_PX))
    page = open_page(timeline).page
    compared = 0
    for _ in range(6):
        duration = 10 ** rng.uniform(3.5, 6)
        start = rng.uniform(0, 1e6 - duration)
        end = start + duration
        page.evaluate("view => { location.hash = `view=${view}`; }", f"{start},{end}")
        screen = look(page)
        page.mouse.move(screen.x + 10, screen.y + 10)
        page.mouse.wheel(0, rng.randint(-tops[-1], tops[-1]))
        for _ in range(15):
            x = rng.randint(math.ceil(screen.x), int(screen.x + screen.width) - 1)
            y = rng.randint(math.ceil(screen.y), int(screen.y + screen.height) - 1)
            page.mouse.move(x, y)
            screen = look(page)
            time = BASE + start + (x - screen.x) / screen.width * duration
            pixel = duration / screen.width
            below = y - screen.y + screen.scrolled
            track = next((i for i in range(len(height)) if tops[i] <= below < tops[i + 1]), None)
            depth = -1 if track is None else (below - tops[track] - MARGIN_PX) // LEVEL_PX
            on_level = np.flatnonzero((columns.track == (-1 if track is None else track)) & (columns.depth == depth))
            begins, ends = columns.start[on_level], columns.end[on_level]
            inside = [int(i) for i, a, b in zip(on_level, begins, ends, strict=True) if a + pixel < time < b - pixel]
            near = any(a - 4 * pixel <= time <= b + 4 * pixel for a, b in zip(begins, ends, strict=True))
            if len(inside) != 1 and (inside or near):
                continue  # at an edge, or beside a span so near that it is hit all the same
            compared += 1
            shown = page.locator(".tooltip span").all_inner_texts()
            assert shown == [timeline.names[columns.name[i]].fqn for i in inside]
    assert compared > 40


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
