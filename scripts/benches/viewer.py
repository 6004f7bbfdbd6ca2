"""The speed of the offline page with a large recording: opening, and panning compared with an empty page.

Frames are counted in the page while the key for panning is held. Even without a screen, a browser draws at most 60
frames a second of an empty page, so at a ratio of 1 the page is never the bottleneck. Rounds of both pages are
interleaved; figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING

from tests.support.browser import chromium, count_frames, missing, visit
from tests.support.gpt_timeline import gpt_timeline

from modtrace.write.html import write_html

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

LAYERS = 12
ZOOMS = {"all in sight": 0, "zoomed in": 12, "single spans": 36}
"""Number of presses of the zoom key."""


def opened(browser: Browser, url: str) -> float:
    """Return the time from the navigation to the first drawing, in ms."""
    with visit(browser) as seen:
        seen.page.goto(url)
        seen.page.wait_for_selector("html[data-ready]", state="attached")
        return float(seen.page.evaluate("() => Number(document.documentElement.dataset.ready)"))


def panning(page: Page, milliseconds: int) -> float:
    """Return the frames per second while panning back and forth."""
    frames = []
    for key in "da":
        page.keyboard.down(key)
        frames.append(count_frames(page, milliseconds // 2))
        page.keyboard.up(key)
    return statistics.mean(frames)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spans", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if reason := missing():
        sys.exit(reason)

    per_step = len(gpt_timeline(1, LAYERS).columns)
    timeline = gpt_timeline(-(-options.spans // per_step), LAYERS)
    with TemporaryDirectory() as folder, chromium() as browser:
        path = Path(folder) / "bench.html"
        start = perf_counter()
        write_html(timeline, path)
        write_seconds = perf_counter() - start
        print(f"{len(timeline.columns):,} spans: written in {write_seconds:.2f} s, {path.stat().st_size / 1e6:.2f} MB")
        times = [opened(browser, path.as_uri()) for _ in range(options.rounds)]
        print(f"opens in {statistics.median(times):.0f} ms ({min(times):.0f} to {max(times):.0f})")
        print(f"{'panning':16}{'frames/s':>10}{'empty page':>12}{'ratio':>8}")
        for name, presses in ZOOMS.items():
            with visit(browser) as empty, visit(browser) as seen:
                seen.page.goto(path.as_uri())
                seen.page.wait_for_selector("html[data-ready]", state="attached")
                for _ in range(presses):
                    seen.page.keyboard.press("w")
                pairs = []
                for _ in range(options.rounds):
                    empty.page.bring_to_front()
                    idle = count_frames(empty.page, 1000)
                    seen.page.bring_to_front()
                    pairs.append((panning(seen.page, 1000), idle))
            frames, idle = (statistics.median(part) for part in zip(*pairs, strict=True))
            ratio = statistics.median(frames / idle for frames, idle in pairs)
            print(f"{name:16}{frames:10.1f}{idle:12.1f}{ratio:8.2f}")


if __name__ == "__main__":
    main()
