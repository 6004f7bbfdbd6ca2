"""Layout of the page: headers that stay in sight, details beside the tracks or below them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.support.gpt_timeline import gpt_timeline
from tests.support.viewer_page import HEADER_PX, Open, choose_modules, one_step, settle, table

if TYPE_CHECKING:
    from playwright.sync_api import Page

RANK_PX = 2 * (5 * 18 + 6) + 50
"""Height of a rank's rows: forward and backward of five levels, and a counter."""


def box(page: Page, selector: str) -> dict[str, float]:
    bounds = page.locator(selector).bounding_box()
    assert bounds is not None
    return {"x": bounds["x"], "y": bounds["y"], "width": bounds["width"], "height": bounds["height"]}


def scroll_rows(page: Page, pixels: float) -> None:
    area = box(page, ".scroller")
    page.mouse.move(area["x"] + area["width"] / 2, area["y"] + area["height"] / 2)
    page.mouse.wheel(0, pixels)
    settle(page)


def test_header_of_a_process_stays_in_sight_until_its_last_row_has_gone(open_page: Open) -> None:
    page = open_page(gpt_timeline(2, 2, ranks=8)).page
    top = box(page, ".scroller")["y"]

    def headers() -> list[float]:
        return [box(page, f"[data-row='process {rank}']")["y"] - top for rank in range(3)]

    period = HEADER_PX + RANK_PX
    assert headers() == [0, period, 2 * period]
    scroll_rows(page, 100)
    assert headers() == [0, period - 100, 2 * period - 100]
    scroll_rows(page, period - 110)
    # The next header pushes it out.
    assert headers() == [10 - HEADER_PX, 10, period + 10]
    scroll_rows(page, 30)
    assert headers()[1:] == [0, period - 20]

    page.locator("[data-row='process 1'] button").click()
    settle(page)
    assert page.locator("[data-row='process 1'] button").get_attribute("aria-expanded") == "false"
    assert page.locator("[data-row='track 2']").count() == 0
    assert page.locator("[data-row='track 4']").count() == 1


def test_title_of_a_long_track_stays_below_the_header_of_its_process(open_page: Open) -> None:
    page = open_page(gpt_timeline(2, 2, ranks=8)).page
    scroll_rows(page, HEADER_PX + 50)
    title, header = box(page, "[data-row='track 0'] button"), box(page, "[data-row='process 0']")
    row = box(page, "[data-row='track 0']")
    assert row["y"] < header["y"]
    assert header["y"] + HEADER_PX <= title["y"] < title["y"] + title["height"] <= row["y"] + row["height"]


def test_totals_are_beside_many_rows_and_below_few(open_page: Open) -> None:
    page = open_page(one_step()).page
    tracks, panel = box(page, ".timeline"), box(page, ".panel")
    assert (tracks["width"], panel["width"]) == (1600, 1600)
    assert panel["y"] == tracks["y"] + tracks["height"]

    page = open_page(gpt_timeline(2, 2, ranks=4)).page
    tracks, panel = box(page, ".timeline"), box(page, ".panel")
    assert (panel["y"], panel["height"]) == (tracks["y"], tracks["height"])
    assert panel["x"] == tracks["x"] + tracks["width"]
    assert box(page, "table")["width"] < panel["width"]
    assert "GPT2LMHeadModel.transformer.h.0" in table(page)

    page.get_by_role("button", name="Put the details below the tracks").click()
    settle(page)
    assert box(page, ".panel")["width"] == 1600
    page.get_by_role("button", name="Put the details beside the tracks").click()
    page.set_viewport_size({"width": 1100, "height": 900})
    settle(page)
    assert box(page, ".panel")["width"] == 1100, "too narrow for both"
    assert page.get_by_role("button", name="Put the details").count() == 0


def test_splitter_beside_the_tracks_changes_the_width(open_page: Open) -> None:
    page = open_page(gpt_timeline(2, 2, ranks=4)).page
    splitter = page.get_by_role("separator", name="Width of the details")
    assert box(page, ".panel")["width"] == 0.42 * 1600
    splitter.focus()
    page.keyboard.press("ArrowLeft")
    assert box(page, ".panel")["width"] == 0.46 * 1600
    edge = box(page, ".splitter")
    page.mouse.move(edge["x"] + 2, 500)
    page.mouse.down()
    page.mouse.move(1200, 500)
    page.mouse.up()
    assert box(page, ".panel")["width"] == 0.25 * 1600


def test_all_processes_fold_and_unfold_at_once(open_page: Open) -> None:
    page = open_page(gpt_timeline(2, 2, ranks=3)).page
    page.get_by_role("button", name="fold all processes", exact=True).click()
    settle(page)
    assert [page.locator(f"[data-row^='{kind}']").count() for kind in ("process", "track", "counter")] == [3, 0, 0]
    page.get_by_role("button", name="unfold all processes").click()
    assert page.locator("[data-row^='track']").count() == 6
    assert open_page(one_step()).page.get_by_role("button", name="all processes").count() == 0


