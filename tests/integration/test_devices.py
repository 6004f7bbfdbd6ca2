"""Backward on a device's own thread, as on a GPU: autograd really runs it there, for a fake device."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modtrace.track.engine import EngineName
from tests.support import fake_device
from tests.support.python_process import run_python

DEVICE, MAIN = "pt_autograd_0", "MainThread"
HOOKED, OBSERVED = "SEGMENT_BEGIN", "NODE_BEGIN"


@pytest.fixture(autouse=True)
def possible() -> None:
    reason = fake_device.missing()
    if reason is not None:
        pytest.skip(reason)


def run(scenario: str, engine: EngineName) -> dict[str, Any]:
    done = run_python("-m", "tests.support.fake_device", scenario, engine)
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def backward(thread: str, *slices: tuple[str, int]) -> list[list[object]]:
    """Complete backward slices of a thread: name and depth of each."""
    return [[thread, "backward", fqn, depth, True] for fqn, depth in slices]


ONCE = backward(DEVICE, ("Chain", 0), ("Chain.b", 1), ("Chain.a", 1))


@pytest.mark.parametrize(
    ("scenario", "way", "expected"),
    [
        ("plain", HOOKED, ONCE + ONCE),
        ("observed", OBSERVED, ONCE),
        (
            "offloaded",
            OBSERVED,
            [
                *backward(DEVICE, ("Offloaded", 0), ("Offloaded.device", 1)),
                *backward(MAIN, ("Offloaded", 0), ("Offloaded.host", 1)),
            ],
        ),
        (
            "reentrant",
            HOOKED,
            [
                [DEVICE, "backward", "Checkpointed", 0, True],
                [DEVICE, "recompute", "Checkpointed.inner", 1, True],
                [DEVICE, "recompute", "Checkpointed.inner.a", 2, True],
                [DEVICE, "recompute", "Checkpointed.inner.b", 2, True],
                *backward(DEVICE, ("Checkpointed.inner", 1), ("Checkpointed.inner.b", 2), ("Checkpointed.inner.a", 2)),
            ],
        ),
        ("failing", HOOKED, backward(DEVICE, ("Scale", 0)) + ONCE),
    ],
)
def test_backward_lies_on_the_track_of_the_devices_thread(
    engine: EngineName, scenario: str, way: str, expected: list[list[object]]
) -> None:
    said = run(scenario, engine)

    assert said["spans"] == expected
    if engine == "native":
        assert {HOOKED, OBSERVED} & set(said["kinds"]) == {way}
        # What runs on two threads after one another does not overlap, either.
        assert said["overlaps"] == 0


def test_passes_that_take_turns_on_a_device_are_told_apart(native_engine: None) -> None:
    said = run("shared", "native")

    assert {HOOKED, OBSERVED} <= set(said["kinds"])
    # Of the first two that meet one is hooked still, and until it is over others seem to lie in it; afterwards each
    # node is seen. The engine prefers newer nodes, so that some passes of the other thread can come before its last.
    assert sum(depth > 1 for *_, depth, _ in said["spans"]) <= len(said["spans"]) / 5
    names = [fqn for _, _, fqn, depth, _ in said["spans"] if depth == 1]
    assert names.count("Chain.a") >= 75
    assert names.count("Chain.b") >= 75
