"""Recordings without a line of code: by the variable `MODTRACE`, or by `modtrace run`.

`MODTRACE=trace.pftrace python train.py` records a script that imports modtrace and saves at its end;
`MODTRACE=run-%r.modtrace` keeps a ring file. The variable can also name `path` and the options of `modtrace.record`:
`MODTRACE="ring=run-%r.modtrace,path=run-%r.pftrace,capacity=4000000,on_signal=SIGUSR1,shapes=true"`.
`modtrace run` has the same options with dashes (`--on-signal SIGUSR1`), and `-o` for the path.

In a path `%r` is the rank, `%p` the process id, `%h` a hash of the host's name, and `%%` a percent sign. If several
ranks run, a path without `%r` and `%p` gets the rank before its suffixes: `trace.json.gz` → `trace.rank3.json.gz`.

The recording starts when torch is imported. A recording that the script starts replaces it.
Child processes are recorded too, each from its first call of a module on, to `trace.pid4711.json.gz`.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from multiprocessing.util import Finalize
from string import digits
from typing import TYPE_CHECKING, Any

from .._after_import import call_after_import
from .._errors import RecordingError
from .._files import RING_SUFFIXES, next_step_hint
from .._ranks import absolute_path, add_rank
from .._tables import printable
from ..record_options import parse_flag
from .job import PARSERS, PATHS, ChildFiles, Job

if TYPE_CHECKING:
    from ..recording import Recording

_AFTER_CHILDREN = -1000
"""Priority of a `multiprocessing` finalizer that runs after the wait for the children."""
_log = logging.getLogger("modtrace")


class AutoRecording:
    """A recording that starts once torch is imported; children of this process record themselves.

    It waits for torch because a script may set variables that torch reads on import, such as `OMP_NUM_THREADS`. At the
    end of the process, a line on stderr reports the files of the children, or the reason why nothing is recorded.

    Args:
        arguments: the arguments of `modtrace.record`, with `path`; paths are absolute.
        prepare: called before the recording starts, when torch is imported.
        unattended: no command waits for the recording: log an error of its start, and report its file on stderr. If
            False, the script's import of torch raises such an error.
        save_on_term: save to the path if SIGTERM ends this process.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        *,
        unattended: bool,
        prepare: Callable[[], object] = lambda: None,
        save_on_term: bool = False,
    ) -> None:
        self._arguments = arguments
        self._prepare = prepare
        self._unattended = unattended
        self._save_on_term = save_on_term
        self._process = os.getpid()
        self._folder = ""
        with contextlib.suppress(OSError):
            self._folder = os.path.join(os.getcwd(), "")
        self.recording: Recording | None = None  # None until torch is imported
        self.error: Exception | None = None  # the error of its start
        self._has_run = unattended
        self._has_started = False
        self._job = Job.make(arguments)
        self._job.tell_children()
        call_after_import("torch", self._start)
        Finalize(None, self._report_at_exit, exitpriority=_AFTER_CHILDREN)

    @property
    def in_starting_process(self) -> bool:
        """Whether this process made the object; a forked child has a recording of its own."""
        return os.getpid() == self._process

    def finish(self) -> None:
        """Stop the recording, and save it if that failed before.

        Raises WriteError if the trace cannot be saved, and `error` if the recording could not start.
        """
        self._has_run = True
        if self.error is not None:
            raise self.error
        if self.recording is not None:
            self.recording.stop()
            self.recording.internal.save_unsaved()

    def _start(self) -> None:
        """Start the recording, or in a forked child that child's recording, after the import of torch."""
        if self._unattended and "modtrace.cli" in sys.modules:  # `modtrace run` has its own options
            return
        self._has_started = True
        try:
            from ..recording import record
            from .child_recording import record_forked_children, record_this_child

            if not self.in_starting_process:
                record_this_child(self._job)
                return
            self._prepare()
            recording = record(**self._arguments)
            recording.internal.is_replaceable = True
            recording.internal.warn = _say
            recording.internal.on_saved = _say_saved if self._unattended else lambda _: None  # the command reports it
            if self._save_on_term and recording.path is not None:
                recording.internal.save_on_term()
            recording.start()
            self.recording = recording
        except Exception as error:
            self.error = error
            if not self._unattended:
                raise
            _log.error("MODTRACE: %s; nothing is recorded", error)
            return
        with contextlib.suppress(RecordingError):  # the schedule has not recorded a step yet
            if recording.engine == "python":
                # Without it, each child would warn again that the native engine is missing.
                self._job.arguments["engine"] = "python"
                self._job.tell_children()
        record_forked_children(recording, self._job)

    def _report_at_exit(self) -> None:
        children = self._job.close()
        has_events = self.recording is not None and not self.recording.internal.is_empty
        if children.saved or children.unsaved:
            line = self._describe_children(children)
            if children.saved and not has_events:
                line = f"{line}. {next_step_hint(children.saved[0].removeprefix(self._folder))}"
            _say(line)
        elif self._has_run and self.error is None and not has_events:
            reason = self._explain_emptiness()
            if not self._unattended:
                _say(f"nothing is recorded: {reason}")
            elif "modtrace.cli" not in sys.modules:
                _log.error("MODTRACE: %s; nothing is recorded", reason)

    def _explain_emptiness(self) -> str:
        if self.recording is not None:
            return "no module was called"
        if self._has_started:
            return "the script was interrupted before the recording started"
        if "torch.nn" in sys.modules:
            if "torch" not in sys.modules:
                return "the script was interrupted while it imported torch"
            return "torch was imported by a loader that modtrace cannot follow; use modtrace.record() after that"
        return "the script ended before torch was imported"

    def _describe_children(self, children: ChildFiles) -> str:
        parts = []
        if children.saved:
            count = "1 child process is" if len(children.saved) == 1 else f"{len(children.saved)} child processes are"
            parts.append(f"{count} in {pattern_of(children.saved).removeprefix(self._folder)}")
        if children.unsaved:
            count = "1 child process" if len(children.unsaved) == 1 else f"{len(children.unsaved)} child processes"
            part = f"{count} called modules and saved nothing (killed, ended by os._exit, or still running)"
            rings = [ring for ring in children.unsaved if ring]
            parts.append(f"{part}: see {pattern_of(rings).removeprefix(self._folder)}" if rings else part)
        return "; ".join(parts)


