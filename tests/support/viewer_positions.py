"""The positions at which the offline page draws the slices of a timeline whose slices are numbered."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from modtrace import Timeline
from modtrace.timeline import Name, Process, Track
from modtrace.timeline.slices import Slices, sort_by_start
from tests.support.gpt_timeline import BASE
from tests.support.span_fields import SPAN_FIELDS
from tests.support.tracks_screen import Screen
from tests.support.viewer_page import GAP_PX, HEADER_PX, LEVEL_PX, MARGIN_PX

SLOT_NS = 1000


@dataclass(frozen=True)
class Level:
    """One depth of one track: where it lies below the top of all rows, and the number that its spans spell."""

    track: int
    depth: int
    y: float
    number: int

    def fqn(self, slot: int) -> str:
        return f"t{self.track}.d{self.depth}.s{slot}"


@dataclass(frozen=True)
class Numbered:
    """A timeline whose levels spell their numbers, in so many bits."""

    timeline: Timeline
    levels: list[Level]
    bits: int


def numbered_timeline(threads: int, depths: int) -> Numbered:
    """A forward and a backward track per thread, each of so many levels that spell 1, 2, 3, …"""
    process = Process(7, 0)
    tracks = [
        Track(kind, f"thread {thread}", thread, process)
        for thread in range(threads)
        for kind in ("forward", "backward")
    ]
    levels = [
        Level(
            track,
            depth,
            HEADER_PX + track * (depths * LEVEL_PX + GAP_PX) + MARGIN_PX + depth * LEVEL_PX,
            track * depths + depth + 1,
        )
        for track in range(len(tracks))
        for depth in range(depths)
    ]
    bits = levels[-1].number.bit_length()
    rows: list[tuple[int, ...]] = []
    names: list[Name] = []
    for level in levels:
        for slot in range(bits):
            if level.number >> slot & 1:
                start = BASE + slot * SLOT_NS
                phase = level.track % 2
                rows.append((start, start + SLOT_NS - 50, len(names), phase, level.track, level.depth, -1, 0, 0, -1, 1))
                names.append(Name("span", level.fqn(slot), f"Class{level.number % 40}"))
    columns = Slices.of(**dict(zip(SPAN_FIELDS, np.array(rows, np.int64).T, strict=True)))
    return Numbered(Timeline(sort_by_start(columns), names, tracks), levels, bits)


def x_of(screen: Screen, slot: int) -> float:
    """The middle of a time slot."""
    return screen.x + ((slot + 0.5) * SLOT_NS - screen.start) / (screen.end - screen.start) * screen.width


def y_of(screen: Screen, level: Level) -> float:
    """The upper edge of a level."""
    return screen.y + level.y - screen.scrolled


def visible_in(screen: Screen, levels: list[Level]) -> list[Level]:
    """The levels that are wholly in sight, below the header of the process."""
    top, bottom = screen.y + HEADER_PX, screen.y + screen.height
    return [level for level in levels if top <= y_of(screen, level) and y_of(screen, level) + LEVEL_PX <= bottom]
