"""Ranks of a job that read different clocks: one of them runs in a time namespace of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from modtrace.clocks import ClockTree, clock_in, measurements_in
from modtrace.ring import read_ring
from tests.support.python_process import python_environment

AHEAD_S = 5_000
UNSHARE = ("unshare", "--time", "--monotonic", str(AHEAD_S), "--fork", "--")
TIMEOUT_S = 120


def can_unshare() -> bool:
    try:
        return subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


needs_time_namespaces = pytest.mark.skipif(
    not can_unshare(), reason="unshare --time needs root and a kernel from 5.6 on"
)


@needs_time_namespaces
@pytest.mark.parametrize("ending", ["stop", "kill"])
def test_the_offset_of_a_rank_in_another_time_namespace_is_measured(ending: str, tmp_path: Path) -> None:
    rings = [tmp_path / f"{rank}.modtrace" for rank in range(2)]
    processes = []
    for rank, ring in enumerate(rings):
        arguments = ("-W", "ignore", "-m", "tests.support.clocks_job", rank, tmp_path / "store", ring, ending)
        command = [*(UNSHARE if rank else ()), sys.executable, *map(str, arguments)]
        environment = python_environment(WORLD_SIZE="2", RANK=str(rank))
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=TIMEOUT_S)[0].splitlines() for process in processes]
    assert [output[0].split()[0] for output in outputs] == ["measured", "measured"]
    if ending == "stop":
        assert [process.returncode for process in processes] == [0, 0]
        assert not any("modtrace" in output[1] for output in outputs)

    records = [read_ring(ring).records for ring in rings]
    clocks = [clock_in(of_rank) for of_rank in records]
    assert None not in clocks
    assert clocks[0] != clocks[1]
    measurements = [measurement for of_rank in records for measurement in measurements_in(of_rank)]
    assert measurements
    tree = ClockTree(measurements)
    times = [int(output[0].split()[1]) for output in outputs]
    (measured,) = {measurement.clock for measurement in measurements}
    found = tree.to_root(measured, [times[clocks.index(measured)]])
    truth = (AHEAD_S if measured == clocks[0] else -AHEAD_S) * 10**9
    assert abs(int(found.offset_ns[0]) - truth) <= int(found.bound_ns[0])
    errors = [abs(measurement.reading.offset_ns - truth) for measurement in measurements]
    assert all(error <= m.reading.bound_ns for error, m in zip(errors, measurements, strict=True))
