"""Memory and FLOPs on the page: the curve over the tracks, the largest holders, and colours by the costs of calls."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from modtrace.write.html import write_html
from tests.support.browser import Visit, visit
from tests.support.cost_timelines import with_flops
from tests.support.viewer_page import BACKWARD, FORWARD, Open, color_of, details, one_step, position_of, settle

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


def choose(page: Page, title: str) -> None:
    page.get_by_role("group", name="Colour spans by").get_by_role("button", name=title).click()
    settle(page)


def hover(page: Page, row: str, depth: int, ns: float) -> str:
    page.mouse.move(*position_of(page, row, depth, ns - 1000))
    settle(page)
    return page.locator(".tooltip").inner_text()


def color(page: Page, row: str, depth: int, ns: int) -> str:
    return color_of(page, row, depth, ns - 1000)


def test_memory_is_over_the_tracks_and_its_peak_names_the_holders(open_page: Open) -> None:
    page = open_page(with_flops()).page

    tops = page.eval_on_selector_all(
        "[data-kind]", "rows => rows.map(row => [row.getBoundingClientRect().top, row.dataset.kind])"
    )
    assert [kind for _, kind in sorted(tops)] == ["process", "counter", "forward", "backward"]
    # As in `test_holders_at_the_peak_sum_to_all_that_is_held`; the first sample is time 0.
    assert hover(page, "counter 0", 0, 2010).split("\n") == [
        "peak of allocated, 250 B at 1.01 µs",
        "Held by",
        *("Net.b", "140 B", "Net.a", "10 B", "other", "100 B"),
    ]
    assert hover(page, "counter 0", 0, 2200) == "allocated, 190 B at 1.1 µs"
    page.get_by_role("tab", name="Recording").click()
    assert page.locator("#details h2").all_inner_texts() == ["Held at the peak: 250 B at 1.01 µs"]
    assert page.locator("#details .note").inner_text() == "Net.a grows"
    rows = page.locator(".holders tbody tr").all()
    assert [row.inner_text().split("\t") for row in rows] == [
        ["Net.b", "140 B", "56.0 %"],
        ["Net.a", "10 B", "4.0 %"],
        ["other", "100 B", "40.0 %"],
    ]


def test_colours_by_memory_are_a_shade_for_each_doubling(open_page: Open) -> None:
    page = open_page(with_flops()).page
    by_class = color(page, FORWARD, 0, 1250)

    choose(page, "Retained")
    net, a, b = color(page, FORWARD, 0, 1250), color(page, FORWARD, 1, 1150), color(page, FORWARD, 1, 1350)
    freed, again = color(page, BACKWARD, 0, 2250), color(page, BACKWARD, 1, 2050)
    # Bytes: 60, 20, 50 of at most 60; -30 and 30.
    assert net == b != a == again != freed
    assert int(net[1:3], 16) > int(net[5:], 16)
    assert int(freed[1:3], 16) < int(freed[5:], 16)
    assert hover(page, BACKWARD, 0, 2250).startswith("Net, backward, 300 ns, Retained -30 B")
    assert "up to 60 B" in page.locator("#details").inner_text()
    page.wait_for_function("() => location.hash.includes('color=retained')")
    page.reload()
    page.wait_for_selector("html[data-ready]", state="attached")
    assert color(page, FORWARD, 0, 1250) == net

    choose(page, "Peak inside")
    # Bytes: 70, 40 and 50 of at most 100.
    assert color(page, FORWARD, 0, 1250) != color(page, FORWARD, 1, 1150) == color(page, FORWARD, 1, 1350)
    page.mouse.click(*position_of(page, FORWARD, 0, 250))
    settle(page)
    said = details(page)
    assert (said["Retained"], said["Peak inside"], said["FLOP/s"]) == ("60 B", "70 B", "10 GFLOP/s")
    page.keyboard.press("Escape")
    page.get_by_role("tab", name="Modules").click()
    choose(page, "Colour by class")
    assert color(page, FORWARD, 0, 1250) == by_class


def test_colours_by_flops_are_those_of_the_time_that_a_call_took(open_page: Open) -> None:
    page = open_page(with_flops()).page

    choose(page, "FLOP/s")
    # 10, 2 and 1 GFLOP/s; those of b are unknown.
    shown = [color(page, row, depth, ns) for row, depth, ns in ((FORWARD, 0, 1250), (FORWARD, 1, 1150))]
    shown += [color(page, BACKWARD, 0, 2250), color(page, FORWARD, 1, 1350)]
    assert len(set(shown)) == 4
    assert hover(page, FORWARD, 1, 1150).startswith("a: Linear, forward, 110 ns, FLOP/s 2 GFLOP/s")
    assert hover(page, FORWARD, 1, 1350).startswith("b: Linear, forward, 100 ns, FLOP/s unknown")


def test_a_recording_without_costs_has_colours_by_class_alone(open_page: Open) -> None:
    page = open_page(one_step()).page

    assert page.get_by_role("group", name="Colour spans by").count() == 0
    page.get_by_role("tab", name="Recording").click()
    assert "Held at the peak" not in page.locator("#details").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_costs_pass_axe(browser: Browser, packages: Path, tmp_path: Path, scheme: str) -> None:
    write_html(with_flops(), tmp_path / "t.html")
    with visit(browser, color_scheme=scheme, bypass_csp=True) as seen:
        opened(seen, tmp_path / "t.html", packages)
        for tab in ("Modules", "Recording"):
            seen.page.get_by_role("tab", name=tab).click()
            if tab == "Modules":
                choose(seen.page, "Retained")
            violations = seen.page.evaluate("() => axe.run().then(found => found.violations)")
            assert [v["id"] for v in violations if v["impact"] in ("serious", "critical")] == []


def opened(seen: Visit, page_file: Path, packages: Path) -> None:
    seen.page.goto(page_file.as_uri())
    seen.page.wait_for_selector("html[data-ready]", state="attached")
    seen.page.add_script_tag(path=packages / "axe-core/axe.min.js")
