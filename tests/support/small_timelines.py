"""A call of a net as a timeline, and a timeline as plain values to compare."""

from __future__ import annotations

import numpy as np

from modtrace import Timeline
from modtrace.timeline import BACKWARD, FORWARD, CounterSeries, Mark, Name, Process, Slices, Stats, Track
from modtrace.timeline import Timeline as TimelineData
from modtrace.timeline.slices import DTYPES
from tests.support.timelines import EPOCH, with_args

PROCESS = Process(4242, 0)


def call_of_net() -> Timeline:
    """A net with a layer, forward and backward; in backward both start in the same nanosecond."""
    rows = [
        (0, 1_000_001, 0, FORWARD, 0, -1, 7),
        (1, 1_000, 1, FORWARD, 1, 0, 8),
        (2_000_000, 2_500_000, 0, BACKWARD, 0, -1, 7),
        (2_000_000, 2_000_999, 1, BACKWARD, 1, 2, 8),
        (2_400_000, 2_500_000, 1, BACKWARD, 1, 2, 8),
    ]
    start, end, name, phase, depth, parent, link = np.array(rows).T
    return with_args(Timeline(
        slices=Slices.of(
            start=EPOCH + start, end=EPOCH + end, name=name, phase=phase, track=phase, depth=depth, parent=parent,
            call=[0, 3, 0, 3, 3], step=[5] * 5, link=link, complete=[1, 1, 1, 1, 0],
        ),
        names=[Name("Net", "Net", "Net"), Name("fc: Linear", "Net.fc", "Linear")],
        tracks=[Track(kind, "MainThread", 4242, PROCESS) for kind in ("forward", "backward")],
        stats=Stats(recorded=10, unfinished=1),
        marks=[Mark(EPOCH + 2_500_001, "step", "step 5")],
        counters=[CounterSeries("RSS", "bytes", PROCESS, np.array([EPOCH + 10]), np.array([2**40]))],
        metadata={"engine": "native", "versions": {"torch": "2.13.0"}},
    ), {1: {"shapes": "float32[2, 8]"}})  # fmt: skip


def as_values(timeline: TimelineData) -> dict[str, object]:
    """Return all content of a timeline, with names and tracks instead of numbers, links by the first slice of each."""
    columns = {field: getattr(timeline.slices, field).tolist() for field in DTYPES}
    columns["name"] = [timeline.names[name] if name >= 0 else None for name in columns["name"]]
    columns["track"] = [timeline.tracks[track] for track in columns["track"]]
    _, first, link = np.unique(timeline.slices.link, return_index=True, return_inverse=True)
    columns["link"] = first[link].tolist()
    columns |= {counter.name: [counter.time.tolist(), counter.value.tolist()] for counter in timeline.counters}
    columns |= {"args": timeline.span_args}
    return columns | {"stats": timeline.stats, "marks": [*timeline.marks], "metadata": timeline.metadata}
