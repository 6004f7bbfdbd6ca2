"""Written traces are read back: every span to the nanosecond, and all facts about the recording."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import cast

import pytest
from hypothesis import HealthCheck, given, settings

from modtrace import ModtraceError, Timeline, TraceError, load
from modtrace.write import chrome, perfetto, slices
from tests.support.test_scale import scaled
from tests.support.timelines import gpt2_timeline, timeline_of, timelines

FORMATS = (".json", ".json.gz", ".pftrace", ".pftrace.gz")


def told(timeline: Timeline) -> dict[str, object]:
    """All content of a timeline, except the order of spans that start in the same nanosecond at the same depth."""
    columns = timeline.columns
    spans = list(timeline.spans)
    tracks = [timeline.tracks[track] for track in columns.track.tolist()]
    rows = [
        (span, tracks[i], link, timeline.span_args.get(i, {}), (spans[parent], tracks[parent]) if parent >= 0 else None)
        for i, (span, parent, link) in enumerate(
            zip(spans, columns.parent.tolist(), columns.link.tolist(), strict=True)
        )
    ]
    return {
        "spans": sorted(rows, key=lambda row: (row[0].start_ns, row[0].depth, repr(row))),
        "sorted": [(span.start_ns, span.depth) for span in spans],
        "tracks": list(timeline.tracks),
        "stats": timeline.stats,
        "marks": list(timeline.marks),
        "counters": [(c.name, c.unit, c.process, c.time.tolist(), c.value.tolist()) for c in timeline.counters],
        "metadata": dict(timeline.metadata),
    }


@pytest.mark.parametrize("suffix", FORMATS)
@settings(max_examples=scaled(20, 60, 1000), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(timeline=timelines())
def test_a_round_trip_keeps_everything(tmp_path: Path, suffix: str, timeline: Timeline) -> None:
    path = tmp_path / f"trace{suffix}"
    timeline.save(path)
    assert told(load(path)) == told(timeline)


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_round_trip_of_more_than_one_chunk_keeps_the_columns(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, at_a_time in ((chrome, "_CHUNK"), (slices, "_SPANS_AT_A_TIME"), (perfetto, "_CHUNK")):
        monkeypatch.setattr(module, at_a_time, 1 << 10)
    timeline = gpt2_timeline(scaled(5_000, 150_000, 150_000))
    path = tmp_path / f"trace{suffix}"
    timeline.save(path)
    assert told(load(path)) == told(timeline)


@pytest.mark.parametrize("suffix", FORMATS)
def test_an_empty_timeline_is_read_back_empty(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"trace{suffix}"
    Timeline(slices=timeline_of().columns).save(path)
    assert told(load(path)) == told(Timeline(slices=timeline_of().columns))


def test_the_content_and_not_the_name_decides_the_format(tmp_path: Path) -> None:
    timeline = timeline_of((0, 10, "a"))
    timeline.save(tmp_path / "trace.pftrace.gz")
    (tmp_path / "trace.pftrace.gz").rename(tmp_path / "trace.json")
    assert told(load(tmp_path / "trace.json")) == told(timeline)


def test_reformatted_json_is_read_as_a_profile(tmp_path: Path) -> None:
    timeline = gpt2_timeline(400)
    timeline.save(tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    (tmp_path / "pretty.json").write_text(json.dumps(document, indent=2))

    read = load(tmp_path / "pretty.json")
    changed, *_ = cast("list[str]", read.metadata["notes"])
    assert changed == "another program has changed this trace since modtrace wrote it; it was read as a profiler's"
    process = timeline.tracks[0].process
    assert [span._replace(process=process) for span in read.spans] == list(timeline.spans)


REFUSED = {
    b"": "it is empty",
    b"PK\x03\x04": "ZIP archive",
    b"<!doctype html><p>": "it is a page that modtrace did not write",
    b"\x7fELF\x02\x01": "neither a ring file nor a trace",
    b"hello, world": "neither a ring file nor a trace",
    b'{"traceEvents": [': "this is not a profiler trace, or it was cut off",
    b"{}": 'it has no "traceEvents"',
    b'{"baseTimeNanoseconds": 0, "otherData": {"modtrace": {"format": 1': "broken JSON before the events",
    gzip.compress(b"hello", mtime=0)[:-6]: "incomplete or damaged",
    b"\x0a\x02\x08\x01": "it has no table of modtrace",
}


@pytest.mark.parametrize("content", REFUSED, ids=lambda content: repr(content[:12]))
def test_the_error_of_another_file_names_its_kind(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "thing"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=REFUSED[content]) as raised:
        load(path)
    assert str(path) in str(raised.value)


def test_a_trace_is_read_if_no_temporary_file_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = gpt2_timeline(10)
    timeline.save(tmp_path / "trace.json")
    timeline.save(tmp_path / "report.zip")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))

    assert len(load(tmp_path / "trace.json").spans) == len(timeline.spans)
    for needs_one in (lambda: load(tmp_path / "report.zip"), lambda: timeline.save(tmp_path / "new.zip")):
        with pytest.raises(ModtraceError, match=r"no folder for temporary files .* set TMPDIR"):
            needs_one()


def test_a_path_that_is_not_a_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.json"):
        with pytest.raises(TraceError, match="cannot be read"):
            load(path)


@pytest.mark.parametrize("suffix", [".json", ".pftrace"])
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"trace{suffix}"
    gpt2_timeline(40).save(path)
    content = path.read_bytes().rstrip()
    for length in range(1, len(content), max(1, len(content) // 400)):
        path.write_bytes(content[:length])
        with pytest.raises(TraceError):
            load(path)


def test_the_error_of_a_profile_without_events_has_possible_reasons(tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_text('{"traceEvents": []}')
    (note,) = cast("list[str]", load(tmp_path / "empty.json").metadata["notes"])
    assert note == "the trace has no events: nothing ran under the profiler, or it was exported within its with block"
