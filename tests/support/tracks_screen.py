"""The positions of tracks on the screen, by the boxes of the page's elements, without the scroll position."""

from __future__ import annotations

from typing import NamedTuple

from .viewer_page import HEADER_PX

__all__ = ["BOXES", "Screen", "screen_of"]

BOXES = """(() => {
    const pane = document.querySelector("#timeline");
    const { x, y, width } = pane.getBoundingClientRect();
    const bottom = document.querySelector(".scroller").getBoundingClientRect().bottom;
    const first = document.querySelector("[data-row='track 0']").getBoundingClientRect().top;
    return [x, y, width, bottom - y, first, Number(pane.dataset.start), Number(pane.dataset.end)];
})()"""
"""JavaScript whose result `screen_of` takes."""


class Screen(NamedTuple):
    """The tracks' visible part in CSS pixels, how far the rows are scrolled, and what time its width shows."""

    x: float
    y: float
    width: float
    height: float
    scrolled: float
    start: float
    end: float


def screen_of(x: float, y: float, width: float, height: float, first: float, start: float, end: float) -> Screen:
    """Return what the boxes say: of the pane, and of the first track's label its top."""
    return Screen(x, y, width, height, y + HEADER_PX - first, start, end)
