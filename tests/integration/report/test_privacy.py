"""A report has nothing private in any byte, and hostile names are text."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import modtrace
from modtrace import Timeline
from modtrace.reporting import zip_bytes
from modtrace.timeline import Mark, Name, Process
from tests.support.gpt_timeline import gpt_timeline
from tests.support.kineto import GPU_TRACES
from tests.support.planted_run import PLANTED, environ
from tests.support.python_process import run_python
from tests.support.report_bytes import FILES, files_of, words_in
from tests.support.timelines import with_args

ALEXNET, DDP, _ = GPU_TRACES


@pytest.mark.parametrize("options", [[], ["--anonymize"]], ids=["plain", "anonymized"])
@pytest.mark.parametrize(
    "name",
    [
        *("run.ring", "run.pftrace", "with.json", "merged.pftrace", ALEXNET.name),
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("run.json", "plain.json", "merged.json", *(path.name for path in GPU_TRACES[1:]))
        ),
    ],
)
def test_nothing_private_is_in_any_byte(
    request: pytest.FixtureRequest, run: Path, name: str, options: list[str], tmp_path: Path
) -> None:
    if name.endswith(".json.gz"):
        request.getfixturevalue("gpu_traces")
    source = (run / name).read_bytes()
    source = gzip.decompress(source) if name.endswith(".gz") else source
    assert b"zaphod" in source  # otherwise the test could not fail

    command = ("-m", "modtrace", "report", name, "-o", tmp_path / "bug.zip", "--show", *options)
    done = run_python(*command, cwd=run, env=environ(run))
    data = (tmp_path / "bug.zip").read_bytes()

    expected = ["trace.json.gz" if file.startswith("trace") and name == "merged.json" else file for file in FILES]
    assert list(files_of(data)) == expected
    names = ("vogon", "babelfish", "slartibart") if options and name.startswith(("run", "with", "merged")) else ()
    assert words_in(data, PLANTED + names) == []
    assert [word for word in PLANTED if word in done.stdout.lower()] == []
    own = name.startswith(("run", "with", "merged", "plain"))
    assert (b"Vogon" in files_of(data)["summary.md"]) is (own and not options)


PLANTED_ELSEWHERE = ("hf_qwertyuiop12", "arthur", "betelgeuse", "milliways", "40123", "1791234567")
"""Planted values of another machine: token, user, host, folder of the program, process, start of the run."""
START_NS = 1_791_234_567_000_000_000


def timeline_from_elsewhere() -> Timeline:
    """A timeline with a token in a mark, user and host in a thread's name, and a path in the program's name."""
    plain = gpt_timeline(2, 1)
    shift = START_NS - int(plain.columns.start[0])
    process = Process(40_123, 0, "/srv/milliways/train.py")
    return replace(
        plain,
        slices=replace(plain.columns, start=plain.columns.start + shift, end=plain.columns.end + shift),
        tracks=[track._replace(tid=40_123, thread="arthur@betelgeuse", process=process) for track in plain.tracks],
        marks=[Mark(START_NS + 5, "mark", "login with hf_qwertyuiop12"), Mark(START_NS + 9, "step", "step of arthur")],
        counters=[
            replace(counter, name="RSS on betelgeuse", process=process, time=counter.time + shift)
            for counter in plain.counters
        ],
        metadata={"torch": "2.13.0", "host": "betelgeuse", "program": "/srv/milliways/train.py", "argv": "arthur"},
    )


@pytest.mark.parametrize("suffix", [".json", ".pftrace"])
def test_nothing_private_of_another_machine_is_in_any_byte(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"elsewhere{suffix}"
    timeline_from_elsewhere().save(path)

    report = modtrace.report(path)

    data = zip_bytes(report.files)
    assert [word for word in PLANTED_ELSEWHERE[:4] if word.encode() not in path.read_bytes()] == []  # the test can fail
    assert words_in(data, PLANTED_ELSEWHERE) == []
    assert report.texts["mark"] == ("mark 1", "mark 2")
    assert report.texts["thread"] == ("thread 1",)
    assert "GPT2LMHeadModel.transformer.h.0" in report.texts["module"]


def test_nothing_private_of_a_profile_from_another_machine_is_in_any_byte(tmp_path: Path) -> None:
    place = {"pid": 40_123, "tid": 40_123}
    operation = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "dur": 5, **place}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", **place, "args": {"name": "/srv/milliways/train.py"}},
        {"ph": "M", "name": "thread_name", **place, "args": {"name": "thread 40123 (arthur@betelgeuse)"}},
        {"ph": "M", "name": "process_sort_index", **place, "args": {"sort_index": 40_123}},
        {"ph": "X", "cat": "user_annotation", "name": "login with hf_qwertyuiop12", "ts": 1, "dur": 50, **place},
        {"ph": "X", "cat": "python_function", "name": "nn.Module: Linear_0", "ts": 2, "dur": 20, **place},
        {**operation, "ts": 3, "args": {"Call stack": "/srv/milliways/train.py(3): arthur"}},
    ]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"baseTimeNanoseconds": START_NS, "traceEvents": events, "user": "arthur"}))

    report = modtrace.report(path)

    assert words_in(zip_bytes(report.files), PLANTED_ELSEWHERE) == []
    assert report.texts["annotation"] == ("annotation 1",)
    assert report.texts["operation"] == ("aten::mm",)


def test_a_recording_saves_a_private_report(run: Path) -> None:
    data = (run / "run.zip").read_bytes()

    assert list(files_of(data)) == FILES
    assert words_in(data, PLANTED) == []
    assert b"Vogon" in files_of(data)["summary.md"]


HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    "<!--",
    "| a | b |",
    "`code` **bold** [x](javascript:alert(1))",
    "../../../etc/passwd",
    "line\nbreak\r\n### heading",
    "a\u2028b\u202ec\0d",
    "half \ud800",
    "$$x$$ @someone #1 https://evil.example",
)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_text_everywhere(name: str, tmp_path: Path) -> None:
    plain = gpt_timeline(1, 1)
    process = Process(1, 0, name)
    timeline = with_args(
        replace(
            plain,
            names=[Name(f"{name}: {name}", f"{name}.{number}", name) for number in range(len(plain.names))],
            tracks=[track._replace(thread=name, process=process) for track in plain.tracks],
            marks=[Mark(plain.marks[0].time_ns, "step", name)],
            counters=[replace(counter, name=name, unit=name, process=process) for counter in plain.counters],
            metadata={"torch": name, "engine": name, name: name},
        ),
        {0: {"shapes": name}, 1: {name: name}},
    )

    timeline.save(tmp_path / "bug.zip")
    files = files_of((tmp_path / "bug.zip").read_bytes())

    assert list(files) == FILES
    summary = files["summary.md"].decode()
    assert not re.search(r"<img|<!--|</script|\*\*bold|javascript:|https://evil|@someone", summary)
    head, table = summary.split("\n\n| module ", 1)
    # A heading, a list, and two paragraphs: the recording and the findings.
    assert head.count("\n") == head.count("\n- ") + 1 + 4
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    # Names that look like paths or URLs lose the parts that distinguish them.
    assert len(rows) == (1 if "etc/" in name or "https:" in name else len(plain.names))
    # An unescaped Markdown character would add or remove cells.
    (headings,) = (line for line in summary.splitlines() if line.startswith("| module "))
    assert {line.count("|") for line in rows} == {headings.count("|")}
    assert b"<img" not in files["viewer.html"]
    assert files["viewer.html"].count(b"</script>") == modtrace_page().count(b"</script>") + 1  # the table's
    assert name.encode("utf-8", "replace") not in files["environment.txt"]


def modtrace_page() -> bytes:
    return (Path(modtrace.__file__).parent / "view/viewer.html").read_bytes()


def test_ranges_that_stand_for_modules_lose_their_texts(tmp_path: Path) -> None:
    modtrace.merge(ALEXNET, None, tmp_path / "merged.json")
    modtrace.merge(ALEXNET, None, tmp_path / "merged.pftrace")
    assert b"alex_net" in (tmp_path / "merged.json").read_bytes()

    for name in ("merged.json", "merged.pftrace"):
        for file, content in modtrace.report(tmp_path / name).files.items():
            plain = gzip.decompress(content) if file.endswith(".gz") else content
            assert b"alex_net" not in plain, file
            assert b"[param|" not in plain, file


@pytest.mark.usefixtures("native_engine")
@pytest.mark.parametrize("suffix", ["json", "pftrace"])
def test_tables_of_memory_and_flops_of_a_merged_trace_have_aliases(tmp_path: Path, suffix: str) -> None:
    class Hush(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whisper = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.whisper(x)
            return result

    model = Hush()
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler,
        modtrace.record(engine="native", memory=True, flops=True) as recording,
    ):
        for _ in range(2):
            model(torch.randn(2, 16)).mean().backward()
    profiler.export_chrome_trace(str(tmp_path / "profile.json"))
    modtrace.merge(tmp_path / "profile.json", recording.timeline(), tmp_path / f"merged.{suffix}")

    plain, aliased = (
        modtrace.report(tmp_path / f"merged.{suffix}", anonymize=anonymize) for anonymize in (False, True)
    )

    counts = [plain.files["summary.md"].count(name) for name in (b"`Hush`", b"`Hush.whisper`")]
    assert min(counts) >= 4  # in the tables of times, memory, FLOPs and FLOP/s
    assert [aliased.files["summary.md"].count(name) for name in (b"`Class1`", b"`Class1.m1`")] == counts
    assert words_in(zip_bytes(aliased.files), ("hush", "whisper")) == []
