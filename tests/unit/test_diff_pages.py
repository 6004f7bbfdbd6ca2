"""A comparison's files: the two typical steps, on one time axis, and the change shown for each span."""

from __future__ import annotations

import base64
import gzip
import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import modtrace
from modtrace import Timeline
from modtrace.compare.side_by_side import TypicalStep, make_comparison, side_by_side
from modtrace.timeline import BACKWARD, FORWARD, CounterSeries, Mark, Name, Process, Slices, Track
from modtrace.timeline.slices import DTYPES
from modtrace.write.html import payload
from tests.support.compared_runs import invoke, recording
from tests.support.report_pages import unpack, values
from tests.support.trace_processor import TraceProcessor

BASE = 1_790_000_000_000_000_000
US = 1_000


def shown(comparison: modtrace.Diff) -> tuple[TypicalStep, TypicalStep]:
    assert comparison._sides is not None
    return comparison._sides


def steps_of(*durations: int, start: int = BASE) -> Timeline:
    """Steps of the given µs: a forward from 10 µs after the start to 5 µs before the end, with another inside it."""
    edges = start + US * np.concatenate([[0], np.cumsum(durations)])
    # A recording starts with its first span.
    edges[0] += 10 * US
    rows = []
    for step, (begin, end) in enumerate(itertools.pairwise(edges)):
        first = begin + 10 * US * (step > 0)
        rows += [(first, end - 5 * US, 0, 0, -1, step), (first + US, first + 3 * US, 1, 1, 2 * step, step)]
    begins, ends, name, depth, parent, step_of = zip(*rows, strict=True)
    columns = Slices.of(
        start=begins, end=ends, name=name, phase=[FORWARD] * len(rows), track=[0] * len(rows), depth=depth,
        parent=parent, call=step_of, step=step_of, link=step_of, complete=[True] * len(rows),
    )  # fmt: skip
    names = [Name("Net", "Net", "Net"), Name("fc: Linear", "Net.fc", "Linear")]
    process = Process(5, 0)
    marks = [Mark(int(edge), "step", f"step {step}") for step, edge in enumerate(edges[1:])]
    counters = [CounterSeries("RSS", "bytes", process, edges[:-1].copy(), np.arange(len(durations)))]
    return Timeline(columns, names, [Track("forward", "MainThread", 5, process)], marks=marks, counters=counters)


@pytest.mark.parametrize(
    ("durations", "typical"),
    [
        ((100, 200, 300), 1),
        ((900, 400, 100, 107, 102, 103, 101, 110), 4),  # two steps of warm-up; the median of the others is 102.5
        ((100, 100, 100), 1),  # the first step's first 10 µs are not recorded
        ((50,), 0),
    ],
)
def test_typical_step_is_nearest_the_median_after_the_warm_up(durations: tuple[int, ...], typical: int) -> None:
    step = steps_of(*durations).typical_step()
    assert step.columns.step.tolist() == [typical, typical]
    assert [mark.text for mark in step.marks] == [f"step {typical}"]


def test_typical_step_without_a_whole_step_is_an_error() -> None:
    whole = steps_of(100)
    cut = replace(whole.slices, complete=np.zeros(len(whole.slices), np.bool_))
    with pytest.raises(modtrace.ModtraceError, match=r"call recording\.step\(\) after each step"):
        replace(whole, slices=cut, marks=[]).typical_step()


def test_sides_are_on_two_tracks_and_start_together() -> None:
    comparison = modtrace.diff(steps_of(100, 100, 100), steps_of(130, 130, 130, start=BASE + 10**12))
    joined = side_by_side(shown(comparison))

    assert [(track.name, track.process.name) for track in joined.tracks] == [
        ("forward · MainThread", "rank 0 · before · python"),
        ("forward · MainThread", "rank 0 · after · python"),
    ]
    origin = BASE + 100 * US
    columns = joined.columns
    rows = zip(columns.start - origin, columns.end - origin, columns.track, columns.parent, columns.depth, strict=True)
    # Step 1 is typical on both sides: 100 µs and 130 µs, with the first span 10 µs after the start.
    assert [tuple(int(value) for value in row) for row in rows] == [
        (10_000, 95_000, 0, -1, 0),
        (10_000, 125_000, 1, -1, 0),
        (11_000, 13_000, 0, 0, 1),
        (11_000, 13_000, 1, 1, 1),
    ]
    assert [joined.names[name].fqn for name in columns.name] == ["Net", "Net", "Net.fc", "Net.fc"]
    assert len(set(columns.link[:2].tolist())) == 2, "calls of the two sides are not joined"
    assert [(mark.time_ns - origin, mark.kind, mark.text) for mark in joined.marks] == [
        (100_000, "mark", "end of step 1, before"),
        (130_000, "mark", "end of step 1, after"),
    ]
    assert [(counter.process.program, (counter.time - origin).tolist()) for counter in joined.counters] == [
        ("before · python", [0]),
        ("after · python", [0]),
    ]


