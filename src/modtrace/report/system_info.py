"""Describe where a recording was made, from what it noted at its start: versions and hardware, by an allow-list."""

from __future__ import annotations

import re
from collections.abc import Mapping

from .._version import __version__
from ..timeline.contents import BACKWARD_PASSES, STEPS_END_WITH
from ..timeline.gpu_tracks import DEVICE_METADATA

__all__ = ["clean_metadata", "environment_text"]

_VERSION = r"[0-9][\w.+-]{0,40}"
_COUNT = r"\d+"
_WORD = r"[A-Za-z][\w-]{0,40}"
_ALLOWED: Mapping[str, tuple[str | None, re.Pattern[str]]] = {
    key: (label, re.compile(pattern, re.ASCII))
    for key, label, pattern in (
        ("modtrace", "modtrace", _VERSION),
        ("torch", "torch", _VERSION),
        ("python", "Python", _VERSION),
        ("engine", "engine", "native|python"),
        ("capacity", "capacity", _COUNT),
        ("os", "operating system", rf"{_WORD} {_WORD}"),
        ("cpu", "CPU", r"[\w .()@/+-]{1,80}"),
        ("cpus", "CPUs", _COUNT),
        ("gpu", "GPU", r"\d+ × [\w .()-]{1,60}"),
        ("gpu_driver", "GPU driver", _VERSION),
        ("cuda", "CUDA", _VERSION),
        ("hip", "HIP", _VERSION),
        ("libraries", "libraries", rf"{_WORD} {_VERSION}(?:, {_WORD} {_VERSION})*"),
        (STEPS_END_WITH, None, BACKWARD_PASSES),
        *((key, None, _COUNT) for key in DEVICE_METADATA),
    )
}
"""For each key of a recording's metadata that may be told: what to call it, None where it says nothing of the machine,
and what its value must look like."""


def clean_metadata(metadata: Mapping[str, object]) -> dict[str, object]:
    """Return versions, hardware and counts in a recording's metadata: no host, no hash of its name, nothing unknown."""
    clean: dict[str, object] = {}
    for key, (_, pattern) in _ALLOWED.items():
        value = metadata.get(key)
        expected = int if pattern.pattern == _COUNT else str
        # torch's version is a text of its own class.
        if isinstance(value, expected) and not isinstance(value, bool) and pattern.fullmatch(str(value)):
            clean[key] = expected(value)
    return clean


def environment_text(metadata: Mapping[str, object]) -> str:
    """Return the text of `environment.txt`.

    It is about the machine that recorded: the one that makes the report may be another.

    Args:
        metadata: of the recording.
    """
    lines = [f"{label}: {value}" for key, value in clean_metadata(metadata).items() if (label := _ALLOWED[key][0])]
    if lines:
        lines = ["Noted by the recording when it started:", "", *lines]
    else:
        lines = ["The trace does not say where it was recorded."]
    return "".join(f"{line}\n" for line in [*lines, "", f"Reported by modtrace {__version__}."])
