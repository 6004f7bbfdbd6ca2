"""Files of ours that someone changed, and JSON that someone else wrote: an error that names the file, or a timeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

from modtrace import ModtraceError, TraceError
from modtrace.read import load
from tests.support.json_mutations import all_paths, mutated, mutations
from tests.unit.test_write_chrome import call_of_net

WHAT_TO_DO = (
    "another program has changed or cut it; load the file as modtrace saved it, or the ring file of the recording"
)


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    """What modtrace writes for a small timeline with a bit of everything."""
    call_of_net().save(tmp_path / "good.json")
    read: dict[str, Any] = json.loads((tmp_path / "good.json").read_text())
    return read


def use(path: Path, out: Path) -> None:
    timeline = load(path)
    timeline.summary()
    repr(list(timeline.spans))
    for name in ("out.json", "out.pftrace"):
        timeline.save(out / name)


HEADER_FAULTS: list[tuple[tuple[Any, ...], list[Any], str]] = [
    (("processes", 0, "trace_pid"), [], "processes[0].trace_pid is missing"),
    (("processes", 0, "trace_pid"), ["4242"], "processes[0].trace_pid is '4242'"),
    (("processes", 0, "rank"), [], "processes[0].rank is missing"),
    (("processes", 0), [7], "processes[0] is 7"),
    (("processes",), [None], "processes is None"),
    (("lanes",), [], "lanes is missing"),
    (("lanes", 1, "track"), [2], "lanes[1].track is 2"),
    (("lanes", 1, "tid"), [[1]], "lanes[1].tid is [1]"),
    (("tracks", 0, "kind"), ["sideways"], "tracks[0].kind is 'sideways'"),
    (("tracks", 1, "tid"), [2**63], "tracks[1].tid is 9223372036854775808"),
    (("tracks", 1, "process"), [-1], "tracks[1].process is -1"),
    (("counters", 0, "unit"), [None], "counters[0].unit is None"),
    (("stats",), [[]], "stats is []"),
    (("stats", "recorded"), ["10"], "stats.recorded is '10'"),
    (("stats", "guessed"), [10], "stats.guessed is 10"),
    (("metadata",), [], "metadata is missing"),
]


@pytest.mark.parametrize(("path", "value", "fault"), HEADER_FAULTS)
def test_a_changed_header_is_refused_by_file_and_place(
    document: dict[str, Any], tmp_path: Path, path: tuple[Any, ...], value: list[Any], fault: str
) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps(mutated(document, ("otherData", *path), *value)))

    with pytest.raises(TraceError) as raised:
        load(trace)
    assert str(raised.value) == f"{trace}: its header is not as modtrace writes it: {fault}; {WHAT_TO_DO}"


def test_a_changed_header_in_a_pftrace_is_refused_too(tmp_path: Path) -> None:
    path = tmp_path / "trace.pftrace"
    call_of_net().save(path)
    trace = Trace.FromString(path.read_bytes())
    (entry,) = (entry for packet in trace.packet for entry in packet.chrome_events.metadata if entry.name == "modtrace")
    header = mutated(orjson.loads(entry.string_value), ("lanes", 0, "track"))
    entry.string_value = orjson.dumps(header).decode()
    path.write_bytes(trace.SerializeToString())

    with pytest.raises(TraceError) as raised:
        load(path)
    fault = "its header is not as modtrace writes it: lanes[0].track is missing"
    assert str(raised.value) == f"{path}: {fault}; {WHAT_TO_DO}"


EVENT_FAULTS: list[tuple[tuple[Any, ...], Any, str]] = [
    (("baseTimeNanoseconds",), "x", "ValueError(\"baseTimeNanoseconds is 'x'\")"),
    (("baseTimeNanoseconds",), 2**63, "ValueError('baseTimeNanoseconds is 9223372036854775808')"),
    (("traceEvents", 8, "name"), 1, "ValueError('1 is no text')"),
    (("traceEvents", 9, "args", "bytes"), 1.5, "ValueError('a sample of RSS is 1.5')"),
    (
        ("traceEvents", 9, "name"),
        "foreign",
        "ValueError(\"the header knows no counter 'foreign' of 'bytes' in process 4242\")",
    ),
    (("traceEvents", 18, "dur"), -0.001, "ValueError('a time is -0.001 µs')"),
    (("traceEvents", 18, "dur"), 1e300, "ValueError('a time is 1e+300 µs')"),
    (("traceEvents", 19, "args", "fqn"), 2, "ValueError('2 is no text')"),
    (("traceEvents", 19, "args", "shapes"), 2, "ValueError(\"an argument in {'shapes': 2} is no text\")"),
    (("traceEvents", 19, "args", "call"), 2**64 - 1, "OverflowError('int too big to convert')"),
]


@pytest.mark.parametrize(("path", "value", "fault"), EVENT_FAULTS)
def test_a_changed_event_is_refused_by_file(
    document: dict[str, Any], tmp_path: Path, path: tuple[Any, ...], value: Any, fault: str
) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps(mutated(document, path, value)))

    with pytest.raises(TraceError) as raised:
        load(trace)
    assert str(raised.value) == f"{trace}: its events are not as modtrace writes them: {fault}; {WHAT_TO_DO}"


@pytest.mark.parametrize("part", ["otherData", "traceEvents", ""])
def test_any_one_change_gives_an_error_of_ours_or_a_timeline_that_can_be_used(
    document: dict[str, Any], tmp_path: Path, part: str
) -> None:
    paths = [path for path in all_paths(document) if path[0] == part or not part]
    trace = tmp_path / "trace.json"
    refused = 0
    for changed in mutations(document, 300, paths):
        trace.write_text(json.dumps(changed))
        try:
            use(trace, tmp_path)
        except TraceError as error:
            refused += str(trace) in str(error)
        except ModtraceError:
            pass  # what has been loaded cannot be saved in every format
    assert 0 < refused < 300
