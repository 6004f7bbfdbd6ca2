"""The page opens with the findings, and a click on a finding shows its place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from modtrace import Timeline
from tests.support.viewer_page import Open, details, settle, viewport
from tests.unit.test_findings import FETCH, training

if TYPE_CHECKING:
    from playwright.sync_api import Page

MS = 1_000_000
SLOW_MODULE = training(forward=lambda step, block: 9 if (step, block) == (6, 2) else 4 if block == 2 else 1)
"""Steps of 12 ms; the seventh takes 17 ms. Its third block starts 2 ms after the step's start."""
SLOW_LOADER = training(ranges=lambda step: [(FETCH, "data loading", 50 if step == 4 else 20)])
"""The wait before the fifth step is long; the steps before that take 29 ms each."""
UNNAMED = training(before=30)
"""The first of these pauses is before everything that is shown."""


def selected_tab(page: Page) -> str:
    return page.get_by_role("tab", selected=True).inner_text()


def rows(page: Page) -> list[list[str]]:
    return [row.locator("th, td").all_inner_texts() for row in page.locator("#details tbody tr").all()]


def test_a_page_opens_with_its_findings(open_page: Open) -> None:
    page = open_page(SLOW_MODULE).page

    assert page.get_by_role("tab").all_inner_texts()[0] == selected_tab(page) == "Findings"
    assert rows(page) == [
        [
            "Net.blocks.2.act is slower than its siblings",
            "3.000",
            "24.0",
            "5 ms a step, its siblings 2 ms (medians), mostly forward\n"
            "modtrace summary TRACE --only 'Net.blocks.*.act'",
        ]
    ]
    assert page.locator("#details .hint").inner_text() == "nothing else stands out"


@pytest.mark.parametrize(
    ("timeline", "begin_ms", "end_ms", "name"),
    [
        (SLOW_MODULE, 6 * 12 + 2, 6 * 12 + 11, "act: GELU"),
        (SLOW_LOADER, 4 * 29, 4 * 29 + 50, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"),
    ],
    ids=["module", "range"],
)
def test_a_click_on_a_finding_goes_to_its_longest_span(
    timeline: Timeline, begin_ms: int, end_ms: int, name: str, open_page: Open
) -> None:
    page = open_page(timeline).page

    page.locator("#details button.link").first.click()
    settle(page)

    start, end = viewport(page)
    margin = 0.02 * (end_ms - begin_ms) * MS
    assert (start, end) == pytest.approx((begin_ms * MS - margin, end_ms * MS + margin))
    assert selected_tab(page) == "Findings"
    page.get_by_role("tab", name="Selection").click()
    assert page.locator(".selection-head").inner_text().startswith(name)
    assert details(page)["Duration"] == f"{end_ms - begin_ms} ms"


def test_a_click_on_a_finding_without_a_name_goes_to_the_step_with_most_of_its_part(open_page: Open) -> None:
    page = open_page(UNNAMED).page
    assert rows(page)[0][0].startswith("time outside of modules and ranges (other)")

    page.locator("#details button.link").first.click()
    settle(page)

    start, end = viewport(page)
    # The second step: 30 ms without a name, and 9 ms of work.
    assert (start, end) == pytest.approx((9 * MS - 0.02 * 39 * MS, 48 * MS + 0.02 * 39 * MS))


def test_without_findings_the_page_opens_with_modules_and_says_so(open_page: Open) -> None:
    page = open_page(training()).page

    assert selected_tab(page) == "Modules"
    assert "Findings" not in page.get_by_role("tab").all_inner_texts()
    page.get_by_role("tab", name="Recording").click()
    assert page.locator("#details .hint").last.inner_text() == (
        "nothing stands out; looked at: 10 steps in their parts, 9 modules and their siblings, 1 kind of ranges"
    )
