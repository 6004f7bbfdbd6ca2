"""GPU columns of summaries from the launching modules: of all or some steps, by class, of selected modules."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import modtrace
from modtrace import Summary
from modtrace.cli.group import group
from modtrace.timeline import GpuWork, ModuleTimes
from modtrace.timeline.summary import GpuTotals, GroupBy
from modtrace.timeline.summary.totals import with_gpu_times
from tests.support.kineto import trace, x

FORWARD, BACKWARD = 0, 1
MODULES = [("Net", "Net"), ("Net.a", "Linear"), ("Net.a.b", "Linear"), ("(no module: outside)", "")]
PLACES = [
    ((0, FORWARD), (1, FORWARD)),  # by Net.a
    ((0, FORWARD), (1, FORWARD), (2, FORWARD)),  # by Net.a.b in Net.a
    ((1, BACKWARD),),
    ((3, -1),),
]
# place, step, kind, count, ns, overlap ns
ROWS = [
    (0, 0, 0, 2, 100, 0),
    (0, 1, 0, 1, 30, 0),
    (1, 0, 1, 1, 7, 0),
    (2, 1, 0, 3, 500, 0),
    (3, 1, 2, 1, 9, 0),
    (1, 1, 3, 4, 60, 20),
]
WORK = GpuWork(MODULES, PLACES, *np.array(ROWS, np.int64).T)


def printed(*arguments: str | Path) -> str:
    return CliRunner().invoke(group, [str(argument) for argument in arguments]).stdout


def times(work: GpuWork, by: GroupBy = "module") -> dict[str, tuple[int, ...]]:
    """Kernels, GPU forward, its own GPU forward, GPU backward and communication of each row."""
    summary = with_gpu_times(Summary([], 0, by=by), work)
    return {
        row.fqn or row.module_class: (
            *(row.kernels, row.gpu_forward_ns, row.gpu_forward_self_ns, row.gpu_backward_ns),
            row.communication_ns,
        )
        for row in summary.rows
    }


def test_modules_have_the_kernels_launched_by_them_and_their_inner_modules() -> None:
    assert times(WORK) == {
        "Net": (0, 137, 0, 0, 0),
        "Net.a": (6, 137, 130, 500, 0),
        "Net.a.b": (0, 7, 7, 0, 60),
        "(no module: outside)": (0, 0, 0, 0, 0),
    }
    summary = with_gpu_times(Summary([ModuleTimes("Net.x", "X", calls=3)], 1), WORK)
    assert summary.gpu == GpuTotals(630, 7, 9, 60, 20)
    assert [tuple(step) for step in summary.gpu_steps] == [(0, 107, 0, 0), (1, 539, 60, 20)]
    assert (summary.rows[0].fqn, summary.rows[0].calls, summary.modules) == ("Net.x", 3, 5)


def test_a_class_counts_the_work_of_nested_calls_of_the_class_once() -> None:
    assert times(WORK, "class") == {
        "Net": (0, 137, 0, 0, 0),
        "Linear": (6, 137, 137, 500, 60),
        "(no module: outside)": (0, 0, 0, 0, 0),
    }


def test_steps_and_selected_modules_have_their_own_work() -> None:
    assert times(WORK.take(WORK.step == 0)) == {
        "Net": (0, 107, 0, 0, 0),
        "Net.a": (2, 107, 100, 0, 0),
        "Net.a.b": (0, 7, 7, 0, 0),
    }
    assert times(WORK.only("*.b", None)) == {"Net.a.b": (0, 7, 7, 0, 60)}
    assert times(WORK.only("Net*", 1)) == {"Net": (3, 137, 137, 0, 60), "Net.a": (3, 0, 0, 500, 0)}


def test_gpu_work_survives_json() -> None:
    again = GpuWork.from_json_values(json.loads(json.dumps(WORK.to_json_values())))
    assert (again.modules, again.places, again.rows.tolist()) == (MODULES, PLACES, WORK.rows.tolist())


PROFILE = trace(
    *(x("user_annotation", f"ProfilerStep#{step}", 1000 * step, 1000 * step + 900) for step in (1, 2)),
    *(x("python_function", "nn.Module: Net_0", 1000 * step + 100, 1000 * step + 500) for step in (1, 2)),
    *(x("python_function", "nn.Module: Linear_0", 1000 * step + 200, 1000 * step + 300) for step in (1, 2)),
    *(x("cuda_runtime", "cudaLaunchKernel", 1000 * step + 250, 1000 * step + 260, correlation=step) for step in (1, 2)),
    *(x("kernel", "gemm", 5000 * step, 5000 * step + 10 * step, pid=0, tid=7, correlation=step) for step in (1, 2)),
)


@pytest.mark.parametrize("suffix", [".json", ".pftrace"])
def test_a_merged_trace_has_its_gpu_times_in_python_and_of_steps_and_classes(tmp_path: Path, suffix: str) -> None:
    path, out = tmp_path / "profile.json", tmp_path / f"merged{suffix}"
    path.write_bytes(PROFILE)
    merged = modtrace.merge(path, None, out)
    loaded = modtrace.load(out)
    assert loaded.summary().gpu == merged.summary.gpu == GpuTotals(30, 0, 0)
    assert {row.fqn: row.gpu_forward_ns for row in loaded.summary().rows} == {"Net_0": 30, "Net_0.Linear_0": 30}
    assert {row.module_class: row.kernel_ns for row in loaded.steps(2).summary("class").rows} == {
        "Net": 0,
        "Linear": 20,
    }
    assert [row.fqn for row in loaded.only("*.Linear_0").summary().rows if row.kernel_ns] == ["Net_0.Linear_0"]
    assert loaded.window(0).summary().gpu is None
    document = json.loads(printed("summary", out, "--steps", "1:2", "--by", "class", "--format", "json"))
    assert (document["gpu"]["kernel_ns"], {row["module_class"]: row["kernels"] for row in document["rows"]}) == (
        10,
        {"Net": 0, "Linear": 1},
    )
    assert loaded.summary().sort_by().modules_text() in printed("summary", out)


@pytest.mark.parametrize("suffix", ["", ".json", ".pftrace"])
def test_sorting_by_gpu_time_is_an_error_for_a_profile_without_it(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(trace(x("python_function", "nn.Module: Net_0", 100, 500)))
    if suffix:
        path = Path(modtrace.merge(path, None, tmp_path / f"merged{suffix}").path)
    result = CliRunner().invoke(group, ["summary", str(path), "--sort", "gpu"])

    assert result.exit_code == 2
    assert result.stderr.endswith(f"{path} has no GPU times; its profile has no GPU work.\n")
