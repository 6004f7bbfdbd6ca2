"""The rows above GPU streams of real merged traces: read into a timeline, written again, and given to the page."""

from __future__ import annotations

import gzip
import json
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import modtrace
from modtrace import Timeline, load
from modtrace.timeline.select import on_gpu, without_gpu
from modtrace.timeline.summary import summarize
from modtrace.write.html import payload
from tests.support.kineto import recording, trace, x
from tests.support.merged_rows import Row, rows_in_json
from tests.support.synthetic_profile import each_trace, synthetic
from tests.support.timelines import with_args


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


def merged(path: Path, folder: Path, suffix: str) -> Path:
    out = folder / f"{path.name.removesuffix('.json.gz')}{suffix}"
    if not out.exists():
        modtrace.merge(path, synthetic(path), out)
    return out


def gpu_rows(timeline: Timeline, moved_ns: int = 0) -> Counter[Row]:
    columns = timeline.columns
    rows: Counter[Row] = Counter()
    for index in np.flatnonzero(on_gpu(timeline)).tolist():
        track, name = timeline.tracks[columns.track[index]], timeline.names[columns.name[index]]
        assert track.kind == "gpu"
        assert track.device is not None
        assert track.stream is not None
        rows[
            track.device,
            track.stream,
            name.label,
            name.fqn,
            modtrace.timeline.PHASES[columns.phase[index]],
            int(columns.call[index]),
            int(columns.step[index]),
            int(columns.start[index]) - moved_ns,
            int(columns.end[index]) - moved_ns,
        ] += 1
    return rows


@each_trace
def test_load_reads_every_span_above_a_stream(path: Path, folder: Path) -> None:
    out = merged(path, folder, ".json")
    expected, read = sorted(rows_in_json(out).elements()), sorted(gpu_rows(load(out)).elements())
    assert len(expected) > 10
    assert [row[:-2] for row in read] == [row[:-2] for row in expected]
    # The events nest in every reading of their times (see `merged_json`); the times read here are exact.
    quantum = 3 if json.loads(out.read_text()).get("baseTimeNanoseconds") else 500
    pairs = [
        (one, two)
        for rows in zip(read, expected, strict=True)
        for one, two in zip(*(r[-2:] for r in rows), strict=True)
    ]
    assert max(abs(one - two) for one, two in pairs) <= quantum


@each_trace
def test_both_formats_of_a_merged_trace_have_the_same_gpu_tracks(path: Path, folder: Path) -> None:
    ours, packets = load(merged(path, folder, ".json")), load(merged(path, folder, ".pftrace"))
    assert [track for track in ours.tracks if track.kind == "gpu"] == [t for t in packets.tracks if t.kind == "gpu"]
    # In JSON a span may move by the nanoseconds that a double cannot represent.
    one, other = sorted(gpu_rows(ours).elements()), sorted(gpu_rows(packets).elements())
    assert Counter(row[:7] for row in one) == Counter(row[:7] for row in other)


@each_trace
def test_spans_nest_on_their_stream_and_have_the_link_of_their_call(path: Path, folder: Path) -> None:
    timeline = load(merged(path, folder, ".json"))
    columns, gpu = timeline.columns, on_gpu(timeline)
    for index in np.flatnonzero(gpu).tolist():
        parent = int(columns.parent[index])
        assert parent < index
        assert (parent < 0) == (columns.depth[index] == 0)
        if parent >= 0:
            assert columns.track[parent] == columns.track[index]
            assert columns.start[parent] <= columns.start[index] <= columns.end[index] <= columns.end[parent]
            assert columns.depth[parent] == columns.depth[index] - 1
    key = np.stack([columns.name, columns.call])
    calls = [timeline.names[name].module_class != "communication" for name in columns.name.tolist()]
    assert not any(columns.link[index] >= 0 for index in range(len(columns)) if not calls[index])
    link_of = {tuple(key[:, index]): int(columns.link[index]) for index in np.flatnonzero(~gpu).tolist()}
    assert all(columns.link[index] == link_of[tuple(key[:, index])] for index in np.flatnonzero(gpu & calls).tolist())


@each_trace
@pytest.mark.parametrize("suffix", [".json", ".json.gz", ".pftrace", ".zip"])
def test_saved_again_the_gpu_tracks_are_kept(path: Path, folder: Path, suffix: str, tmp_path: Path) -> None:
    timeline = load(merged(path, folder, ".pftrace"))
    timeline.save(tmp_path / f"again{suffix}")
    again = load(tmp_path / f"again{suffix}")
    moved_ns = int(again.columns.start.min() - timeline.columns.start.min())
    assert (moved_ns != 0) is (suffix == ".zip")  # a report lacks the time of its recording
    assert gpu_rows(again, moved_ns) == gpu_rows(timeline)
    assert [track for track in again.tracks if track.kind == "gpu"] == [
        track._replace(process=again.tracks[0].process) for track in timeline.tracks if track.kind == "gpu"
    ]


