"""Which rank this process is, as launchers (torchrun and others) say it in the environment."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["rank_in", "world_size_in"]


def rank_in(environment: Mapping[str, str]) -> int | None:
    """Return `RANK`, None where it is not set or no number."""
    text = environment.get("RANK", "")
    return int(text) if text.isdecimal() else None


def world_size_in(environment: Mapping[str, str]) -> int:
    """Return `WORLD_SIZE`, 1 where it is not set or no number."""
    text = environment.get("WORLD_SIZE", "")
    return int(text) if text.isdecimal() else 1
