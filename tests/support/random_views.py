"""Random timelines at random scroll positions and zooms: what is drawn and hit at a point, compared with the data.

Where a span lies is worked out here from the data, the viewport and the sizes of rows; the page is only asked for what
it shows, so that this finds wrong painting as well as wrong hits, in any browser.
"""

from __future__ import annotations

import math
import random
from itertools import accumulate
from typing import Protocol

import numpy as np

from modtrace import Timeline
from modtrace.timeline import Name, Process, Track
from modtrace.timeline.slices import Slices, sort_by_start
from tests.support.span_fields import SPAN_FIELDS

from .gpt_timeline import BASE
from .screenshots import Rgb
from .tracks_screen import Screen
from .viewer_page import GAP_PX, HEADER_PX, LEVEL_PX, MARGIN_PX

__all__ = ["Hands", "check_random_views", "random_timeline"]

VIEWS = 6
POINTS = 15


class Hands(Protocol):
    """The actions on a page, and the view of it, in some browser."""

    def look(self) -> Screen:
        """Return the positions on the page, once all is drawn."""

    def show(self, start: float, end: float) -> None:
        """Go to a range of time, ns behind the first moment."""

    def move(self, x: float, y: float) -> None:
        """Move the pointer."""

    def wheel(self, pixels: int) -> None:
        """Turn the wheel where the pointer is."""

    def named(self) -> list[str]:
        """The fully qualified name that the tooltip shows; empty where it shows none."""

    def colors(self, points: list[tuple[float, float]]) -> list[Rgb]:
        """The colours on the screen."""


