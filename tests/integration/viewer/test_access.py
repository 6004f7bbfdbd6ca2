"""The page by keyboard alone, for axe, at 200 percent, in dark mode and on a phone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from modtrace.timeline import Stats
from modtrace.write.html import write_html
from tests.support.browser import visit
from tests.support.gpt_timeline import gpt_timeline
from tests.support.viewer_page import (
    BACKWARD,
    FORWARD,
    US,
    Open,
    click,
    cut_off,
    details,
    one_step,
    position_of,
    settle,
    table,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def test_theme_switched_by_the_button_is_kept_after_a_reload(open_page: Open) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    page = open_page(one_step(), color_scheme="dark").page
    assert page.evaluate(ground) == "rgb(21, 25, 30)"

    page.get_by_role("button", name="Switch to light").click()
    assert page.evaluate(ground) == "rgb(255, 255, 255)"
    other = page.context.new_page()
    other.goto(page.url)
    while not other.evaluate("localStorage.length"):  # the browser stores it with a delay
        other.reload()
    page.reload()
    page.wait_for_selector("html[data-ready]", state="attached")
    assert page.evaluate(ground) == "rgb(255, 255, 255)", "the choice is kept"
    assert open_page(one_step(), color_scheme="light").page.evaluate(ground) == "rgb(255, 255, 255)"


def test_page_with_the_keyboard_alone_reaches_every_control(open_page: Open) -> None:
    page = open_page(one_step()).page
    focused = "document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent"
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "Skip to the timeline"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "timeline"

    announced = []
    for key in ("ArrowRight", "ArrowDown", "ArrowRight", "ArrowUp"):
        page.keyboard.press(key)
        announced.append(page.locator(".visually-hidden").inner_text())
    assert announced == [
        "GPT, forward, 1 ms",
        "h.0: Block, forward, 300 µs",
        "h.1: Block, forward, 400 µs",
        "GPT, forward, 1 ms",
    ]

    page.get_by_role("tab", name="Selection").focus()
    page.keyboard.press("ArrowRight")
    assert page.get_by_role("tab", name="Modules").get_attribute("aria-selected") == "true"
    assert page.evaluate(focused) == "Modules"

    splitter = page.get_by_role("separator", name="Height of the details")
    before = int(splitter.get_attribute("aria-valuenow") or 0)
    splitter.focus()
    page.keyboard.press("ArrowUp")
    assert int(splitter.get_attribute("aria-valuenow") or 0) == before + 4

    page.keyboard.press("?")
    assert page.get_by_role("dialog", name="Keys and legend").is_visible()
    page.keyboard.press("Escape")
    assert page.get_by_role("dialog").count() == 0


def test_flame_graph_with_arrow_keys_moves_and_zooms(open_page: Open) -> None:
    page = open_page(one_step()).page
    page.get_by_role("tab", name="Flame graph").click()
    page.get_by_role("button", name="all 1.8 ms").focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowDown", "ArrowDown", "ArrowUp", "ArrowLeft"):
        page.keyboard.press(key)
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("GPT 1 ms")
    page.keyboard.press("Enter")

    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("GPT 1 ms")
    assert page.evaluate("document.activeElement.style.width") == "100%"


SIZES = {
    "zoomed": {"viewport": {"width": 800, "height": 450}, "device_scale_factor": 2},
    "narrow": {"viewport": {"width": 640, "height": 512}, "device_scale_factor": 2},
}


@pytest.mark.parametrize("size", SIZES)
def test_page_at_200_percent_zoom_cuts_nothing_off(open_page: Open, size: str) -> None:
    """1600 × 900 and 1280 × 1024 pixels at a zoom of 200 %."""
    page = open_page(replace(one_step(), stats=Stats(recorded=9, overwritten=2)), **SIZES[size]).page
    assert cut_off(page) == []
    click(page, FORWARD, 1, 250 * US)
    assert page.locator("#details h2").is_visible()
    assert details(page)["Duration"] == "300 µs"
    # The larger canvas is drawn, not stretched.
    assert page.eval_on_selector("#timeline canvas", "canvas => canvas.width === 2 * canvas.clientWidth")


def test_rows_with_text_of_200_percent_are_taller(open_page: Open) -> None:
    page = open_page(one_step()).page
    before = page.locator("[data-row='track 0']").bounding_box()
    page.evaluate("document.documentElement.style.fontSize = '200%'")
    page.wait_for_function(
        "tall => document.querySelector(\"[data-row='track 0']\").clientHeight > 1.9 * tall",
        arg=before and before["height"],
    )

    assert cut_off(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_in_every_tab_passes_axe(browser: Browser, packages: Path, tmp_path: Path, scheme: str) -> None:
    timeline = replace(one_step(), stats=Stats(recorded=9, overwritten=2))
    write_html(timeline, tmp_path / "t.html")
    # axe is a script that the page's own policy would rightly refuse.
    with visit(browser, color_scheme=scheme, bypass_csp=True) as seen:
        page = seen.page
        page.goto((tmp_path / "t.html").as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        page.add_script_tag(path=packages / "axe-core/axe.min.js")
        page.get_by_role("searchbox").fill("h.0")
        page.keyboard.press("Enter")

        def serious() -> list[str]:
            violations = page.evaluate("() => axe.run().then(found => found.violations)")
            return [
                f"{v['id']}: {v['help']}: {v['nodes'][0]['html']}"
                for v in violations
                if v["impact"] in ("serious", "critical")
            ]

        assert serious() == []
        page.keyboard.press("Escape")
        for tab in ("Modules", "Flame graph", "Recording"):
            page.get_by_role("tab", name=tab).click()
            assert serious() == [], tab
        page.get_by_role("button", name="Keys and legend").click()
        assert serious() == []
        assert page.evaluate("() => axe.run().then(found => found.passes.length)") > 20


def test_page_on_a_phone_selects_scrolls_and_sums(open_page: Open) -> None:
    options = {"viewport": {"width": 390, "height": 800}, "device_scale_factor": 2, "has_touch": True}
    page = open_page(gpt_timeline(2, 2, ranks=2), **options).page
    assert cut_off(page) == []
    assert "GPT2LMHeadModel.transformer" in table(page)
    page.touchscreen.tap(*position_of(page, BACKWARD, 0, 3_000_000))
    page.locator("#details dl").wait_for()
    assert details(page)["Phase"] == "backward"
    # A finger that goes up takes the rows along.
    touch = page.context.new_cdp_session(page)
    x, y = position_of(page, BACKWARD, 0, 3_000_000)
    first = "document.querySelector('[data-row=\"track 0\"]').getBoundingClientRect().top"
    before = page.evaluate(first)
    for kind, points in (
        ("touchStart", [{"x": x, "y": y}]),
        ("touchMove", [{"x": x, "y": y - 30}]),
        ("touchMove", [{"x": x, "y": y - 90}]),
        ("touchEnd", []),
    ):
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    settle(page)
    assert page.evaluate(first) == before - 90
    for tab in ("Modules", "Flame graph", "Recording"):
        page.get_by_role("tab", name=tab).click()
        assert cut_off(page) == []
