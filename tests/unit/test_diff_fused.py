"""Comparisons divide the time of a kernel that is fused from several modules among these modules."""

from __future__ import annotations

import numpy as np
import pytest

from modtrace.compare.run_times import divide_fused, plain_fqn
from modtrace.timeline.metadata import fit_metadata

WORK = [["up: Linear", 1, 1, 0, 0, 0, 0], ["mlp.act: GELU", 1, 1, 0, 0, 0, 0], ["", 1, 0, 0, 0, 0, 0]]
METADATA = fit_metadata(
    {
        "compiled": {
            "Net._orig_mod": [
                # Sum of two kernels of one name in the whole profile: 25 ns for up, 75 for act.
                {"work": WORK, "fused_times": [["up + mlp.act", 0, [["up", 20], ["mlp.act", 60]]]]},
                {"work": WORK, "fused_times": [["up + mlp.act", 0, [["up", 5], ["mlp.act", 15]]]]},
                {"work": WORK, "fused_times": [["itself + up", 1, [["", 1], ["up", 1]]]]},
                {"work": WORK, "fused_times": [["up", 9, 3]]},
                None,
            ],
            "Other": 3,
        }
    }
)


@pytest.mark.parametrize("phase", ["forward", "GPU forward"])
def test_fused_time_is_divided_as_it_was_in_the_whole_profile(phase: str) -> None:
    times = {
        ("Net", "forward"): [7, 7],
        ("Net.up", phase): [100, 100],
        ("Net.up + mlp.act", phase): [40, 80],
        ("Net.itself + up", "backward"): [10, 0],
    }
    self_ns = {key: np.array(step_ns, np.int64) for key, step_ns in times.items()}
    calls = {key: np.minimum(step_ns, 1) for key, step_ns in self_ns.items()}
    calls["Net.up", phase] = np.array([1, 0])
    classes = {"Net": "Net", "Net.up": "Linear", "Net.up + mlp.act": "fused", "Net.itself + up": "fused"}

    divide_fused(self_ns, calls, classes, METADATA, plain_fqn)

    assert {key: step_ns.tolist() for key, step_ns in self_ns.items()} == {
        ("Net", "forward"): [7, 7],
        ("Net.up", phase): [110, 120],
        ("Net.mlp.act", phase): [30, 60],
        ("Net", "backward"): [5, 0],
        ("Net.up", "backward"): [5, 0],
    }
    assert {key: step_ns.tolist() for key, step_ns in calls.items()} == {
        ("Net", "forward"): [1, 1],
        ("Net.up", phase): [1, 1],
        ("Net.mlp.act", phase): [1, 1],
        ("Net", "backward"): [1, 0],
        ("Net.up", "backward"): [1, 0],
    }
    assert classes == {"Net": "Net", "Net.up": "Linear", "Net.mlp.act": "GELU"}


def test_fused_time_is_divided_among_classes_too() -> None:
    self_ns = {("Linear", "forward"): np.array([100]), ("fused", "forward"): np.array([40])}
    calls = {key: np.array([1]) for key in self_ns}
    classes = {"Linear": "Linear", "fused": "fused"}

    divide_fused(self_ns, calls, classes, METADATA, None)

    assert self_ns == {("Linear", "forward"): 110, ("GELU", "forward"): 30}
    assert classes == {"Linear": "Linear", "GELU": "GELU"}
