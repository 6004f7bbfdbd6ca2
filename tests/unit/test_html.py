"""The payload of a page, field by field, with any names."""

from __future__ import annotations

import base64
import gzip
import re
import struct
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modtrace import Timeline, WriteError
from modtrace.timeline import CounterSeries, Mark, Name, Process, Stats, Track
from modtrace.timeline.slices import Slices
from modtrace.write.html import Comparison, payload, render_html, write_html
from tests.support.cost_timelines import recorded
from tests.support.gpt_timeline import BASE, gpt_timeline
from tests.support.report_pages import unpack, values
from tests.support.span_fields import SPAN_FIELDS
from tests.support.timelines import slice_args
from tests.unit.test_findings import training


def two_spans(**changes: Any) -> Timeline:
    """A forward from 100 to 160 ns after BASE and its backward from 200 to 300."""
    process = Process(7, 0)
    columns: dict[str, Any] = {
        "start": [BASE + 100, BASE + 200],
        "end": [BASE + 160, BASE + 300],
        "name": [0, 0],
        "phase": [0, 1],
        "track": [0, 1],
        "depth": [0, 0],
        "parent": [-1, -1],
        "call": [0, 0],
        "step": [0, 0],
        "link": [5 << 40, 5 << 40],
        "complete": [True, False],
    }
    timeline: dict[str, Any] = {
        "names": [Name("GPT", "GPT", "GPT")],
        "tracks": [Track("forward", "MainThread", 7, process), Track("backward", "MainThread", 7, process)],
        "stats": Stats(recorded=4, unfinished=1),
        "marks": [Mark(BASE + 310, "step", "step 0")],
        "counters": [CounterSeries("RSS", "bytes", process, np.array([BASE + 50]), np.array([4096]))],
        "metadata": {"torch": "2.13.0"},
    }
    assert changes.keys() <= columns.keys() | timeline.keys()
    columns |= {key: value for key, value in changes.items() if key in columns}
    slices = Slices.of(slice_args({1: {"shapes": "float32[2]"}}), **columns)
    return Timeline(slices, **{**timeline, **{k: v for k, v in changes.items() if k in timeline}})


def test_holders_of_memory_at_the_peak_are_in_the_payload_and_in_no_comparison() -> None:
    timeline = recorded()
    # The peak of `test_holders_at_the_peak_sum_to_all_that_is_held`, 1010 ns after the first sample.
    rows = [["Net.b", 140], ["Net.a", 10], ["other", 100]]
    assert unpack(payload(timeline))[0]["holders"] == {"time": 1010, "rows": rows}
    comparison = Comparison(("a", "b"), [], [], np.full(len(timeline.columns), -1, np.int32))
    assert "holders" not in unpack(payload(timeline, comparison))[0]


def test_findings_are_in_the_payload_and_in_no_comparison() -> None:
    timeline = training(forward=lambda step, block: 4 if block == 2 else 1)
    (finding,) = unpack(payload(timeline))[0]["findings"]
    assert finding == timeline.summary().findings[0]._asdict()
    comparison = Comparison(("a", "b"), [], [], np.full(len(timeline.columns), -1, np.int32))
    assert "findings" not in unpack(payload(timeline, comparison))[0]


def test_every_field_is_in_the_payload() -> None:
    header, body = unpack(payload(two_spans()))

    assert header.pop("arrays").keys() == {*SPAN_FIELDS} - {"end"} | {"duration"}
    counters, args = header.pop("counters"), header.pop("args")
    steps = header.pop("step_parts")
    assert header == {
        "version": 1,
        # The counter's sample is the first time of the recording.
        "base_ns": str(BASE + 50),
        "metadata": {"torch": "2.13.0"},
        "findings": [],
        "findings_end": "nothing stands out; looked at: 1 step in its parts (too few to tell what is usual: "
        "record 6 or more), 1 module and their siblings",
        "stats": {
            "recorded": 4,
            "overwritten": 0,
            "torn": 0,
            "unfinished": 1,
            "unstarted": 0,
            "unattributed": 0,
        },
        "names": [["GPT", "GPT", "GPT"]],
        "processes": [{"pid": 7, "rank": 0, "name": "rank 0 · python"}],
        "tracks": [
            {
                "kind": "forward",
                "thread": "MainThread",
                "tid": 7,
                "process": 0,
                "device": None,
                "stream": None,
                "name": "forward · MainThread",
            },
            {
                "kind": "backward",
                "thread": "MainThread",
                "tid": 7,
                "process": 0,
                "device": None,
                "stream": None,
                "name": "backward · MainThread",
            },
        ],
        "marks": [[260, "step", "step 0"]],
    }
    assert args.pop("kinds") == [{"shapes": "float32[2]"}]
    assert {name: values(body, ref) for name, ref in args.items()} == {"rows": [1], "kind": [0]}
    assert [counters[0][key] for key in ("name", "unit", "process")] == ["RSS", "bytes", 0]
    assert values(body, counters[0]["time"]) == [0]
    assert values(body, counters[0]["value"]) == [4096]
    columns = {name: values(body, steps.pop(name)) for name in ("start", "duration", "whole", "ns")}
    # 60 ns of forward, 40 until backward, 100 of backward, 10 until the mark.
    assert columns == {"start": [50], "duration": [210], "whole": [1], "ns": [60, 40, 100, 10]}
    parts = ("forward", "loss", "backward", "other")
    shares = [[part, ns / 210] for part, ns in zip(parts, columns["ns"], strict=True)]
    assert steps == {"parts": shares, "names": ["step 0"], "causes": [None]}


