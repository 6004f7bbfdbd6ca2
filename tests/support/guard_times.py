"""Switches off torch's timing of guards, used only for its log: it empties the CPU caches, 20 ms per compilation."""

from __future__ import annotations

import sys

__all__ = ["measure_no_guards"]


def measure_no_guards() -> None:
    """Switch the timing off, in a process that has torch's compiler imported."""
    guards = sys.modules.get("torch._dynamo.guards")
    if hasattr(guards, "profile_guard_manager"):
        vars(guards)["profile_guard_manager"] = lambda *_: 0.0
