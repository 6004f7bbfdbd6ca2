"""Which calls get device times, and that none can be had."""

from __future__ import annotations

import fnmatch
import logging
from typing import NamedTuple

__all__ = ["DEFAULT_DEPTH", "DeviceChoice", "say_device_unused", "say_no_device_times"]

DEFAULT_DEPTH = 2

_log = logging.getLogger("modtrace")


class DeviceChoice(NamedTuple):
    """Which calls of modules get events of the device; a call has to fit both.

    Attributes:
        depth: those with fewer calls around them than this; None: any.
        modules: those whose fully qualified name matches this pattern, as of a shell; None: any.
    """

    depth: int | None = DEFAULT_DEPTH
    modules: str | None = None

    def fits(self, fqn: str, depth: int) -> bool:
        """Return whether a call is chosen: of a module of this name, with so many calls around it."""
        return (self.depth is None or depth < self.depth) and (
            self.modules is None or fnmatch.fnmatchcase(fqn, self.modules)
        )


def say_no_device_times(reason: str) -> None:
    """Log why a recording has no device times; it goes on without them."""
    _log.warning("device_times: %s; the recording goes on without", reason)


def say_device_unused(device_type: str) -> None:
    """Log that a recording has ended without device times, as the process had not used the device."""
    _log.warning(
        "device_times: there are none, as no module was called from outside of all others after torch initialized %s",
        device_type,
    )
