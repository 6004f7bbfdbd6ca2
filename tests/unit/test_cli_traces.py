"""The commands that read a trace, on a trace worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import modtrace
from modtrace import Timeline
from modtrace.cli.group import group
from modtrace.timeline import Mark, Name, Process, Track
from modtrace.timeline.slices import BACKWARD, FORWARD, Slices
from tests.support.gpt_timeline import gpt_timeline
from tests.unit.test_findings import training

START = 1_700_000_000_000_000_000
MS = 1_000_000


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two steps of 10 ms: Net for 4 ms with 1 ms of Net.a inside it, and 2 ms of its backward."""
    main = Process(7)
    rows = [
        (step, phase, name, START + (10 * step + begin) * MS, START + (10 * step + end) * MS)
        for step in (0, 1)
        for phase, name, begin, end in [
            (FORWARD, 0, 0, 4),
            (FORWARD, 1, 1, 2),
            (BACKWARD, 0, 5, 7),
        ]
    ]
    step, phase, name, start, end = zip(*rows, strict=True)
    columns = Slices.of(
        start=start,
        end=end,
        name=name,
        phase=phase,
        track=phase,
        depth=name,
        parent=[-1, 0, -1, -1, 3, -1],
        call=step,
        step=step,
        link=[0, -1, 0, 1, -1, 1],
        complete=[True] * 6,
    )
    timeline = Timeline(
        columns,
        [Name("Net", "Net", "Net"), Name("a: Linear", "Net.a", "Linear")],
        [Track("forward", "MainThread", 7, main), Track("backward", "MainThread", 7, main)],
        marks=[Mark(START + 8 * MS, "step", "step 0"), Mark(START + 18 * MS, "step", "step 1")],
    )
    path = tmp_path / "trace.json"
    timeline.save(path)
    return path


def invoke(*arguments: str | int | Path) -> Result:
    return CliRunner().invoke(group, [str(argument) for argument in arguments])


def converted(trace: Path, *options: str) -> list[tuple[str, str, float, float]]:
    """Spans that `convert` keeps with the options, as (fqn, phase, start in ms, end in ms)."""
    out = trace.with_name("out.json")
    result = invoke("convert", trace, out, *options)
    assert result.exit_code == 0, result.output
    spans = modtrace.load(out).spans
    assert result.stderr == f"{'1 span is' if len(spans) == 1 else f'{len(spans)} spans are'} in {out}\n"
    return [(s.fqn, s.phase, (s.start_ns - START) / MS, (s.end_ns - START) / MS) for s in spans]


ALL = [
    ("Net", "forward", 0, 4),
    ("Net.a", "forward", 1, 2),
    ("Net", "backward", 5, 7),
    ("Net", "forward", 10, 14),
    ("Net.a", "forward", 11, 12),
    ("Net", "backward", 15, 17),
]


@pytest.mark.parametrize(
    ("options", "spans"),
    [
        ([], ALL),
        (["--steps", "1:2"], ALL[3:]),
        (["--steps", ":1"], ALL[:3]),
        (["--steps", "1:"], ALL[3:]),
        (["--window", "1.5:6"], [("Net", "forward", 1.5, 4), ("Net.a", "forward", 1.5, 2), ("Net", "backward", 5, 6)]),
        (["--window", "14:"], ALL[5:]),
        (["--only", "*.a"], [ALL[1], ALL[4]]),
        (["--max-depth", "1"], [ALL[0], ALL[2], ALL[3], ALL[5]]),
        (["--only", "Net*", "--max-depth", "1", "--steps", "1:"], [ALL[3], ALL[5]]),
        # The window starts at the first slice of the selected steps.
        (["--steps", "1:", "--window", "0:1.5"], [("Net", "forward", 10, 11.5), ("Net.a", "forward", 11, 11.5)]),
    ],
)
def test_convert_cuts(trace: Path, options: list[str], spans: list[tuple[str, str, float, float]]) -> None:
    assert converted(trace, *options) == spans


