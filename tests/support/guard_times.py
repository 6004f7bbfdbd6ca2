"""torch measures how long guards take for its log alone: it empties the processor's caches, 20 ms a compilation."""

from __future__ import annotations

import sys

__all__ = ["measure_no_guards"]


def measure_no_guards() -> None:
    """Leave it out, where torch's compiler is imported."""
    guards = sys.modules.get("torch._dynamo.guards")
    if hasattr(guards, "profile_guard_manager"):
        vars(guards)["profile_guard_manager"] = lambda *_: 0.0