def pattern_of(paths: Sequence[str]) -> str:
    """Return a shell pattern for files whose names differ in the numbers of their processes."""
    return os.sep.join(_name_pattern(names) for names in zip(*(path.split(os.sep) for path in paths), strict=True))


def _name_pattern(names: Sequence[str]) -> str:
    """Return the name, or `PREFIX*SUFFIX` of different names; a number that differs is not cut into pieces."""
    if len({*names}) == 1:
        return names[0]
    prefix = _common_prefix(names).rstrip(digits)
    suffix = _common_prefix([name[len(prefix) :][::-1] for name in names])[::-1].lstrip(digits)
    return f"{prefix}*{suffix}"


def _common_prefix(names: Sequence[str]) -> str:
    return "".join(letters[0] for letters in takewhile(lambda column: len({*column}) == 1, zip(*names, strict=False)))


def _say_saved(path: str) -> None:
    _say(f"recorded to {path}. {next_step_hint(path)}")


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the script may have closed stderr
        sys.stderr.write(f"modtrace: {printable(line)}\n")


_VARIABLE = "MODTRACE"
_EXAMPLES = "MODTRACE=trace.pftrace, or MODTRACE=ring=run-%r.modtrace,path=run-%r.pftrace"
_PARSERS: Mapping[str, Callable[[str], Any]] = {"path": str, "save_on_term": parse_flag, **PARSERS}


def start_from_variable() -> None:
    """Record by the variable `MODTRACE` once torch is imported; an error in the variable is logged, never raised."""
    text = os.environ[_VARIABLE]
    try:
        arguments = parse_variable(text, os.environ)
    except RecordingError as error:
        _log.error("%s; nothing is recorded", error)
        return
    # With the variable, a child that imports modtrace would replace the parent's files; children use the job instead.
    del os.environ[_VARIABLE]
    save_on_term = arguments.pop("save_on_term", False)
    AutoRecording(arguments, unattended=True, save_on_term=save_on_term)


def parse_variable(text: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of `modtrace.record` in the variable: a path, or `name=value` joined by commas.

    Raises RecordingError with the reason if the variable cannot be understood.
    """
    arguments: dict[str, Any] = {}
    for key, value in _split(text):
        if key not in _PARSERS or not value:
            options = ", ".join(f"{name}=…" for name in _PARSERS)
            raise RecordingError(f"{_VARIABLE}: {f'{key}={value}'!r} is not one of {options} ({_EXAMPLES})")
        try:
            argument = _PARSERS[key](value)
            # Paths are absolute because the script may change its directory.
            arguments[key] = absolute_path(add_rank(argument, environment)) if key in PATHS else argument
        except ValueError as error:
            raise RecordingError(f"{_VARIABLE}: {f'{key}={value}'!r} cannot be understood: {error}") from error
    return arguments


def _split(text: str) -> list[tuple[str, str]]:
    if "=" not in text:
        return [("ring" if text.endswith(RING_SUFFIXES) else "path", text)]
    pairs: list[tuple[str, str]] = []
    for part in text.split(","):
        if pairs and part.strip().isdecimal():  # the next number of a list
            pairs[-1] = (pairs[-1][0], f"{pairs[-1][1]},{part.strip()}")
        else:
            key, _, value = part.partition("=")
            pairs.append((key.strip(), value.strip()))
    return pairs
