"""The view in the page's address: links, reload, back and forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.gpt_timeline import gpt_timeline
from tests.support.viewer_page import FORWARD, US, Open, choose_modules, click, details, one_step, table, viewport

if TYPE_CHECKING:
    from playwright.sync_api import Page


def wait_for_address(page: Page, part: str) -> None:
    page.wait_for_function("part => location.hash.includes(part)", arg=part)


def reopen(page: Page, address: str) -> None:
    """Load an address from scratch, which a change behind the # alone would not do."""
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector("html[data-ready]", state="attached")


def test_address_of_a_view_opened_again_shows_the_same_view(open_page: Open) -> None:
    page = open_page(one_step()).page
    choose_modules(page)
    page.get_by_role("searchbox").fill("h.0")
    page.get_by_role("button", name="By class").click()
    click(page, FORWARD, 1, 250 * US)
    page.keyboard.press("f")
    page.get_by_role("button", name="forward · MainThread").click()
    wait_for_address(page, "fold=track-0")
    view, address = viewport(page), page.url

    reopen(page, address)
    assert viewport(page) == pytest.approx(view, abs=0.001)
    assert page.get_by_role("searchbox").input_value() == "h.0"
    assert details(page)["Start"] == "100 µs"
    assert page.get_by_role("button", name="forward · MainThread").get_attribute("aria-expanded") == "false"
    page.get_by_role("tab", name="Modules").click()
    assert list(table(page)) == ["Block"]


def test_back_and_forward_go_through_the_earlier_views(open_page: Open) -> None:
    page = open_page(gpt_timeline(3, 1)).page
    whole = viewport(page)
    page.keyboard.press("]")
    wait_for_address(page, "view=")
    first, address = viewport(page), page.url
    page.keyboard.press("]")
    page.wait_for_function("address => location.href !== address", arg=address)
    second = viewport(page)
    page.keyboard.press("w")  # a zoom stays in the same history entry
    page.wait_for_function(
        "([start, end]) => Number(new URLSearchParams(location.hash.slice(1)).get('view').split(',')[0]) > start",
        arg=second,
    )
    closer = viewport(page)
    assert closer[0] > second[0]

    page.go_back()
    assert viewport(page) == pytest.approx(first, abs=0.001)
    page.go_back()
    assert viewport(page) == whole
    page.go_forward()
    page.go_forward()
    assert viewport(page) == pytest.approx(closer, abs=0.001)


def test_back_to_the_first_view_shows_its_tab_again(open_page: Open) -> None:
    page = open_page(one_step()).page
    click(page, FORWARD, 1, 250 * US)
    wait_for_address(page, "tab=selection")
    page.go_back()
    page.wait_for_function("location.hash === ''")
    assert page.get_by_role("tab", name="Findings").get_attribute("aria-selected") == "true"
    page.go_forward()
    assert details(page)["Start"] == "100 µs"


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ("range=1e30,1e31", "tab=modules"),
        ("range=-1e30,20000&tab=modules", "range=0,20000&tab=modules"),
        ("view=1e30,1e31&tab=steps", "tab=steps"),
        ("tab=modules&on=gpu", "tab=modules"),
        ("compare=1,1&view=5,10&range=5,10&span=3&tab=steps", "tab=steps"),
        ("compare=0,7", "tab=modules"),
        ("compare=0,2&tab=modules", "compare=0,2&tab=changes"),
        ("tab=changes&change=0&color=class", "tab=modules"),
        ("tab=flame&levels=99&fold=track-77,process-0", "tab=flame&fold=process-0"),
    ],
)
def test_parts_of_an_address_that_fit_nothing_are_dropped_from_it(open_page: Open, asked: str, kept: str) -> None:
    seen = open_page(gpt_timeline(3, 1))
    page = seen.page
    reopen(page, f"{page.url}#{asked}")
    page.wait_for_function("hash => location.hash === hash", arg=f"#{kept}")
    shown = page.locator("#details").inner_text()
    if "tab=modules" in kept:
        scope = "Selected range of 20 µs" if "range" in kept else "The whole recording"
        assert scope in shown
        assert "GPT2LMHeadModel" in table(page)
    assert page.get_by_role("button", name="Back to the recording").count() == ("compare" in kept)
    # The page may have requested only itself.
    seen.requests[:] = [url for url in seen.requests if "#" not in url]


@pytest.mark.parametrize(
    "hash_", ["#span=99999&view=5,1&tab=none&group=99&fold=track-77", "#view=-1e300,1e300", "#%E0%A4%A"]
)
def test_address_that_fits_no_view_opens_all_the_same(open_page: Open, hash_: str) -> None:
    seen = open_page(one_step())
    reopen(seen.page, seen.page.url + hash_)
    start, end = viewport(seen.page)
    assert -2500 * US < start < end < 4500 * US
    assert start < 2000 * US
    assert end > 0
    # The page may have requested only itself.
    seen.requests[:] = [url for url in seen.requests if "#" not in url]
