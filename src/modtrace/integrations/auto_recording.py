"""Recordings without a line of code: by the variable `MODTRACE`, or by `modtrace run`.

`MODTRACE=trace.pftrace python train.py` records a script that imports modtrace and saves at its end;
`MODTRACE=run-%r.modtrace` keeps a ring file. Or give `path` and the options of `modtrace.record` by name, as text:
`MODTRACE="ring=run-%r.modtrace,path=run-%r.pftrace,capacity=4000000,on_signal=SIGUSR1,shapes=true"`.
`modtrace run` has the same options with dashes (`--on-signal SIGUSR1`), and `-o` for the path.

In a path `%r` is the rank, `%p` the process id, `%h` a hash of the host's name, and `%%` a percent sign. Where several
ranks run, a path without `%r` and `%p` gets the rank before its suffixes: `trace.json.gz` → `trace.rank3.json.gz`.

The recording starts when torch is imported. If the script starts a recording of its own, that replaces this one.
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
from .._ranks import absolute_path, add_rank
from .._tables import next_step_hint, printable
from ..record_options import parse_flag
from .job import PARSERS, PATHS, ChildCount, Job

if TYPE_CHECKING:
    from ..recording import Recording

_AFTER_CHILDREN = -1000
"""Priority of a `multiprocessing` finalizer that runs after the wait for the children."""
_log = logging.getLogger("modtrace")


class AutoRecording:
    """A recording that starts once torch is imported; children of this process record themselves.

    It waits for torch because a script may set what torch reads when it is imported, `OMP_NUM_THREADS` and the like.
    When the process ends, it says on stderr what the children recorded, and where nothing is recorded, why.

    Args:
        arguments: of `modtrace.record`, `path` included; paths are absolute.
        prepare: called before the recording starts, when torch is imported.
        unattended: no command waits for the recording: log what keeps it from starting, and say on stderr where the
            file is once it is there. False lets such an error leave the script's import of torch.
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
        self.error: Exception | None = None  # what kept it from starting
        self._ran = unattended
        self._began = False
        self._job = Job.begin(arguments)
        self._job.tell_children()
        call_after_import("torch", self._start)
        Finalize(None, self._report_at_exit, exitpriority=_AFTER_CHILDREN)

    @property
    def in_starting_process(self) -> bool:
        """Whether this process made it; a forked child has a recording of its own."""
        return os.getpid() == self._process

    def finish(self) -> None:
        """Stop the recording; if it had stopped and could not be saved then, save it.

        Raises WriteError if the trace cannot be saved; and `error`, where there is one.
        """
        self._ran = True
        if self.error is not None:
            raise self.error
        if self.recording is not None:
            self.recording.stop()
            self.recording.internal.save_unsaved()

    def _start(self) -> None:
        """Start the recording, or in a forked child have that record itself: torch was just imported."""
        if self._unattended and "modtrace.cli" in sys.modules:  # `modtrace run` has options for all this
            return
        self._began = True
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
            recording.internal.on_saved = _say_saved if self._unattended else lambda _: None  # who made it says it
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
        with contextlib.suppress(RecordingError):  # a schedule that has not begun
            if recording.engine == "python":
                # Each child would say again why it is not the native one.
                self._job.arguments["engine"] = "python"
                self._job.tell_children()
        record_forked_children(recording, self._job)

    def _report_at_exit(self) -> None:
        children = self._job.close()
        recorded = self.recording is not None and not self.recording.internal.is_empty
        if children.saved or children.unsaved:
            line = self._about_children(children)
            if children.saved and not recorded:
                line = f"{line}. {next_step_hint(children.saved[0].removeprefix(self._folder))}"
            _say(line)
        elif self._ran and self.error is None and not recorded:
            reason = self._why_nothing()
            if not self._unattended:
                _say(f"nothing is recorded: {reason}")
            elif "modtrace.cli" not in sys.modules:
                _log.error("MODTRACE: %s; nothing is recorded", reason)

    def _why_nothing(self) -> str:
        if self.recording is not None:
            return "no module was called"
        if self._began:
            return "the script was interrupted before the recording began"
        if "torch.nn" in sys.modules:
            if "torch" not in sys.modules:
                return "the script was interrupted while it imported torch"
            return "torch was imported by a loader that modtrace cannot follow; use modtrace.record() after that"
        return "the script ended before torch was imported"

    def _about_children(self, children: ChildCount) -> str:
        parts = []
        if children.saved:
            count = "1 child process is" if len(children.saved) == 1 else f"{len(children.saved)} child processes are"
            parts.append(f"{count} in {pattern_of(children.saved).removeprefix(self._folder)}")
        if children.unsaved:
            count = "1 child process" if len(children.unsaved) == 1 else f"{len(children.unsaved)} child processes"
            part = f"{count} called modules and saved nothing (killed, ended by os._exit, or running still)"
            rings = [ring for ring in children.unsaved if ring]
            parts.append(f"{part}: see {pattern_of(rings).removeprefix(self._folder)}" if rings else part)
        return "; ".join(parts)


def pattern_of(paths: Sequence[str]) -> str:
    """Return a pattern, as a shell's, of files whose names differ in what their processes filled in."""
    return os.sep.join(_common(names) for names in zip(*(path.split(os.sep) for path in paths), strict=True))


def _common(names: Sequence[str]) -> str:
    """Return the name, or what all begin and end with; a number that differs is left out as a whole."""
    if len({*names}) == 1:
        return names[0]
    begin = _shared_begin(names).rstrip(digits)
    end = _shared_begin([name[len(begin) :][::-1] for name in names])[::-1].lstrip(digits)
    return f"{begin}*{end}"


def _shared_begin(names: Sequence[str]) -> str:
    return "".join(letters[0] for letters in takewhile(lambda all_of: len({*all_of}) == 1, zip(*names, strict=False)))


def _say_saved(path: str) -> None:
    _say(f"recorded to {path}. {next_step_hint(path)}")


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the script may have closed it
        sys.stderr.write(f"modtrace: {printable(line)}\n")


_VARIABLE = "MODTRACE"
_RING_SUFFIX = ".modtrace"
_EXAMPLES = "MODTRACE=trace.pftrace, or MODTRACE=ring=run-%r.modtrace,path=run-%r.pftrace"
_PARSERS: Mapping[str, Callable[[str], Any]] = {"path": str, "save_on_term": parse_flag, **PARSERS}


def start_from_variable() -> None:
    """Record as the variable `MODTRACE` says, once torch is there; what is wrong with it is logged, never raised."""
    text = os.environ[_VARIABLE]
    try:
        arguments = parse_variable(text, os.environ)
    except RecordingError as error:
        _log.error("%s; nothing is recorded", error)
        return
    # A child that imports modtrace too would replace the parent's files by its own: the job says what it records.
    del os.environ[_VARIABLE]
    save_on_term = arguments.pop("save_on_term", False)
    AutoRecording(arguments, unattended=True, save_on_term=save_on_term)


def parse_variable(text: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of `modtrace.record` that the variable means: a path, or `name=value` joined by commas.

    Raises RecordingError, which says why, if it cannot be understood.
    """
    arguments: dict[str, Any] = {}
    for key, value in _split(text):
        if key not in _PARSERS or not value:
            options = ", ".join(f"{name}=…" for name in _PARSERS)
            raise RecordingError(f"{_VARIABLE}: {f'{key}={value}'!r} is none of {options} ({_EXAMPLES})")
        try:
            parsed = _PARSERS[key](value)
            # The script may change its directory.
            arguments[key] = absolute_path(add_rank(parsed, environment)) if key in PATHS else parsed
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