def random_timeline(rng: random.Random) -> Timeline:
    """Some processes with threads of calls in calls, of any length, with gaps and with none, in 1 ms."""
    processes = [Process(rank, rank) for rank in range(rng.randint(1, 3))]
    owners = sorted(rng.randrange(len(processes)) for _ in range(rng.randint(1, 8)))
    tracks = [Track("forward", f"thread {thread}", thread, processes[owner]) for thread, owner in enumerate(owners)]
    rows: list[tuple[int, ...]] = []
    names: list[Name] = []

    def fill(track: int, depth: int, parent: int, start: int, end: int) -> None:
        while start < end and depth < 30 and len(rows) < 500 * (track + 1):
            begin = start + rng.choice((0, 0, rng.randint(0, (end - start) // 2)))
            stop = rng.choice((end, rng.randint(begin, end)))
            rows.append((BASE + begin, BASE + stop, len(names), 0, track, depth, parent, 0, 0, -1, 1))
            names.append(Name("call", f"s{len(names)}", f"Class{rng.randint(0, 30)}"))
            fill(track, depth + 1, len(rows) - 1, begin, stop)
            start = stop + 1

    # From the first moment to the last, so that these are known.
    rows.append((BASE, BASE + 1_000_000, 0, 0, 0, 0, -1, 0, 0, -1, 1))
    names.append(Name("call", "s0", "Class0"))
    fill(0, 1, 0, 0, 1_000_000)
    for track in range(1, len(tracks)):
        fill(track, 0, -1, 0, 1_000_000)
    columns = Slices.of(**dict(zip(SPAN_FIELDS, np.array(rows, np.int64).T, strict=True)))
    return Timeline(sort_by_start(columns), names, tracks)


class _Layout:
    """The positions of tracks and of headers of processes, below the top of all rows."""

    def __init__(self, timeline: Timeline) -> None:
        self.columns = timeline.columns
        track_heights = [
            (int(self.columns.depth[self.columns.track == track].max()) + 1) * LEVEL_PX + GAP_PX
            for track in range(len(timeline.tracks))
        ]
        owners = [track.process for track in timeline.tracks]
        starts_process = [index == 0 or owners[index - 1] != owner for index, owner in enumerate(owners)]
        heights = [height + HEADER_PX * first for height, first in zip(track_heights, starts_process, strict=True)]
        ends = list(accumulate(heights))
        self.height = ends[-1]
        self.tops = [end - height for end, height in zip(ends, track_heights, strict=True)]
        self.bottoms = ends
        firsts = [index for index, first in enumerate(starts_process) if first]
        self.processes = [
            (self.tops[first] - HEADER_PX, ends[after - 1])
            for first, after in zip(firsts, [*firsts[1:], len(owners)], strict=True)
        ]

    def is_header(self, below: float, scrolled: float) -> bool:
        """Whether a header is at this height: a process' stays at the top of the pane as long as any row of it is."""
        return any(
            header <= below < header + HEADER_PX
            for top, bottom in self.processes
            for header in (min(max(top, scrolled), bottom - HEADER_PX),)
        )

    def spans_at(self, below: float, scrolled: float) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the spans of the level at this height."""
        if self.is_header(below, scrolled):
            return np.array([], np.int64)
        for track, (top, bottom) in enumerate(zip(self.tops, self.bottoms, strict=True)):
            if top <= below < bottom:
                depth = (below - top - MARGIN_PX) // LEVEL_PX
                return np.flatnonzero((self.columns.track == track) & (self.columns.depth == depth))
        return np.array([], np.int64)

    def below_level_top(self, below: float) -> float:
        """Return how far below the upper edge of its level this height is."""
        top = next(top for top, bottom in zip(self.tops, self.bottoms, strict=True) if top <= below < bottom)
        return (below - top - MARGIN_PX) % LEVEL_PX


def check_random_views(timeline: Timeline, hands: Hands, rng: random.Random) -> int:
    """Compare what is drawn and hit at random points with the data; return how many points were compared."""
    layout = _Layout(timeline)
    columns = timeline.columns
    color_of_class: dict[str, Rgb] = {}
    compared = 0
    for _ in range(VIEWS):
        duration = 10 ** rng.uniform(3.5, 6)
        start = rng.uniform(0, 1e6 - duration)
        hands.show(start, start + duration)
        screen = hands.look()
        hands.move(screen.x + 10, screen.y + 10)
        hands.wheel(rng.randint(-int(layout.height), int(layout.height)))
        screen = hands.look()
        pixel = duration / screen.width
        drawn: list[tuple[tuple[float, float], int | None]] = []
        for _ in range(POINTS):
            x = rng.randint(math.ceil(screen.x), int(screen.x + screen.width) - 1)
            y = rng.randint(math.ceil(screen.y), int(screen.y + screen.height) - 1)
            hands.move(x, y)
            assert hands.look() == screen, "pointing moves nothing"
            below = y - screen.y + screen.scrolled
            time = BASE + start + (x - screen.x) / screen.width * duration
            on_level = layout.spans_at(below, screen.scrolled)
            edges = list(zip(on_level.tolist(), columns.start[on_level], columns.end[on_level], strict=True))
            inside = [span for span, begin, end in edges if begin + 3 * pixel < time < end - 3 * pixel]
            near = any(begin - 4 * pixel <= time <= end + 4 * pixel for _, begin, end in edges)
            if len(inside) != 1 and (inside or near):
                continue  # at an edge, or beside a span so near that it is hit all the same
            compared += 1
            shown = hands.named()
            assert shown == [timeline.names[columns.name[span]].fqn for span in inside]
            if layout.is_header(below, screen.scrolled) or below >= layout.height:
                continue
            offset = layout.below_level_top(below)
            if inside:
                below += 1.5 - offset  # where no label is
            elif not 1 <= offset <= LEVEL_PX - 1:
                continue  # a pixel that two levels share
            if below > screen.scrolled and not layout.is_header(below, screen.scrolled):
                drawn.append(((x, screen.y + below - screen.scrolled), inside[0] if inside else None))
        hands.move(1, 1)
        hands.look()
        for (point, span), color in zip(drawn, hands.colors([point for point, _ in drawn]), strict=True):
            if span is None:
                assert max(color) - min(color) <= 30, f"nothing is drawn where no span is: at {point} of {screen}"
            else:
                module_class = timeline.names[columns.name[span]].module_class
                assert max(color) - min(color) > 30
                assert color_of_class.setdefault(module_class, color) == color
    assert len(set(color_of_class.values())) == len(color_of_class), "a colour tells the class"
    return compared
