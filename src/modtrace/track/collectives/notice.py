"""What a recording says once of the collectives that it cannot see."""

from __future__ import annotations

import logging
from functools import cache

__all__ = ["say_inference_mode_unseen", "say_portable_limits", "say_unavailable"]

_log = logging.getLogger("modtrace")


@cache
def say_inference_mode_unseen() -> None:
    """Log that collectives in inference mode are not recorded; once in a process."""
    _log.warning(
        "this torch keeps collectives in torch.inference_mode from being recorded, but for the waits for them; "
        "under torch.no_grad all are"
    )


@cache
def say_portable_limits() -> None:
    """Log what the portable engine does not see; once in a process."""
    _log.warning(
        "the portable engine records the collectives that Python calls: not those of DistributedDataParallel's reducer "
        "and of functional collectives, and not when one completes; the native engine does (`modtrace build`)"
    )


@cache
def say_unavailable(reason: str) -> None:
    """Log that no collective is recorded; once in a process.

    Args:
        reason: why not.
    """
    _log.warning("collectives are not recorded: %s", reason)
