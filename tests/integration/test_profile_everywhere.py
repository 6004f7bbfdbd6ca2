"""Every command answers for a profile as a merge does, for each layout, compression and writer of the file."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import modtrace
from modtrace.cli import main
from tests.support.kineto import BASE, PID, x

Event = dict[str, Any]
DRAWN = [
    x("python_function", "nn.Module: Net_0", 1000, 9000),
    x("python_function", "nn.Module: Linear_0", 2000, 5000),
    x("cuda_runtime", "cudaLaunchKernel", 2200, 2300, correlation=1),
    x("kernel", "gemm", 3000, 4000, pid=0, tid=7, correlation=1),
    x("user_annotation", "ProfilerStep#3", 500, 9500),
]
SPANS = [("Net", 1000, 9000), ("Net", 3000, 4000), ("Linear_0: Linear", 2000, 5000), ("Linear_0: Linear", 3000, 4000)]
NAMED = [{"ph": "M", "name": "process_name", "pid": PID, "tid": 0, "args": {"name": "python"}}]

WRITERS: dict[str, Callable[[list[Event]], list[Event]]] = {
    "torch": lambda events: events,
    "times as text": lambda events: [e | {"ts": str(e["ts"]), "dur": str(e["dur"])} for e in events],
    "keys in another order": lambda events: [dict(sorted(e.items())) for e in events],
    "the last first": lambda events: events[::-1],
}


def in_kinetos_lines(document: Event) -> str:
    head = json.dumps({key: value for key, value in document.items() if key != "traceEvents"})[:-1]
    lines = ",\n".join(
        "  {\n    "
        + ",\n    ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in event.items())
        + "\n  }"
        for event in document["traceEvents"]
    )
    return f'{head},\n  "traceEvents": [\n{lines}\n]\n}}'


LAYOUTS: dict[str, Callable[[Event], str]] = {
    "in one line": lambda document: json.dumps(document, separators=(",", ":")),
    "indented": lambda document: json.dumps(document, indent=2),
    "in Kineto's lines": in_kinetos_lines,
}


def command(monkeypatch: pytest.MonkeyPatch, *args: object) -> None:
    monkeypatch.setattr(sys, "argv", ["modtrace", *map(str, args)])
    try:
        main()
    except SystemExit as left:
        assert not left.code  # noqa: PT017


def answer(timeline: modtrace.Timeline) -> tuple[list[Any], list[Any], int]:
    summary = timeline.summary()
    assert summary.gpu is not None
    rows = [(row.fqn, row.calls, row.forward_ns, row.kernel_ns) for row in summary.rows]
    spans = sorted((span.name, span.start_ns, span.end_ns, span.step) for span in timeline.spans)
    return spans, sorted(rows), summary.gpu.kernel_ns


@pytest.mark.parametrize("base", [None, BASE])
@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("writer", WRITERS)
def test_each_command_answers_as_a_merge_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    writer: str,
    layout: str,
    suffix: str,
    base: int | None,
) -> None:
    path = tmp_path / f"profile{suffix}"
    times = {} if base is None else {"baseTimeNanoseconds": base}
    events = NAMED + WRITERS[writer](DRAWN)
    text = LAYOUTS[layout]({"schemaVersion": 1, **times, "traceEvents": events}).encode()
    path.write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)
    answers = {"load": answer(modtrace.load(path))}
    for out in ("merged.json", "merged.json.gz", "merged.pftrace"):
        command(monkeypatch, "merge", path, "-o", tmp_path / out)
        answers[f"merge {out}"] = answer(modtrace.load(tmp_path / out))
    for out in ("converted.json", "converted.pftrace"):
        command(monkeypatch, "convert", path, tmp_path / out)
        answers[f"convert {out}"] = answer(modtrace.load(tmp_path / out))
    spans, rows, kernel_ns = answers["merge merged.json"]
    assert sorted((name, start - (base or 0), end - (base or 0)) for name, start, end, _ in spans) == sorted(SPANS)
    assert {step for *_, step in spans} == {3}
    assert rows == [("Net_0", 1, 8000, 0), ("Net_0.Linear_0", 1, 3000, 1000)]
    assert kernel_ns == 1000
    assert {name for name, said in answers.items() if said != answers["merge merged.json"]} == set()
    capsys.readouterr()
    command(monkeypatch, "summary", path, "--format", "json", "--limit", "0")
    said = json.loads(capsys.readouterr().out)
    assert sorted((row["fqn"], row["calls"], row["forward_ns"], row["kernel_ns"]) for row in said["rows"]) == rows
    for trace in (path, tmp_path / "merged.json", tmp_path / "merged.pftrace", tmp_path / "converted.pftrace"):
        command(monkeypatch, "check", "--strict", trace)
        assert "no faults" in capsys.readouterr().out
    command(monkeypatch, "report", path, "-o", tmp_path / "report.zip")
    reported = [(row.calls, row.forward_ns) for row in modtrace.load(tmp_path / "report.zip").summary().rows]
    assert sorted(reported) == sorted((calls, forward) for _, calls, forward, _ in rows)