@pytest.mark.parametrize(
    "options", [["--only", "nothing"], ["--steps", "7:"], ["--window", "99:"], ["--only", "x", "--window", "0:1"]]
)
def test_convert_of_an_empty_selection_is_an_error_and_writes_nothing(trace: Path, options: list[str]) -> None:
    out = trace.with_name("out.json")

    result = invoke("convert", trace, out, *options)

    assert result.exit_code == 1
    assert result.stderr == (
        f"modtrace: nothing is left of {trace}: it holds 6 spans in steps 0 to 1, over 17.000 ms, of modules such as "
        "Net\n"
    )
    assert not out.exists()


@pytest.mark.parametrize(("spans", "line"), [(1, "1 span is"), (2, "2 spans are"), (1_200, "1,200 spans are")])
def test_convert_reports_the_number_of_spans(spans: int, line: str, tmp_path: Path) -> None:
    ones_column, starts = np.ones(spans, np.int64), START + MS * np.arange(spans)
    columns = Slices.of(
        start=starts,
        end=starts + 1,
        name=0 * ones_column,
        phase=0 * ones_column,
        track=0 * ones_column,
        depth=0 * ones_column,
        parent=-ones_column,
        call=np.arange(spans),
        step=0 * ones_column,
        link=-ones_column,
        complete=ones_column,
    )
    source, target = tmp_path / "in.json", tmp_path / "out.pftrace"
    Timeline(columns, [Name("Net", "Net", "Net")], [Track("forward", "MainThread", 7, Process(7))]).save(source)

    result = invoke("convert", source, target)

    assert (result.exit_code, result.stdout, result.stderr) == (0, "", f"{line} in {target}\n")


def test_convert_accepts_its_output_as_an_option(trace: Path) -> None:
    as_argument, as_option = trace.with_name("a.json"), trace.with_name("b.json")
    assert invoke("convert", trace, as_argument).exit_code == 0
    assert invoke("convert", trace, "-o", as_option).exit_code == 0
    assert as_option.read_bytes() == as_argument.read_bytes()
    for wrong in ((), (as_argument, "-o", as_option)):
        result = invoke("convert", trace, *wrong)
        assert (result.exit_code, result.stderr.splitlines()[-1]) == (
            2,
            "modtrace: Give one file to write, as OUT or -o OUT.",
        )


def test_convert_refuses_to_overwrite_its_input(trace: Path) -> None:
    content = trace.read_bytes()
    link, hard = trace.with_name("link.json"), trace.with_name("hard.json")
    link.symlink_to(trace)
    hard.hardlink_to(trace)

    for target in (trace, link, hard, trace.parent / "." / trace.name):
        result = invoke("convert", trace, target, "--steps", "1:")
        assert result.exit_code == 1
        assert result.stderr == f"modtrace: {target}: IN and OUT are the same file; give OUT another name\n"
    assert trace.read_bytes() == content


@pytest.mark.parametrize("suffix", [".json", ".json.gz", ".pftrace", ".pftrace.gz"])
def test_convert_keeps_every_span_in_every_format(trace: Path, suffix: str) -> None:
    there, back = trace.with_name(f"there{suffix}"), trace.with_name("back.json")

    assert invoke("convert", trace, there).exit_code == 0
    assert invoke("convert", there, back).exit_code == 0

    assert list(modtrace.load(back).spans) == list(modtrace.load(trace).spans)
    assert invoke("check", there).exit_code == 0


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--window", "5"], "'5' is not A:B, two numbers, one of which may be missing."),
        (["--window", "a:b"], "'a:b' is not A:B"),
        (["--window", "nan:"], "'nan:' is not A:B"),
        (["--steps", "1.5:2"], "'1.5:2' is not A:B"),
        (["--steps", "2:1"], "'2:1' ends before it starts."),
        (["--max-depth", "0"], "0 is not in the range x>=1."),
    ],
)
def test_convert_refuses_other_cuts(trace: Path, options: list[str], fault: str) -> None:
    out = trace.with_name("out.json")

    result = invoke("convert", trace, out, *options)

    assert result.exit_code == 2
    assert f"Invalid value for '{options[0]}': {fault}" in result.stderr
    assert not out.exists()