def test_names_that_have_no_room_keep_their_distinct_parts(open_page: Open) -> None:
    timeline = one_step()
    tracks = [
        track._replace(thread=f"{track.thread} of a pool of many workers {index}")
        for index, track in enumerate(timeline.tracks)
    ]
    names = [name._replace(fqn=f"GPT.transformer.blocks.{name.fqn[-1]}.mlp.down_proj") for name in timeline.names]
    page = open_page(replace(timeline, tracks=tracks, names=names), viewport={"width": 390, "height": 844}).page
    choose_modules(page)
    # A thread's name ends within its label; a module's name lies entirely within its cell.
    assert page.locator(".label .thread").count() == 2
    outside = """elements => elements.filter(element => {
        const [text, box] = [element.firstElementChild ?? element, element.closest(".label, th")].map(
            part => part.getBoundingClientRect());
        return text.right > box.right + 1 || (element.closest("th") && text.left < box.left - 1);
    }).length"""
    assert page.locator(".label .thread").evaluate_all(outside) == 0
    assert page.locator("tbody th .link").count() == 3
    assert page.locator("tbody th .link").evaluate_all(outside) == 0


def test_rows_of_the_only_thread_of_a_process_name_only_their_kind(open_page: Open) -> None:
    page = open_page(gpt_timeline(2, 1, ranks=2), viewport={"width": 900, "height": 600}).page
    tracks = page.locator(".label.track")
    assert tracks.all_inner_texts() == ["forward", "backward"] * 2
    titles = [button.get_attribute("title") for button in tracks.locator("button").all()]
    assert titles == ["forward · MainThread", "backward · MainThread"] * 2


def test_rows_of_several_threads_name_kind_and_thread(open_page: Open) -> None:
    timeline = one_step()
    forward, backward, *others = timeline.tracks
    several = [forward, backward._replace(thread="pt_autograd_0 of a pool", tid=8), *others]
    tracks = [*several, forward._replace(kind="backward pass")]
    page = open_page(replace(timeline, tracks=tracks), viewport={"width": 900, "height": 600}).page
    cut = "kinds => kinds.map(kind => kind.scrollWidth > kind.clientWidth)"
    named = page.locator(":is([data-kind=forward], [data-kind=backward]) .kind")
    assert named.all_inner_texts() == ["forward · ", "backward · "]
    assert named.evaluate_all(cut) == [False, False]
    outside = """parts => parts.filter(part =>
        part.getBoundingClientRect().right > part.closest(".label").getBoundingClientRect().right)"""
    assert page.locator(".label .thread").count() == 3
    assert page.locator(".label .thread").evaluate_all(outside) == []


@pytest.mark.parametrize("width", [900, 1600])
def test_a_flame_graph_stays_in_its_panel(open_page: Open, width: int) -> None:
    page = open_page(gpt_timeline(2, 6), viewport={"width": width, "height": 900}).page
    page.get_by_role("tab", name="Flame graph").click()
    reach = """panel => {
        const edge = panel.getBoundingClientRect().right;
        const past = [...panel.querySelectorAll("*")].filter(part => part.getBoundingClientRect().right > edge);
        return [panel.scrollWidth - panel.clientWidth, past.length];
    }"""
    for choice in ("All, top down", "One, callers and callees", "All, top down"):
        page.get_by_role("button", name=choice).click()
        settle(page)
        assert page.locator("#details").evaluate(reach) == [0, 0], choice
    if width == 1600:
        page.locator(".dock").click()
        settle(page)
        assert page.locator("#details").evaluate(reach) == [0, 0]


def test_on_a_phone_a_row_names_its_kind_above_its_thread(open_page: Open) -> None:
    timeline = one_step()
    forward, backward, *others = timeline.tracks
    several = [forward, backward._replace(thread="pt_autograd_0", tid=8), *others]
    page = open_page(replace(timeline, tracks=several), viewport={"width": 390, "height": 844}).page
    # The box of the word itself: its element is as wide as the label, even if most of it is cut off.
    places = """(label, word) => {
        const [kind, thread] = [label.querySelector(".kind"), label.querySelector(".thread")];
        const range = document.createRange();
        range.setStart(kind.firstChild, 0);
        range.setEnd(kind.firstChild, word.length);
        const [said, part, below] = [range, kind, thread].map(shown => shown.getBoundingClientRect());
        const whole = said.right <= part.right && said.right <= label.getBoundingClientRect().right;
        return [kind.textContent.startsWith(word), whole, below.top >= said.bottom - 4, below.width > 40];
    }"""
    for row, word in (("track 0", "forward"), ("track 1", "backward")):
        assert page.locator(f"[data-row='{row}']").evaluate(places, word) == [True] * 4, word


def test_paper_has_the_current_view_and_no_controls(open_page: Open) -> None:
    page = open_page(gpt_timeline(2, 1)).page
    page.emulate_media(media="print")

    shown = [button.inner_text() for button in page.locator("button:visible").all()]
    assert [text for text in shown if text in {"Modules", "Steps", "Flame graph", "By module", "By class"}] == [
        "Modules",
        "By module",
    ]
    for control in (".search", ".steps", ".switches", ".dock", ".copy", ".corner label"):
        assert page.locator(control).count()
        assert not page.locator(control).first.is_visible()
    assert "GPT2LMHeadModel.transformer" in table(page)
    # Otherwise browsers leave out backgrounds, and with them the legend's colours.
    assert page.evaluate("() => getComputedStyle(document.querySelector('.label.process')).printColorAdjust") == "exact"
