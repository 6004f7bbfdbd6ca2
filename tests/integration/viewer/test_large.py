"""A page of 200,000 spans; `scripts/bench viewer` measures its speed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from modtrace.write.html import write_html
from tests.support.browser import visit
from tests.support.gpt_timeline import gpt_timeline
from tests.support.viewer_page import viewport

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.mark.full
def test_a_page_of_200_000_spans_opens_and_pans(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "large.html"
    write_html(gpt_timeline(725, 12), path)
    with visit(browser) as seen:
        seen.page.goto(path.as_uri())
        seen.page.wait_for_selector("html[data-ready]", state="attached")
        assert seen.page.locator(".summary").inner_text().startswith("200,100 spans")
        for _ in range(12):
            seen.page.keyboard.press("w")
        left = viewport(seen.page)[0]
        seen.page.keyboard.down("d")
        seen.page.wait_for_timeout(700)
        seen.page.keyboard.up("d")
        assert viewport(seen.page)[0] > left
        assert seen.problems == []
