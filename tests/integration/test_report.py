"""Reports as a whole: nothing private in any byte of them, never too large, the same for the same trace."""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import modtrace
from modtrace import WriteError
from modtrace.cli.group import group
from modtrace.report import MAX_REPORT_BYTES, Report, report_file, report_timeline, write_report, zip_bytes
from modtrace.report.identity import REPORT_START_NS
from modtrace.timeline import Mark, Name, Process, Span, Timeline
from tests.support.gpt_timeline import gpt_timeline
from tests.support.kineto import GPU_TRACES
from tests.support.python_process import run_python

ALEXNET, DDP, _ = GPU_TRACES
FILES = ["summary.md", "environment.txt", "trace.pftrace.gz", "viewer.html"]

PLANTED = ("zaphod", "heartofgold", "magrathea", "tok_5f1e2d3c4b5a", "towel42secret", "deepthought")
"""User, home, host, token, secret in a class attribute, name of the script."""


def files_of(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as packed:
        assert packed.testzip() is None
        return {name: packed.read(name) for name in packed.namelist()}


def all_bytes(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Every byte of an archive by place: as it is, unpacked, and what is packed inside."""
    yield "archive", data
    for name, content in files_of(data).items():
        yield name, content
        if name.endswith(".gz"):
            yield f"{name} unpacked", gzip.decompress(content)
        if name.endswith(".html"):
            packed = re.search(rb'id="modtrace-data">([A-Za-z0-9+/=]+)</script>', content)
            assert packed is not None
            yield f"{name} data", gzip.decompress(base64.b64decode(packed[1]))


def found(data: bytes, words: tuple[str, ...]) -> list[tuple[str, str]]:
    """Which words are in an archive, in any case or as hexadecimal digits, and where."""
    return [
        (word, place)
        for place, content in all_bytes(data)
        for word in words
        # Three letters are in packed bytes by chance; unpacked, all of it is looked at.
        if len(word) > 3 or not (place == "archive" or place.endswith(".gz"))
        if word.encode() in content.lower() or word.encode().hex().encode() in content.lower()
    ]


# A run under planted names.

RUN = """
import threading, torch, modtrace
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

class Vogon(nn.Module):
    poem = "towel42secret"
    def __init__(self):
        super().__init__()
        self.zaphod_head = nn.Linear(4, 4)
        self.slartibart = nn.ModuleDict({"/heartofgold/zaphod/x": nn.Linear(4, 4), "say zaphod\\n": nn.Linear(4, 4)})
        self.secret = "towel42secret"
    def extra_repr(self):
        return "towel42secret"
    def forward(self, x, babelfish=None):
        x = self.zaphod_head(x)
        for layer in self.slartibart.values():
            x = layer(x)
        return x

def step():
    with record_function("reads /heartofgold/zaphod/data on magrathea"):
        model(torch.ones(2, 4), babelfish=torch.ones(1)).sum().backward()

model = Vogon()
activities = [ProfilerActivity.CPU]
with profile(activities=activities, with_stack=True, record_shapes=True) as profiler:
    step()
profiler.export_chrome_trace("plain.json")
with modtrace.record(ring="run.ring", shapes=True, memory_interval=0, host_name=True, engine="python") as rec:
    with profile(activities=activities, with_stack=True, record_shapes=True) as profiler:
        for _ in range(2):
            thread = threading.Thread(target=step, name="loader of zaphod")
            thread.start()
            thread.join()
            step()
            rec.mark("saved /heartofgold/zaphod/model.pt for zaphod@magrathea.example")
            rec.step()
profiler.export_chrome_trace("with.json")
rec.save("run.json")
rec.save("run.pftrace")
rec.save("run.zip")
"""


def planted(source: Any) -> Any:
    """A profiler's trace as a cluster writes it: with who, where and what at the top, and in its events."""
    source |= {
        "username": "zaphod",
        "host_name": "magrathea",
        "hostname": "magrathea",
        "job_name": "zaphod/deepthought",
        "job_user": "zaphod",
        "traceName": "/heartofgold/zaphod/trace.json",
        "command": "python deepthought.py --token tok_5f1e2d3c4b5a",
        "env": {"HF_TOKEN": "tok_5f1e2d3c4b5a"},
        "INFO": ["at magrathea"],
        "distributedInfo": {"rank": 0, "world_size": 1, "pg_config": [{"pg_desc": "zaphod's"}], "host": "magrathea"},
    }
    events = source["traceEvents"]
    for event in events[:: max(len(events) // 50, 1)]:
        event.setdefault("args", {})["Call stack"] = "/heartofgold/zaphod/deepthought.py(3): towel42secret"
        event["id_of"] = "zaphod"
    place = {"pid": events[0]["pid"], "tid": events[0]["tid"], "ts": events[-1].get("ts", 1), "dur": 1}
    events += [
        {"ph": "X", "cat": "python_function", "name": "deepthought.py(1): towel42secret", **place},
        {"ph": "X", "cat": "user_annotation", "name": "## zaphod@magrathea.example: ~/heartofgold ##", **place},
        {"ph": "X", "cat": "cpu_op", "name": "load(/heartofgold/zaphod/x.py)", **place},
        {"ph": "X", "cat": "zaphod", "name": "zaphod", **place},
        {"ph": "M", "name": "process_name", **place, "args": {"name": "deepthought.py"}},
        {"ph": "M", "name": "thread_name", **place, "args": {"name": "thread 1 (deepthought)"}},
    ]
    return source


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a run under planted names left."""
    home = tmp_path_factory.mktemp("run") / "heartofgold" / "zaphod"
    home.mkdir(parents=True)
    (home / "deepthought.py").write_text(RUN)
    wrapper: tuple[str, ...] = ()
    if shutil.which("unshare") and subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode == 0:
        wrapper = ("unshare", "--uts", "sh", "-c", 'hostname magrathea && exec "$@"', "sh")
    run_python("deepthought.py", "--token", "tok_5f1e2d3c4b5a", cwd=home, env=environ(home), wrapper=wrapper)
    for name in ("plain.json", "with.json"):
        (home / name).write_text(json.dumps(planted(json.loads((home / name).read_text()))))
    for name in ("merged.json", "merged.pftrace"):
        modtrace.merge(home / "with.json", home / "run.ring", home / name)
    for path in filter(Path.exists, GPU_TRACES):
        with gzip.open(path) as real, gzip.open(home / path.name, "wt", 1) as spiked:
            json.dump(planted(json.load(real)), spiked)
    return home


def environ(home: Path) -> dict[str, str]:
    return {
        **os.environ,
        "USER": "zaphod",
        "LOGNAME": "zaphod",
        "HOME": str(home),
        "HOSTNAME": "magrathea",
        "HF_TOKEN": "tok_5f1e2d3c4b5a",
        "MODTRACE_TEST_SETTING": "towel42secret",
        "PYTHONPATH": str(Path(modtrace.__file__).parents[1]),
    }


@pytest.mark.parametrize("options", [[], ["--anonymize"]], ids=["plain", "anonymized"])
@pytest.mark.parametrize(
    "name",
    [
        *("run.ring", "run.json", "run.pftrace", "plain.json", "with.json", "merged.json", "merged.pftrace"),
        *(path.name for path in GPU_TRACES),
    ],
)
def test_nothing_private_is_in_any_byte(
    request: pytest.FixtureRequest, run: Path, name: str, options: list[str], tmp_path: Path
) -> None:
    if name.endswith(".json.gz"):
        request.getfixturevalue("gpu_traces")
    source = (run / name).read_bytes()
    source = gzip.decompress(source) if name.endswith(".gz") else source
    assert b"zaphod" in source  # the test can fail

    command = ("-m", "modtrace", "report", name, "-o", tmp_path / "bug.zip", "--show", *options)
    done = run_python(*command, cwd=run, env=environ(run))
    data = (tmp_path / "bug.zip").read_bytes()

    expected = ["trace.json.gz" if file.startswith("trace") and name == "merged.json" else file for file in FILES]
    assert list(files_of(data)) == expected
    names = ("vogon", "babelfish", "slartibart") if options and name.startswith(("run", "with", "merged")) else ()
    assert found(data, PLANTED + names) == []
    assert [word for word in PLANTED if word in done.stdout.lower()] == []
    own = name.startswith(("run", "with", "merged", "plain"))
    assert (b"Vogon" in files_of(data)["summary.md"]) is (own and not options)


PLANTED_ELSEWHERE = ("hf_qwertyuiop12", "arthur", "betelgeuse", "milliways", "40123", "1791234567")
"""On a machine that this one knows nothing of: token, user, host, folder of the program, process, start of the run."""
START_NS = 1_791_234_567_000_000_000


def timeline_from_elsewhere() -> Timeline:
    """A timeline with a token in a mark, user and host in a thread's name, and a path in the program's."""
    plain = gpt_timeline(2, 1)
    shift = START_NS - int(plain.columns.start[0])
    process = Process(40_123, 0, "/srv/milliways/train.py")
    return replace(
        plain,
        columns=replace(plain.columns, start=plain.columns.start + shift, end=plain.columns.end + shift),
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

    report = report_file(path)

    data = zip_bytes(report.files)
    assert [word for word in PLANTED_ELSEWHERE[:4] if word.encode() not in path.read_bytes()] == []  # the test can fail
    assert found(data, PLANTED_ELSEWHERE) == []
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

    report = report_file(path)

    assert found(zip_bytes(report.files), PLANTED_ELSEWHERE) == []
    assert report.texts["annotation"] == ("annotation 1",)
    assert report.texts["operation"] == ("aten::mm",)


def test_a_recording_saves_a_private_report(run: Path) -> None:
    data = (run / "run.zip").read_bytes()

    assert list(files_of(data)) == FILES
    assert found(data, PLANTED) == []
    assert b"Vogon" in files_of(data)["summary.md"]


def test_the_trace_in_a_report_is_whole(run: Path, tmp_path: Path) -> None:
    (tmp_path / "t.pftrace.gz").write_bytes(report_file(run / "run.ring").files["trace.pftrace.gz"])

    there, here = modtrace.load(tmp_path / "t.pftrace.gz"), modtrace.load(run / "run.ring")

    first = here.spans[0].start_ns - REPORT_START_NS
    assert [(span.phase, span.start_ns, span.end_ns, span.depth, *span[8:]) for span in there.spans] == [
        (span.phase, span.start_ns - first, span.end_ns - first, span.depth, *span[8:]) for span in here.spans
    ]  # all but names, tracks and the start
    assert [span.module_class for span in there.spans] == [span.module_class for span in here.spans]
    assert there.stats == here.stats
    assert "host" not in there.metadata


@pytest.mark.usefixtures("gpu_traces")
def test_the_profilers_kernels_are_in_a_report(trace_processor: Any, tmp_path: Path) -> None:
    files = report_file(DDP).files
    trace = trace_processor.open(gzip.decompress(files["trace.pftrace.gz"]))
    count = "select category, count(*) as n from slice group by 1"
    clean = {row["category"]: row["n"] for row in trace.query(count)}
    problems = trace.import_problems()
    modtrace.merge(DDP, None, tmp_path / "all.pftrace")
    all_ = {row["category"]: row["n"] for row in trace_processor.open(tmp_path / "all.pftrace").query(count)}

    assert problems == {}
    assert clean == all_
    assert clean["kernel"] == 2700


def test_a_report_of_a_merged_trace_has_the_modules_and_the_profilers_events(run: Path, trace_processor: Any) -> None:
    files = report_file(run / "merged.json").files
    trace = trace_processor.open(gzip.decompress(files["trace.json.gz"]))
    spans = len(modtrace.load(run / "run.ring").spans)

    assert trace.import_problems() == {}
    rows = trace.query("select category, count(*) as n from slice group by 1")
    counts = {row["category"]: row["n"] for row in rows}
    assert counts["forward"] + counts["backward"] >= spans / 2
    assert counts["cpu_op"] > 100
    assert b"| module | class | calls | " in files["summary.md"]


@pytest.mark.usefixtures("gpu_traces")
def test_a_report_of_a_merged_gpu_trace_has_gpu_times(tmp_path: Path) -> None:
    modtrace.merge(ALEXNET, None, tmp_path / "merged.json")

    summary = report_file(tmp_path / "merged.json").files["summary.md"].decode()
    assert "| kernels | GPU self ms |" in summary
    assert "| &#40;no module&#41; |  | 0 | 79 | 66.203 |" in summary


def moved(timeline: Timeline) -> list[Span]:
    """A timeline's spans at the time at which every report begins."""
    shift = REPORT_START_NS - int(timeline.columns.start[0])
    return [span._replace(start_ns=span.start_ns + shift, end_ns=span.end_ns + shift) for span in timeline.spans]


# Aliases.


def test_aliases_keep_every_time_and_place(tmp_path: Path) -> None:
    timeline = gpt_timeline(steps=2, layers=2)

    def read(files: dict[str, bytes]) -> Timeline:
        (tmp_path / "t.pftrace.gz").write_bytes(files["trace.pftrace.gz"])
        return modtrace.load(tmp_path / "t.pftrace.gz")

    plain = read(dict(report_timeline(timeline).files))
    aliased = read(dict(report_timeline(timeline, anonymize=True).files))

    assert list(plain.spans) == moved(timeline)
    pairs = [(old, new) for old, new in zip(plain.spans, aliased.spans, strict=True)]
    assert [old[3:] for old, _ in pairs] == [new[3:] for _, new in pairs]
    for part in ("name", "fqn", "module_class"):
        alias = dict.fromkeys((getattr(old, part), getattr(new, part)) for old, new in pairs)
        assert len(alias) == len({old for old, _ in alias}) == len({new for _, new in alias})
    words = (
        "gpt2",
        "conv1d",
        "embedding",
        "layernorm",
        "gelu",
        "c_attn",
        "c_proj",
        "ln_1",
        "lm_head",
        "transformer",
        "wte",
    )
    assert found(zip_bytes(report_timeline(timeline, anonymize=True).files), words) == []


def test_a_report_is_the_same_for_the_same_trace() -> None:
    timeline = gpt_timeline(steps=2, layers=1)

    for anonymize in (False, True):
        first, second = (zip_bytes(report_timeline(timeline, anonymize=anonymize).files) for _ in range(2))
        assert first == second


# Size.


def read_back(report: Report, tmp_path: Path) -> Timeline:
    (tmp_path / "t.pftrace.gz").write_bytes(report.files["trace.pftrace.gz"])
    return modtrace.load(tmp_path / "t.pftrace.gz")


@pytest.fixture(scope="module")
def bare() -> int:
    """Bytes of an archive with next to nothing in it."""
    return report_timeline(gpt_timeline(1, 1)).size


def test_the_limit_is_githubs() -> None:
    assert MAX_REPORT_BYTES == 25_000_000


def test_a_long_trace_is_cut_to_the_last_steps(tmp_path: Path, bare: int) -> None:
    timeline = gpt_timeline(steps=40, layers=8)
    limit = bare + (report_timeline(timeline).size - bare) // 2

    report = report_timeline(timeline, max_bytes=limit)

    assert report.size == len(zip_bytes(report.files)) <= limit
    found_steps = re.fullmatch(r"the (\d+) slowest steps of 40", report.cut or "")
    assert found_steps is not None
    kept = int(found_steps[1])
    assert 10 < kept < 40
    # All steps take the same time here, and of such the later ones are kept.
    assert list(read_back(report, tmp_path).spans) == moved(timeline)[-len(timeline.steps(40 - kept).spans) :]
    summary = report.files["summary.md"].decode()
    assert (
        f"**Cut to fit:** the trace and the page hold the {kept} slowest steps of 40; the table is of all." in summary
    )
    assert "| `GPT2LMHeadModel.lm_head` | `Linear` | 40 |" in summary


def test_the_slowest_steps_are_kept_where_not_all_fit(tmp_path: Path, bare: int) -> None:
    timeline = gpt_timeline(steps=40, layers=8)
    # Steps 7 and 21 take longer: what ends last in them ends later, before the next step begins.
    columns = timeline.columns
    end = columns.end.copy()
    for step in (7, 21):
        end[np.flatnonzero((columns.step == step) & (columns.depth == 0))] += 1
    timeline = replace(timeline, columns=replace(columns, end=end))
    whole = report_timeline(timeline).size

    report = report_timeline(timeline, max_bytes=bare + (whole - bare) // 10)

    assert re.fullmatch(r"the \d slowest steps of 40", report.cut or "")
    assert {7, 21} <= {span.step for span in read_back(report, tmp_path).spans}


def test_one_long_step_is_cut_to_its_end(tmp_path: Path, bare: int) -> None:
    timeline = gpt_timeline(steps=1, layers=300)
    limit = bare + (report_timeline(timeline).size - bare) // 2

    report = report_timeline(timeline, max_bytes=limit)

    assert report.size <= limit
    assert re.fullmatch(r"the last [\d.,]+ ms of [\d.,]+ ms", report.cut or "")
    rest = read_back(report, tmp_path)
    assert len(timeline.spans) / 4 < len(rest.spans) < len(timeline.spans)
    assert int(rest.columns.end.max()) == max(span.end_ns for span in moved(timeline))


@pytest.mark.usefixtures("gpu_traces")
def test_a_profilers_trace_is_cut_too(tmp_path: Path) -> None:
    source = DDP
    whole = report_file(source)

    report = report_file(source, max_bytes=400_000)

    assert whole.cut is None
    assert whole.size > 600_000
    assert report.size <= 400_000
    assert report.cut == "the profiler's slowest step of 3"
    assert "the page hold the profiler's slowest step of 3; " in report.files["summary.md"].decode()


@pytest.mark.usefixtures("gpu_traces")
def test_a_profilers_trace_without_steps_is_cut_to_its_end() -> None:
    source = ALEXNET
    limit = report_file(source).size - 10_000

    report = report_file(source, max_bytes=limit)

    assert report.size <= limit
    assert re.fullmatch(r"the last [\d.,]+ ms of 43,458\.933 ms", report.cut or "")


def test_a_profilers_trace_is_cut_to_its_steps(tmp_path: Path, trace_processor: Any) -> None:
    place = {"pid": 1, "tid": 1}
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "x"}}]
    random = np.random.default_rng(0)
    for step in range(10):
        begin = 1e6 * step
        events.append(
            {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "ts": begin + 1, "dur": 9e5, **place}
        )
        starts = np.sort(random.integers(10, 800_000, 4_000)).tolist()
        operation = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "dur": 0.5, **place}
        events += [{**operation, "ts": begin + start} for start in starts]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"baseTimeNanoseconds": 10**18, "traceEvents": events}))
    whole = report_file(path)

    report = report_file(path, max_bytes=whole.size * 2 // 3)

    kept = re.fullmatch(r"the profiler's (\d) slowest steps of 10", report.cut or "")
    assert kept is not None
    trace = trace_processor.open(gzip.decompress(report.files["trace.pftrace.gz"]))
    steps = trace.query("select name from slice where name glob 'ProfilerStep*' order by ts")
    assert [row["name"] for row in steps] == [f"ProfilerStep#{step}" for step in range(10 - int(kept[1]), 10)]


def test_nothing_is_written_where_nothing_fits(tmp_path: Path) -> None:
    out = tmp_path / "bug.zip"
    out.write_bytes(b"before")

    with pytest.raises(WriteError, match="a report of 10,000 bytes cannot hold even one span"):
        write_report(gpt_timeline(2, 1), out, max_bytes=10_000)

    assert out.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [out]


def test_an_empty_timeline_has_a_report_too() -> None:
    report = report_timeline(
        replace(gpt_timeline(1, 1), columns=gpt_timeline(1, 1).columns.take(np.array([], np.int64)))
    )

    assert list(report.files) == FILES
    assert "- No module spans." in report.files["summary.md"].decode()


# Hostile names.

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
    timeline = replace(
        plain,
        names=[Name(f"{name}: {name}", f"{name}.{number}", name) for number in range(len(plain.names))],
        tracks=[track._replace(thread=name, process=process) for track in plain.tracks],
        marks=[Mark(plain.marks[0].time_ns, "step", name)],
        counters=[replace(counter, name=name, unit=name, process=process) for counter in plain.counters],
        metadata={"torch": name, "engine": name, name: name},
        span_args={0: {"shapes": name}, 1: {name: name}},
    )

    timeline.save(tmp_path / "bug.zip")
    files = files_of((tmp_path / "bug.zip").read_bytes())

    assert list(files) == FILES
    summary = files["summary.md"].decode()
    assert not re.search(r"<img|<!--|</script|\*\*bold|javascript:|https://evil|@someone", summary)
    head, table = summary.split("\n\n| module ", 1)
    assert head.count("\n") == head.count("\n- ") + 1
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    # What looks like a place loses what tells it from the others.
    assert len(rows) == (1 if "etc/" in name or "https:" in name else len(plain.names))
    # A sign that Markdown knows would make more cells, or fewer.
    assert {line.count("|") for line in rows} == {14}
    assert b"<img" not in files["viewer.html"]
    assert files["viewer.html"].count(b"</script>") == modtrace_page().count(b"</script>")
    assert name.encode("utf-8", "replace") not in files["environment.txt"]


def modtrace_page() -> bytes:
    return (Path(modtrace.__file__).parent / "view/viewer.html").read_bytes()


# The command.


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(group, ["report", *map(str, arguments)])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "run.pftrace"
    gpt_timeline(2, 1).save(path)
    return path


def test_show_lists_all_and_writes_nothing(trace: Path) -> None:
    result = invoke(trace, "--show")

    assert result.exit_code == 0, result.output
    report = report_file(trace)
    lines = result.stdout.splitlines()
    assert lines[:4] == [f"{len(data):12,} {name}" for name, data in report.files.items()]
    for name in ("summary.md", "environment.txt"):
        assert f"\n--- {name}\n{report.files[name].decode()}" in result.stdout
    _, _, texts = result.stdout.partition("\n--- names and texts in the trace\n")
    assert texts.splitlines()[:-1] == [f"{kind}: {text}" for kind, used in report.texts.items() for text in used]
    assert "module: GPT2LMHeadModel.transformer.h.0" in texts
    assert "mark: step 0" in texts
    assert [path.name for path in trace.parent.iterdir()] == [trace.name]


def test_it_writes_the_archive(trace: Path) -> None:
    out = trace.with_name("bug.zip")

    result = invoke(trace, "-o", out)

    assert result.exit_code == 0, result.output
    assert out.read_bytes() == zip_bytes(report_file(trace).files)
    assert result.stderr == f"{out}: {out.stat().st_size:,} bytes\n"
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "Say where to write it: -o bug.zip"),
        (["-o", "bug.html"], 2, "A report is a .zip, and bug.html is none"),
        (["-o", "absent/bug.zip"], 1, "there is no directory absent"),
    ],
)
def test_where_it_cannot_be_written(trace: Path, arguments: list[str], code: int, said: str) -> None:
    result = invoke(trace, *arguments)

    assert result.exit_code == code
    assert said in result.stderr


def test_report_of_a_file_that_is_no_trace_fails_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("no trace")

    result = invoke(tmp_path / "x.txt", "-o", tmp_path / "bug.zip")

    assert result.exit_code == 1
    assert result.stderr.startswith(f"modtrace: {tmp_path / 'x.txt'}: it is neither")
    assert not (tmp_path / "bug.zip").exists()


def test_a_cut_report_says_so_on_the_terminal(tmp_path: Path, caplog: pytest.LogCaptureFixture, bare: int) -> None:
    timeline = gpt_timeline(steps=40, layers=8)
    limit = bare + (report_timeline(timeline).size - bare) // 2

    write_report(timeline, tmp_path / "bug.zip", max_bytes=limit)

    (message,) = (record.message for record in caplog.records if record.name == "modtrace")
    assert message.startswith(f"{tmp_path / 'bug.zip'} holds the 18 slowest steps of 40, so that it has no more than")
