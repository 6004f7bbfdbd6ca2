"""One event of a profile is damaged: it alone is lost, and said, in every layout of lines."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modtrace import load, merge
from modtrace.formats.event_stream import EventStream
from modtrace.formats.trace_file import TraceFile
from modtrace.profiler.event_collector import EventCollector
from tests.support.kineto import GPU_TRACES, x
from tests.support.test_scale import scaled

COUNT = 400
EVENTS = [
    x("cpu_op", f"op{n}", 1000 + 10 * n, 1005 + 10 * n, External_id=n, Input_Dims=[[2, 3], []]) for n in range(COUNT)
]


def as_kineto(event: dict[str, Any]) -> str:
    args = ", ".join(f'"{key}": {json.dumps(value)}' for key, value in event["args"].items())
    ids, times = (", ".join(f'"{key}": {event[key]}' for key in keys) for keys in (("pid", "tid"), ("ts", "dur")))
    head = f'"ph": "X", "cat": "cpu_op", "name": "{event["name"]}", {ids},\n    {times}'
    return f'  {{\n    {head},\n    "args": {{\n      {args}\n    }}\n  }}'


LAYOUTS: dict[str, tuple[Callable[[dict[str, Any]], str], str]] = {
    "as Kineto": (as_kineto, ",\n"),
    "in one line": (lambda event: json.dumps(event, separators=(",", ":")), ","),
    "indented": (lambda event: json.dumps(event, indent=2), ",\n"),
}


def change(pattern: str, by: str) -> Callable[[str], str]:
    return lambda text: re.sub(pattern, by, text, count=1)


DAMAGES: dict[str, Callable[[str], str]] = {
    "a quote before its name": change(r'("name":\s*)"', r"\1"),
    "a quote after its name": change(r'("name":\s*"\w+)"', r"\1"),
    "a quote before a key": change(r'"dur":', "dur:"),
    "a quote after a key": change(r'"dur":', '"dur:'),
    "its first brace": change(r"\{", ""),
    "its last brace": lambda text: text.rstrip()[:-1],
    "both last braces": lambda text: text.rstrip()[:-1].rstrip()[:-1],
    "a colon": change(r'("ts")\s*:', r"\1"),
    "a comma": change(r',(\s*"dur")', r"\1"),
    "a bracket": change(r'("Input Dims":\s*)\[', r"\1"),
    "its second half": lambda text: text[: len(text) // 2],
    "its first half": lambda text: text[len(text) // 2 :],
    "most of it": lambda text: text[: len(text) // 5],
    "all of it but noise": lambda _: "#$%&!",
    "nothing, with a comma too many": change(r',(\s*"dur")', r",,\1"),
    "nothing, with a brace too many": lambda text: text + "}",
    "nothing, with a quote in its name": change(r'("name":\s*"op)', r'\1"x'),
    "its duration, which is NaN": change(r'("dur":\s*)[\d.]+', r"\1NaN"),
    "its time, which is a word": change(r'("ts":\s*)[\d.]+', r"\1later"),
    "bytes, which are 0": lambda text: text[: len(text) // 2] + "\0" * 20 + text[len(text) // 2 + 20 :],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_an_event_that_lacks_something_is_lost_alone_and_said(tmp_path: Path, layout: str, damage: str) -> None:
    write, between = LAYOUTS[layout]
    whole = {json.dumps(event) for event in EVENTS}
    for place in (0, 200, COUNT - 1):
        texts = [write(event) for event in EVENTS]
        texts[place] = DAMAGES[damage](texts[place])
        path = tmp_path / "profile.json"
        path.write_text(f'{{"schemaVersion": 1, "traceEvents": [{between.join(texts)}]}}')
        with TraceFile(path) as source:
            stream = EventStream(source)
            events = [event for chunk in stream.chunks() for event in chunk.events]
        assert len(whole & {json.dumps(event) for event in events}) >= COUNT - 1
        assert stream.count + stream.dropped == COUNT
        notes = stream.notes()
        assert notes
        assert set(notes) <= set(merge(path, None, tmp_path / "out.json").notes)
        assert set(notes) <= set(merge(path, None, tmp_path / "out.pftrace").notes)
        said = load(path).metadata["notes"]
        assert isinstance(said, list)
        assert set(notes) <= set(said)


CHANGES = scaled(100, 300, 10_000)


@pytest.mark.usefixtures("gpu_traces")
def test_no_byte_of_a_real_profile_costs_an_event_that_is_not_counted(tmp_path: Path) -> None:
    """The byte between two events is of both."""
    chance, path = random.Random(46), tmp_path / "profile.json"
    data = gzip.decompress(GPU_TRACES[0].read_bytes())
    begin, end = data.index(b"[", data.index(b'"traceEvents"')) + 1, data.rindex(b"]")
    events = re.findall(rb"\n  \{\n.*?\n  \}", data[begin:end], re.DOTALL)
    assert len(events) == 1408
    for _ in range(CHANGES):
        first = chance.randrange(len(events) - 100)
        body = bytearray(b",".join(events[first : first + 100]))
        place = chance.randrange(len(body))
        byte = chance.choice([b"", *(bytes([byte]) for byte in b'{}[]",:\\0aN \n\xff\x00')])
        body[place : place + chance.choice((0, 1, 1))] = byte
        path.write_bytes(data[:begin] + body + data[end:])
        collector = EventCollector()
        with TraceFile(path) as source:
            stream = EventStream(source)
            for chunk in stream.chunks():
                collector.add(chunk.events)
        assert collector.events().event_count == stream.count
        assert stream.count + stream.dropped >= 100
        assert stream.dropped <= 2
