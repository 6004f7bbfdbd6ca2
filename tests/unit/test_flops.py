"""FLOPs of rings written by hand, and their rates and peak shares in summaries."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import modtrace
from modtrace.cli.group import group
from modtrace.ring import Kind
from modtrace.ring.slot_format import NO_NAME
from modtrace.timeline import GpuWork, Slices
from modtrace.timeline.join import add_gpu_tracks
from modtrace.timeline.slices import UNKNOWN_FLOPS
from modtrace.timeline.summary import summarize
from modtrace.timeline.summary.flop_summary import peak_tbytes, peak_tflops
from tests.support.cost_timelines import counted
from tests.support.event_script import EventScript
from tests.support.timelines import build_timeline, with_args


def test_a_call_like_a_counted_call_has_its_flops_and_another_has_none() -> None:
    timeline = counted()
    flops_of = {
        (span.step, span.fqn, span.phase): timeline.span_args.get(row, {}).get("flops")
        for row, span in enumerate(timeline.spans)
    }

    assert flops_of == {
        (step, name, phase): flops if step < 2 else UNKNOWN_FLOPS
        for step in range(3)
        for name, phase, flops in (
            ("Net", "forward", 130),
            ("Net.a", "forward", 100),
            ("Net", "backward", 200),
            ("Net.a", "backward", 200),
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


def test_a_summary_has_rates_and_shares_of_the_peak() -> None:
    summary = counted().summary()

    assert summary.flops is not None
    assert [(row.fqn, row.flops_forward, row.flops_backward, row.flops_recompute) for row in summary.rows] == [
        ("Net", 260, 400, 0),
        ("Net.a", 200, 400, 0),
    ]
    assert [(row.flops_forward, row.flops_backward, row.flops_recompute) for row in summary.flops.rows] == [
        (260, 400, None),
        (200, 400, None),
    ]
    # 660 in 3 · (30 + 10) ns
    assert [(row.flops, row.self_flops, row.flops_per_second) for row in summary.flops.rows] == [
        (660, 60, 5.5e9),
        (600, 600, 1e10),
    ]
    # Forward is 30 ns a step (10 ns of Net.a), backward 10 ns; in the last step nothing is counted.
    rates = [("Net", "forward", 260, 90), ("Net", "backward", 400, 30)]
    rates += [("Net.a", "forward", 200, 30), ("Net.a", "backward", 400, 30)]
    assert [(rate.fqn, rate.phase, rate.flops, rate.time_ns) for rate in summary.flops.rates] == rates
    assert [rate.flops_per_second for rate in summary.flops.rates] == [
        pytest.approx(flops / ns * 1e9) for *_, flops, ns in rates
    ]
    assert {rate.peak_share for rate in summary.flops.rates} == {None}
    assert summary.flops.peak_tflops is None
    at_peak = summary.flops.with_peak(0.01, summary.steps)  # 10 FLOP/ns: 1,000 in a step
    assert [(step.flops, step.mfu) for step in at_peak.by_step] == [(330, 0.33), (330, 0.33), (0, 0.0)]
    assert [rate.peak_share for rate in at_peak.rates] == [pytest.approx(flops / ns / 10) for *_, flops, ns in rates]
    assert summary.tables["flops"].to("text").splitlines()[:4] == [
        "a step: at least 0.000 GFLOP (median); counted in step 0",
        "outside modules: 0.000 GFLOP in these steps",
        "FLOPs of 3 spans are unknown: no similar call was counted",
        "not counted, as torch has no formula: aten::rnn",
    ]


def test_rates_of_a_merged_trace_use_the_time_of_kernels() -> None:
    forward, backward, recompute = range(3)
    places = [((0, forward),), ((0, forward), (1, forward)), ((1, backward),), ((1, backward), (1, recompute))]
    # place, step, kind, count, ns, overlap ns
    rows = [(0, 0, 0, 1, 10, 0), (1, 0, 0, 1, 40, 0), (2, 0, 0, 1, 80, 0), (3, 0, 0, 1, 7, 0)]
    work = GpuWork([("Net", "Net"), ("Net.a", "A")], places, *np.array(rows, np.int64).T)
    timeline = counted()
    facts = timeline.metadata["flops"] | {"dtypes": {"NVIDIA H100 80GB HBM3 bfloat16": 337}}
    merged = replace(timeline, metadata={"flops": facts}, gpu_work=work).summary()

    assert merged.flops is not None
    assert [(rate.fqn, rate.phase, rate.flops, rate.time_ns) for rate in merged.flops.rates] == [
        ("Net", "forward", 260, 50),
        ("Net", "backward", 400, 80),
        ("Net.a", "forward", 200, 40),
        ("Net.a", "backward", 400, 80),
    ]
    assert merged.flops.rates[0].peak_share == pytest.approx(5.2e9 / 989.4e12)
    assert [row.flops_per_second for row in merged.flops.rows] == [660 / 137 * 1e9, 600 / 127 * 1e9]


def test_rates_use_device_times_if_there_are_any() -> None:
    timeline = counted()
    said = timeline.metadata["flops"] | {"dtypes": {"NVIDIA H100 80GB HBM3 bfloat16": 337}}
    begin = int(timeline.columns.start[0])
    spans = Slices.of(
        start=[begin + 60, begin + 62, begin + 70],
        end=[begin + 68, begin + 65, begin + 74],
        name=[0, 1, 0],
        phase=[0, 0, 1],
        track=[0, 0, 0],
        depth=[0, 1, 0],
        parent=[-1, 0, -1],
        call=[0, 0, 0],
        step=[0, 0, 0],
        link=[-1, -1, -1],
        complete=[True, True, True],
    )
    on_device = add_gpu_tracks(replace(timeline, metadata={"flops": said, "device_clock_bound_ns": 5}), [(0, 7)], spans)
    flops = summarize(on_device).flops

    assert flops is not None
    assert [(rate.fqn, rate.phase, rate.flops, rate.time_ns) for rate in flops.rates] == [
        ("Net", "forward", 260, 8),
        ("Net", "backward", 400, 4),
        ("Net.a", "forward", 200, 3),
    ]
    without = replace(timeline, metadata={"flops": said}).summary().flops
    assert without is not None
    assert (without.rates, [row.flops_per_second for row in without.rows]) == ([], [None, None])


def test_selected_modules_have_only_their_rows() -> None:
    summary = counted().summary()
    for selected, name in ((summary.only("Net.*"), "Net.a"), (summary.only(max_depth=1), "Net")):
        assert selected.flops is not None
        assert [row.fqn for row in selected.flops.rows] == [name]
        assert [(rate.fqn, rate.phase) for rate in selected.flops.rates] == [(name, "forward"), (name, "backward")]


def test_on_a_roofline_a_phase_is_bound_by_the_lower_limit() -> None:
    timeline = counted()
    facts = timeline.metadata["flops"] | {"dtypes": {"NVIDIA H100 80GB HBM3 bfloat16": 337}}
    work = GpuWork([("Net", "Net")], [((0, 0),), ((0, 1),)], *np.array([(0, 0, 0, 1, 10, 0), (1, 0, 0, 1, 4, 0)]).T)
    summary = replace(timeline, metadata={"flops": facts}, gpu_work=work).summary()

    assert summary.flops is not None
    assert (summary.flops.peak_tflops, summary.flops.peak_tbytes) == (989.4, 3.35)
    # Each of two steps runs operators 0 (5 bytes) and 1 (7) in forward and operator 3 (11) in backward.
    rates = [(rate.phase, rate.flops, rate.bytes_accessed, rate.bytes_per_second) for rate in summary.flops.rates]
    assert rates == [("forward", 260, 24, 2.4e9), ("backward", 400, 22, 5.5e9)]
    forward = summary.flops.rates[0]
    # 260 / 24 FLOP/byte times 3.35 TB/s are 36.3 TFLOP/s.
    assert (forward.intensity, forward.bound_by) == (260 / 24, "memory")
    assert forward.attainable_share == pytest.approx(0.026 / (260 / 24 * 3.35))
    bound = summary.flops.with_peak(50, summary.steps).rates
    assert [rate.bound_by for rate in bound] == ["memory", "compute"]  # backward could reach 60.9
    assert bound[1].attainable_share == pytest.approx(0.1 / 50)
    assert summary.flops.with_peak(None, summary.steps).rates[0].bound_by is None
    on_cpu = counted().summary().flops
    assert on_cpu is not None
    assert {rate.bound_by for rate in on_cpu.with_peak(0.01, summary.steps).rates} == {None}  # no bandwidth is known
    assert summary.tables["rates"].to("text").splitlines()[:3] == [
        "module  class  phase     GFLOP     ms  GFLOP/s  % of peak   GB/s  FLOP/byte  bound by  % of limit",
        "Net     Net    backward  0.000  0.000  100.000        0.0  5.500       18.2  memory           0.2",
        "Net     Net    forward   0.000  0.000   26.000        0.0  2.400       10.8  memory           0.1",
    ]


@pytest.mark.parametrize(
    ("device", "moved"),
    [
        ("NVIDIA H100 80GB HBM3", 3.35),
        ("NVIDIA H200", 4.8),
        ("NVIDIA A100-SXM4-80GB", 2.039),
        ("NVIDIA A100-PCIE-40GB", 1.555),
        ("NVIDIA A100 80GB PCIe", 1.935),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("AMD Instinct MI250X", None),
        ("cpu", None),
    ],
)
def test_the_bandwidth_of_some_devices_is_known(device: str, moved: float | None) -> None:
    assert peak_tbytes(device) == moved


def test_a_diff_has_the_exact_flops_of_steps_if_they_differ(tmp_path: Path) -> None:
    modtrace.save_baseline(counted(), tmp_path / "base.json")
    comparison = modtrace.diff(tmp_path / "base.json", counted(103))
    plain = with_args(
        replace(
            counted(),
            metadata={},
        ),
        {},
    )

    # Two of three calls are counted.
    assert comparison.environment == {"FLOPs of a step": ("330", "333"), "FLOPs of a call of Net.a": ("200", "202")}
    assert "FLOPs of a step: 330 before, 333 after" in comparison.header
    assert modtrace.diff(counted(), counted()).environment == {}
    assert modtrace.diff(counted(), plain).environment == {}


def test_markdown_and_html_have_the_table_of_flops() -> None:
    summary = counted().summary()

    lines = summary.to_markdown().splitlines()
    assert lines[-13:-11] == [
        "| `Net` | `Net` | 3 | 0.000 | 0.000 | 0.000 | 0.000 | 5.500 |",
        "| `Net.a` | `A` | 3 | 0.000 | 0.000 | 0.000 | 0.000 | 10.000 |",
    ]
    assert lines[-6:-2] == [
        "| `Net` | `Net` | backward | 0.000 | 0.000 | 13.333 | 0.733 | 18.2 |",
        "| `Net.a` | `A` | backward | 0.000 | 0.000 | 13.333 | 0.733 | 18.2 |",
        "| `Net` | `Net` | forward | 0.000 | 0.000 | 2.889 | 0.267 | 10.8 |",
        "| `Net.a` | `A` | forward | 0.000 | 0.000 | 6.667 | 0.333 | 20.0 |",
    ]
    assert "GFLOP/s" in summary.to_html()


def test_a_limited_json_has_the_flops_of_the_steps_that_it_has() -> None:
    document = json.loads(counted().summary().to_json(1))

    assert [cost["step"] for cost in document["flops"]["by_step"]] == [step["step"] for step in document["steps"]]
    assert [len(document["flops"][name]) for name in ("rows", "rates", "by_step")] == [1, 1, 1]


def test_the_command_shows_only_flops_and_reports_if_there_are_none(tmp_path: Path) -> None:
    counted().save(tmp_path / "counted.json")
    result = CliRunner().invoke(group, ["summary", str(tmp_path / "counted.json"), "--flops", "--peak-tflops", "0.01"])
    script = EventScript()
    script.enter(0, script.name("Net"))
    script.exit(5, 0)
    build_timeline(script.snapshot()).save(tmp_path / "none.json")
    none = CliRunner().invoke(group, ["summary", str(tmp_path / "none.json"), "--flops"])
    as_json = CliRunner().invoke(group, ["summary", str(tmp_path / "none.json"), "--format", "json"])

    assert result.exit_code == 0
    assert "MFU 33.0% of 0.01 TFLOP/s; counted in step 0" in result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert lines[-11:-8] == [
        ["module", "class", "calls", "GFLOP", "self", "forward", "backward", "GFLOP/s"],
        ["Net", "Net", "3", "0.000", "0.000", "0.000", "0.000", "5.500"],
        ["Net.a", "A", "3", "0.000", "0.000", "0.000", "0.000", "10.000"],
    ]
    assert lines[-6:-3] == [
        ["module", "class", "phase", "GFLOP", "ms", "GFLOP/s", "%", "of", "peak", "GB/s", "FLOP/byte"],
        ["Net", "Net", "backward", "0.000", "0.000", "13.333", "133.3", "0.733", "18.2"],
        ["Net.a", "A", "backward", "0.000", "0.000", "13.333", "133.3", "0.733", "18.2"],
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
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16", None),
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
    script.operator(2, 1)  # the process died before its cost was noted
    script.exit(3, inner)
    script.operator(4, 0)
    script.exit(5, net)
    timeline = build_timeline(script.snapshot())

    assert [timeline.span_args[row]["flops"] for row in range(2)] == [50, UNKNOWN_FLOPS]
    assert timeline.metadata["flops"]["unknown"] == 1


def test_operators_without_any_module_are_outside() -> None:
    script = EventScript()
    script.note_operator(0, "aten::mm", "float32", 50)
    script.operator(1, 0)
    script.operator(2, 0)

    timeline = build_timeline(script.snapshot())

    assert list(timeline.spans) == []
    assert timeline.metadata["flops"]["outside"] == 100
