"""Torch's own users of its trackers count the same per module with ours."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed._tools.mod_tracker import ModTracker
from torch.utils.module_tracker import ModuleTracker

import modtrace

from .torch_users import MODULES, USERS, swapped


@pytest.mark.parametrize(
    ("user", "checkpointed"),
    # SACEstimator is for models without checkpoints: it knows storages by address, and checkpoints free storages.
    [
        (user, checkpointed)
        for user in USERS
        for checkpointed in (False, True)
        if user != "SACEstimator" or not checkpointed
    ],
)
def test_a_user_of_torchs_trackers_counts_the_same_with_ours(user: str, checkpointed: bool) -> None:
    expected = USERS[user](checkpointed)

    with swapped(modtrace.ModuleTracker, modtrace.ModTracker):
        counted = USERS[user](checkpointed)

    assert counted == expected


@pytest.mark.parametrize("tracker", [ModuleTracker, ModTracker, modtrace.ModuleTracker, modtrace.ModTracker])
def test_flops_are_counted_by_any_tracker(tracker: Any) -> None:
    with swapped(tracker, modtrace.ModTracker):
        counts = USERS["FlopCounterMode"](False)

    totals = {name: sum(by_operator.values()) for name, by_operator in counts.items()}
    # 2 · rows · inputs · outputs for each of forward, the input's gradient and the weight's gradient; 3 rows.
    linear = 3 * 2 * 3 * 16 * 32
    assert totals == {
        "Global": 4 * linear + 3 * 2 * 3 * 16 * 4,
        "Net": 4 * linear + 3 * 2 * 3 * 16 * 4,
        "Net.head": 3 * 2 * 3 * 16 * 4,
        **{f"Net.blocks.{number}": 2 * linear for number in (0, 1)},
        **{f"Net.blocks.{number}.{name}": linear for number in (0, 1) for name in ("up", "down")},
    }


@pytest.mark.parametrize("user", ["MemTracker", "CommDebugMode"])
def test_every_module_is_counted(user: str) -> None:
    with swapped(modtrace.ModuleTracker, modtrace.ModTracker):
        counted = USERS[user](False)

    assert set(counted) - {"Global", "table", "tree", "after"} == MODULES
