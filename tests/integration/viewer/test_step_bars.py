"""The stacked bar per step: its text, its link to the step, and that it holds thousands of steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from modtrace import Timeline
from modtrace.timeline import FORWARD
from modtrace.timeline.select import keep_rows
from modtrace.timeline.slices import MODULE
from modtrace.write.html import write_html
from tests.support.browser import visit
from tests.support.gpt_timeline import gpt_timeline
from tests.support.viewer_page import Open, cut_off, one_step, settle, viewport

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

BAR_PX = 40
"""CSS pixels of a bar if there is room for all."""
STEP_NS = 2_780_000
"""The duration of a step of `gpt_timeline(…, 1)`."""


def point_at(page: Page, bar: int, width: float = BAR_PX) -> None:
    box = page.locator(".step-bars").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + (bar + 0.5) * width, box["y"] + box["height"] / 2)
    settle(page)


def with_a_slow_step(steps: int, slow: int) -> Timeline:
    """Steps of equal duration except one, whose mark comes 100 steps later."""
    timeline = gpt_timeline(steps, 1)
    start = timeline.slices.start + (timeline.slices.step > slow) * 100 * STEP_NS
    end = timeline.slices.end + start - timeline.slices.start
    marks = [
        mark._replace(time_ns=mark.time_ns + (100 * STEP_NS if number >= slow else 0))
        for number, mark in enumerate(timeline.marks)
    ]
    return replace(timeline, slices=replace(timeline.slices, start=start, end=end), marks=marks, counters=[])


def test_pointer_on_a_bar_says_the_parts_of_its_step_and_a_click_zooms_to_it(open_page: Open) -> None:
    page = open_page(gpt_timeline(3, 1)).page
    assert page.get_by_role("list", name="Parts of the steps").locator("li").all_inner_texts() == [
        "forward 36.7 %",
        "loss 0.7 %",
        "backward 61.2 %",
        "other 1.4 %",
    ]
    point_at(page, 1)
    assert page.locator(".tooltip strong").inner_text() == "step 1 · 2.78 ms"
    rows = page.locator(".tooltip-row").all()
    assert [(row.inner_text().split("\n")[0], row.locator("b").inner_text()) for row in rows] == [
        ("backward", "1.700 ms"),
        ("forward", "1.020 ms"),
        ("other", "0.040 ms"),
        ("loss", "0.020 ms"),
    ]

    page.mouse.down()
    page.mouse.up()
    start, end = viewport(page)
    assert 0.9 * STEP_NS < start < STEP_NS
    assert 2 * STEP_NS < end < 2.1 * STEP_NS
    assert page.get_by_title("Zoom to the step in the middle").inner_text() == "step 1 · 2 of 3"


def test_a_call_has_a_bar_if_nothing_is_trained(open_page: Open) -> None:
    timeline = replace(gpt_timeline(3, 1), marks=[])
    slices = timeline.slices
    calls = keep_rows(timeline, np.flatnonzero((slices.kind == MODULE) & (slices.phase == FORWARD)))
    page = open_page(calls).page
    assert page.get_by_role("list", name="Parts of the steps").locator("li").all_inner_texts() == ["forward 100.0 %"]
    point_at(page, 1)
    assert page.locator(".tooltip strong").inner_text() == "GPT2LMHeadModel 1 · 1.02 ms"

    page.mouse.down()
    page.mouse.up()
    assert page.get_by_title("Zoom to the step in the middle").inner_text() == "GPT2LMHeadModel 1 · 2 of 3"


def test_keys_on_the_bars_go_from_step_to_step_and_enter_zooms(open_page: Open) -> None:
    page = open_page(gpt_timeline(3, 1)).page
    bars = page.get_by_role("slider", name="Steps")
    bars.focus()
    for key in ("End", "ArrowLeft", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert [bars.get_attribute(f"aria-value{name}") for name in ("min", "max", "now")] == ["1", "3", "3"]
    said = "step 2 · 2.78 ms, backward 1.700 ms, forward 1.020 ms, other 0.040 ms, loss 0.020 ms"
    assert bars.get_attribute("aria-valuetext") == said

    page.keyboard.press("Enter")
    start, end = viewport(page)
    assert 1.9 * STEP_NS < start < 2 * STEP_NS < end


def test_thousands_of_steps_share_bars_and_the_slow_one_is_seen(open_page: Open) -> None:
    page = open_page(with_a_slow_step(4000, 2345)).page
    bars = page.get_by_role("slider", name="Steps")
    count = int(bars.get_attribute("aria-valuemax") or 0)
    box = bars.bounding_box()
    assert box is not None
    assert count == box["width"] // 4
    point_at(page, 2345 * count // 4000, box["width"] / count)
    title = page.locator(".tooltip strong").inner_text()
    assert title.startswith("step 2345 · 280.8 ms, the slowest from step 23")

    page.mouse.down()
    page.mouse.up()
    assert page.get_by_title("Zoom to the step in the middle").inner_text() == "step 2345 · 2,346 of 4000".replace(
        ",", ""
    )
    assert cut_off(page) == []


def test_a_page_of_a_comparison_has_no_bars(open_page: Open) -> None:
    page = open_page(gpt_timeline(3, 1)).page
    page.get_by_role("tab", name="Steps").click()
    page.get_by_role("button", name="Compare step").click()
    page.get_by_role("tab", name="Changes").wait_for()
    assert page.locator(".step-bars").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_bars_pass_axe(browser: Browser, packages: Path, tmp_path: Path, scheme: str) -> None:
    write_html(one_step(), tmp_path / "t.html")
    with visit(browser, color_scheme=scheme, bypass_csp=True) as seen:
        page = seen.page
        page.goto((tmp_path / "t.html").as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        page.add_script_tag(path=packages / "axe-core/axe.min.js")
        page.get_by_role("slider", name="Steps").focus()
        page.keyboard.press("ArrowRight")
        violations = page.evaluate("() => axe.run('.ruler').then(({ violations }) => violations.map(({ id }) => id))")
        assert violations == []
