"""Alignment: offset and drift from sync marks, and the message without marks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from modtrace.profiler.alignment import (
    Alignment,
    OffsetBounds,
    OperatorFit,
    align_by_sync_marks,
    align_by_wall_clock,
)
from modtrace.timeline import Mark
from tests.support.kineto import BASE

SECOND = 1_000_000_000
BAND = OffsetBounds(np.array([BASE]), np.array([-1500.0]), np.array([1500.0]))


def sync(number: int, time: int) -> Mark:
    return Mark(BASE + time, "sync", f"modtrace.sync#{number}")


def around(number: int, middle: int, half: int = 500) -> tuple[str, list[tuple[int, int]]]:
    return f"modtrace.sync#{number}", [(middle - half, middle + half)]


def moved(alignment: Alignment, *times: int) -> list[int]:
    moments: list[int] = alignment.to_trace(np.array([BASE + time for time in times], np.int64)).tolist()
    return moments


def test_one_mark_gives_the_offset() -> None:
    alignment = align_by_sync_marks([sync(0, 1000)], dict([around(0, 1700)]), BASE)
    assert moved(alignment, 0, 1000, 5000) == [700, 1700, 5700]
    assert (alignment.marks, alignment.bound_ns) == (1, 500)
    assert alignment.residual_ns == pytest.approx(0, abs=1e-6)


def test_offset_and_drift_are_found_and_the_residual_is_reported() -> None:
    times = [number * SECOND for number in range(11)]
    # 3 µs ahead, 2 µs more every second; one mark was interrupted and is 90 µs wide.
    slices = dict(around(n, time + 3000 + 2000 * n) for n, time in enumerate(times))
    slices |= dict([around(5, times[5] + 50_000, 45_000)])
    alignment = align_by_sync_marks([sync(n, time) for n, time in enumerate(times)], slices, BASE)
    assert moved(alignment, 0, 4 * SECOND, 10 * SECOND) == pytest.approx(
        [3000, 4 * SECOND + 11_000, 10 * SECOND + 23_000], abs=20
    )
    assert alignment.residual_ns is not None
    assert alignment.residual_ns < 20
    assert alignment.worst_ns == pytest.approx(50_000 - 13_000, abs=50)
    assert str(alignment).startswith("aligned by 11 sync marks: residual")


def test_noise_alone_is_no_drift() -> None:
    noise = [300, -200, 100, -300, 200, 0, -100, 250]
    slices = dict(around(n, n * 1_000_000 + off) for n, off in enumerate(noise))
    alignment = align_by_sync_marks([sync(n, n * 1_000_000) for n in range(len(noise))], slices, BASE)
    assert alignment.line.drift == 0
    assert abs(moved(alignment, 0)[0]) < 100


def test_the_nearer_of_two_slices_with_one_name_is_used() -> None:
    alignment = align_by_sync_marks(
        [sync(0, 5 * SECOND)], {"modtrace.sync#0": [(0, 100), (5 * SECOND, 5 * SECOND + 200)]}, BASE
    )
    assert moved(alignment, 0) == [100]


def test_marks_of_another_run_are_not_used() -> None:
    syncs = dict([around(0, 0), around(1, SECOND)])
    late = [sync(number, (140 + number) * SECOND) for number in range(2)]
    assert align_by_sync_marks(late, syncs, BASE) == align_by_wall_clock(BASE)
    assert align_by_sync_marks([sync(0, 5 * SECOND)], syncs, BASE).marks == 1


@pytest.mark.parametrize("marks", [[], [Mark(BASE, "mark", "modtrace.sync#0")], [sync(7, 0)]])
def test_without_common_marks_the_wall_clock_is_used_with_its_uncertainty(marks: list[Mark]) -> None:
    alignment = align_by_sync_marks(marks, dict([around(0, 0)]), BASE)
    assert alignment == align_by_wall_clock(BASE)
    assert moved(alignment, 0, 12345) == [0, 12345]
    assert alignment.metadata()["method"] == "wall clock"
    assert "usually agree within 10 µs" in str(alignment)


def test_offsets_that_contradict_each_other_are_counted() -> None:
    fit = OperatorFit(BAND, operators=12, left_out=0, contradicted=0, typical_ns=200, bound_ns=1500)
    assert str(fit) == "aligned to about ±1.5 µs, typically ±0.2 µs, by 12 operators"
    assert str(replace(fit, contradicted=3)) == (
        "aligned to about ±1.5 µs, typically ±0.2 µs, by 12 operators; 3 edges of calls suit no offset"
    )
