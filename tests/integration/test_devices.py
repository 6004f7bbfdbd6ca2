"""Backward on a device's own thread, as on a GPU: autograd really runs it there, for a fake device."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modtrace.record_options import EngineName
from tests.support import fake_device
from tests.support.forked_python import run_forked
from tests.support.test_scale import PYTHON_IN_FULL

DEVICE, MAIN = "pt_autograd_0", "MainThread"
HOOKED, OBSERVED = "SEGMENT_BEGIN", "NODE_BEGIN"


@pytest.fixture(autouse=True)
def possible() -> None:
    reason = fake_device.missing()
    if reason is not None:
        pytest.skip(reason)


def run(scenario: str, engine: EngineName) -> dict[str, Any]:
    done = run_forked("-c", "from tests.support.fake_device import main; main()", scenario, engine)
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def backward(thread: str, *slices: tuple[str, int]) -> list[list[object]]:
    """Complete backward slices of a thread: name and depth of each."""
    return [[thread, "backward", fqn, depth, True] for fqn, depth in slices]


ONCE = backward(DEVICE, ("Chain", 0), ("Chain.b", 1), ("Chain.a", 1))


@PYTHON_IN_FULL
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
        ("failing", HOOKED, backward(DEVICE, ("Scale#2", 0)) + ONCE),
    ],
)
def test_backward_lies_on_the_track_of_the_devices_thread(
    engine: EngineName, scenario: str, way: str, expected: list[list[object]]
) -> None:
    said = run(scenario, engine)

    assert said["spans"] == expected
    if engine == "native":
        assert {HOOKED, OBSERVED} & set(said["kinds"]) == {way}
        # Two threads that run one after the other do not overlap, either.
        assert said["overlaps"] == 0


def test_passes_that_take_turns_on_a_device_are_distinguished_except_the_first(native_engine: None) -> None:
    said = run("shared", "native")

    # A pass that runs alone is hooked; once two have met, each node is observed.
    assert {HOOKED, OBSERVED} <= set(said["kinds"])
    # A pass that another one comes into is hooked to its end.
    later = said["spans"][len(said["spans"]) // 2 :]
    places = {(track, depth, complete) for track, _, _, depth, complete in later}
    assert places == {(DEVICE, 0, True), (DEVICE, 1, True)}
    names = [(fqn.replace("#2", ""), depth) for _, _, fqn, depth, _ in later]
    assert set(names) == {("Chain", 0), ("Chain.a", 1), ("Chain.b", 1)}
    # A pass that another one came into is two spans.
    all_names = [fqn.replace("#2", "") for _, _, fqn, _, _ in said["spans"]]
    assert min(all_names.count("Chain.a"), all_names.count("Chain.b")) >= 101