def test_the_columns_are_in_the_payload() -> None:
    header, body = unpack(payload(two_spans()))

    assert {name: values(body, ref) for name, ref in header["arrays"].items()} == {
        "start": [50, 150],
        "duration": [60, 100],
        "name": [0, 0],
        "phase": [0, 1],
        "track": [0, 1],
        "depth": [0, 0],
        "parent": [-1, -1],
        "call": [0, 0],
        "step": [0, 0],
        # Links are renumbered, so that they fit in 32 bits.
        "link": [0, 0],
        "complete": [1, 0],
    }


def test_arrays_are_aligned_to_8_bytes() -> None:
    block = payload(gpt_timeline(3, 3))
    header, _ = unpack(block)

    assert (4 + struct.unpack_from("<I", block)[0]) % 8 == 0
    assert {ref["offset"] % 8 for ref in header["arrays"].values()} == {0}
    assert len(block) % 8 == 0


def test_spans_without_another_half_have_no_link() -> None:
    header, body = unpack(payload(two_spans(link=[-1, 9])))

    assert values(body, header["arrays"]["link"]) == [-1, 0]


def test_numbers_beyond_32_bits_stay_exact() -> None:
    header, body = unpack(payload(two_spans(call=[0, 1 << 40])))

    assert header["arrays"]["call"]["type"] == "f64"
    assert values(body, header["arrays"]["call"]) == [0, 1 << 40]


def test_times_are_exact_a_hundred_days_later() -> None:
    later = 100 * 86_400 * 10**9 + 1
    header, body = unpack(payload(two_spans(start=[BASE + 50, BASE + later], end=[BASE + 50, BASE + later + 1])))

    assert values(body, header["arrays"]["start"]) == [0, later - 50]
    assert values(body, header["arrays"]["duration"]) == [0, 1]


def test_an_empty_timeline_has_a_payload() -> None:
    header, body = unpack(payload(Timeline(Slices.empty())))

    assert (header["base_ns"], header["processes"], body) == ("0", [], b"")
    assert {ref["length"] for ref in header["arrays"].values()} == {0}


def test_two_threads_of_one_name_are_distinguished_in_their_process() -> None:
    tracks = [Track("forward", "pool", tid, Process(pid)) for tid, pid in ((3, 7), (4, 7), (3, 8))]
    header, _ = unpack(payload(two_spans(tracks=tracks)))

    assert [track["name"] for track in header["tracks"]] == ["forward · pool 3", "forward · pool 4", "forward · pool"]
    assert [track["process"] for track in header["tracks"]] == [0, 0, 1]


class Scripts(HTMLParser):
    """Texts of the script elements of a page, by id, as a browser parses them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: dict[str | None, str] = {}
        self._inside: list[str | None] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "script":
            self._inside.append(dict(attrs).get("id"))

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[self._inside[-1]] = data


@given(st.text(st.characters(), max_size=40))
def test_any_name_is_read_back_from_the_page(name: str) -> None:
    page = render_html(two_spans(names=[Name(name, name, name)])).decode()
    scripts = Scripts(page).texts
    header, _ = unpack(gzip.decompress(base64.b64decode(scripts["modtrace-data"])))

    assert set(scripts) == {None, "modtrace-data", "modtrace-table"}
    assert header["names"] == [[name] * 3]


def test_a_lone_surrogate_is_read_back_as_its_escape() -> None:
    header, _ = unpack(payload(two_spans(names=[Name("\ud800", "a\udfff", "\0")])))

    assert header["names"] == [["\ud800", "a\udfff", "\0"]]


@pytest.mark.parametrize("name", ["GPT", "\ud800"])
def test_metadata_that_no_browser_could_read_are_converted(name: str) -> None:
    metadata = {"path": Path("x"), "nan": float("nan"), "list": [float("inf"), 1.5]}
    header, _ = unpack(payload(two_spans(names=[Name(name, name, name)], metadata=metadata)))

    assert header["metadata"] == {"path": "x", "nan": None, "list": [None, 1.5]}


def test_the_same_timeline_makes_the_same_bytes() -> None:
    assert render_html(gpt_timeline(2, 2)) == render_html(gpt_timeline(2, 2))


def test_the_page_is_written_to_a_path(tmp_path: Path) -> None:
    write_html(two_spans(), tmp_path / "t.html")

    assert (tmp_path / "t.html").read_bytes() == render_html(two_spans())
    assert [path.name for path in tmp_path.iterdir()] == ["t.html"]


def test_the_error_of_a_failed_write_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match=re.escape(str(tmp_path / "no" / "t.html"))):
        write_html(two_spans(), tmp_path / "no" / "t.html")
