"""Recording a range of steps: a file for each cycle of a schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import schedule

import modtrace
from tests.support.forked_python import run_forked
from tests.support.python_process import python_environment

TRAIN = """
import torch
from torch import nn

net = nn.Linear(2, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(9):
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


def train(steps: int) -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()


def recorded_steps(path: Path) -> list[tuple[str, int]]:
    return [(span.phase, span.step) for span in modtrace.load(path).spans]


def both_phases(*steps: int) -> list[tuple[str, int]]:
    return [(phase, step) for step in steps for phase in ("forward", "backward")]


def test_each_cycle_has_a_file_with_its_steps(tmp_path: Path, engine: Any) -> None:
    cycles = schedule(skip_first=1, wait=1, warmup=1, active=2, repeat=2)
    ring = tmp_path / "run.modtrace"
    with modtrace.record(tmp_path / "a.json", engine=engine, ring=ring, schedule=cycles) as recording:
        train(12)

    assert recording.steps == 12
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("a.cycle0.json", "a.cycle1.json", "run.cycle0.modtrace", "run.cycle1.modtrace")
    ]
    assert recording.saved_paths == [str(tmp_path / "a.cycle0.json"), str(tmp_path / "a.cycle1.json")]
    for number, steps in enumerate([(3, 4), (7, 8)]):
        assert recorded_steps(tmp_path / f"a.cycle{number}.json") == both_phases(*steps)
        assert recorded_steps(tmp_path / f"run.cycle{number}.modtrace") == both_phases(*steps)


def test_a_cycle_that_is_cut_off_is_saved_at_the_end(tmp_path: Path) -> None:
    with modtrace.record(tmp_path / "a.json", engine="python", schedule=schedule(wait=1, warmup=1, active=3)):
        train(4)

    assert recorded_steps(tmp_path / "a.cycle0.json") == both_phases(2, 3)


def test_between_cycles_torch_is_as_it_was() -> None:
    call = nn.Module.__call__
    with modtrace.record(engine="python", schedule=schedule(wait=1, warmup=1, active=1, repeat=1)) as recording:
        assert nn.Module.__call__ is call
        recording.step()
        recording.step()
        assert nn.Module.__call__ is not call
        recording.step()
        assert nn.Module.__call__ is call
        with pytest.raises(modtrace.RecordingError, match="runs"):
            recording.timeline()
    assert recording.timeline().marks[0].text == "step 2"


def test_a_schedule_that_records_no_step_saves_nothing(tmp_path: Path) -> None:
    with modtrace.record(tmp_path / "a.json", engine="python", schedule=schedule(wait=5, warmup=1, active=1)) as never:
        train(2)

    assert list(tmp_path.iterdir()) == []
    with pytest.raises(modtrace.RecordingError, match="the schedule has recorded no step yet"):
        never.timeline()


def test_an_invalid_schedule_is_an_error() -> None:
    wrong: Any = (1, 1, 1)
    with pytest.raises(modtrace.RecordingError, match=r"give it as torch\.profiler\.schedule"):
        modtrace.record(schedule=wrong)
    with pytest.raises(modtrace.RecordingError, match=r"must be a torch\.profiler\.ProfilerAction"):
        modtrace.record(schedule=lambda step: wrong)


@pytest.mark.parametrize("way", ["command", "variable"])
def test_a_script_is_recorded_by_a_schedule(tmp_path: Path, way: str) -> None:
    (tmp_path / "train.py").write_text(("" if way == "command" else "import modtrace") + TRAIN)
    text = "1,1,2,2"
    if way == "command":
        options = ("-m", "modtrace", "run", "-o", "a.json", "--engine", "python", "--schedule", text)
        done = run_forked(*options, "train.py", cwd=tmp_path, env=python_environment())
        assert "2 parts of 9 steps are in a.cycle0.json, a.cycle1.json" in done.stderr
    else:
        variable = f"path=a.json,engine=python,schedule={text}"
        run_forked("train.py", cwd=tmp_path, env=python_environment(MODTRACE=variable))

    assert [recorded_steps(tmp_path / f"a.cycle{number}.json") for number in range(2)] == [
        both_phases(2, 3),
        both_phases(6, 7),
    ]
