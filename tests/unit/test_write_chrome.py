"""Chrome's JSON, line by line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modtrace import Timeline, WriteError
from modtrace.formats.limits import MAX_CHROME_NS
from modtrace.timeline import BACKWARD, FORWARD, Mark, Slices
from modtrace.write.chrome import (
    ChromeTimeline,
    digit_count,
    format_decimal,
    format_microseconds,
    write_chrome,
)
from modtrace.write.lanes import Lanes
from modtrace.write.written_parts import first_moment
from tests.support.small_timelines import call_of_net
from tests.support.timelines import EPOCH, gpt2_timeline, timeline_of, with_args

HEAD = {
    "modtrace": {"format": 2, "version": "0.1.0"},
    "stats": {"recorded": 10, "overwritten": 0, "torn": 0, "unfinished": 1, "unstarted": 0, "unattributed": 0},
    "metadata": {"engine": "native", "versions": {"torch": "2.13.0"}},
}

EVENTS = """\
{"ph":"M","name":"process_name","pid":4242,"tid":0,"args":{"name":"rank 0 · python"}},
{"ph":"M","name":"process_sort_index","pid":4242,"tid":0,"args":{"sort_index":0}},
{"ph":"M","name":"thread_name","pid":4242,"tid":3,"args":{"name":"steps and marks"}},
{"ph":"M","name":"thread_sort_index","pid":4242,"tid":3,"args":{"sort_index":-1}},
{"ph":"M","name":"thread_name","pid":4242,"tid":1,"args":{"name":"forward · MainThread"}},
{"ph":"M","name":"thread_sort_index","pid":4242,"tid":1,"args":{"sort_index":0}},
{"ph":"M","name":"thread_name","pid":4242,"tid":2,"args":{"name":"backward · MainThread"}},
{"ph":"M","name":"thread_sort_index","pid":4242,"tid":2,"args":{"sort_index":1}},
{"ph":"i","s":"t","pid":4242,"tid":3,"cat":"step","name":"step 5","ts":2500.001},
{"ph":"C","pid":4242,"name":"RSS","args":{"bytes":1099511627776},"ts":0.010},
{"ph":"C","pid":4242,"cat":"step parts","name":"step: forward","args":{"ms":1.000001},"ts":0.000},
{"ph":"C","pid":4242,"cat":"step parts","name":"step: forward","args":{"ms":0.0},"ts":2500.001},
{"ph":"C","pid":4242,"cat":"step parts","name":"step: loss","args":{"ms":0.999999},"ts":0.000},
{"ph":"C","pid":4242,"cat":"step parts","name":"step: loss","args":{"ms":0.0},"ts":2500.001},
{"ph":"C","pid":4242,"cat":"step parts","name":"step: backward","args":{"ms":0.5},"ts":0.000},
{"ph":"C","pid":4242,"cat":"step parts","name":"step: backward","args":{"ms":0.0},"ts":2500.001},
{"ph":"C","pid":4242,"cat":"step parts","name":"step: other","args":{"ms":1e-6},"ts":0.000},
{"ph":"C","pid":4242,"cat":"step parts","name":"step: other","args":{"ms":0.0},"ts":2500.001},
{"ph":"X","pid":4242,"tid":1,"cat":"forward","name":"Net","args":{"fqn":"Net","module_class":"Net","call":0,"step":5},"flow_out":true,"bind_id":4294967303,"ts":0.000,"dur":1000.001},
{"ph":"X","pid":4242,"tid":1,"cat":"forward","name":"fc: Linear","args":{"fqn":"Net.fc","module_class":"Linear","call":3,"step":5,"shapes":"float32[2, 8]"},"ts":0.001,"dur":0.999},
{"ph":"s","pid":4242,"tid":1,"cat":"call","name":"backward","id":8,"ts":0.001},
{"ph":"X","pid":4242,"tid":2,"cat":"backward","name":"Net","args":{"fqn":"Net","module_class":"Net","call":0,"step":5},"flow_in":true,"bind_id":4294967303,"ts":2000.000,"dur":500.000},
{"ph":"X","pid":4242,"tid":2,"cat":"backward","name":"fc: Linear","args":{"fqn":"Net.fc","module_class":"Linear","call":3,"step":5},"ts":2000.000,"dur":0.999},
{"ph":"f","bp":"e","pid":4242,"tid":2,"cat":"call","name":"backward","id":8,"ts":2000.000},
{"ph":"X","pid":4242,"tid":2,"cat":"backward","name":"fc: Linear","args":{"fqn":"Net.fc","module_class":"Linear","complete":false,"call":3,"step":5,"link":8},"ts":2400.000,"dur":100.000}
"""  # noqa: E501


def saved(timeline: Timeline, folder: Path) -> dict[str, Any]:
    write_chrome(timeline, folder / "trace.json")
    document: dict[str, Any] = json.loads((folder / "trace.json").read_text("utf-8"))
    return document


def test_a_small_file_byte_by_byte(tmp_path: Path) -> None:
    write_chrome(call_of_net(), tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text("utf-8")
    head, events = text.split('"traceEvents":[\n')
    assert events.startswith(EVENTS + '],\n"modtraceTable":"')
    assert events.endswith('"}\n')
    assert json.loads(head.rstrip(",\n") + "}") == {"baseTimeNanoseconds": EPOCH, "otherData": HEAD}


def test_an_empty_timeline_is_a_complete_document(tmp_path: Path) -> None:
    assert saved(Timeline(slices=Slices.empty()), tmp_path)["traceEvents"] == []


def test_times_are_relative_to_the_first_event_of_any_kind() -> None:
    timeline = call_of_net()
    assert first_moment(timeline) == EPOCH
    assert first_moment(dataclasses.replace(timeline, marks=[Mark(EPOCH - 5, "mark", "")])) == EPOCH - 5
    early = dataclasses.replace(timeline.counters[0], time=np.array([EPOCH - 9]))
    assert first_moment(dataclasses.replace(timeline, counters=[early])) == EPOCH - 9
    assert first_moment(Timeline(slices=Slices.empty())) == 0


def test_no_nanosecond_is_lost_in_eleven_days(tmp_path: Path) -> None:
    edge = MAX_CHROME_NS - 1
    timeline = timeline_of((0, edge, "a"), (edge - 1, edge, "b"))
    events = [event for event in saved(timeline, tmp_path)["traceEvents"] if event["ph"] == "X"]
    assert [(round(event["ts"] * 1000), round(event["dur"] * 1000)) for event in events] == [(0, edge), (edge - 1, 1)]


def test_longer_timelines_are_refused(tmp_path: Path) -> None:
    for timeline in (
        timeline_of((0, MAX_CHROME_NS, "a")),
        dataclasses.replace(timeline_of((0, 1, "a")), marks=[Mark(EPOCH + MAX_CHROME_NS, "mark", "")]),
    ):
        with pytest.raises(WriteError, match=r"11\.6 days long.*\.pftrace"):
            write_chrome(timeline, tmp_path / "trace.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["fqn", "module_class", "call", "step", "complete", "link"])
@pytest.mark.parametrize("suffix", [".json", ".pftrace"])
def test_arguments_cannot_hide_the_fixed_ones(tmp_path: Path, name: str, suffix: str) -> None:
    timeline = with_args(
        dataclasses.replace(
            timeline_of((0, 1, "a")),
        ),
        {0: {name: "x"}},
    )
    with pytest.raises(WriteError, match=f"cannot be called {name}"):
        timeline.save(tmp_path / f"trace{suffix}")


@pytest.mark.parametrize("suffix", [".json", ".pftrace"])
def test_metadata_that_is_not_json_is_refused(tmp_path: Path, suffix: str) -> None:
    for value in (object(), 2**70, {1: 2}):
        timeline = dataclasses.replace(timeline_of((0, 1, "a")), metadata={"odd": value})
        with pytest.raises(WriteError, match="must be JSON values"):
            timeline.save(tmp_path / f"trace{suffix}")


def test_a_block_of_events_is_complete_by_itself() -> None:
    """Blocks can be put between other events, without an extra comma, whatever their number."""
    timeline = gpt2_timeline(40_000)
    chrome = ChromeTimeline(timeline, Lanes.from_timeline(timeline), EPOCH, parts=[])
    blocks = [text for _, text in chrome.events()]
    assert len(blocks) > 3
    events = [event for block in blocks for event in orjson.loads(b"[" + block + b"]")]
    assert sum(event["ph"] == "X" for event in events) == len(timeline.columns)


def test_calls_steps_and_links_far_apart_are_written_too(tmp_path: Path) -> None:
    far = 2**62 - 1
    columns: dict[str, Any] = {"phase": [FORWARD, BACKWARD], "call": [-1, far], "step": [0, far], "link": [far, far]}
    events = saved(timeline_of((0, 1, "a"), (2, 3, "a"), **columns), tmp_path)["traceEvents"]
    spans = [event["args"] for event in events if event["ph"] == "X"]
    assert [(args["call"], args["step"]) for args in spans] == [(-1, 0), (far, far)]
    assert [event["id"] for event in events if event["ph"] in "sf"] == [far, far]


@given(st.lists(st.integers(0, MAX_CHROME_NS - 1), min_size=1, max_size=40))
def test_digits(numbers: list[int]) -> None:
    values = np.array(numbers, np.int64)
    assert [bytes(row).decode() for row in format_microseconds(values, 12)] == [
        f"{number // 1000:012}.{number % 1000:03}" for number in numbers
    ]
    assert digit_count(values).tolist() == [len(str(number)) for number in numbers]
    assert [bytes(row).decode() for row in format_decimal(values, 15)] == [f"{number:015}" for number in numbers]


def test_width_at_the_powers_of_ten() -> None:
    edges = [0, 9, 10, 99, 100, 10**18 - 1, 10**18, 2**63 - 1]
    assert digit_count(np.array(edges, np.int64)).tolist() == [len(str(edge)) for edge in edges]
