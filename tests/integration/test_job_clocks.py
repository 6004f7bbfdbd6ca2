"""Ranks of a job with different clocks: one of them runs in its own time namespace."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from modtrace.ring import read_ring
from modtrace.ring.clocks import ClockTree, clock_in, measurements_in
from modtrace.track.job_clocks import PingClient
from tests.support.delaying_relay import delaying_relay
from tests.support.forked_python import start_forked
from tests.support.python_process import HANGS_AFTER_S, python_environment
from tests.support.test_scale import scaled

AHEAD_S = 5_000
UNSHARE = ("unshare", "--time", "--monotonic", str(AHEAD_S), "--fork", "--")
WINDOWS = scaled(10, 40, 1_000)


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
    commands = [
        ["-W", "ignore", "-m", "tests.support.clocks_job", str(rank), str(tmp_path / "store"), str(ring), ending]
        for rank, ring in enumerate(rings)
    ]
    here, there = (python_environment(WORLD_SIZE="2", RANK=str(rank)) for rank in range(2))
    unshared = [*UNSHARE, sys.executable, *commands[1]]
    processes = [
        start_forked(*commands[0], env=here),
        subprocess.Popen(unshared, env=there, stdout=subprocess.PIPE, text=True),
    ]
    outputs = [process.communicate(timeout=HANGS_AFTER_S)[0].splitlines() for process in processes]
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
    offset = tree.to_root(measured, [times[clocks.index(measured)]])
    truth = (AHEAD_S if measured == clocks[0] else -AHEAD_S) * 10**9
    assert abs(int(offset.offset_ns[0]) - truth) <= int(offset.bound_ns[0])
    errors = [abs(measurement.reading.offset_ns - truth) for measurement in measurements]
    assert all(error <= m.reading.bound_ns for error, m in zip(errors, measurements, strict=True))


@needs_time_namespaces
@pytest.mark.parametrize(("there_us", "back_us"), [(0, 200), (200, 0)])
def test_the_bound_holds_in_all_windows_if_one_direction_is_slower(there_us: int, back_us: int) -> None:
    command = [*UNSHARE, sys.executable, "-m", "tests.support.delaying_relay"]
    server = subprocess.Popen(
        command, env=python_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    port, token = server.stdout.readline().split()
    with delaying_relay(int(port), there_us / 1e6, back_us / 1e6) as address:
        client = PingClient(address, token)
        readings = [client.read() for _ in range(WINDOWS)]
        client.close()
    server.communicate(timeout=HANGS_AFTER_S)

    errors = [reading.offset_ns - AHEAD_S * 10**9 for reading in readings]
    assert all(abs(error) <= reading.bound_ns for error, reading in zip(errors, readings, strict=True))
    # Readings are usually wrong by half of the slower direction's extra time, which the bound covers.
    assert statistics.median(errors) >= 100_000 if there_us else statistics.median(errors) <= -100_000