def test_ranks_of_both_sides_are_paired() -> None:
    def two_ranks(timeline: Timeline) -> Timeline:
        columns = timeline.columns
        other = replace(columns, track=np.ones_like(columns.track))
        both = Slices.of(None, **{f: np.concatenate([getattr(columns, f), getattr(other, f)]) for f in DTYPES})
        order = np.lexsort((both.depth, both.start))
        tracks = [timeline.tracks[0], timeline.tracks[0]._replace(process=Process(6, 1))]
        return replace(timeline, slices=replace(both.take(order), parent=np.full(len(both), -1)), tracks=tracks)

    comparison = modtrace.diff(two_ranks(steps_of(100, 100, 100)), two_ranks(steps_of(100, 100, 100)))
    assert [track.process.name for track in side_by_side(shown(comparison)).tracks] == [
        "rank 0 · before · python",
        "rank 0 · after · python",
        "rank 1 · before · python",
        "rank 1 · after · python",
    ]


def test_each_span_has_the_change_of_its_module_and_phase() -> None:
    renamed = {f"Net.h.{layer}": f"Net.layers.{layer}" for layer in range(8)}
    difference = modtrace.diff(
        recording(0), recording(1, {("Net.h.3", BACKWARD): 1.5}, rename=renamed), map={"Net.h": "Net.layers"}
    )
    joined = side_by_side(shown(difference))
    header, body = unpack(
        payload(joined, make_comparison(joined, shown(difference), difference.header, difference.changes))
    )

    comparison = header["comparison"]
    assert comparison["titles"] == ["before", "after"]
    assert comparison["notes"] == difference.header
    assert comparison["changes"] == [
        [
            c.fqn,
            c.phase,
            c.base_ns,
            c.new_ns,
            c.difference_ns,
            c.low_ns,
            c.high_ns,
            c.base_calls,
            c.new_calls,
            c.verdict,
        ]
        for c in difference.changes
    ]
    of_span = [int(index) for index in values(body, comparison["of_span"])]
    assert len(of_span) == len(joined.columns) == 2 * 18
    for span, index in zip(joined.spans, of_span, strict=True):
        change = difference.changes[index]
        assert (change.fqn, change.phase) == (span.fqn.replace("Net.h.", "Net.layers."), span.phase)
    assert [difference.changes[i].verdict for i in of_span].count("slower") == 2, "on both sides"


def test_save_writes_the_format_of_the_suffix(tmp_path: Path) -> None:
    comparison = modtrace.diff(recording(0), recording(1, {("Net.h.3", FORWARD): 1.5}))
    for suffix, form in (
        (".csv", comparison.to_csv()),
        (".json", comparison.to_json()),
        (".md", comparison.to_markdown()),
    ):
        comparison.save(tmp_path / f"d{suffix}")
        assert (tmp_path / f"d{suffix}").read_text() == form
    with pytest.raises(modtrace.WriteError, match=r"d\.txt: the suffix must be one of \.html, "):
        comparison.save(tmp_path / "d.txt")
    comparison.save(tmp_path / "d.html")
    page = (tmp_path / "d.html").read_bytes()
    header, _ = unpack(gzip.decompress(base64.b64decode(page.rpartition(b'id="modtrace-data">')[2].partition(b"<")[0])))
    assert header["comparison"]["notes"] == [*comparison.findings_lines, *comparison.header]
    assert b'id="modtrace-data">H4sI' in (tmp_path / "d.html").read_bytes()


def test_saved_trace_has_both_sides_in_perfetto(tmp_path: Path, trace_processor: type[TraceProcessor]) -> None:
    comparison = modtrace.diff(recording(0), recording(1, {("Net.h.3", FORWARD): 1.5}))
    comparison.save(tmp_path / "d.pftrace")

    rows = trace_processor.open(tmp_path / "d.pftrace").query(
        "select process.name as name, count(*) as spans, min(slice.ts) as first from slice join thread_track on "
        "slice.track_id = thread_track.id join thread using (utid) join process using (upid) "
        "where category in ('forward', 'backward') group by process.name order by process.name"
    )
    assert [(row["name"], row["spans"]) for row in rows] == [("after · python", 18), ("before · python", 18)]
    assert len({row["first"] for row in rows}) == 1, "their first spans follow the starts of their steps at once"
    again = modtrace.load(tmp_path / "d.pftrace")
    assert len(again.columns) == 36
    assert [mark.text for mark in again.marks] == [mark.text for mark in side_by_side(shown(comparison)).marks]


def test_command_writes_the_comparison(tmp_path: Path) -> None:
    base, new = tmp_path / "base.pftrace", tmp_path / "new.pftrace"
    recording(0).save(base)
    recording(1).save(new)
    done = invoke(base, new, "-o", tmp_path / "changes.html")
    assert (done.exit_code, done.stderr) == (0, f"the comparison is in {tmp_path / 'changes.html'}\n")
    assert "step: " in done.stdout
    assert (tmp_path / "changes.html").stat().st_size > 10_000
    refused = invoke(base, new, "-o", tmp_path / "changes.doc")
    assert (refused.exit_code, "the suffix must be one of" in refused.stderr) == (1, True)
