"""Every command that reads a trace opens every kind of file, and shows the same calls in each."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import modtrace
from modtrace import TraceError
from modtrace.cli.group import group
from modtrace.read import FileKind, file_kind, trace_path
from modtrace.view.server import ensure_viewable
from tests.support.kineto import BASE, evaluate, recording, trace, x

PROFILE = trace(
    x("python_function", "nn.Module: Net_0", 900, 2100, Python_module_id=0),
    x("python_function", "nn.Module: Linear_0", 950, 1900, Python_module_id=1),
    x("cpu_op", "aten::linear", 1000, 1800, Sequence_number=1),
    evaluate("AddmmBackward0", 3000, 3500, 1),
)
RECORDED = recording(("Net", 900, 2100, 0), ("a: Linear", 950, 1900, 1), ("Net", 2900, 3600, 0, "backward"))

KINDS = {
    "run.ring": FileKind.RING,
    "saved.json": FileKind.SAVED_JSON,
    "saved.json.gz": FileKind.SAVED_JSON,
    "saved.pftrace": FileKind.PERFETTO,
    "saved.pftrace.gz": FileKind.PERFETTO,
    "profile.json": FileKind.PROFILE,
    "merged.json": FileKind.MERGED_JSON,
    "merged.json.gz": FileKind.MERGED_JSON,
    "merged.pftrace": FileKind.MERGED_PERFETTO,
    "merged.pftrace.gz": FileKind.MERGED_PERFETTO,
    "saved.zip": FileKind.ZIP,
    "report-of-profile.zip": FileKind.ZIP,
    "report-of-merged.zip": FileKind.ZIP,
}
CALLS = {"Net": 1, "Linear": 1}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one file of each kind, all with the same calls; the ring has other times."""
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.a(x)
            return out

    folder = tmp_path_factory.mktemp("kinds")
    with modtrace.record(ring=folder / "run.ring", memory_interval=0, engine="python"):
        Net()(torch.ones(1, 2)).sum().backward()
    (folder / "profile.json").write_bytes(PROFILE)
    for suffix in (".json", ".json.gz", ".pftrace", ".pftrace.gz"):
        RECORDED.save(folder / f"saved{suffix}")
        modtrace.merge(folder / "profile.json", RECORDED, folder / f"merged{suffix}")
    RECORDED.save(folder / "saved.zip")
    for name in ("profile", "merged"):
        done = invoke("report", folder / f"{name}.json", "-o", folder / f"report-of-{name}.zip")
        assert done.exit_code == 0, done.output
    return folder


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(group, [str(argument) for argument in arguments])


def forward_calls(path: Path) -> dict[str, int]:
    spans = [span for span in modtrace.load(path).spans if span.phase == "forward"]
    return {span.module_class: sum(other.module_class == span.module_class for other in spans) for span in spans}


@pytest.mark.parametrize("name", KINDS)
def test_load_and_every_command_open_it(files: Path, name: str, tmp_path: Path) -> None:
    path = files / name
    assert file_kind(path) is KINDS[name]
    assert forward_calls(path) == CALLS

    converted = invoke("convert", path, tmp_path / "out.json")
    assert converted.exit_code == 0, converted.output
    assert forward_calls(tmp_path / "out.json") == CALLS

    summary = invoke("summary", path, "--format", "json")
    assert summary.exit_code == 0, summary.output
    assert {row["module_class"]: row["calls"] for row in json.loads(summary.stdout)["rows"]} == CALLS

    report = invoke("report", path, "-o", tmp_path / "bug.zip")
    assert report.exit_code == 0, report.output
    assert forward_calls(tmp_path / "bug.zip") == CALLS

    assert invoke("check", path).stdout == f"{path}: no faults\n"

    with trace_path(path) as inner, trace_path(tmp_path / "bug.zip") as packed:
        merged = (FileKind.MERGED_JSON, FileKind.MERGED_PERFETTO)
        # In a merged trace in Perfetto's format, only the modules can be distinguished.
        assert (file_kind(packed) in merged) is (file_kind(inner) is FileKind.MERGED_JSON or name == "profile.json")

    viewable, _ = ensure_viewable(path, tmp_path)
    assert forward_calls(viewable) == CALLS


