"""Device times on the page: beside the times of threads, and the same as in the summary."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from modtrace import Timeline
from modtrace.timeline.summary.device_summary import DeviceSummary
from tests.support.device_steps import device_steps
from tests.support.timelines import build_timeline
from tests.support.viewer_page import Open, at_modules, cut_off, table

if TYPE_CHECKING:
    from playwright.sync_api import Page

COPY = {"permissions": ["clipboard-read", "clipboard-write"]}


def made() -> tuple[Timeline, DeviceSummary]:
    timeline = build_timeline(device_steps().snapshot())
    device = timeline.summary().device
    assert device is not None
    assert any(row.recompute_ns for row in device.rows)
    assert device.streams == 2
    return timeline, device


def copied(page: Page) -> dict[str, dict[str, str]]:
    page.get_by_role("button", name="Copy table").click()
    page.get_by_role("button", name="Copied").wait_for()
    lines = [line.split("\t") for line in page.evaluate("navigator.clipboard.readText()").split("\n")]
    return {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[1:]}


@pytest.fixture(name="open_page")
def open_at_modules(open_page: Open) -> Open:
    return at_modules(open_page)


def test_device_times_beside_those_of_threads_are_those_of_the_summary(open_page: Open) -> None:
    timeline, device = made()
    page = open_page(timeline, **COPY).page

    shares = {fqn: cells[-3] for fqn, cells in table(page).items()}
    rows = copied(page)

    assert {fqn: (int(row["gpu ns"]), int(row["latency ns"])) for fqn, row in rows.items() if int(row["gpu ns"])} == {
        row.fqn: (row.total_ns, row.latency_p50_ns) for row in device.rows
    }
    assert {fqn: share for fqn, share in shares.items() if share != "–"} == {
        row.fqn: f"{100 * row.total_ns / device.length_ns:.1f} %" for row in device.rows
    }


def test_totals_on_the_gpu_are_those_of_the_summary_of_device_times(open_page: Open) -> None:
    timeline, device = made()
    page = open_page(timeline, **COPY).page
    page.get_by_role("button", name="GPU", exact=True).click()

    rows = copied(page)

    fields = ("forward", "backward", "recompute", "total", "self")
    assert {fqn: tuple(int(row[f"{field} ns"]) for field in fields) for fqn, row in rows.items()} == {
        row.fqn: (row.forward_ns, row.backward_ns, row.recompute_ns, row.total_ns, row.self_ns) for row in device.rows
    }


@pytest.mark.parametrize(("looks", "width"), [("light", 1280), ("dark", 1280), ("light", 390)])
def test_columns_of_device_times_are_not_cut_off(open_page: Open, looks: str, width: int) -> None:
    timeline, _ = made()
    page = open_page(timeline, color_scheme=looks, viewport={"width": width, "height": 800}).page

    for tab, columns in (("Modules", ["GPU time", "% GPU", "Latency"]), ("Steps", ["% GPU", "GPU gap"])):
        page.get_by_role("tab", name=tab).click()
        heads = page.locator("#details th[scope=col]").all_inner_texts()
        assert [head for head in heads if head in columns] == columns
        assert cut_off(page) == []
        if folder := os.environ.get("MODTRACE_SCREENSHOTS"):
            page.screenshot(path=Path(folder) / f"device-times-{tab.lower()}-{looks}-{width}.png")
