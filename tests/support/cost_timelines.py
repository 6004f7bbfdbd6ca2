"""Small timelines with FLOPs and memory, whose sums are worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from modtrace import Timeline
from modtrace.ring import Kind
from modtrace.ring.slot_format import NO_NAME
from modtrace.timeline import BACKWARD, FORWARD, CounterSeries, Mark, Name, Process, Slices, Track
from tests.support.event_script import EventScript
from tests.support.timelines import build_timeline, with_args


def counted(flops: int = 100) -> Timeline:
    """Return three steps of 100 ns: the first is counted, the second is like it, and the third has other inputs."""
    script = EventScript()
    net, inner = script.name("Net", module_class="Net"), script.name("Net.a", module_class="A")
    for number, cost in enumerate((flops, 30, 7, 200)):
        script.note_operator(number, "aten::mm", "bfloat16", cost, 2 * number + 5)
    script.note_operator(4, "aten::rnn", "float32", -1)
    for step, inputs in enumerate((0, 0, 1)):
        now = 100 * step
        if step < 2:
            script.event(now, Kind.COUNTING, NO_NAME, 1 - step)
        script.enter(now, net, step, 10 * step)
        script.event(now, Kind.INPUTS, NO_NAME, inputs)
        script.enter(now + 10, inner, step, 10 * step)
        if step == 0:
            script.operator(now + 11, 0)
            script.operator(now + 12, 4)
        script.exit(now + 20, inner, step, 10 * step + 1)
        if step == 0:
            script.operator(now + 21, 1)
        script.exit(now + 30, net, step, 10 * step + 1)
        if step == 0:
            script.operator(now + 35, 2)
        script.node_begin(now + 40, 10 * step)
        if step == 0:
            script.operator(now + 41, 3)
        script.node_end(now + 50, 10 * step)
        script.step(now + 100, step)
    return build_timeline(script.snapshot())


PROCESS = Process(7)


NAMES = [Name("Net", "Net", "Net"), Name("a: Linear", "Net.a", "Linear"), Name("b: Linear", "Net.b", "Linear")]


NET, A, B = range(3)


SAMPLES = [
    *((1000, 100), (1200, 140), (1210, 120), (1400, 170), (1500, 160)),
    *((2010, 250), (2100, 190), (2300, 130)),
    *((3005, 230), (3200, 210), (3500, 150)),
]


# Sampled before each event at which it changed:           100    120         170   160    190       130
#   step 0                                             Net 1001───────────────────1501 ┐Net 2001────2301
#                                                        a  1101──1211
#                                                        b            1301─1401        b 2001─2101
#   step 1: Net keeps 150 - 130, and holds 100 more inside; at its peak it is in a, which has kept 80 by then
SPANS = [
    (NET, FORWARD, 1001, 1501, -1, 0),
    (A, FORWARD, 1101, 1211, 0, 0),
    (B, FORWARD, 1301, 1401, 0, 0),
    (NET, BACKWARD, 2001, 2301, -1, 0),
    (B, BACKWARD, 2001, 2101, 3, 0),
    (NET, FORWARD, 3001, 3501, -1, 1),
    (A, FORWARD, 3101, 3201, 5, 1),
]


def recorded(spans: Sequence[tuple[int, ...]] = SPANS, process: Process = PROCESS) -> Timeline:
    name, phase, start, end, parent, step = zip(*spans, strict=True)
    return Timeline(
        Slices.of(
            start=start,
            end=end,
            name=name,
            phase=phase,
            track=phase,
            depth=[int(above >= 0) for above in parent],
            parent=parent,
            call=step,
            step=step,
            link=[-1] * len(spans),
            complete=[True] * len(spans),
        ),
        NAMES,
        [Track(kind, "MainThread", 7, process) for kind in ("forward", "backward")],
        marks=[Mark(2500, "step", "step 0")],
        counters=[CounterSeries("allocated", "bytes", process, *np.array(SAMPLES, np.int64).T)],
    )


FLOPS = {0: {"flops": "5000"}, 1: {"flops": "220"}, 2: {"flops": "unknown"}, 3: {"flops": "300"}}
"""FLOPs of the first four spans of `recorded`, which take 500, 110, 100 and 300 ns."""


def with_flops() -> Timeline:
    memory, flops = {"sentences": ["Net.a grows"], "saved": {}}, {"dtypes": {"cpu float32": 5520}}
    return with_args(replace(recorded(), metadata={"memory": memory, "flops": flops}), FLOPS)
