"""Actors of Ray, recorded unchanged by their runtime environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import modtrace
from modtrace.ring import newest_rings
from tests.support.python_process import HANGS_AFTER_S

PROGRAM = Path(__file__).parents[1] / "programs" / "ray_actors.py"


@pytest.mark.full
def test_actors_are_recorded_and_who_all_wait_for_is_named(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    subprocess.run([sys.executable, PROGRAM, tmp_path], check=True, timeout=2 * HANGS_AFTER_S)

    waits = [(wait.role, wait.waits_for, wait.fqn) for wait in modtrace.find_slow_ranks(tmp_path).waits]
    rings, earlier = newest_rings(str(path) for path in tmp_path.iterdir())

    assert ("driver", "trainer 0", "Trainer.state") in waits
    # An actor was killed, and started again by Ray.
    assert sorted(Path(ring).name for ring in rings) == [
        "driver.modtrace",
        "rollout0.modtrace",
        "rollout1.modtrace",
        "trainer0.modtrace",
        "trainer1.modtrace",
    ]
    assert [Path(ring).name for ring in earlier] == ["rollout1.1.modtrace"]
    before = [row.name for row in modtrace.load(earlier[0]).ranges if row.name.startswith("Rollout.")]
    assert before == ["Rollout.__init__", *["Rollout.generate"] * 2, "Rollout.process"]
