"""Written timelines, imported by the real trace processor: the same in both formats, without loss."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import modtrace
from modtrace import Timeline
from modtrace.formats.limits import UNNAMED, escaped
from modtrace.timeline import BACKWARD, PHASES, CounterSeries, Mark, Name, Process, Slices, Stats, Track
from modtrace.timeline.nesting import nest_by_time
from modtrace.timeline.slices import sort_by_start
from tests.support.test_scale import scaled
from tests.support.timelines import EPOCH, HOSTILE, gpt2_timeline, timeline_of, timelines, with_args
from tests.support.trace_processor import TraceProcessor

Opener = type[TraceProcessor]
FORMATS = (".json", ".pftrace")

ARGS = ("fqn", "module_class", "call", "step", "complete", "link")
SLICES = f"""
    select s.name, s.category, s.ts, s.dur, s.depth, coalesce(t.name, thread.name) as track,
        {", ".join(f"coalesce(extract_arg(s.arg_set_id, 'debug.{a}'), extract_arg(s.arg_set_id, 'args.{a}')) {a}" for a in ARGS)}
    from slice s join track t on t.id = s.track_id
        left join thread_track on thread_track.id = t.id left join thread using (utid)
    where s.category in ('forward', 'backward', 'recompute')
"""  # noqa: E501
FLOWS = f"""
    select a.name, a.ts, a.dur, b.name as to_name, b.ts as to_ts, b.dur as to_dur
    from flow join ({SLICES.replace("select ", "select s.id, ", 1)}) a on a.id = slice_out
        join ({SLICES.replace("select ", "select s.id, ", 1)}) b on b.id = slice_in
"""
# Counters, without the parts of steps.
SAMPLES = """
    select c.ts, c.value from counter c join counter_track t on t.id = c.track_id where t.name not like 'step: %'
