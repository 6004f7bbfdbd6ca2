from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.support.viewer_page import (
    BACKWARD,
    FORWARD,
    US,
    Open,
    click,
    one_step,
    position_of,
    table,
    viewport,
)

if TYPE_CHECKING:
    pass


def test_totals_of_a_range_are_per_module(open_page: Open) -> None:
    page = open_page(one_step()).page
    click(page, FORWARD, 1, 250 * US)
    page.keyboard.press("m")

    assert "Selected range of 300 µs" in page.locator("#details").inner_text()
    # Class, spans, forward, backward, recompute is left out, total, self, share of self.
    assert table(page) == {
        "GPT": ["GPT", "1", "300 µs", "–", "300 µs", "–", "0.0 %"],
        "GPT.h.0": ["Block", "1", "300 µs", "–", "300 µs", "300 µs", "100.0 %"],
    }
    page.get_by_role("button", name="clear").click()
    assert table(page) == {
        "GPT": ["GPT", "2", "1 ms", "800 µs", "–", "1.8 ms", "600 µs", "33.3 %"],
        "GPT.h.0": ["Block", "3", "300 µs", "100 µs", "150 µs", "550 µs", "550 µs", "30.6 %"],
        "GPT.h.1": ["Block", "2", "400 µs", "250 µs", "–", "650 µs", "650 µs", "36.1 %"],
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
    assert table(page)["GPT"][1] == "1"
    assert viewport(page) == before


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
    assert table(page)["Block"] == ["5", "700 µs", "350 µs", "150 µs", "1.2 ms", "1.2 ms", "66.7 %"]

    page.get_by_role("button", name="GPU", exact=True).click()
    assert table(page) == {"gemm_kernel": ["1", "200 µs", "–", "200 µs", "200 µs", "100.0 %"]}


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
