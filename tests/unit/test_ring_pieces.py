"""A large ring in pieces: the timeline, the summary and some steps are those of the ring as a whole."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import numpy as np
import pytest

from modtrace.read import load, load_around, summarize_large
from modtrace.ring import Kind, ring_serials
from modtrace.ring.range_text import range_text
from modtrace.timeline import Timeline
from modtrace.timeline.decode import pieces
from modtrace.timeline.slices import DTYPES
from tests.support.event_script import EventScript

STEPS = 60


class Training:
    """Steps of a model with a backward pass of each, in ranges that are around some of them.

    Args:
        path: the ring.
        seed: of what is random.
        capacity: of the ring.
        retains: how often the backward pass of a step comes in the next one.
    """

    def __init__(self, path: Path, seed: int, capacity: int = 8192, retains: float = 0) -> None:
        begin = time.monotonic_ns() + 10**9
        self.script = EventScript(capacity, path, clock=lambda at: begin + at)
        self.random, self.now, self.sequence, self.calls = random.Random(seed), 0, 0, 0
        self.names = [self.script.name(name) for name in ("Net", "Net.body", "Net.head")]
        left: list[int] = []
        for number in range(STEPS):
            if number % 20 == 0:
                self.range(Kind.RANGE_BEGIN, "epoch", number)
            self.range(Kind.RANGE_BEGIN, "fetch", 1000 + number)
            self.range(Kind.RANGE_END, "fetch", 1000 + number)
            made = self.forward()
            if self.random.random() >= retains:
                left, made = [], left + made
                self.backward(number, made)
            else:
                left += made
            if number % 7 == 0:
                self.script.mark(self.after(), f"at {number}")
            self.range(Kind.RANGE_BEGIN, "update", 2000 + number)
            self.script.step(self.after(), number)
            self.range(Kind.RANGE_END, "update", 2000 + number)
            if number % 20 == 14:
                self.range(Kind.RANGE_END, "epoch", number - 14)
        self.script.close()

    def after(self) -> int:
        self.now += self.random.randint(1, 1000)
        return self.now

    def range(self, kind: Kind, name: str, number: int) -> None:
        texts = {"update": range_text(name, "optimizer"), "fetch": range_text(name, "data loading")}
        self.script.collective(self.after(), kind, texts.get(name, range_text(name, "user")), number)

    def forward(self) -> list[int]:
        first, call, (net, *inner) = self.sequence, self.calls, self.names
        self.script.enter(self.after(), net, call, self.sequence)
        for name in inner * self.random.randint(1, 3):
            self.calls += 1
            self.script.enter(self.after(), name, self.calls, self.sequence)
            self.sequence += 2
            self.script.exit(self.after(), name, self.calls, self.sequence)
        self.script.exit(self.after(), net, call, self.sequence)
        self.calls += 1
        return [*range(first, self.sequence)]

    def backward(self, number: int, made: list[int]) -> None:
        self.script.pass_begin(self.after(), number)
        for sequence in reversed(made):
            self.script.node(self.after(), self.after(), sequence)
        self.script.pass_end(self.after(), number)


def as_values(timeline: Timeline) -> dict[str, object]:
    """All that a timeline says, with names in place of their numbers, and links by the first slice of each."""
    columns = {field: getattr(timeline.slices, field).tolist() for field in DTYPES}
    columns["name"] = [timeline.names[name] for name in columns["name"]]
    _, first, link = np.unique(timeline.slices.link, return_index=True, return_inverse=True)
    columns["link"] = first[link].tolist()
    whole_run = {**timeline.metadata, "whole_run": {}}
    return columns | {"stats": timeline.stats, "marks": [*timeline.marks], "metadata": whole_run}


def no_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_EVENTS", 1 << 30)


@pytest.mark.parametrize(("seed", "capacity", "retains"), [(1, 8192, 0), (2, 1500, 0), (3, 8192, 0.1), (1, 8192, 0.2)])
def test_pieces_say_what_the_whole_ring_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, capacity: int, retains: float
) -> None:
    ring = tmp_path / "run.modtrace"
    Training(ring, seed, capacity, retains)
    monkeypatch.setattr(pieces, "PIECE_EVENTS", 128)
    in_pieces, summary = load(ring), summarize_large(ring, "module")
    chosen = [(-3, -1), (-2, None), (50, 53), (45, -12)]
    some = [load_around(ring, steps) for steps in chosen]
    no_pieces(monkeypatch)
    whole = load(ring)

    assert as_values(in_pieces) == as_values(whole)
    assert (summary is None) == (retains == 0.2)  # the graph of a step outlives the piece that it is in
    if summary is not None:
        assert json.loads(summary.to_json()) == json.loads(whole.summary().to_json())
    for steps, part in zip(chosen, some, strict=True):
        assert len(part.slices) < len(whole.slices) / 2
        stats = {"stats": part.stats}  # what nodes outside of all modules are in the rest is not read
        assert as_values(part.steps(*steps)) == as_values(whole.steps(*steps)) | stats


def test_the_oldest_events_of_a_running_process_are_left_out(tmp_path: Path) -> None:
    path, begin = tmp_path / "run.modtrace", time.monotonic_ns()
    script = EventScript(64, path, clock=lambda at: begin + at)
    for number in range(100):
        script.step(number, number)

    assert ring_serials(path) == range(40, 100)
    script.close()
    assert ring_serials(path) == range(36, 100)