"""


class Imported:
    """A timeline as the trace processor has it, in nanoseconds since its first moment."""

    def __init__(self, opener: Opener, timeline: Timeline, path: Path) -> None:
        timeline.save(path)
        trace = opener.open(path)
        self.problems = trace.import_problems()
        moments = [
            *timeline.columns.start[:1].tolist(),
            *(mark.time_ns for mark in timeline.marks),
            *(int(counter.time[0]) for counter in timeline.counters if len(counter.time)),
        ]
        # Chrome's times count from the first moment, Perfetto's are Unix time.
        self.base = 0 if path.suffix == ".json" else min(moments, default=0)
        self.slices = in_order([{**row, "ts": row["ts"] - self.base} for row in trace.query(SLICES)])
        self.flows = in_order(
            [{**row, "ts": row["ts"] - self.base, "to_ts": row["to_ts"] - self.base} for row in trace.query(FLOWS)]
        )
        self.marks = in_order(
            [
                {**row, "ts": row["ts"] - self.base}
                for row in trace.query("select name, category, ts, dur from slice where category in ('step', 'mark')")
            ]
        )
        self.samples = in_order([{"ts": row["ts"] - self.base, "value": row["value"]} for row in trace.query(SAMPLES)])
        self.first = min(moments, default=0)


def in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["ts"], row.get("depth", 0), repr(row)))


def expected_slices(timeline: Timeline, first: int) -> list[dict[str, Any]]:
    columns = timeline.columns
    in_process = [(track.process, track.name) for track in timeline.tracks]
    tracks = [
        track.name if in_process.count((track.process, track.name)) == 1 else f"{track.name} {track.tid}"
        for track in timeline.tracks
    ]
    arrowed = {row for pair in expected_pairs(timeline) for row in pair}
    rows = []
    for row, span in enumerate(timeline.spans):
        link = int(columns.link[row])
        rows.append(
            {
                "name": escaped(span.name) or UNNAMED,
                "category": span.phase,
                "ts": span.start_ns - first,
                "dur": span.duration_ns,
                "depth": span.depth,
                "track": escaped(tracks[columns.track[row]]),
                "fqn": escaped(span.fqn),
                "module_class": escaped(span.module_class),
                "call": span.call,
                "step": span.step,
                "complete": None if span.complete else 0,
                "link": link if link >= 0 and row not in arrowed else None,
            }
        )
    return in_order(rows)


def expected_pairs(timeline: Timeline) -> list[tuple[int, int]]:
    """The first span of each link that is not backward, and the first backward span, if it starts later."""
    columns = timeline.columns
    pairs = []
    for link in sorted({*columns.link.tolist()} - {-1}):
        rows = [row for row in range(len(columns)) if columns.link[row] == link]
        leaves = [row for row in rows if columns.phase[row] != BACKWARD]
        arrives = [row for row in rows if columns.phase[row] == BACKWARD]
        if leaves and arrives and columns.start[leaves[0]] < columns.start[arrives[0]]:
            pairs.append((leaves[0], arrives[0]))
    return pairs


def expected_flows(timeline: Timeline, first: int) -> list[dict[str, Any]]:
    spans = timeline.spans

    def end(row: int, prefix: str) -> dict[str, Any]:
        span = spans[row]
        name = escaped(span.name) or UNNAMED
        return {f"{prefix}name": name, f"{prefix}ts": span.start_ns - first, f"{prefix}dur": span.duration_ns}

    return in_order([end(leaves, "") | end(arrives, "to_") for leaves, arrives in expected_pairs(timeline)])


def check(opener: Opener, timeline: Timeline, folder: Path) -> None:
    """Assert that the trace processor has everything of the timeline, in both formats, and nothing else."""
    for suffix in FORMATS:
        imported = Imported(opener, timeline, folder / f"trace{suffix}")
        assert imported.problems == {}
        assert imported.slices == expected_slices(timeline, imported.first)
        assert imported.flows == expected_flows(timeline, imported.first)
        assert imported.marks == in_order(
            [
                {"name": escaped(m.text), "category": m.kind, "ts": m.time_ns - imported.first, "dur": 0}
                for m in timeline.marks
            ]
        )
        assert imported.samples == in_order(
            [
                {"ts": time - imported.first, "value": float(value)}
                for counter in timeline.counters
                for time, value in zip(counter.time.tolist(), counter.value.tolist(), strict=True)
            ]
        )


@settings(max_examples=scaled(20, 60, 1000), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(timeline=timelines())
def test_any_timeline_is_imported_alike_and_whole(trace_processor: Opener, tmp_path: Path, timeline: Timeline) -> None:
    check(trace_processor, timeline, tmp_path)


def test_training_steps_of_more_than_one_chunk(trace_processor: Opener, tmp_path: Path) -> None:
    timeline = gpt2_timeline(70_000)
    both = [Imported(trace_processor, timeline, tmp_path / f"trace{suffix}") for suffix in FORMATS]
    for imported in both:
        assert imported.problems == {}
        assert imported.slices == expected_slices_without_arrows(timeline, imported.first)
        assert len(imported.flows) == len(timeline.columns) // 2
    assert both[0].flows == both[1].flows


def expected_slices_without_arrows(timeline: Timeline, first: int) -> list[dict[str, Any]]:
    """The slices of a timeline in which every span has its arrow."""
    bare = dataclasses.replace(timeline.columns, link=np.full(len(timeline.columns), -1))
    return expected_slices(dataclasses.replace(timeline, slices=bare), first)


def test_empty_timelines(trace_processor: Opener, tmp_path: Path) -> None:
    check(trace_processor, Timeline(slices=Slices.empty()), tmp_path)
    check(trace_processor, dataclasses.replace(timeline_of(), stats=Stats(recorded=7)), tmp_path)


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name[:12]))
def test_hostile_names(trace_processor: Opener, tmp_path: Path, name: str) -> None:
    process = Process(4242, 0, name)
    timeline = with_args(
        dataclasses.replace(
            timeline_of((0, 10, "a"), (2, 8, "b")),
            names=[Name(name, name, name), Name("plain", "plain", "Plain")],
            tracks=[Track(kind, name or "t", 1, process) for kind in ("forward", "backward")],
            marks=[Mark(EPOCH + 5, "mark", name or "m")],
            counters=[CounterSeries(name or "c", "bytes", process, np.array([EPOCH + 1]), np.array([3]))],
            metadata={name: [name, {"deeper": name}]},
        ),
        {0: {"shapes": name, name or "key": "value"}},
    )
    check(trace_processor, timeline, tmp_path)


def test_512_levels_are_all_there_and_of_more_check_says_so(trace_processor: Opener, tmp_path: Path) -> None:
    rows = [(level, 2_000 - level, f"level {level}") for level in range(600)]
    check(trace_processor, timeline_of(*rows[:512]), tmp_path)
    timeline = timeline_of(*rows)
    for suffix in (".json", ".pftrace"):
        path = tmp_path / f"deep{suffix}"
        timeline.save(path)
        assert [fault.rule for fault in modtrace.check(path).faults] == ["too-deep"]
        assert [span.depth for span in modtrace.load(path).spans] == list(range(600))


def test_arguments_are_args(trace_processor: Opener, tmp_path: Path) -> None:
    timeline = with_args(
        dataclasses.replace(
            timeline_of((0, 10, "a"), (2, 8, "b"), (12, 13, "a")),
        ),
        {0: {"shapes": "float32[2, 8]"}, 2: {"shapes": "float32[2, 8]", "other": "x"}},
    )
    for suffix, prefix in ((".json", "args"), (".pftrace", "debug")):
        timeline.save(tmp_path / f"trace{suffix}")
        rows = trace_processor.open(tmp_path / f"trace{suffix}").query(
            f"select extract_arg(arg_set_id, '{prefix}.shapes') s, extract_arg(arg_set_id, '{prefix}.other') o "
            "from slice order by ts"
        )
        assert rows == [{"s": "float32[2, 8]", "o": None}, {"s": None, "o": None}, {"s": "float32[2, 8]", "o": "x"}]


def two_ranks() -> Timeline:
    """Two ranks with the same pid on two hosts, with two threads each, whose backward is first in the list."""
    ranks = [Process(4242, rank) for rank in (1, 0)]
    tracks = [
        Track(kind, thread, tid, process)
        for process in ranks
        for thread, tid in (("MainThread", 4242), ("worker", 4250))
        for kind in ("backward", "forward")
    ]
    count = len(tracks)
    columns = Slices.of(
        start=EPOCH + np.arange(count),
        end=EPOCH + np.arange(count) + 100,
        name=np.zeros(count),
        phase=[PHASES.index(track.kind) for track in tracks],
        track=np.arange(count),
        depth=np.zeros(count),
        parent=np.full(count, -1),
        call=np.zeros(count),
        step=np.zeros(count),
        link=np.full(count, -1),
        complete=np.ones(count),
    )
    counter = CounterSeries("allocated", "bytes", ranks[0], np.array([EPOCH]), np.array([5]))
    return Timeline(slices=columns, names=[Name("Net", "Net", "Net")], tracks=tracks, counters=[counter])


def test_ranks_are_processes_even_with_one_pid(trace_processor: Opener, tmp_path: Path) -> None:
    timeline = two_ranks()
    check(trace_processor, timeline, tmp_path)
    for suffix in FORMATS:
        timeline.save(tmp_path / f"trace{suffix}")
        trace = trace_processor.open(tmp_path / f"trace{suffix}")
        rows = trace.query("select name, pid from process where name is not null order by name")
        assert [row["name"] for row in rows] == ["rank 0 · python", "rank 1 · python"]
        assert rows[0]["pid"] == 4242
        assert rows[1]["pid"] != 4242
        (counter,) = trace.query("select process.name as process from process_counter_track join process using (upid)")
        assert counter == {"process": "rank 1 · python"}


def test_perfetto_orders_forward_above_backward(trace_processor: Opener, tmp_path: Path) -> None:
    two_ranks().save(tmp_path / "trace.pftrace")
    trace = trace_processor.open(tmp_path / "trace.pftrace")
    trace.query("include perfetto module viz.summary.track_event")
    rows = trace.query("""
        select process.name as process, thread.name as thread, above.name as above, t.name, order_id
        from _track_event_tracks_ordered_groups t join track above on above.id = t.parent_id
            join thread using (utid) join process on process.upid = thread.upid
        where has_data order by process.name, thread.name, order_id
    """)
    assert [tuple(row.values()) for row in rows] == [
        (f"rank {rank} · python", thread, "modules", f"{kind} · {thread}", order)
        for rank in (0, 1)
        for thread in ("MainThread", "worker")
        for order, kind in enumerate(("forward", "backward"), 1)
    ]


@pytest.mark.parametrize("suffix", [*FORMATS, ".json.gz", ".pftrace.gz"])
@pytest.mark.parametrize("ranks", [0, 1, 2])
def test_steps_and_marks_lie_on_a_row_of_that_name(
    trace_processor: Opener, tmp_path: Path, suffix: str, ranks: int
) -> None:
    spans = timeline_of((0, 4, "a"), (5, 10, "b"))
    tracks = [Track("forward", "MainThread", 7, Process(7, rank)) for rank in range(ranks)]
    timeline = Timeline(
        slices=dataclasses.replace(spans.columns, track=np.array([0, ranks - 1], np.int32))
        if ranks
        else Slices.empty(),
        names=spans.names,
        tracks=tracks,
        marks=[Mark(EPOCH + 4, "step", "step 0"), Mark(EPOCH + 5, "mark", "here"), Mark(EPOCH + 5, "mark", "there")],
    )
    timeline.save(tmp_path / f"trace{suffix}")

    trace = trace_processor.open(tmp_path / f"trace{suffix}")
    assert trace.import_problems() == {}
    rows = trace.query(
        """select s.name, s.dur, coalesce(t.name, thread.name) as track, process.name as process
        from slice s join track t on t.id = s.track_id
            left join thread_track on thread_track.id = t.id left join thread using (utid)
            left join process using (upid)
        where s.category in ('step', 'mark') order by s.id"""
    )
    # In JSON every row belongs to a process.
    process = "rank 0 · python" if ranks and "json" in suffix else None
    assert rows == [
        {"name": name, "dur": 0, "track": "steps and marks", "process": process} for name in ("step 0", "here", "there")
    ]
    spans_seen = trace.query("select depth from slice where category = 'forward'")
    assert spans_seen == [{"depth": 0}] * (2 if ranks else 0)


def test_a_module_has_one_correlation_in_all_its_calls(trace_processor: Opener, tmp_path: Path) -> None:
    timeline = gpt2_timeline(2_000)
    timeline.save(tmp_path / "trace.pftrace")
    rows = trace_processor.open(tmp_path / "trace.pftrace").query(
        "select distinct extract_arg(arg_set_id, 'debug.fqn') fqn, extract_arg(arg_set_id, 'correlation_id') id "
        "from slice where category != 'step'"
    )
    assert {row["fqn"] for row in rows} == {name.fqn for name in timeline.names}
    assert len(rows) == len({row["id"] for row in rows}) == len(timeline.names)


def test_metadata_and_losses_are_in_the_metadata(trace_processor: Opener, tmp_path: Path) -> None:
    timeline = dataclasses.replace(
        timeline_of((0, 1, "a")), metadata={"engine": "native", "versions": {"torch": "2.13"}}, stats=Stats(9, 4)
    )
    timeline.save(tmp_path / "trace.pftrace")
    rows = trace_processor.open(tmp_path / "trace.pftrace").query(
        "select name, str_value from metadata where name like 'cr-%'"
    )
    told = {row["name"]: row["str_value"] for row in rows}
    assert told["cr-engine"] == "native"
    assert told["cr-versions"] == '{"torch":"2.13"}'
    assert (told["cr-recorded"], told["cr-overwritten"]) == ("9", "4")


def test_traces_in_one_file_keep_their_names(trace_processor: Opener, tmp_path: Path) -> None:
    """A concatenation of Perfetto traces is a trace; the numbers of one must not affect the next."""
    parts = []
    for label in ("first", "second"):
        timeline_of((0, 10, label)).save(tmp_path / "part.pftrace")
        parts.append((tmp_path / "part.pftrace").read_bytes())
    trace = trace_processor.open(b"".join(parts))
    assert trace.import_problems() == {}
    rows = trace.query("select name, extract_arg(arg_set_id, 'debug.fqn') fqn from slice order by name")
    assert rows == [{"name": label, "fqn": f"Net.{label}"} for label in ("first", "second")]


def test_nesting_follows_perfetto_if_times_alone_decide() -> None:
    """Empty spans lie in the span that contains or starts at their instant; adjoining ones do not nest."""
    rows = [(0, 10, 0), (0, 4, 1), (4, 4, 2), (4, 10, 1), (10, 10, 1), (10, 12, 0), (12, 12, 0)]
    columns = timeline_of(*[(start, end, f"{start}-{end}-{i}") for i, (start, end, _) in enumerate(rows)]).columns
    assert dict(
        zip(
            zip((columns.start - EPOCH).tolist(), (columns.end - EPOCH).tolist(), strict=True),
            columns.depth.tolist(),
            strict=True,
        )
    ) == {(start, end): depth for start, end, depth in rows}
    assert np.array_equal(sort_by_start(nest_by_time(columns)).depth, columns.depth)
