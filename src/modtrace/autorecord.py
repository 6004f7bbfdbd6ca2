"""Recordings that nobody wrote a line for: by the variable `MODTRACE`, or by `modtrace run`.

`MODTRACE=trace.pftrace python train.py` records a script that imports modtrace and saves at its end;
`MODTRACE=run-%r.modtrace` keeps a ring file. Or give `path` and the options of `modtrace.record` by name, as text:
`MODTRACE="ring=run-%r.modtrace,path=run-%r.pftrace,capacity=4000000,on_signal=SIGUSR1,shapes=true"`.
`modtrace run` has the same options with dashes (`--on-signal SIGUSR1`), and `-o` for the path.

In a path `%r` is the rank, `%p` the process id, `%h` a hash of the host's name, and `%%` a percent sign. Where several
ranks run, a path without `%r` and `%p` gets the rank before its suffixes: `trace.json.gz` → `trace.rank3.json.gz`.

The recording starts when torch is imported. What the script records itself stops it and goes on in its place. A child
process inherits the variable only where `%p` tells the files apart.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ._after_import import call_after_import
from ._errors import RecordingError
from ._next_step import next_step_hint
from ._rank import absolute_path, add_rank
from .record_options import OPTIONS

if TYPE_CHECKING:
    from .recording import Recording

__all__ = ["AutoRecording", "parse_variable", "start_from_variable"]

_VARIABLE = "MODTRACE"
_RING_SUFFIX = ".modtrace"
_EXAMPLES = "MODTRACE=trace.pftrace, or MODTRACE=ring=run-%r.modtrace,path=run-%r.pftrace"
_PARSERS: Mapping[str, Callable[[str], Any]] = {"path": str, **{option.name: option.parse for option in OPTIONS}}
_PATHS = {"path", *(option.name for option in OPTIONS if option.is_path)}
_log = logging.getLogger("modtrace")


class AutoRecording:
    """A recording that starts once torch is imported.

    It waits for torch because a script may set what torch reads when it is imported, `OMP_NUM_THREADS` and the like.

    Args:
        arguments: of `modtrace.record`, `path` included.
        prepare: called before the recording starts, when torch is imported.
        unattended: nobody waits for the recording: log what keeps it from starting, and say on stderr where the file is
            once it is there. False lets such an error leave the script's import of torch.

    Attributes:
        recording: None until torch is imported.
        error: what kept it from starting.
    """

    def __init__(
        self, arguments: Mapping[str, Any], *, unattended: bool, prepare: Callable[[], object] = lambda: None
    ) -> None:
        self._arguments = arguments
        self._prepare = prepare
        self._unattended = unattended
        self._process = os.getpid()
        self.recording: Recording | None = None
        self.error: Exception | None = None
        call_after_import("torch", self._start)

    @property
    def in_starting_process(self) -> bool:
        """False in a forked child: the recording is its parent's."""
        return os.getpid() == self._process

    def finish(self) -> None:
        """Stop the recording, and save it where it stopped before and could not be saved then.

        Raises:
            WriteError: the trace cannot be saved.
            Exception: `error`, where there is one.
        """
        if self.error is not None:
            raise self.error
        if self.recording is not None:
            self.recording.stop()
            self.recording.save_unsaved()

    def _start(self) -> None:
        try:
            from .recording import record

            self._prepare()
            recording = record(**self._arguments)
            recording.replaceable = True
            recording.on_saved = _say_where if self._unattended else _say_nothing
            recording.warn = _say
            recording.start()
            self.recording = recording
        except Exception as error:
            self.error = error
            if not self._unattended:
                raise
            _log.error("%s: %s; nothing is recorded", _VARIABLE, error)


def _say_where(path: str) -> None:
    _say(f"recorded to {path}. {next_step_hint(path)}")


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the script may have closed it
        sys.stderr.write(f"modtrace: {text}\n")


def _say_nothing(_path: str) -> None:
    """Say nothing: who made the recording does."""


def start_from_variable() -> None:
    """Record as the variable `MODTRACE` says, once torch is there; what is wrong with it is logged, never raised."""
    text = os.environ[_VARIABLE]
    try:
        arguments = parse_variable(text, os.environ)
    except RecordingError as error:
        _log.error("%s; nothing is recorded", error)
        return
    if not all("%p" in value for key, value in _split(text) if key in _PATHS):
        # A child that imports modtrace too would replace the parent's files by its own.
        del os.environ[_VARIABLE]
    call_after_import("torch", lambda: _start_unless_command(arguments))


def _start_unless_command(arguments: Mapping[str, Any]) -> None:
    if "modtrace.cli" not in sys.modules:  # `modtrace run` has options for all this
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