def test_convert_checks_its_target_before_it_reads(trace: Path) -> None:
    result = invoke("convert", trace.with_name("absent.json"), "out.txt")

    assert result.exit_code == 1
    assert result.stderr.startswith("modtrace: out.txt: the suffix must be one of")


def test_summary_as_csv_is_exact(trace: Path) -> None:
    assert invoke("summary", trace, "--format", "csv").stdout == (
        "fqn,module_class,calls,forward_ns,forward_self_ns,backward_ns,backward_self_ns,recompute_ns,recompute_self_ns,"
        "step_p50_ns,step_p95_ns,in_steps_ns,total_ns,self_ns,mean_ns\n"
        "Net,Net,2,8000000,6000000,4000000,4000000,0,0,6000000,6000000,12000000,12000000,10000000,6000000\n"
        "Net.a,Linear,2,2000000,2000000,0,0,0,0,1000000,1000000,2000000,2000000,2000000,1000000\n"
    )


def test_summary_of_steps_as_csv_is_exact(trace: Path) -> None:
    assert invoke("summary", trace, "--by", "step", "--format", "csv").stdout == (
        "step,duration_ns,forward_ns,backward_ns,recompute_ns,before_ns,between_ns,after_ns,backward_pass_ns,whole,"
        "evaluation_ns,parts.forward,parts.loss,parts.backward,parts.other\n"
        "0,8000000,4000000,2000000,0,0,1000000,1000000,0,True,0,4000000,1000000,2000000,1000000\n"
        "1,10000000,4000000,2000000,0,2000000,1000000,1000000,0,True,0,4000000,1000000,2000000,3000000\n"
    )


@pytest.mark.parametrize("limit", [1, 2])
def test_summary_of_the_slowest_steps_is_of_the_same_steps_in_each_format(trace: Path, limit: int) -> None:
    def printed(output_format: str) -> str:
        return invoke("summary", trace, "--by", "step", "--limit", limit, "--format", output_format).stdout

    # Step 1 lasts 10 ms, step 0 lasts 8 ms; CSV and JSON have the steps in order.
    assert [line.split(",")[0] for line in printed("csv").splitlines()[1:]] == ["0", "1"][-limit:]
    assert [step["step"] for step in json.loads(printed("json"))["steps"]] == [0, 1][-limit:]
    assert [line.split()[1] for line in printed("markdown").splitlines()[2 : 2 + limit]] == ["1", "0"][:limit]
    assert [line.split()[0] for line in printed("table").splitlines()[1 : 1 + limit]] == ["1", "0"][:limit]


def test_a_long_list_of_steps_is_as_long_as_a_first_screen_unless_all_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    training(steps=80).save(path)

    first, all_steps = (invoke("summary", path, "--by", "step", *options).stdout for options in ((), ("--limit", "0")))

    assert len(first.encode()) <= 3_000 < len(all_steps.encode())
    assert first.splitlines()[:21] == all_steps.splitlines()[:21]
    assert first.splitlines()[-1] == "more: --limit 0 (all rows)"


@pytest.mark.parametrize("option", [("--sort", "total"), ("--only", "Net*"), ("--max-depth", "1")])
def test_summary_by_step_refuses_options_of_modules(trace: Path, option: tuple[str, str]) -> None:
    result = invoke("summary", trace, "--by", "step", *option)

    assert (result.exit_code, result.stdout) == (2, "")
    assert "apply to modules; leave out --by step." in result.stderr


