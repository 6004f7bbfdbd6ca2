"""`modtrace report`."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import modtrace
from modtrace.cli.group import group
from modtrace.reporting import zip_bytes
from tests.support.gpt_timeline import gpt_timeline


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
    report = modtrace.report(trace)
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
    assert out.read_bytes() == zip_bytes(modtrace.report(trace).files)
    share = f"To show it to others, give them {out}: they open the viewer.html in it, or run modtrace view\n"
    said = f"{out}: {out.stat().st_size:,} bytes\n{share}"
    hint = "It names your modules and classes: --show lists the names in it, --anonymize replaces them.\n"
    assert (result.stdout, result.stderr) == ("", said + hint)
    assert invoke(trace, "-o", out, "--anonymize").stderr == f"{out}: {out.stat().st_size:,} bytes\n{share}"
    summary = modtrace.report(trace).files["summary.md"].decode()
    rows = [line for line in summary.splitlines() if line.startswith("|")]
    assert rows[0].startswith("| module | class | calls | % step | total ms | self |")
    assert all(len(row.split(" | ")) < 13 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "Give a file to write: -o bug.zip"),
        (["-o", "bug.html"], 2, "A report is a .zip archive; name it bug.zip"),
        (["-o", "absent/bug.zip"], 1, "there is no directory absent"),
    ],
)
def test_an_archive_that_cannot_be_written_is_an_error(trace: Path, arguments: list[str], code: int, said: str) -> None:
    result = invoke(trace, *arguments)

    assert result.exit_code == code
    assert said in result.stderr


def test_report_of_a_file_that_is_no_trace_fails_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("no trace")

    result = invoke(tmp_path / "x.txt", "-o", tmp_path / "bug.zip")

    assert result.exit_code == 1
    assert result.stderr.startswith(f"modtrace: {tmp_path / 'x.txt'}: it is neither")
    assert not (tmp_path / "bug.zip").exists()
