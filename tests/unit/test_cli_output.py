"""Output of the commands: no control characters for the terminal, hints after typing errors, no clipped lines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result
from rich.console import Console

from modtrace import Timeline
from modtrace._files import next_step_hint
from modtrace._tables import printable
from modtrace.cli.group import group
from modtrace.timeline import Name, Process, Slices, Track

HOSTILE = "\x1b[2J[/nope][link=x]\x9b31m\u202egnp\u2066"
ESCAPED = r"\x1b[2J[/nope][link=x]\x9b31m\u202egnp\u2066"


def invoke(*arguments: str | Path, width: int | None = None) -> Result:
    env = {} if width is None else {"COLUMNS": str(width)}
    return CliRunner(env=env).invoke(group, [str(argument) for argument in arguments])


def timeline(fqn: str, module_class: str = "Linear") -> Timeline:
    """One call of one module."""
    columns = Slices.of(
        start=[10**18], end=[10**18 + 2_000_000], name=[0], phase=[0], track=[0], depth=[0], parent=[-1], call=[0],
        step=[0], link=[-1], complete=[1],
    )  # fmt: skip
    return Timeline(columns, [Name(fqn, fqn, module_class)], [Track("forward", "MainThread", 7, Process(7))])


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("h.4.mlp.act: GELU · 3 µs – 你好", "h.4.mlp.act: GELU · 3 µs – 你好"),
        ("a\nb\tc\x00", r"a\nb\tc\x00"),
        ("half \ud800", r"half \ud800"),
        (HOSTILE, ESCAPED),
    ],
)
def test_printable_escapes_control_characters(text: str, safe: str) -> None:
    assert printable(text) == safe


@pytest.mark.parametrize("command", ["check", "summary", "report", "where", "view"])
def test_a_hostile_file_name_is_escaped_by_every_command(command: str, tmp_path: Path) -> None:
    result = invoke(command, tmp_path / HOSTILE, *(["--show"] if command == "report" else []))

    assert result.exit_code == 1
    assert ESCAPED in result.output
    assert "\x1b" not in result.output


def test_hostile_names_are_escaped_in_tables_and_faults(tmp_path: Path) -> None:
    timeline(HOSTILE).save(tmp_path / "t.json")
    (tmp_path / "bad.json").write_text(json.dumps([{"ph": "B", "name": HOSTILE, "ts": 1}]))

    assert ESCAPED in invoke("summary", tmp_path / "t.json").output
    # The text as Python's repr, with its escapes.
    assert invoke("check", tmp_path / "bad.json").output.splitlines()[0] == (
        f"begin-without-end: event 0: {HOSTILE!r} is never ended"
    )


def test_a_pipe_gets_every_name_in_full(tmp_path: Path) -> None:
    fqn = "GPT2LMHeadModel.transformer." + ".".join(f"h.{index}" for index in range(60))
    timeline(fqn).save(tmp_path / "t.json")

    assert fqn in invoke("summary", tmp_path / "t.json").output


@pytest.mark.parametrize("width", [70, 80, 240])
def test_a_terminal_gets_names_shortened_from_the_left(width: int) -> None:
    fqn = "GPT2LMHeadModel.transformer.encoder.layers.11.attention.self_attention.h.4.mlp.act"
    console = Console(width=width, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(timeline(fqn, "NewGELUActivation").summary())

    (line,) = (line for line in captured.get().splitlines() if ".mlp.act" in line and "2.000" in line)
    assert line.split()[0].endswith("h.4.mlp.act")
    assert line.startswith("…") == (width < 240)
    # In a narrow terminal, percentiles, class, mean and the self times of phases are left out first.
    assert line.split()[-3:] == (["2.000", "0.000", "0.000"] if width == 240 else ["2.000", "2.000", "0.000"])
    assert "2.000" in line.split()[2:6]
    assert len(line) <= width


def test_the_error_of_a_mistyped_command_lists_the_commands() -> None:
    result = invoke("sumary")

    assert result.exit_code == 2
    message = "modtrace: No such command 'sumary'; try run, demo, view, summary, "
    assert result.stderr.splitlines()[-1].startswith(message)


def test_wrong_usage_has_the_style_of_all_errors() -> None:
    usage, error = invoke("view", "--ofline", "x").stderr.splitlines()

    assert usage == "Usage: modtrace view [OPTIONS] TRACE; help: modtrace view -h"
    assert error.startswith("modtrace: No such option")
    assert "Did you mean" in error
    assert "--offline" in error


@pytest.mark.parametrize(
    "line", ["summary --modules x", "convert --modules x", "diff --modules x", "run --only x", "demo --steps 5"]
)
def test_options_of_other_commands_are_unknown(line: str) -> None:
    assert invoke(*line.split()).stderr.splitlines()[-1].startswith("modtrace: No such option")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no file here is always full")
@pytest.mark.parametrize("arguments", [("--help",), ("summary", "a.json")])
def test_output_to_a_full_disk_is_one_line_of_error(arguments: tuple[str, ...], tmp_path: Path) -> None:
    timeline("Net").save(tmp_path / "a.json")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "modtrace", *arguments], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (1, "modtrace: the output cannot be written: No space left on device\n")


@pytest.mark.parametrize("closed", ["2>&-", "0<&- 1>&- 2>&-"])
@pytest.mark.parametrize("arguments", ["summary a.json", "convert a.json b.json"])
def test_a_command_runs_without_a_stream_for_its_progress(arguments: str, closed: str, tmp_path: Path) -> None:
    timeline("Net").save(tmp_path / "a.json")

    done = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m modtrace {arguments} {closed}"], cwd=tmp_path, capture_output=True
    )

    assert done.returncode == 0


@pytest.mark.parametrize("width", [60, 80])
def test_no_line_of_the_commands_is_clipped(width: int) -> None:
    assert "..." not in invoke("--help", width=width).output.split("Record:")[1]


@pytest.mark.parametrize(
    ("arguments", "incomplete", "expected"),
    [
        ([], "su", {"summary"}),
        (["convert"], "--st", {"--steps", "--step-by"}),
        (["summary"], "", {"file"}),
        (["merge", "-o"], "", {"file"}),
    ],
)
def test_commands_options_and_files_are_completed(arguments: list[str], incomplete: str, expected: set[str]) -> None:
    completions = ShellComplete(group, {}, "modtrace", "_MODTRACE_COMPLETE").get_completions(arguments, incomplete)

    assert {item.type if item.type == "file" else item.value for item in completions} == expected


@pytest.mark.parametrize(
    ("path", "program"),
    [("a.speedscope.json", "https://www.speedscope.app"), ("a.folded", "https://www.speedscope.app")],
)
def test_the_next_step_with_a_flame_graph(path: str, program: str) -> None:
    assert next_step_hint(path) == f"Next: drop {path} onto {program}"
