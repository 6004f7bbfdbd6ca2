"""`MODTRACE=…`: a recording that is turned on from outside, in a script that imports modtrace.

`MODTRACE=trace.pftrace` saves there at the end; `MODTRACE=run-%r.modtrace` keeps a ring file; or arguments of
`modtrace.record` by name: `MODTRACE="ring=run-%r.modtrace,path=run-%r.pftrace,capacity=4000000,on_signal=SIGUSR1"`.
In a path `%r` is the rank, `%p` the process number, and `%%` a percent sign.

The recording starts when torch is imported, and marks a step after each optimizer step. What the script records itself
goes before it. A child process inherits the variable only where `%p` tells the files apart.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ._errors import RecordingError
from ._on_import import after_import

if TYPE_CHECKING:
    from .recording import Recording

__all__ = ["arguments", "arm"]

_VARIABLE = "MODTRACE"
_RING_SUFFIX = ".modtrace"
_EXAMPLES = "MODTRACE=trace.pftrace, or MODTRACE=ring=run-%r.modtrace,path=run-%r.pftrace"
_log = logging.getLogger("modtrace")


def arm() -> None:
    """Record as the variable says, once torch is there; what is wrong with it is logged once, never raised."""
    text = os.environ[_VARIABLE]
    try:
        wanted = arguments(text, os.environ)
    except RecordingError as error:
        _log.error("%s; nothing is recorded", error)
        return
    if not all("%p" in value for key, value in _parts(text) if _READ[key] is _path):
        # A child that imports modtrace too would replace the parent's files by its own.
        del os.environ[_VARIABLE]
    after_import("torch", lambda: _start(wanted))


def _start(wanted: Mapping[str, Any]) -> None:
    if "modtrace.cli" in sys.modules:
        return  # `modtrace run` has options for all this
    try:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        from .recording import record

        recording = record(**wanted)
        recording.gives_way = True
        recording.start()
        register_optimizer_step_post_hook(lambda *_: _step(recording))
    except Exception as error:
        _log.error("%s: %s; nothing is recorded", _VARIABLE, error)


def _step(recording: Recording) -> None:
    if recording.running:
        recording.step()


def arguments(text: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of `modtrace.record` that a value of the variable stands for.

    Args:
        text: the value.
        environment: where the rank is looked up, `RANK` and `WORLD_SIZE`.

    Raises:
        RecordingError: it cannot be understood; says why.
    """
    found: dict[str, Any] = {}
    for key, value in _parts(text):
        if key not in _READ or not value:
            known = ", ".join(f"{name}=…" for name in _READ)
            raise RecordingError(f"{_VARIABLE}: {f'{key}={value}'!r} is none of {known} ({_EXAMPLES})")
        try:
            found[key] = _READ[key](value, environment)
        except (ValueError, KeyError) as error:
            raise RecordingError(f"{_VARIABLE}: {f'{key}={value}'!r} cannot be understood") from error
    return found


def _parts(text: str) -> list[tuple[str, str]]:
    if "=" not in text:
        return [("ring" if text.endswith(_RING_SUFFIX) else "path", text)]
    pairs = [part.partition("=") for part in text.split(",")]
    return [(key.strip(), value.strip()) for key, _, value in pairs]


def _path(text: str, environment: Mapping[str, str]) -> str:
    several = int(environment.get("WORLD_SIZE", "1")) > 1
    if several and not re.search("%[rp]", text):
        # As under `modtrace run`: each rank has files of its own.
        folder, name = os.path.split(text)
        stem, dot, suffixes = name.partition(".")
        text = os.path.join(folder, f"{stem}.rank%r{dot}{suffixes}")
    values = {"%r": environment.get("RANK", "0"), "%p": str(os.getpid()), "%%": "%"}
    # The script may change its directory.
    return os.path.abspath(re.sub("%[rp%]", lambda match: values[match[0]], text))


_READ: Mapping[str, Callable[[str, Mapping[str, str]], Any]] = {
    "path": _path,
    "ring": _path,
    "engine": lambda text, _: text,
    "capacity": lambda text, _: int(text),
    "on_signal": lambda text, _: signal.Signals[text],
}
