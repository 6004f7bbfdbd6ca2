"""Rows of a merged trace: those that a merge should have, and those that a file has."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

from modtrace import Timeline
from modtrace.timeline import BackwardPass, CollectiveName, Group, Mark, Track
from tests.support.kineto import BASE, PROCESS, TID, recording
from tests.support.other_kinds import collectives_of, with_collectives, with_passes
from tests.support.synthetic_profile import ns

WORKER = 202


GROUPS = [Group("0", (0, 1), "default_pg"), Group("mesh\ud800", (0, 2, 4), "mesh_dp")]


NAMES = [CollectiveName("all_reduce", "0"), CollectiveName("send", "mesh\ud800", 1), CollectiveName("barrier", "0")]


LATE = 7_000
"""The lead of the recording's clock over the trace's, in ns."""


FIELDS = ("start", "end", "done", "name", "is_wait", "counter", "nbytes", "track", "step", "complete")


# Start, end, done (or -1), name, whether it is a wait, counter, bytes, track, step, whether it is complete.
ROWS = [
    (1500, 1700, 1900, 0, False, 0, 4096, 2, 0, True),  # in Net.a
    (1600, 1650, -1, 0, True, 0, 0, 2, 0, True),  # in the call itself
    (2200, 2600, -1, -1, True, -1, 0, 2, 0, True),  # in Net, for something unknown
    (5200, 5300, -1, 1, False, 3, 20, 2, 1, False),  # outside of all modules
    (5250, 5400, 5390, 2, False, -1, 0, 3, 1, True),  # on another thread, on which no module ran
]


PASSES = [
    (5900, 6500, "MainThread", TID, True),
    (6100, 6200, "MainThread", TID, True),
    (6600, 6700, "worker", WORKER, False),
]


def recorded(late: int = LATE) -> Timeline:
    calls = recording(
        ("Net", 1000, 5000, 0),
        ("a: Linear", 1100, 2000, 1),
        ("a: Linear", 6000, 6400, 0, "backward"),
        base=BASE + late,
    )
    rows = np.array(ROWS, np.int64)
    rows[:, :2] += BASE + late
    rows[:, 2] = np.where(rows[:, 2] >= 0, rows[:, 2] + BASE + late, -1)
    tracks = [
        *calls.tracks,
        Track("communication", "MainThread", TID, PROCESS),
        Track("communication", "worker", WORKER, PROCESS),
    ]
    timeline = replace(calls, tracks=tracks, marks=[Mark(BASE + late + 5100, "step", "step 0")])
    timeline = replace(timeline, slices=replace(calls.columns, step=np.array([0, 0, 1])))
    collectives = collectives_of(NAMES, GROUPS, FIELDS, rows)
    passes = [
        BackwardPass(BASE + late + start, BASE + late + end, thread, tid, PROCESS, complete)
        for start, end, thread, tid, complete in PASSES
    ]
    return with_passes(with_collectives(timeline, collectives), passes)


Row = tuple[int, int, str, str, str, int, int, int, int]
"""device, stream, label, fqn, phase, call, step, start, end."""


def rows_in_json(path: Path) -> Counter[Row]:
    """Return the rows of a file, read by code that shares nothing with modtrace's reader."""
    document = json.loads(path.read_text())
    base = document.get("baseTimeNanoseconds", 0)
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in document["traceEvents"]
        if event.get("name") == "thread_name" and str(event["args"]["name"]).startswith("modules · ")
    }
    rows: Counter[Row] = Counter()
    for event in document["traceEvents"]:
        if event.get("ph") == "X" and (event["pid"], event["tid"]) in names and "fqn" in event["args"]:
            match = re.search(r"stream (\d+)", names[event["pid"], event["tid"]])
            assert match is not None
            args, start = event["args"], base + ns(event["ts"])
            end = start + ns(event["dur"])
            key = (event["pid"], int(match[1]), event["name"], args["fqn"], event["cat"], args["call"], args["step"])
            rows[key + (start, end)] += 1  # noqa: RUF005 (mypy reads it as Python 3.10)
    return rows
