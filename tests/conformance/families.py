"""All cases: importing their files adds them to the list, family by family."""

from __future__ import annotations

from . import (  # noqa: F401
    checkpointing,
    compiled,
    distributed,
    errors,
    inplace,
    inputs,
    modes,
    operations,
    outputs,
    passes,
    reuse,
    threads,
)
from .case import CASES, Case

__all__ = ["all_cases"]


def all_cases() -> list[Case]:
    """Return every case."""
    return list(CASES.values())