@each_trace
def test_the_page_gets_kind_device_and_stream_of_each_track(path: Path, folder: Path) -> None:
    timeline = load(merged(path, folder, ".json"))
    block = payload(timeline)
    (length,) = struct.unpack_from("<I", block)
    header: dict[str, Any] = json.loads(block[4 : 4 + length])
    tracks = [(t["kind"], t["device"], t["stream"], t["name"]) for t in header["tracks"]]
    assert tracks == [
        (t.kind, t.device, t.stream, name) for t, name in zip(timeline.tracks, timeline.track_names, strict=True)
    ]
    assert {name for kind, _, _, name in tracks if kind == "gpu"} == {
        f"gpu {t.device} · stream {t.stream}" for t in timeline.tracks if t.kind == "gpu"
    }


@each_trace
def test_a_summary_of_cpu_times_leaves_them_out(path: Path, folder: Path) -> None:
    timeline = load(merged(path, folder, ".json"))
    threads = without_gpu(timeline)
    assert 0 < len(threads.columns) < len(timeline.columns)
    assert not on_gpu(threads).any()
    assert timeline.summary() == summarize(threads)
    assert list(threads.spans) == [
        span for span, gpu in zip(timeline.spans, on_gpu(timeline).tolist(), strict=True) if not gpu
    ]


@each_trace
def test_merging_a_merged_trace_lays_only_the_threads_over_it(path: Path, folder: Path, tmp_path: Path) -> None:
    once = merged(path, folder, ".json")
    modtrace.merge(path, once, tmp_path / "twice.json")
    assert rows_in_json(tmp_path / "twice.json") == rows_in_json(once)


PROFILE = trace(
    x("python_function", "nn.Module: Net_0", 1000, 9000, Python_module_id=0),
    x("python_function", "nn.Module: Linear_0", 2000, 4000, Python_module_id=1),
    x("cuda_runtime", "cudaLaunchKernel", 2100, 2200, correlation=1),
    x("cuda_runtime", "cudaLaunchKernel", 5000, 5100, correlation=2),
    x("cuda_runtime", "cudaLaunchKernel", 9500, 9600, correlation=3),
    x("kernel", "gemm", 10_000, 11_000, pid=0, tid=7, correlation=1),
    x("kernel", "relu", 11_500, 12_000, pid=0, tid=7, correlation=2),
    x("kernel", "other", 13_000, 14_000, pid=0, tid=7, correlation=3),
    x("kernel", "copy", 10_500, 10_900, pid=1, tid=20, correlation=2),
)
EXPECTED = [
    (0, 7, "Net", "forward", 10_000, 12_000, 0),
    (0, 7, "Linear", "forward", 10_000, 11_000, 1),
    (1, 20, "Net", "forward", 10_500, 10_900, 0),
]


@pytest.mark.parametrize("suffix", ["", ".json", ".pftrace"])
def test_spans_worked_out_by_hand(tmp_path: Path, suffix: str) -> None:
    """A bare trace, and merged ones in both formats; the kernel that no module launched is in no span."""
    path = tmp_path / "profile.json"
    path.write_bytes(PROFILE)
    if suffix:
        out = tmp_path / f"merged{suffix}"
        modtrace.merge(path, None, out)
        path = out
    timeline = load(path)
    base = int(timeline.columns.start[0]) - 1000
    rows = []
    for index, span in enumerate(timeline.spans):
        track = timeline.tracks[timeline.columns.track[index]]
        if track.device is not None:
            times = (span.start_ns - base, span.end_ns - base)
            rows.append((track.device, track.stream, span.module_class, span.phase, *times, span.depth))
    assert rows == EXPECTED
    assert [span.track for span in timeline.spans][2:] == ["gpu 0 · stream 7", "gpu 0 · stream 7", "gpu 1 · stream 20"]


def test_a_merged_trace_keeps_the_metadata_of_the_recording(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(trace(x("cpu_op", "op", 1000, 2000)))
    plain = recording(("Net", 900, 2100, 0))
    told = with_args(
        Timeline(
            plain.columns,
            plain.names,
            plain.tracks,
            metadata={"engine": "native"},
        ),
        {0: {"shapes": "[2, 8]"}},
    )
    for suffix in (".json", ".json.gz", ".pftrace"):
        modtrace.merge(path, told, tmp_path / f"out{suffix}")
        back = load(tmp_path / f"out{suffix}")
        assert back.metadata["engine"] == "native"
        assert dict(back.span_args) == {0: {"shapes": "[2, 8]"}}
        assert list(back.spans) == list(told.spans)
    packed = gzip.decompress((tmp_path / "out.json.gz").read_bytes())
    assert json.loads(packed)["modtrace"]["header"]["metadata"]["engine"] == "native"
