"""Totals of the page, overall and of a range, its flame graph and its callers, compared with those of `summary`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

import pytest

import modtrace
from tests.support.models import ARCHITECTURES
from tests.support.viewer_page import (
    BACKWARD,
    FORWARD,
    US,
    Open,
    at_modules,
    click,
    details,
    one_step,
    pixels,
    position_of,
    settle,
    table,
    viewport,
)

if TYPE_CHECKING:
    from playwright.sync_api import Locator


@pytest.fixture(name="open_page")
def open_at_modules(open_page: Open) -> Open:
    return at_modules(open_page)


def test_totals_of_a_range_are_per_module(open_page: Open) -> None:
    page = open_page(one_step()).page
    click(page, FORWARD, 1, 250 * US)
    page.keyboard.press("m")

    assert "Selected range of 300 µs" in page.locator("#details").inner_text()
    # Columns: class, calls, total and its share of the range, self, forward, backward, share of self; no recompute.
    assert table(page) == {
        "GPT": ["GPT", "1", "100.0 %", "300 µs", "–", "300 µs", "–", "0.0 %"],
        "GPT.h.0": ["Block", "1", "100.0 %", "300 µs", "300 µs", "300 µs", "–", "100.0 %"],
    }
    page.get_by_role("button", name="clear").click()
    assert table(page) == {
        "GPT": ["GPT", "1", "90.0 %", "1.8 ms", "600 µs", "1 ms", "650 µs", "150 µs", "30.0 %"],
        "GPT.h.0": ["Block", "1", "27.5 %", "550 µs", "550 µs", "300 µs", "100 µs", "150 µs", "27.5 %"],
        "GPT.h.1": ["Block", "1", "32.5 %", "650 µs", "650 µs", "400 µs", "250 µs", "–", "32.5 %"],
    }


@pytest.mark.parametrize("over", ["tracks", "axis"])
def test_range_dragged_with_the_pointer_has_its_totals(open_page: Open, over: str) -> None:
    page = open_page(one_step()).page
    x0, y = position_of(page, BACKWARD, 0, 1200 * US)
    x1, _ = position_of(page, BACKWARD, 0, 2000 * US)
    before = viewport(page)
    if over == "axis":
        axis = page.locator(".axis").bounding_box()
        assert axis is not None
        y = axis["y"] + 10
    else:
        page.keyboard.down("Shift")
    page.mouse.move(x1, y)
    page.mouse.down()
    page.mouse.move((x0 + x1) / 2, y)
    page.mouse.move(x0, y)
    page.mouse.up()
    page.keyboard.up("Shift")

    length = re.search(r"Selected range of ([\d.]+) µs", page.locator("#details").inner_text())
    assert length is not None
    assert float(length[1]) == pytest.approx(800, abs=4)
    assert table(page)["GPT"][1:3] == ["0", "100.0 %"], "backward alone, all the time"
    assert viewport(page) == before


@pytest.mark.parametrize("by", ["module", "class"])
@pytest.mark.parametrize("workload", ["Llama, checkpointed", "Llama, checkpointed (reentrant)"])
def test_totals_of_a_checkpointed_model_are_those_of_its_summary(
    open_page: Open, workload: str, by: Literal["module", "class"]
) -> None:
    model, loss = ARCHITECTURES[workload]()
    with modtrace.record(model=model, engine="python") as recording:
        for _ in range(2):
            loss().backward()
            recording.step()
    timeline = recording.timeline()
    summary = timeline.summary(by=by)
    page = open_page(timeline, permissions=["clipboard-read", "clipboard-write"]).page
    page.get_by_role("button", name=f"By {by}").click()
    share = 2 if by == "module" else 1
    assert {name: cells[share] for name, cells in table(page).items()} == {
        row.fqn or row.module_class: f"{100 * row.total_ns / summary.steps_ns:.1f} %" for row in summary.rows
    }
    page.get_by_role("button", name="Copy table").click()
    page.get_by_role("button", name="Copied").wait_for()
    _, *lines = page.evaluate("navigator.clipboard.readText()").split("\n")

    shown = {name: tuple(map(int, numbers)) for name, _, *numbers in (line.split("\t") for line in lines)}
    fields = ("calls", "total_ns", "self_ns", "forward_ns", "backward_ns", "recompute_ns")
    assert shown == {
        row.fqn or row.module_class: tuple(getattr(row, field) for field in fields) for row in summary.rows
    }
    assert any(row.recompute_ns for row in summary.rows)


def test_totals_sorted_by_a_column_are_in_its_order(open_page: Open) -> None:
    page = open_page(one_step()).page
    page.get_by_role("tab", name="Modules").click()
    column = page.get_by_role("columnheader", name="Self", exact=True)
    assert list(table(page)) == ["GPT", "GPT.h.1", "GPT.h.0"]

    column.get_by_role("button").click()
    assert (list(table(page)), column.get_attribute("aria-sort")) == (["GPT.h.1", "GPT", "GPT.h.0"], "descending")
    column.get_by_role("button").click()
    assert (list(table(page)), column.get_attribute("aria-sort")) == (["GPT.h.0", "GPT", "GPT.h.1"], "ascending")


def test_totals_by_class_and_on_the_gpu_have_their_own_rows(open_page: Open) -> None:
    page = open_page(one_step()).page
    page.get_by_role("tab", name="Modules").click()
    page.get_by_role("button", name="By class").click()
    assert table(page)["Block"] == ["2", "60.0 %", "1.2 ms", "1.2 ms", "700 µs", "350 µs", "150 µs", "60.0 %"]

    page.get_by_role("button", name="GPU", exact=True).click()
    assert table(page) == {"gemm_kernel": ["1", "10.0 %", "200 µs", "200 µs", "200 µs", "–", "10.0 %"]}


def test_totals_with_a_search_list_what_matches(open_page: Open) -> None:
    page = open_page(one_step()).page
    search = page.get_by_role("searchbox")
    search.fill("class:block phase:recompute")
    assert list(table(page)) == ["GPT.h.0"]
    search.fill(">500us")
    assert list(table(page)) == ["GPT"]
    search.fill("/h\\.\\d$/")
    assert list(table(page)) == ["GPT.h.1", "GPT.h.0"]
    search.fill("nothing of the kind")
    assert table(page) == {}
    assert "The search matches none of these" in page.locator("#details").inner_text()
    search.fill("/(/")
    assert page.locator(".match-count").inner_text() == "/(/ is no regular expression"


def test_click_on_a_module_highlights_its_spans_and_shows_its_calls(open_page: Open) -> None:
    page = open_page(one_step()).page
    # The backward of h.0 is cut in two: 100 and, as recompute, 150 µs.
    page.get_by_role("button", name="GPT.h.0", exact=True).click()
    calls = page.get_by_role("region", name="Calls of GPT.h.0")
    assert [" ".join(line.split()) for line in calls.locator("p").all_inner_texts()] == [
        "forward 1 × · min 300 µs · p50 300 µs · p95 300 µs · max 300 µs",
        "backward 1 × · min 100 µs · p50 100 µs · p95 100 µs · max 100 µs",
        "recompute 1 × · min 150 µs · p50 150 µs · p95 150 µs · max 150 µs",
    ]
    assert page.locator(".match-count").inner_text() == "4 found", "three and the kernel on the GPU"
    picked, other = (position_of(page, FORWARD, 1, us * US) for us in (150, 620))
    assert pixels(page, picked[0], picked[1] - 7)[0][3] == 255
    assert pixels(page, other[0], other[1] - 7)[0][3] < 128

    page.get_by_role("button", name="max 150 µs").click()
    assert details(page)["Phase"] == "recompute"
    page.keyboard.press("Escape")
    page.get_by_role("tab", name="Modules").click()
    assert calls.count() == 0
    settle(page)
    assert pixels(page, other[0], other[1] - 7)[0][3] == 255


def test_copy_buttons_give_the_table_and_the_name(open_page: Open) -> None:
    page = open_page(one_step(), permissions=["clipboard-read", "clipboard-write"]).page
    page.get_by_role("button", name="Copy table").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()").split("\n") == [
        "name\tclass\tcalls\ttotal ns\tself ns\tforward ns\tbackward ns\trecompute ns",
        "GPT\tGPT\t1\t1800000\t600000\t1000000\t650000\t150000",
        "GPT.h.1\tBlock\t1\t650000\t650000\t400000\t250000\t0",
        "GPT.h.0\tBlock\t1\t550000\t550000\t300000\t100000\t150000",
    ]
    page.get_by_role("button", name="GPT.h.1", exact=True).click()
    page.get_by_role("button", name="Copy name").click()
    page.get_by_role("button", name="Copied").nth(-1).wait_for()
    page.wait_for_function("async () => await navigator.clipboard.readText() === 'GPT.h.1'")


def test_flame_graph_cells_are_as_wide_as_their_totals(open_page: Open) -> None:
    page = open_page(one_step()).page
    page.get_by_role("tab", name="Flame graph").click()

    def wide(name: str) -> float:
        box = page.get_by_role("button", name=name).bounding_box()
        assert box is not None
        return float(box["width"])

    whole = wide("all 1.8 ms")
    assert wide("forward 1 ms (55.6 %)") == pytest.approx(whole / 1.8, abs=2)
    assert wide("GPT 800 µs (44.4 %), self 300 µs, 1 span, GPT") == pytest.approx(whole * 0.8 / 1.8, abs=2)
    assert wide("h.1: Block 400 µs (22.2 %), self 400 µs, 1 span, GPT.h.1") == pytest.approx(whole * 0.4 / 1.8, abs=2)

    page.get_by_role("button", name="GPT 1 ms").click()
    assert wide("GPT 1 ms") == whole
    page.get_by_role("button", name="all 1.8 ms").click()
    assert wide("GPT 1 ms") == pytest.approx(whole / 1.8, abs=2)


def test_sandwich_of_a_module_shows_its_callers_and_callees(open_page: Open) -> None:
    page = open_page(one_step()).page
    page.get_by_role("tab", name="Flame graph").click()
    page.get_by_role("button", name="One, callers and callees").click()
    assert "Pick a module or class" in page.locator("#details").inner_text()
    page.get_by_role("tab", name="Modules").click()
    page.get_by_role("button", name="GPT.h.1", exact=True).click()
    page.get_by_role("tab", name="Flame graph").click()
    callers = page.get_by_role("group", name=re.compile("What calls it"))
    callees = page.get_by_role("group", name=re.compile("What it calls"))

    def names(of: Locator) -> list[str | None]:
        return [cell.get_attribute("aria-label") for cell in of.get_by_role("button").all()]

    h1 = "h.1: Block 650 µs (100.0 %), 2 spans, GPT.h.1"
    assert names(callers) == [h1, "GPT 650 µs (100.0 %), 2 spans, GPT"]
    assert names(callees) == [h1]
    root, caller = (callers.get_by_role("button").nth(i).bounding_box() for i in (0, 1))
    assert root is not None
    assert caller is not None
    assert caller["y"] < root["y"], "callers lie above"

    callers.get_by_role("button").nth(1).click()
    assert names(callees) == [
        "GPT 1.8 ms (100.0 %), 2 spans, GPT",
        "h.0: Block 550 µs (30.6 %), 3 spans, GPT.h.0",
        "h.1: Block 650 µs (36.1 %), 2 spans, GPT.h.1",
    ]
