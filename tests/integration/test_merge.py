"""Merging into real GPU traces: the profiler's events survive, everything adds up, and Perfetto imports it."""

from __future__ import annotations

import bisect
import gzip
import io
import json
import stat
from collections import Counter
from pathlib import Path

import pytest

import modtrace
from modtrace import Timeline, TraceError, WriteError, merge
from modtrace.formats.trace_file import read_merge_metadata
from tests.support.kineto import GPU_TRACES, recording, trace, x
from tests.support.python_process import run_python
from tests.support.synthetic_profile import NODE, document, each_trace, extent, ns, slices, synthetic
from tests.support.trace_processor import TraceProcessor

GPU = {"kernel": "kernel_ns", "gpu_memcpy": "memcpy_ns", "gpu_memset": "memset_ns"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("merged")


def merged(path: Path, folder: Path, suffix: str = ".json") -> Path:
    out = folder / f"{path.name.removesuffix('.json.gz')}{suffix}"
    if not out.exists():
        merge(path, synthetic(path), out)
    return out


@each_trace
def test_the_profilers_events_survive(path: Path, folder: Path) -> None:
    before, after = document(path), json.loads(merged(path, folder).read_text())
    assert after["traceEvents"][: len(before["traceEvents"])] == before["traceEvents"]
    assert {key: value for key, value in after.items() if key not in ("traceEvents", "modtrace", "modtraceTable")} == {
        key: value for key, value in before.items() if key != "traceEvents"
    }
    raw = gzip.decompress(path.read_bytes())
    end = raw.rindex(b"}", 0, raw.rindex(b'"traceName"') if b'"INFO"' not in raw else raw.rindex(b'"INFO"')) + 1
    assert merged(path, folder).read_bytes()[:end] == raw[:end]


@each_trace
def test_our_ids_collide_with_none_and_lie_above(path: Path, folder: Path) -> None:
    events = json.loads(merged(path, folder).read_text())["traceEvents"]
    count = len(document(path)["traceEvents"])
    theirs, ours = events[:count], events[count:]
    # Counters belong to a process, not to a thread.
    assert {event["name"].split(":")[0] for event in ours if "tid" not in event} <= {"step"}
    assert not {event["tid"] for event in ours if "tid" in event} & {event.get("tid") for event in theirs}
    assert {event["pid"] for event in ours} <= {event.get("pid") for event in theirs}
    order = {(e["pid"], e["tid"]): e["args"]["sort_index"] for e in events if e.get("name") == "thread_sort_index"}
    added = [event for event in ours if event["name"] == "thread_name" and event["tid"] != -1]
    for event in added:
        # With equal indexes, the main thread's row is first, then rows by thread id.
        of_process = [(index, tid != pid, tid) for (pid, tid), index in order.items() if pid == event["pid"]]
        shown = [tid for _, _, tid in sorted(of_process)]
        below = shown[shown.index(event["tid"]) :]
        name = event["args"]["name"].split(" · ")[-1]
        if name == "steps and marks":
            assert below == shown
        else:
            under = next(tid for tid in below if tid not in {other["tid"] for other in added})
            assert str(under) in name


@each_trace
def test_every_kernel_whose_launch_lies_in_the_recording_is_attributed(path: Path, folder: Path) -> None:
    events = document(path)["traceEvents"]
    covered = {
        track.tid: (int(start), int(end))
        for track, start, end in (
            (synthetic(path).tracks[t], s, e)
            for t, s, e, d in zip(
                *(getattr(synthetic(path).columns, f) for f in ("track", "start", "end", "depth")), strict=True
            )
            if d == 0
        )
    }
    base = document(path).get("baseTimeNanoseconds", 0)
    launched = {
        event["args"]["correlation"]
        for event in slices(events, "cuda_runtime", "cuda_driver")
        if event["tid"] in covered
        and covered[event["tid"]][0] - base <= ns(event["ts"]) < covered[event["tid"]][1] - base
    }
    added = json.loads(merged(path, folder).read_text())["traceEvents"][len(events) :]
    names = {event["tid"]: event["args"]["name"] for event in added if event["name"] == "thread_name"}
    above: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for event in slices(added, "forward"):
        if names[event["tid"]].startswith("modules · ") and event["args"]["fqn"] != "Net":
            above.setdefault((event["pid"], names[event["tid"]]), []).append(extent(event))
    for extents in above.values():
        extents.sort()
    forward = [e for e in slices(events, *GPU) if e["args"]["correlation"] in launched]
    assert forward
    for event in forward:
        row = above[event["pid"], f"modules · stream {event['tid']}"]
        begin, end = extent(event)
        at = bisect.bisect_right(row, (begin, 1 << 62)) - 1
        assert any(s <= begin and end <= e for s, e in row[max(at - 2, 0) : at + 1])


@each_trace
def test_no_slice_of_ours_partly_overlaps_a_node(path: Path, folder: Path) -> None:
    events = json.loads(merged(path, folder).read_text())["traceEvents"]
    count = len(document(path)["traceEvents"])
    nodes = sorted(extent(event) for event in events[:count] if event["name"].startswith(NODE))
    backward = [extent(event) for event in slices(events[count:], "backward") if event["pid"] != 0]
    assert bool(nodes) == bool(backward)
    begins = [begin for begin, _ in nodes]
    for start, end in backward:
        for time in (start, end):
            at = bisect.bisect_left(begins, time) - 1
            assert at < 0 or not nodes[at][0] < time < nodes[at][1]


def problems(trace_processor: type[TraceProcessor], trace: Path | bytes) -> Counter[str]:
    return Counter(trace_processor.open(trace).import_problems())


@each_trace
@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_it_imports_with_no_fault_of_ours(
    path: Path, folder: Path, suffix: str, trace_processor: type[TraceProcessor]
) -> None:
    before = problems(trace_processor, gzip.decompress(path.read_bytes()))
    out = merged(path, folder, suffix)
    assert problems(trace_processor, out) == before
    opened = trace_processor.open(out)
    module_slices = {
        (row["name"], row["ts"], row["dur"])
        for row in opened.query(
            "select slice.name, slice.ts, slice.dur from slice join thread_track t on slice.track_id = t.id "
            "join thread using (utid) where thread.name like '% · %'"
        )
    }
    metadata = read_merge_metadata(out)
    assert metadata is not None
    added = json.loads(merged(path, folder).read_text())["traceEvents"][len(document(path)["traceEvents"]) :]
    assert len(slices(added, "forward", "backward", "gpu")) == len([event for event in added if event["ph"] == "X"])
    assert len(module_slices) > 30


@each_trace
def test_as_pftrace_every_slice_of_the_profiler_keeps_its_time(
    path: Path, folder: Path, trace_processor: type[TraceProcessor]
) -> None:
    out = merged(path, folder, ".pftrace")
    opened = trace_processor.open(out)
    assert opened.import_problems() == {}
    base = document(path).get("baseTimeNanoseconds", 0)
    wanted = Counter(
        (event["cat"], ns(event["ts"]) + base, ns(event["dur"]))
        for event in document(path)["traceEvents"]
        if event["ph"] == "X"
    )
    rows = opened.query("select category, ts, dur from slice where category is not null")
    ours = {"forward", "backward", "recompute", "gpu"}
    assert Counter((r["category"], r["ts"], r["dur"]) for r in rows if r["category"] not in {*ours, "step"}) == wanted
    packets, json_ = (modtrace.load(file).summary() for file in (out, merged(path, folder)))
    assert [(row.fqn, row.calls) for row in packets.rows] == [(row.fqn, row.calls) for row in json_.rows]
    assert [row[16:] for row in packets.rows] == [row[16:] for row in json_.rows]  # the columns of GPU times
    assert (packets.gpu, packets.gpu_steps) == (json_.gpu, json_.gpu_steps)
    written = Counter(
        event["cat"]
        for event in json.loads(merged(path, folder).read_text())["traceEvents"][len(document(path)["traceEvents"]) :]
        if event["ph"] == "X"
    )
    assert Counter(row["category"] for row in rows if row["category"] in ours) == written


def test_sync_marks_are_found_anywhere_in_the_trace(tmp_path: Path) -> None:
    marks = [x("cpu_op", f"modtrace.sync#{n}", 10_000 * n + 700, 10_000 * n + 900) for n in range(1, 5)]
    filler = [x("cpu_op", "op", 100 + n, 101 + n) for n in range(30_000)]
    events = [*filler[:9000], marks[0], *filler[9000:20_000], *marks[1:3], *filler[20_000:], marks[3]]
    path = tmp_path / "trace.json"
    path.write_bytes(trace(*events))
    base = recording(("Net", 1000, 50_000, 0))
    timeline = Timeline(
        base.columns,
        base.names,
        base.tracks,
        marks=[
            modtrace.timeline.Mark(modtrace_base + 10_000 * n, "sync", f"modtrace.sync#{n}")
            for n, modtrace_base in ((n, int(base.columns.start[0]) - 1000) for n in range(1, 5))
        ],
    )
    told = merge(path, timeline, tmp_path / "out.json")
    assert told.metadata["alignment"]["marks"] == 4
    ours = json.loads((tmp_path / "out.json").read_text())["traceEvents"][len(events) :]
    assert [extent(event) for event in slices(ours, "forward")] == [(1800, 50_800)]


def test_a_bare_array_becomes_an_object(tmp_path: Path) -> None:
    events = [x("cpu_op", "op", 1000, 2000)]
    path = tmp_path / "trace.json"
    path.write_bytes(json.dumps(events).encode())
    merge(path, recording(("Net", 900, 2100, 0), base=0), tmp_path / "out.json")
    after = json.loads((tmp_path / "out.json").read_text())
    assert after["traceEvents"][0] == events[0]
    assert [extent(event) for event in slices(after["traceEvents"], "forward")] == [(900, 2100)]


@pytest.mark.usefixtures("gpu_traces")
def test_a_cut_off_trace_is_refused(tmp_path: Path) -> None:
    whole = gzip.decompress(GPU_TRACES[1].read_bytes())
    path = tmp_path / "cut.json"
    path.write_bytes(whole[: len(whole) * 9 // 10])
    with pytest.raises(TraceError, match="it is cut off within or after the event that begins here"):
        merge(path, synthetic(GPU_TRACES[1]), tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()


def test_a_trace_is_not_merged_twice(tmp_path: Path) -> None:
    path, once = tmp_path / "trace.json", tmp_path / "once.json"
    path.write_bytes(trace(x("cpu_op", "op", 1000, 2000)))
    merge(path, recording(("Net", 900, 2100, 0)), once)
    with pytest.raises(TraceError, match="merged before"):
        merge(once, recording(("Net", 900, 2100, 0)), tmp_path / "twice.json")
    assert not (tmp_path / "twice.json").exists()


def test_wrong_targets_are_refused_and_harm_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(trace(x("cpu_op", "op", 1000, 2000)))
    before = path.read_bytes()
    net = recording(("Net", 900, 2100, 0))
    for out, said in ((path, "the profiler's trace itself"), (tmp_path / "out.html", "ends in")):
        with pytest.raises(WriteError, match=said):
            merge(path, net, out)
    existing = tmp_path / "out.json"
    existing.write_text("precious")
    path.write_bytes(b"no trace")
    with pytest.raises(TraceError):
        merge(path, net, existing)
    assert existing.read_text() == "precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.json", "trace.json"]
    path.write_bytes(before)
    path.chmod(stat.S_IRUSR)
    merge(path, net, existing)
    assert path.read_bytes() == before


@pytest.mark.usefixtures("gpu_traces")
def test_the_command_merges_and_reports_it(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = run_python("-m", "modtrace", "merge", GPU_TRACES[0], "-o", out)
    assert "its ranges of record_function; profile with with_stack=True" in done.stderr
    summary = modtrace.load(out).summary()
    outer = "[param|cuda]"
    assert [row.fqn for row in summary.rows][:2] == [outer, f"{outer}.[param|pytorch.model.alex_net|0|0|0]"]
    assert summary.gpu is not None
    assert summary.gpu.kernel_ns == sum(ns(e["dur"]) for e in slices(document(GPU_TRACES[0])["traceEvents"], "kernel"))
    failed = run_python("-m", "modtrace", "merge", Path(__file__).parents[2] / "README.md", "-o", out, status=1)
    assert failed.stderr.count("\n") == 1
    assert "README.md, byte 0: not a profiler trace" in failed.stderr


@pytest.mark.usefixtures("gpu_traces")
def test_totals_sort_and_print(folder: Path) -> None:
    summary = modtrace.load(merged(GPU_TRACES[1], folder)).summary()
    assert summary.gpu is not None
    top = summary.sort_by("gpu", 3)
    assert [row.gpu_self_ns for row in top.rows] == sorted((row.gpu_self_ns for row in summary.rows), reverse=True)[:3]
    assert top.footer.endswith(f"; {len(summary.rows) - 3} more modules")
    assert top.tables["modules"].to("md").count("\n| ") == 4
    assert len(summary.to_csv().splitlines()) == 1 + len(summary.rows)
    assert json.loads(summary.to_json())["gpu"]["kernel_ns"] == summary.gpu.kernel_ns
    from rich.console import Console

    console = Console(width=240, record=True, file=io.StringIO())
    console.print(top)
    printed = [line.split() for line in console.export_text().splitlines()]
    first = next(index for index, words in enumerate(printed) if words[:3] == ["module", "(in", "Net)"]) + 1
    assert [words[0] for words in printed[first : first + 3]] == [row.fqn.removeprefix("Net.") for row in top.rows]
    with pytest.raises(modtrace.ArgumentError, match="sorts by"):
        summary.sort_by("colour")  # type: ignore[arg-type]
