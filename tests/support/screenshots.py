"""The pixels of a screenshot, decoded in a page that shares nothing with the one in the picture."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

__all__ = ["Rgb", "colors_in", "screen_colors"]

Rgb = tuple[int, int, int]

_DECODE = """async ([png, points]) => {
    const bytes = Uint8Array.from(atob(png), character => character.charCodeAt(0));
    const image = await createImageBitmap(new Blob([bytes], { type: "image/png" }));
    const context = new OffscreenCanvas(image.width, image.height).getContext("2d", { willReadFrequently: true });
    context.drawImage(image, 0, 0);
    const { data } = context.getImageData(0, 0, image.width, image.height);
    return points.map(([x, y]) => {
        const offset = 4 * (y * image.width + x);
        return [data[offset], data[offset + 1], data[offset + 2]];
    });
}"""


def screen_colors(page: Page, points: Sequence[tuple[float, float]], scale: float = 1) -> list[Rgb]:
    """The colours at points of the visible page.

    Args:
        page: what is looked at.
        points: x and y in CSS pixels.
        scale: device pixels per CSS pixel that the page was opened with.
    """
    browser = page.context.browser
    assert browser is not None
    return colors_in(browser, base64.b64encode(page.screenshot()).decode(), points, scale)


def colors_in(browser: Browser, png: str, points: Sequence[tuple[float, float]], scale: float = 1) -> list[Rgb]:
    """The colours at points of a screenshot, which is given as base64."""
    # A page of its own context has neither the shown page's policy nor its scale.
    decoder = browser.new_page()
    try:
        decoded = decoder.evaluate(_DECODE, [png, [[int(x * scale), int(y * scale)] for x, y in points]])
    finally:
        decoder.close()
    return [(red, green, blue) for red, green, blue in decoded]
