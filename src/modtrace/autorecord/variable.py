"""The variable `MODTRACE`: what it says, and the recording that it asks for."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from .._errors import RecordingError
from .._rank import absolute_path, add_rank
from ..record_options import OPTIONS
from .auto_recording import AutoRecording

__all__ = ["parse_variable", "start_from_variable"]

_VARIABLE = "MODTRACE"
_RING_SUFFIX = ".modtrace"
_EXAMPLES = "MODTRACE=trace.pftrace, or MODTRACE=ring=run-%r.modtrace,path=run-%r.pftrace"
_PARSERS: Mapping[str, Callable[[str], Any]] = {"path": str, **{option.name: option.parse for option in OPTIONS}}
_PATHS = {"path", *(option.name for option in OPTIONS if option.is_path)}
_log = logging.getLogger("modtrace")


def start_from_variable() -> None:
    """Record as the variable `MODTRACE` says, once torch is there; what is wrong with it is logged, never raised."""
    text = os.environ[_VARIABLE]
    try:
        arguments = parse_variable(text, os.environ)
    except RecordingError as error:
        _log.error("%s; nothing is recorded", error)
        return
    # A child that imports modtrace too would replace the parent's files by its own: the job tells it what to record.
    del os.environ[_VARIABLE]
    AutoRecording(arguments, unattended=True)


def parse_variable(text: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of `modtrace.record` that a value of the variable stands for.

    Args:
        text: the value: a path, or `name=value` joined by commas.
        environment: where `WORLD_SIZE` is looked up.

    Raises:
        RecordingError: it cannot be understood; the message says why.
    """
    arguments: dict[str, Any] = {}
    for key, value in _split(text):
        if key not in _PARSERS or not value:
            known = ", ".join(f"{name}=…" for name in _PARSERS)
            raise RecordingError(f"{_VARIABLE}: {f'{key}={value}'!r} is none of {known} ({_EXAMPLES})")
        try:
            parsed = _PARSERS[key](value)
            # The script may change its directory.
            arguments[key] = absolute_path(add_rank(parsed, environment)) if key in _PATHS else parsed
        except ValueError as error:
            raise RecordingError(f"{_VARIABLE}: {f'{key}={value}'!r} cannot be understood: {error}") from error
    return arguments


def _split(text: str) -> list[tuple[str, str]]:
    if "=" not in text:
        return [("ring" if text.endswith(_RING_SUFFIX) else "path", text)]
    pairs: list[tuple[str, str]] = []
    for part in text.split(","):
        if pairs and part.strip().isdecimal():  # of a value that is a list of numbers
            pairs[-1] = (pairs[-1][0], f"{pairs[-1][1]},{part.strip()}")
        else:
            key, _, value = part.partition("=")
            pairs.append((key.strip(), value.strip()))
    return pairs
