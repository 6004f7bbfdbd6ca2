"""The command line without a recording: help, versions, `doctor`, `check`, errors and exit codes."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import modtrace.cli
from modtrace import ModtraceError
from modtrace.cli.group import group
from modtrace.track.native.library import FAILURE, native_path
from tests.support.python_process import run_python

COMMANDS = [
    "build",
    "check",
    "convert",
    "demo",
    "diff",
    "doctor",
    "mcp",
    "merge",
    "ranks",
    "report",
    "run",
    "summary",
    "top",
    "view",
    "watch",
    "where",
]
HEAVY = {"torch", "numpy", "rich", "perfetto", "google.protobuf", "orjson"}
DATA = Path(__file__).parents[1] / "data" / "check"


def test_every_module_of_the_package_is_a_command() -> None:
    result = CliRunner().invoke(group, ["--help"])

    assert result.exit_code == 0
    listed = result.output.split("Record:\n")[1].splitlines()
    assert sorted(line.split()[0] for line in listed if line.startswith("  ")) == COMMANDS
    assert [line for line in listed if line and line[0] != " "] == [
        "Look:",
        "Compare:",
        "Jobs:",
        "Agents:",
        "Maintenance:",
    ]
    folder = Path(modtrace.cli.__file__).parent / "commands"
    assert sorted(path.stem for path in folder.glob("[!_]*.py")) == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_explains_itself(name: str) -> None:
    result = CliRunner().invoke(group, [name, "--help"])

    assert result.exit_code == 0
    usage, _, explained, *_ = result.output.splitlines()
    assert usage.startswith(f"Usage: modtrace {name} [OPTIONS]")
    assert explained.startswith("  ")


@pytest.mark.parametrize("name", [*COMMANDS, "ranks pack", "ranks query", "ranks slow"])
def test_help_names_the_kind_of_each_number(name: str) -> None:
    explained = CliRunner().invoke(group, [*name.split(), "--help"]).output

    assert explained.startswith(f"Usage: modtrace {name} ")
    assert not {"INTEGER", "FLOAT", "RANGE"} & set(explained.split())


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["check", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys, modtrace.cli\n"
        f"sys.argv = ['modtrace', *{arguments}]\n"
        "try:\n    modtrace.cli.main()\nexcept SystemExit as ended:\n    assert ended.code == 0\n"
        f"print(sorted({HEAVY} & set(sys.modules)))"
    )

    done = run_python("-c", code)

    assert done.stdout.splitlines()[-1] == "[]"


def test_the_version() -> None:
    result = CliRunner().invoke(group, ["--version"], prog_name="modtrace")

    assert result.output == f"modtrace, version {modtrace.__version__}\n"


@pytest.mark.parametrize("is_loaded", [False, True])
def test_doctor_shows_in_one_screen_why_the_python_engine_records(
    is_loaded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_loaded:
        # As if this process had loaded a library that has been removed since.
        monkeypatch.setattr("modtrace.track.native.library.why_unavailable", lambda: None)
    monkeypatch.setenv("MODTRACE_CACHE", str(tmp_path / "home" / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CXX", "no-such-compiler")

    result = CliRunner().invoke(group, ["doctor"])

    lines = {label: text.strip() for label, _, text in (line.partition(" ") for line in result.output.splitlines())}
    assert result.exit_code == 0
    assert len(lines) == len(result.output.splitlines()) <= 24
    assert lines["torch"] == torch.__version__
    assert lines["engine"] == f"python; the native one: it is not built for torch {lines['torch']}"
    assert lines["compiler"].startswith("there is no C++ compiler (no-such-compiler)")
    assert lines["viewer"].endswith(" bytes")
    assert lines["modtrace"] == f"{modtrace.__version__} in {Path(modtrace.__file__).parent}"
    assert lines["cache"] == "~/cache, can be written, 0 engines"
    assert str(tmp_path) not in result.output
    assert (
        json.loads(CliRunner().invoke(group, ["doctor", "--format", "json"]).output).items()
        >= {
            "torch": lines["torch"],
            "compiler": lines["compiler"],
        }.items()
    )


@pytest.mark.parametrize(
    ("compiler", "cache", "headers", "failed", "ends"),
    [
        ("true", "cache", True, False, "; run `modtrace build`"),
        ("true", "cache", True, True, ": it broke; `modtrace build` tries again"),
        ("absent-compiler", "cache", True, True, ": it broke"),
        ("false", "cache", True, False, torch.__version__),
        ("true", "cache", False, False, torch.__version__),
        ("true", "a-file/cache", True, False, torch.__version__),
    ],
)
def test_doctor_advises_to_build_only_if_that_can_work(
    compiler: str,
    cache: str,
    headers: bool,
    failed: bool,
    ends: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "a-file").touch()
    monkeypatch.setenv("MODTRACE_CACHE", str(tmp_path / cache))
    monkeypatch.setenv("CXX", compiler)
    if failed:
        folder = native_path().parent
        folder.mkdir(parents=True)
        (folder / FAILURE).write_text("it broke")
    if not headers:
        monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))

    result = CliRunner().invoke(group, ["doctor"])

    [line] = [line for line in result.output.splitlines() if line.startswith("engine")]
    assert line.endswith(ends)


@pytest.mark.parametrize("raised", ["ImportError", "OSError", "RuntimeError"])
def test_doctor_reports_a_broken_torch_and_that_nothing_can_be_recorded(raised: str, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"raise {raised}('libcudart.so.13:\\n no such file')")
    first = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv[1:] = ['doctor']"

    done = run_python("-c", f"{first}; from modtrace.cli import main; main()", status=1)

    assert "engine       none: torch cannot be imported: libcudart.so.13: no such file\n" in done.stdout
    assert done.stderr == ""


def test_doctor_reports_a_missing_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def without_torch(name: str) -> str:
        if name == "torch":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_torch)

    result = CliRunner().invoke(group, ["doctor"])

    assert result.exit_code == 1
    assert "torch        not installed: nothing can be recorded" in result.output


def test_an_error_of_ours_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent.json")

    done = run_python("-m", "modtrace", "check", absent, status=1)

    assert done.stdout == ""
    assert done.stderr == f"modtrace: {absent}: cannot be read: No such file or directory\n"


def test_an_error_of_several_lines_is_printed_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str, **__: object) -> None:
        raise ModtraceError("first\nsecond\r\nthird")

    monkeypatch.setattr("modtrace.checking.check", fail)
    result = CliRunner().invoke(group, ["check", "x"])

    assert (result.exit_code, result.stderr) == (1, "modtrace: first second third\n")


@pytest.mark.parametrize(
    "arguments", [["check"], ["summary"], ["unknown"], ["run"], ["summary", "--sort", "size", "x"]]
)
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(group, arguments)

    assert result.exit_code == 2
    assert "Usage: " in result.stderr


def test_check_prints_a_line_for_each_fault_and_a_count_by_rule() -> None:
    result = CliRunner().invoke(group, ["check", str(DATA / "tid-out-of-range.json")])

    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "id-out-of-range: event 0: tid 4294967296 is not within 0 to 4294967295",
        "id-out-of-range: event 2: tid 1.5 is not within 0 to 4294967295",
        "       2 id-out-of-range",
    ]


def test_check_names_the_file_that_is_not_a_trace(tmp_path: Path) -> None:
    notes, good = tmp_path / "notes.txt", str(DATA / "good.json")
    notes.write_text("42\n")
    message = f"{notes}: not-a-trace: neither Chrome JSON nor a Perfetto trace: it starts with b'42\\n'"

    alone = CliRunner().invoke(group, ["check", str(notes)])
    beside = CliRunner().invoke(group, ["check", str(notes), good])

    assert (alone.exit_code, alone.stdout.splitlines()) == (1, [message, "       1 not-a-trace"])
    assert (beside.exit_code, beside.stdout.splitlines()) == (
        1,
        [message, "       1 not-a-trace", f"{good}: no faults"],
    )


def test_check_of_several_files_names_the_file_of_each_fault() -> None:
    faulty, good = str(DATA / "tid-out-of-range.json"), str(DATA / "good.json")

    result = CliRunner().invoke(group, ["check", faulty, good])

    assert result.stdout.splitlines() == [
        f"{faulty}: id-out-of-range: event 0: tid 4294967296 is not within 0 to 4294967295",
        f"{faulty}: id-out-of-range: event 2: tid 1.5 is not within 0 to 4294967295",
        "       2 id-out-of-range",
        f"{good}: no faults",
    ]


def test_check_prints_json() -> None:
    faulty, good = str(DATA / "tid-out-of-range.json"), str(DATA / "good.json")

    result = CliRunner().invoke(group, ["check", "--format", "json", faulty, good])

    rule, first = "id-out-of-range", "tid 4294967296 is not within 0 to 4294967295"
    second = "tid 1.5 is not within 0 to 4294967295"
    assert result.exit_code == 1
    assert json.loads(result.stdout) == [
        {
            "path": faulty,
            "faults": [
                {"rule": rule, "message": first, "event": 0, "of_profiler": False},
                {"rule": rule, "message": second, "event": 2, "of_profiler": False},
            ],
        },
        {"path": good, "faults": []},
    ]


def test_check_of_a_good_trace() -> None:
    good = str(DATA / "good.json")

    result = CliRunner().invoke(group, ["check", good])

    assert (result.exit_code, result.stdout) == (0, f"{good}: no faults\n")


def test_check_prints_names_that_cannot_be_encoded(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps([{"ph": "B", "name": "\ufffe\x1b[2J", "ts": 1}]))

    done = run_python("-m", "modtrace", "check", trace, status=1)

    assert done.stdout.splitlines()[0] == r"begin-without-end: event 0: '\ufffe\x1b[2J' is never ended"