def test_summary_of_some_steps_some_modules_and_some_levels(trace: Path) -> None:
    def rows(*options: str) -> list[tuple[str, str, int, int]]:
        document = json.loads(invoke("summary", trace, "--format", "json", *options).stdout)
        return [(row["fqn"], row["module_class"], row["calls"], row["self_ns"] // MS) for row in document["rows"]]

    assert rows("--steps", "1:2") == [("Net", "Net", 1, 5), ("Net.a", "Linear", 1, 1)]
    assert rows("--only", "*.a") == [("Net.a", "Linear", 2, 2)]
    assert rows("--only", "a") == [("Net.a", "Linear", 2, 2)]  # the name in the table
    assert rows("--max-depth", "1") == [("Net", "Net", 2, 12)]
    assert rows("--by", "class", "--sort", "name") == [("", "Linear", 2, 2), ("", "Net", 2, 10)]
    absent = invoke("summary", trace, "--steps", "7:")
    assert (absent.exit_code, absent.stderr) == (
        1,
        f"modtrace: nothing is left of {trace}: "
        "it holds 6 spans in steps 0 to 1, over 17.000 ms, of modules such as Net\n",
    )
    unknown = invoke("summary", trace, "--only", "Nett.*")
    assert (unknown.exit_code, unknown.stdout) == (1, "")
    assert (
        unknown.stderr == f"modtrace: nothing is left of {trace}: no module is called Nett.*; there is Net, for one\n"
    )


def test_summary_as_a_tree(trace: Path) -> None:
    assert invoke("summary", trace, "--tree").stdout.splitlines()[-3:] == [
        "% step  total ms    self  module",
        "  66.7    12.000  10.000  Net",
        "  11.1     2.000   2.000  └─ a: Linear",
    ]
    assert invoke("summary", trace, "--tree", "--by", "class").exit_code == 2
    assert invoke("summary", trace, "--max-depth", "1", "--by", "class").exit_code == 2


def test_summary_sorted_and_limited(trace: Path) -> None:
    document = json.loads(invoke("summary", trace, "--format", "json", "--sort", "name", "--limit", "1").stdout)

    assert [row["fqn"] for row in document["rows"]] == ["Net"]
    assert document["modules"] == 2


def test_summary_as_table_and_markdown(trace: Path) -> None:
    table = invoke("summary", trace).stdout.splitlines()
    markdown = invoke("summary", trace, "--format", "markdown").stdout.splitlines()

    nothing = (
        "nothing stands out; looked at: 2 steps in their parts (too few to tell what is usual: record 6 or more), "
        "2 modules and their siblings"
    )
    parts = [
        "part of a step  median ms    p95     %",
        "forward             4.000  4.000  44.4  ███████████",
        "loss                1.000  1.000  11.1  ███",
        "backward            2.000  2.000  22.2  █████",
        "other               2.000  3.000  22.2  █████",
    ]
    header = [
        "2 whole steps, median 9.000 ms, p95 10.000 ms, slowest 10.000 ms (step 1)",
        "6 spans of 2 modules; nothing was lost",
    ]
    assert table == [
        "Net · python",
        nothing,
        "",
        *parts,
        "",
        *header,
        "",
        "module  class   calls  % step  total ms    self  step p50  forward  backward",
        "Net     Net         2    66.7    12.000  10.000     6.000    8.000     4.000",
        "Net.a   Linear      2    11.1     2.000   2.000     1.000    2.000     0.000",
        "",
        "more: --limit 0 (all modules and columns), --tree, --by step, --ranges",
    ]
    assert invoke("summary", trace, "--limit", 0).stdout.splitlines() == [
        "Net · python",
        nothing,
        "",
        *parts,
        "",
        *header,
        "",
        "module  class   calls  % step  total ms    self   mean  step p50  forward  forward self  backward",
        "Net     Net         2    66.7    12.000  10.000  6.000     6.000    8.000         6.000     4.000",
        "Net.a   Linear      2    11.1     2.000   2.000  1.000     1.000    2.000         2.000     0.000",
        "",
        "slowest steps",
        "step  duration ms  forward   loss  backward  other",
        "   1       10.000    4.000  1.000     2.000  3.000",
        "   0        8.000    4.000  1.000     2.000  1.000",
    ]
    assert markdown[:4] == ["Net · python", "", nothing, ""]
    assert markdown[6:] == [
        "| `Net` | `Net` | 2 | 66.7 | 12.000 | 10.000 | 6.000 | 6.000 | 8.000 | 6.000 | 4.000 |",
        "| `Net.a` | `Linear` | 2 | 11.1 | 2.000 | 2.000 | 1.000 | 1.000 | 2.000 | 2.000 | 0.000 |",
    ]


def test_summary_by_gpu_time_of_a_trace_without_it(trace: Path) -> None:
    result = invoke("summary", trace, "--sort", "gpu")

    assert result.exit_code == 2
    assert f"{trace} has no GPU times; 'modtrace merge' adds them." in result.stderr


@pytest.mark.parametrize("command", [["summary", "absent"], ["convert", "absent", "out.json"], ["check", "absent"]])
def test_an_absent_trace_is_named(command: list[str]) -> None:
    result = invoke(*command)

    assert result.exit_code == 1
    assert result.stderr.startswith("modtrace: absent: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["summary", "check", "view"])
def test_the_error_for_a_folder_names_a_command_that_reads_it(command: str, tmp_path: Path) -> None:
    result = invoke(command, tmp_path)

    assert (result.exit_code, result.stderr) == (
        1,
        f"modtrace: {tmp_path}: cannot be read: it is a folder; name one of its files, or compare its ranks: "
        f"modtrace ranks slow {tmp_path}\n",
    )


def test_check_of_an_empty_name_finds_no_file() -> None:
    result = invoke("check", "")

    assert result.exit_code == 1
    assert result.output == "modtrace: : cannot be read: No such file or directory\n"


def test_the_error_of_a_misspelt_column_lists_the_columns(trace: Path) -> None:
    result = invoke("summary", trace, "--sort", "slef")

    assert result.exit_code == 2
    assert "'slef' is not one of 'gpu', 'self', 'total', " in result.output


def test_limit_shortens_every_list_of_a_summary(trace: Path, tmp_path: Path) -> None:
    gpt_timeline(40, 6).save(tmp_path / "long.json")

    def listed(limit: int) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(
            invoke("summary", tmp_path / "long.json", "--format", "json", "--limit", limit).stdout
        )
        return document

    full = json.loads(invoke("summary", tmp_path / "long.json", "--format", "json").stdout)
    for limit in (1, 3):
        document = listed(limit)
        assert [len(document[name]) for name in ("rows", "steps")] == [limit, limit]
        assert document["parts"] == full["parts"]  # the parts add up to the steps
        slowest = sorted((step["duration_ns"] for step in full["steps"]), reverse=True)[:limit]
        assert sorted((step["duration_ns"] for step in document["steps"]), reverse=True) == slowest
        assert [step["step"] for step in document["steps"]] == sorted(step["step"] for step in document["steps"])
    for limit in (1, 5):
        text = invoke("summary", tmp_path / "long.json", "--format", "json", "--limit", limit).stdout
        assert len(text.encode()) <= 6000
        assert text.count("\n") == 1
    table = invoke("summary", tmp_path / "long.json", "--limit", 2).stdout
    assert len(table.partition("slowest steps\n")[2].splitlines()) == 1 + 2 + 1
    assert "38 more steps" in table


def test_only_shows_the_selected_modules(trace: Path) -> None:
    output = invoke("summary", trace, "--only", "*.a").stdout

    assert "Net.a" in output
    assert "part of a step" not in output
    assert "slowest steps" not in output


@pytest.mark.parametrize("option", ["--memory", "--flops"])
def test_summary_by_step_refuses_tables_of_modules(trace: Path, option: str) -> None:
    result = invoke("summary", trace, "--by", "step", option)

    assert (result.exit_code, result.stdout) == (2, "")
    assert "--memory and --flops apply to modules; leave out --by step." in result.stderr
