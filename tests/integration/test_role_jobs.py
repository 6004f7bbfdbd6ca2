"""Jobs of several roles, as processes that send each other messages on gloo."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

import modtrace
from tests.support.forked_python import start_forked
from tests.support.python_process import HANGS_AFTER_S

PROGRAM = Path(__file__).parents[1] / "programs" / "ppo.py"
CULPRITS = {
    "rollout 4": (4, "generate", "range"),
    "rollout 3": (3, "head", "forward"),
    "trainer 2": (2, "advantages", "range"),
    "driver 0": (0, "reward", "range"),
}


@pytest.mark.parametrize(
    "named", [pytest.param(one, marks=[pytest.mark.full] * (one != "rollout 4")) for one in CULPRITS]
)
@pytest.mark.usefixtures("native_engine")
def test_the_process_that_all_wait_for_is_named(tmp_path: Path, named: str) -> None:
    rank, place, phase = CULPRITS[named]
    with ExitStack() as job:
        started = [job.enter_context(start_forked(PROGRAM, one, tmp_path, rank, place)) for one in range(5)]
        assert [process.wait(HANGS_AFTER_S) for process in started] == [0] * 5

    waits = modtrace.find_slow_ranks(tmp_path).waits

    fqn = "Sequential.1" if phase == "forward" else place
    assert (waits[0].waits_for, waits[0].fqn, waits[0].phase) == (named, fqn, phase), waits