@pytest.mark.parametrize("name", [name for name in KINDS if name != "profile.json"])
def test_as_a_recording_each_is_merged_and_as_a_profile_none(files: Path, name: str, tmp_path: Path) -> None:
    if name.endswith(".zip"):
        with pytest.raises(TraceError, match="a report lacks the time of its recording"):
            modtrace.merge(files / "profile.json", files / name, tmp_path / "merged.json")
        assert not (tmp_path / "merged.json").exists()
    elif name != "run.ring":  # from another time
        modtrace.merge(files / "profile.json", files / name, tmp_path / "merged.json")
        assert forward_calls(tmp_path / "merged.json") == CALLS

    with pytest.raises(TraceError) as raised:
        modtrace.merge(files / name, files / "saved.json", tmp_path / "twice.json")
    assert str(files / name) in str(raised.value)
    assert "the profiler's" in str(raised.value)
    assert not (tmp_path / "twice.json").exists()


def test_an_archive_without_a_trace_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "photos.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../trace.json.gz", PROFILE)
    with pytest.raises(TraceError, match=r"photos\.zip: it is a ZIP archive, but not a report of modtrace"):
        modtrace.load(path)
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(TraceError, match=r"photos\.zip: it is an incomplete or damaged ZIP archive"):
        modtrace.load(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("trace.json.gz", b"[{")
    with pytest.raises(TraceError, match=r"photos\.zip, byte 1: trace\.json\.gz: none of its events can be read"):
        modtrace.load(path)


def test_a_profile_without_modules_says_how_to_make_one_with_them(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(trace(x("cpu_op", "op", 1000, 2000)))
    done = invoke("convert", path, tmp_path / "out.json")
    assert done.exit_code == 1
    assert "profile with with_stack=True, or merge a recording with it" in done.stderr
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("keys_first", [True, False])
@pytest.mark.parametrize(
    "file", ["profile.json", "merged.json", "merged.json.gz", "merged.pftrace", "converted.pftrace"]
)
def test_steps_of_a_schedule_are_those_of_a_merge(tmp_path: Path, file: str, keys_first: bool) -> None:
    """Steps from 1 to 4 ms and from 4 to 8 ms, with a forward of 1 ms in each."""
    ms = 1_000_000
    profile = trace(
        x("user_annotation", "ProfilerStep#6", ms, 3 * ms),
        x("python_function", "nn.Module: Linear_0", 2 * ms, 3 * ms, Python_module_id=1),
        x("cpu_op", "aten::linear", 2 * ms + 500, 3 * ms - 500, External_id=1),
        x("user_annotation", "ProfilerStep#7", 4 * ms, 8 * ms),
        x("python_function", "nn.Module: Linear_0", 5 * ms, 6 * ms, Python_module_id=1),
        x("cpu_op", "aten::linear", 5 * ms + 500, 6 * ms - 500, External_id=2),
    )
    if keys_first:
        document = json.loads(profile)
        events = document.pop("traceEvents")
        profile = json.dumps({**document, "traceEvents": events}).encode()
    (tmp_path / "profile.json").write_bytes(profile)
    for name in ("merged.json", "merged.json.gz", "merged.pftrace"):
        merged = modtrace.merge(tmp_path / "profile.json", None, tmp_path / name).summary
    invoke("convert", tmp_path / "profile.json", tmp_path / "converted.pftrace")
    timeline = modtrace.load(tmp_path / file)
    assert [(mark.text, mark.time_ns) for mark in timeline.marks if mark.kind == "step"] == [
        ("step 6", BASE + 4 * ms),
        ("step 7", BASE + 8 * ms),
    ]
    assert timeline.columns.start.tolist() == [BASE + 2 * ms, BASE + 5 * ms]
    assert timeline.columns.step.tolist() == [6, 7]
    assert str(timeline.summary()) == str(merged)
    for command in ("summary", "check"):
        done = invoke(command, tmp_path / file)
        assert (done.exit_code, "modtrace:" in done.stderr) == (0, False)
    assert "forward             1.000  1.000" in invoke("summary", tmp_path / file).stdout
