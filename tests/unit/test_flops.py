"""FLOPs of rings written by hand, and what summaries make of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import modtrace
from modtrace.cli.group import group
from modtrace.ring import Kind
from modtrace.ring.slot_format import NO_NAME
from modtrace.timeline import Timeline, build_timeline
from modtrace.timeline.summary.peak_rates import peak_tflops
from tests.support.event_script import EventScript


def counted(flops: int = 100) -> Timeline:
    """Three steps of 100 ns: one is counted, one is like it, and one has other inputs."""
    script = EventScript()
    net, inner = script.name("Net", module_class="Net"), script.name("Net.a", module_class="A")
    for number, cost in enumerate((flops, 30, 7, 200)):
        script.note_operator(number, "aten::mm", "bfloat16", cost)
    script.note_operator(4, "aten::rnn", "float32", -1)
    for step, inputs in enumerate((0, 0, 1)):
        now = 100 * step
        if step < 2:
            script.event(now, Kind.COUNTING, NO_NAME, 1 - step)
        script.enter(now, net, step, 10 * step)
        script.event(now, Kind.INPUTS, NO_NAME, inputs)
        script.enter(now + 10, inner, step, 10 * step)
        if step == 0:
            script.operator(now + 11, 0)
            script.operator(now + 12, 4)
        script.exit(now + 20, inner, step, 10 * step + 1)
        if step == 0:
            script.operator(now + 21, 1)
        script.exit(now + 30, net, step, 10 * step + 1)
        if step == 0:
            script.operator(now + 35, 2)
        script.node_begin(now + 40, 10 * step)
        if step == 0:
            script.operator(now + 41, 3)
        script.node_end(now + 50, 10 * step)
        script.step(now + 100, step)
    return build_timeline(script.snapshot())


def test_a_call_like_a_counted_one_has_its_flops_and_another_has_none() -> None:
    timeline = counted()
    found = {
        (span.step, span.fqn, span.phase): timeline.span_args.get(row, {}).get("flops")
        for row, span in enumerate(timeline.spans)
    }

    assert found == {
        (step, name, phase): flops if step < 2 else "unknown"
        for step in range(3)
        for name, phase, flops in (
            ("Net", "forward", "130"),
            ("Net.a", "forward", "100"),
            ("Net", "backward", "200"),
            ("Net.a", "backward", "200"),
        )
        if (step, name, phase) != (2, "Net", "backward")
    } | {(2, "Net", "backward"): None}
    assert timeline.metadata["flops"] == {
        "steps": [0],
        "outside": 7,
        "unknown": 3,
        "without_formula": ["aten::rnn"],
        "dtypes": {"cpu bfloat16": 337, "cpu float32": 0},
    }


def test_a_summary_says_rates_and_shares_of_the_peak() -> None:
    summary = counted().summary()

    assert summary.flops is not None
    assert [(row.fqn, row.flops_forward, row.flops_backward, row.flops_recompute) for row in summary.rows] == [
        ("Net", 260, 400, 0),
        ("Net.a", 200, 400, 0),
    ]
    assert [row[-3:] for row in summary.flops.rows] == [(260, 400, None), (200, 400, None)]
    # 660 in 3 · (30 + 10) ns
    assert [(row.flops, row.self_flops, row.flops_per_second) for row in summary.flops.rows] == [
        (660, 60, 5.5e9),
        (600, 600, 1e10),
    ]
    assert summary.flops.peak_tflops is None
    at_peak = summary.flops.with_peak(0.01, summary.steps)  # 10 FLOP/ns: 1,000 in a step
    assert [(step.flops, step.mfu) for step in at_peak.by_step] == [(330, 0.33), (330, 0.33), (0, 0.0)]
    assert summary.flops_text().splitlines()[:4] == [
        "a step: at least 0.000 GFLOP (median); counted in step 0",
        "outside of modules: 0.000 GFLOP in these steps",
        "FLOPs of 3 spans are unknown: no call alike was counted",
        "not counted, as torch has no formula: aten::rnn",
    ]


def test_a_diff_says_exactly_what_steps_cost_if_that_differs(tmp_path: Path) -> None:
    modtrace.save_baseline(counted(), tmp_path / "base.json")
    found = modtrace.diff(tmp_path / "base.json", counted(103))
    plain = replace(counted(), metadata={}, span_args={})

    # 2 of 3 calls are counted.
    assert found.environment == {"FLOPs of a step": ("330", "333"), "FLOPs of a call of Net.a": ("200", "202")}
    assert "FLOPs of a step: 330 before, 333 after" in found.header
    assert modtrace.diff(counted(), counted()).environment == {}
    assert modtrace.diff(counted(), plain).environment == {}


def test_markdown_and_html_have_the_table_of_flops() -> None:
    summary = counted().summary()

    assert summary.to_markdown().splitlines()[-2:] == [
        "| `Net` | `Net` | 3 | 0.000 | 0.000 | 0.000 | 0.000 | 5.500 |",
        "| `Net.a` | `A` | 3 | 0.000 | 0.000 | 0.000 | 0.000 | 10.000 |",
    ]
    assert "GFLOP/s" in summary.to_html()


def test_the_command_shows_flops_alone_and_says_where_there_are_none(tmp_path: Path) -> None:
    counted().save(tmp_path / "counted.json")
    shown = CliRunner().invoke(group, ["summary", str(tmp_path / "counted.json"), "--flops", "--peak-tflops", "0.01"])
    script = EventScript()
    script.enter(0, script.name("Net"))
    script.exit(5, 0)
    build_timeline(script.snapshot()).save(tmp_path / "none.json")
    none = CliRunner().invoke(group, ["summary", str(tmp_path / "none.json"), "--flops"])
    as_json = CliRunner().invoke(group, ["summary", str(tmp_path / "none.json"), "--format", "json"])

    assert shown.exit_code == 0
    assert "MFU 33.0% of 0.01 TFLOP/s; counted in step 0" in shown.output
    assert [line.split() for line in shown.output.splitlines()[-4:-1]] == [
        ["module", "class", "calls", "GFLOP", "self", "forward", "backward", "GFLOP/s"],
        ["Net", "Net", "3", "0.000", "0.000", "0.000", "0.000", "5.500"],
        ["Net.a", "A", "3", "0.000", "0.000", "0.000", "0.000", "10.000"],
    ]
    assert (none.exit_code, "has no FLOPs; record with --flops" in none.output) == (2, True)
    row = json.loads(as_json.output)["rows"][0]
    assert [row[f"flops_{phase}"] for phase in ("forward", "backward", "recompute")] == [None] * 3


@pytest.mark.parametrize(
    ("device", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "float16", 756.0),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312.0),
        ("NVIDIA L40S", "bfloat16", 362.05),
        ("NVIDIA L4", "float8_e4m3fn", 242.5),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2),
        ("AMD Instinct MI300X", "bfloat16", 1307.4),
        ("NVIDIA A100-SXM4-80GB", "float32", None),
        ("NVIDIA A100-SXM4-80GB", "float8_e4m3fn", None),
        ("cpu", "bfloat16", None),
    ],
)
def test_the_peak_is_known_of_some_devices_and_types(device: str, dtype: str, peak: float | None) -> None:
    assert peak_tflops(device, dtype) == peak


def test_a_call_with_an_operator_whose_cost_was_not_noted_is_unknown() -> None:
    script = EventScript()
    net, inner = script.name("Net"), script.name("Net.a")
    script.note_operator(0, "aten::mm", "float32", 50)
    script.event(0, Kind.COUNTING, NO_NAME, 1)
    script.enter(0, net)
    script.enter(1, inner)
    script.operator(2, 1)  # the process died before it was noted
    script.exit(3, inner)
    script.operator(4, 0)
    script.exit(5, net)
    timeline = build_timeline(script.snapshot())

    assert [timeline.span_args[row]["flops"] for row in range(2)] == ["50", "unknown"]
    assert timeline.metadata["flops"]["unknown"] == 1  # type: ignore[index]
