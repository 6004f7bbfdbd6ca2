"""Hands and eyes on the offline page: where a moment is drawn, what colour it has, what the panel says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from modtrace import Timeline
from modtrace.timeline import CounterSeries, Mark, Name, Process, Stats, Track
from modtrace.timeline.slices import Slices
from tests.support.timelines import slice_args

from .browser import Visit
from .gpt_timeline import BASE

if TYPE_CHECKING:
    from playwright.sync_api import Page

__all__ = [
    "BACKWARD",
    "FORWARD",
    "GAP_PX",
    "GPU",
    "HEADER_PX",
    "LEVEL_PX",
    "MARGIN_PX",
    "MS",
    "US",
    "Open",
    "at_modules",
    "choose_modules",
    "click",
    "color_of",
    "cut_off",
    "details",
    "one_step",
    "pixels",
    "position_of",
    "settle",
    "table",
    "viewport",
]

Open = Callable[..., Visit]
"""Writes a timeline's page, opens it and waits until it is drawn; further arguments are playwright's for a context."""
LEVEL_PX = 18
"""CSS pixels of a depth level at the usual text size."""
MARGIN_PX = 3
"""CSS pixels above the first level of a row."""
GAP_PX = 6
"""CSS pixels of a row that no level takes."""
HEADER_PX = 22
"""CSS pixels of the header of a process."""
US, MS = 1_000, 1_000_000
FORWARD, BACKWARD, GPU = "track 0", "track 1", "track 2"
"""The rows of `one_step`."""


def choose_modules(page: Page) -> None:
    """Go to the tab of modules, before which findings may be."""
    page.get_by_role("tab", name="Modules").click()


def at_modules(open_page: Open) -> Open:
    """Return what opens a page and goes to the tab of modules."""

    def opened(*timeline: Any, **options: Any) -> Visit:
        seen = open_page(*timeline, **options)
        choose_modules(seen.page)
        return seen

    return opened


def settle(page: Page) -> None:
    """Wait until what was asked for is drawn: two frames."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def viewport(page: Page) -> tuple[float, float]:
    settle(page)
    start, end = page.eval_on_selector("#timeline", "box => [Number(box.dataset.start), Number(box.dataset.end)]")
    return start, end


def position_of(page: Page, row: str, depth: int, ns: float) -> tuple[float, float]:
    """Return the position of a moment on the page in CSS pixels, in the middle of a depth level."""
    start, end = viewport(page)
    box = page.locator("#timeline").bounding_box()
    label = page.locator(f"[data-row='{row}']").bounding_box()
    assert box is not None
    assert label is not None
    return box["x"] + (ns - start) / (end - start) * box["width"], label["y"] + MARGIN_PX + (depth + 0.5) * LEVEL_PX


def click(page: Page, row: str, depth: int, ns: float) -> None:
    page.mouse.click(*position_of(page, row, depth, ns))
    settle(page)


def pixels(page: Page, x: float, y: float, width: int = 1, height: int = 1) -> list[tuple[int, ...]]:
    """Return pixels of the tracks' canvas as RGBA; x and y are positions on the page."""
    flat = page.eval_on_selector(
        "#timeline canvas",
        """(canvas, [x, y, width, height]) => {
            const box = canvas.getBoundingClientRect();
            const copy = new OffscreenCanvas(width, height).getContext("2d");
            copy.drawImage(canvas, x - box.left, y - box.top, width, height, 0, 0, width, height);
            return [...copy.getImageData(0, 0, width, height).data];
        }""",
        [round(x), round(y), width, height],
    )
    return [tuple(flat[i : i + 4]) for i in range(0, len(flat), 4)]


def color_of(page: Page, row: str, depth: int, ns: float) -> str:
    """The fill at the upper edge of a span, where no label is."""
    x, y = position_of(page, row, depth, ns)
    red, green, blue, _ = pixels(page, x, y - LEVEL_PX / 2 + 2)[0]
    return f"#{red:02x}{green:02x}{blue:02x}"


def details(page: Page) -> dict[str, str]:
    return dict(
        zip(page.locator("#details dt").all_inner_texts(), page.locator("#details dd").all_inner_texts(), strict=True)
    )


def cut_off(page: Page) -> list[str]:
    """Controls that reach out of the page, and scrollbars that the page as a whole has."""
    parts: list[str] = page.evaluate(
        """() => {
            const controls = ".toolbar button, .toolbar input, .tabs button, .label button, #timeline";
            const out = [...document.querySelectorAll(controls)]
                .filter(part => {
                    const box = part.getBoundingClientRect();
                    // Rows are scrolled.
                    const isAbove = !part.closest(".label") && (box.top < 0 || box.bottom > innerHeight + 1);
                    return box.left < 0 || box.right > innerWidth + 1 || isAbove || box.height < 16;
                })
                .map(part => part.outerHTML);
            const root = document.documentElement;
            return root.scrollWidth > innerWidth ? [...out, `${root.scrollWidth} wide`] : out;
        }"""
    )
    return parts


def table(page: Page) -> dict[str, list[str]]:
    """The totals' rows by module."""
    rows = page.locator("tbody tr:has(th)").all()
    return {row.locator("th").inner_text(): row.locator("td").all_inner_texts() for row in rows}


def one_step() -> Timeline:
    """One step by hand, in µs: a model, two layers of one class, a backward in two spans, a kernel, a counter.

    ```
    forward  0 GPT ................... 1000      backward  1200 GPT ................... 2000
               100 h.0 400  500 h.1 900                      1250 h.1 1500  1600 h.0 1700, 1750 h.0 1900 (recompute)
    gpu        150 gemm 350                      RSS  0: 1 GiB   1000: 4 GiB   1500: 2 GiB
    ```
    """
    process = Process(4242, 0)
    names = [Name("GPT", "GPT", "GPT"), Name("h.0: Block", "GPT.h.0", "Block"), Name("h.1: Block", "GPT.h.1", "Block")]
    names.append(Name("gemm", "GPT.h.0", "gemm_kernel"))
    rows = [  # start, end, name, phase, track, depth, parent, link, complete
        (0, 1000, 0, 0, 0, 0, -1, 10, 1),
        (100, 400, 1, 0, 0, 1, 0, 11, 1),
        (150, 350, 3, 0, 2, 0, -1, -1, 1),
        (500, 900, 2, 0, 0, 1, 0, 12, 1),
        (1200, 2000, 0, 1, 1, 0, -1, 10, 1),
        (1250, 1500, 2, 1, 1, 1, 4, 12, 1),
        (1600, 1700, 1, 1, 1, 1, 4, 11, 1),
        (1750, 1900, 1, 2, 1, 1, 4, 11, 1),
    ]
    start, end, name, phase, track, depth, parent, link, complete = np.array(rows).T
    zeros = np.zeros(len(rows))
    return Timeline(
        Slices.of(
            slice_args({1: {"shapes": "float32[2, 8]"}}),
            start=BASE + start * US,
            end=BASE + end * US,
            name=name,
            phase=phase,
            track=track,
            depth=depth,
            parent=parent,
            call=zeros,
            step=zeros,
            link=link,
            complete=complete,
        ),
        names,
        [
            Track("forward", "MainThread", 7, process),
            Track("backward", "MainThread", 7, process),
            Track("gpu", "stream 7", 7, process, 0, 7),
        ],
        Stats(recorded=16),
        [Mark(BASE + 2000 * US, "step", "step 0")],
        [CounterSeries("RSS", "bytes", process, BASE + np.array([0, 1000, 1500]) * US, np.array([1, 4, 2]) << 30)],
        {"torch": "2.13.0"},
    )
