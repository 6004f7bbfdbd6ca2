"""Times far from 0 are read as viewers read them; the profiler's faults are marked; at most 20 lines per rule."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import modtrace
from modtrace.checking import check
from modtrace.formats.chrome_values import read_microseconds_array
from tests.support.kineto import recording, trace, x
from tests.support.python_process import run_python

LATE = 4_503_599_627_371_000 // 1000
"""Time in µs from which, multiplied to ns, neighbouring doubles are 1 ns apart, so that a half cannot be added."""


@pytest.mark.parametrize("nanoseconds", [1, 999, 1_000_001, LATE * 1000 + 1, LATE * 1000 + 333, 2**53 - 1])
def test_a_time_of_three_decimals_is_read_as_it_is_written(nanoseconds: int) -> None:
    microseconds = float(f"{nanoseconds // 1000}.{nanoseconds % 1000:03}")
    assert abs(read_microseconds_array(np.array([microseconds]))[0] - nanoseconds) <= 1


def test_an_odd_nanosecond_beyond_two_to_the_52_is_not_rounded_up() -> None:
    """Products beyond 2⁵² are whole numbers; adding a half to an odd one would round it to the next even number."""
    assert read_microseconds_array(np.array([5_000_000_000_000.001]))[0] == 5_000_000_000_000_001


def test_faults_of_the_profiler_exit_with_0_unless_strict(tmp_path: Path) -> None:
    overlapping = [x("kernel", f"k{n}", 1000 + 10 * n, 2005 + 10 * n, pid=0, tid=7) for n in range(30)]
    profile, merged = tmp_path / "profile.json", tmp_path / "merged.json"
    profile.write_bytes(trace(x("cpu_op", "aten::op", 1000, 5000), *overlapping))
    modtrace.merge(profile, recording(("Net", 900, 6000, 0)), merged)
    for path in (profile, merged):
        overlaps = check(path).faults
        assert len(overlaps) == 29
        assert all(violation.of_profiler for violation in overlaps)
        done = run_python("-m", "modtrace", "check", path)
        lines = done.stdout.splitlines()
        assert sum(line.startswith("partial-overlap: event") for line in lines) == 20
        assert lines[-2:] == [
            "partial-overlap: and 9 more, in events of torch.profiler",
            "      29 partial-overlap, in events of torch.profiler",
        ]
    run_python("-m", "modtrace", "check", "--strict", merged, status=1)
