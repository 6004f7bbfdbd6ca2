"""Values of `MODTRACE=`: the options that they set, and the errors of wrong values."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from modtrace import RecordingError
from modtrace.integrations.auto_recording import parse_variable, pattern_of

HERE = os.getcwd()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trace.pftrace", {"path": f"{HERE}/trace.pftrace"}),
        ("/a/run.modtrace", {"ring": "/a/run.modtrace"}),
        ("path=run.modtrace.json", {"path": f"{HERE}/run.modtrace.json"}),
        (
            "ring=/a/run-%r.modtrace, path=/b/%p%%.json, capacity=4096, engine=native, on_signal=SIGUSR1",
            {
                "ring": "/a/run-%r.modtrace",
                "path": "/b/%p%%.json",
                "capacity": 4096,
                "engine": "native",
                "on_signal": signal.SIGUSR1,
            },
        ),
    ],
)
def test_values(text: str, expected: dict[str, object]) -> None:
    assert parse_variable(text, {}) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/a/run-%r.modtrace", "/a/run-%r.modtrace"),
        ("/a/run.modtrace", "/a/run.rank%r.modtrace"),
        ("/a/run", "/a/run.rank%r"),
        ("/a/llama-3.2-1B.pftrace", "/a/llama-3.2-1B.rank%r.pftrace"),
        ("/a/llama-3.2.speedscope.json", "/a/llama-3.2.rank%r.speedscope.json"),
        ("/a.b/v1.2.json.gz", "/a.b/v1.2.rank%r.json.gz"),
        ("/a/run-%%r", "/a/run-%%r.rank%r"),
        ("/a/run-%p", "/a/run-%p"),
    ],
)
def test_several_ranks_have_files_of_their_own(text: str, expected: str) -> None:
    environment = {"RANK": "3", "WORLD_SIZE": "4"}

    assert parse_variable(f"path={text}", environment) == {"path": expected}


@pytest.mark.parametrize(
    "text",
    ["path=", "pth=a.json", "path=a.json,", "path=a.json,x", "capacity=many", "on_signal=SIGNOTHING", "on_signal=10"],
)
def test_a_meaningless_value_is_an_error(text: str) -> None:
    with pytest.raises(RecordingError, match="MODTRACE: '"):
        parse_variable(text, {})


def test_a_removed_working_directory_only_breaks_relative_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    assert parse_variable("/traces/a.json", {}) == {"path": "/traces/a.json"}
    with pytest.raises(RecordingError, match=r"a\.json: the working directory is gone"):
        parse_variable("a.json", {})


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (["a.pid12.json"], "a.pid12.json"),
        (["a.pid12.json", "a.pid13.json"], "a.pid*.json"),
        (["a.rank0.pid7.json", "a.rank1.pid7.json"], "a.rank*.pid7.json"),
        (["a.pid5.json", "a.rank0.pid9.json"], "a.*.json"),
        (["10/a.json", "20/a.json"], "*/a.json"),
    ],
)
def test_names_of_the_files_of_children_match_a_pattern(names: list[str], pattern: str) -> None:
    assert pattern_of(names) == pattern
