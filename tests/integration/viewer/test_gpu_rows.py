"""GPU rows of a real merged trace on the page: their titles, their drawing and selection, their totals."""

from __future__ import annotations

from pathlib import Path

import modtrace
from modtrace import load
from tests.support.merged_rows import rows_in_json
from tests.support.synthetic_profile import synthetic
from tests.support.viewer_page import Open, color_of, details, position_of, settle, table

TRACE = Path(__file__).parents[2] / "data/kineto/a100-ddp-rank0.json.gz"
LONGEST = 4


def test_gpu_rows_of_a_merged_trace_are_drawn_selected_and_summed(open_page: Open, tmp_path: Path) -> None:
    merged = tmp_path / "merged.json"
    modtrace.merge(TRACE, synthetic(TRACE), merged)
    rows = list(rows_in_json(merged))
    timeline = load(merged)
    page = open_page(timeline).page

    streams = sorted({(device, stream) for device, stream, *_ in rows})
    labels = page.locator("[data-kind=gpu]")
    assert labels.all_inner_texts() == [f"gpu {device} · stream {stream}" for device, stream in streams]

    base = int(timeline.columns.start.min())
    longest = sorted(rows, key=lambda row: row[-2] - row[-1])[:LONGEST]
    for device, stream, label, fqn, phase, call, _, start, end in longest:
        row = labels.nth(streams.index((device, stream)))
        row.scroll_into_view_if_needed()
        key = row.get_attribute("data-row")
        assert key is not None
        inside = [other for other in rows if other[:2] == (device, stream) and other[-2] <= start and end <= other[-1]]
        depth = len(inside) - 1
        # Any moment that no span inside covers would do at the span's own depth: take the middle.
        middle = (start + end) // 2 - base
        assert color_of(page, key, depth, middle) != "#000000"
        page.mouse.click(*position_of(page, key, depth, middle))
        settle(page)
        shown = details(page)
        assert page.locator("#details h2").inner_text() == label
        assert page.locator("#details nav span").inner_text() == fqn
        assert (shown["Phase"], shown["Call"], shown["Unix time"]) == (f"GPU {phase}", str(call), f"{start} ns")
        assert shown["Track"] == f"gpu {device} · stream {stream}"
        assert f", GPU {phase}, " in page.locator(".visually-hidden").inner_text()

    page.get_by_role("tab", name="Modules").click()
    page.get_by_role("button", name="GPU", exact=True).click()
    counts = {fqn: int(cells[1].replace(",", "")) for fqn, cells in table(page).items()}
    calls = [(fqn, phase == "forward") for _, _, _, fqn, phase, *_ in rows]
    assert counts == {fqn: calls.count((fqn, True)) for fqn, _ in calls}
