"""The recording session: what `modtrace.record` returns."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import TracebackType

from torch import nn

from .._errors import ModtraceError, RecordingError
from ..record_options import ENGINES, EngineName
from ..ring import Kind, NameTable
from ..ring.slot_format import NO_NAME
from ..timeline import ThreadStack, Timeline, build_timeline, open_stacks
from ..track.sampling import Sampler
from ..write import check_writable
from .block_exit import block_exit
from .capture import Capture
from .current import is_running, running, start_alone, stop_alone
from .on_signal import SaveOnSignal

__all__ = ["Recording", "current"]

_log = logging.getLogger("modtrace")


class Recording:
    """A recording of when each module runs; made by `record`.

    Use it in a with block, or call `start` and `stop`. It can be started once. While it runs, any thread may call its
    methods; `start` with a signal to save on, and the `stop` that goes with it, belong to the main thread. Whatever
    needs a recording that was started raises `RecordingError` where it was not.

    Attributes:
        saved: whether `stop` has saved it to its path.
        replaceable: True for recordings started by `MODTRACE=` or `modtrace run`: an explicit `record()` stops and
            replaces them.

    Example:
        >>> recording = modtrace.record(ring="run.modtrace")
        >>> recording.start()
        >>> train_step()
        >>> recording.step()
        >>> recording.stop()
        >>> recording.timeline().summary()
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        engine: EngineName,
        capacity: int,
        ring: str | os.PathLike[str] | None,
        model: nn.Module | str | None,
        max_steps: int | None,
        sampler: Sampler,
        on_signal: int | None,
        host_name: bool,
    ) -> None:
        if engine not in ENGINES:
            raise RecordingError(f"engine is {engine!r}; it must be 'auto', 'native' or 'python'")
        if max_steps is not None and max_steps < 1:
            raise RecordingError(f"max_steps is {max_steps}; it must be 1 or more, or None")
        if on_signal is not None and path is None:
            raise RecordingError("on_signal needs a path to save to")
        if path is not None:
            check_writable(_checked("path", path))
        if ring is not None:
            _checked("ring", ring)
        weak_model = weakref.ref(model) if isinstance(model, nn.Module) else model
        self._make_capture = partial(Capture, engine, capacity, ring, weak_model, host_name, sampler)
        self._path = path
        self._max_steps = max_steps
        self._signal = None if on_signal is None else SaveOnSignal(on_signal, self._save_on_signal)
        self._unused = threading.Lock()
        self._capture: Capture | None = None
        self._timeline: Timeline | None = None
        self._steps = 0
        self._entered = False
        self._block: object = None
        self.saved = False
        self.replaceable = False

    def __enter__(self) -> Recording:
        self._entered = True
        self.start()
        return self

    @block_exit
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        except ModtraceError as failure:
            if error is None:
                raise
            # The user's own error is what they need to see.
            _log.error("the recording could not be saved: %s", failure)

    def __repr__(self) -> str:
        state = "not started" if self._capture is None else "running" if self.running else "stopped"
        return f"<Recording: {state}>"

    @property
    def running(self) -> bool:
        """Whether it was started and not stopped yet."""
        return is_running(self)

    @property
    def engine(self) -> str:
        """Which engine runs: "native" or "python".

        Raises:
            RecordingError: the recording was not started.
        """
        return self._started().engine.kind

    def start(self) -> None:
        """Start recording: from now on each call of a module is recorded.

        Raises:
            RecordingError: another recording runs, this one was started before, or its signal cannot be listened to.
            RingError: the ring's file cannot be made or its space not be reserved.
            EngineError: the native engine is asked for and is not built.
        """
        if not self._unused.acquire(blocking=False):
            raise RecordingError("this recording was started before; make a new one with modtrace.record()")
        try:
            start_alone(self, self._switch_on)
        except BaseException:
            stop_alone(self)
            self._capture = None
            self._unused.release()
            raise

    def _switch_on(self) -> None:
        if self._signal is not None:
            self._signal.start()
        self._capture = self._make_capture()
        atexit.register(self._save_at_exit)
        self._capture.start()

    def _switch_off(self) -> None:
        """Undo all of `_switch_on` that was done; what an interrupt came into can be done again."""
        if self._capture is not None:
            self._capture.stop()
        atexit.unregister(self._save_at_exit)
        if self._signal is not None:
            self._signal.stop()
        if self._capture is not None:
            self._capture.close()
        self._block = None

    def stop(self) -> None:
        """Stop recording, restore `nn.Module.__call__`, and save where a path was given; does nothing when stopped.

        Thread-safe; calls that are open then have no end in the timeline.

        Where the exception of a signal's handler comes out of it, it has stopped all the same, and may have saved
        nothing.

        Raises:
            WriteError: the file cannot be written; the timeline is still there, `save` can try another path.
        """
        try:
            ran = stop_alone(self)
        except BaseException:
            stop_alone(self)
            raise
        if ran and self._path is not None:
            self.save(self._path)
            self.saved = True

    def step(self) -> None:
        """Mark the end of a training step: what was recorded since the last one has its number, from 0.

        After `max_steps` of them the recording stops, and saves; an error of saving is logged.
        """
        self._write_mark(Kind.STEP, lambda _: NO_NAME, self._steps)
        self._steps += 1
        if self._steps == self._max_steps:
            self._stop_and_log("after max_steps")

    def mark(self, text: str) -> None:
        """Mark a moment, which traces show under this text.

        Raises:
            TypeError: it is no text.
        """
        if not isinstance(text, str):
            raise TypeError(f"the text of a mark is a str, not {type(text).__name__}")
        self._write_mark(Kind.MARK, lambda names: names.text(text), 0)

    def _write_mark(self, kind: Kind, name: Callable[[NameTable], int], value: int) -> None:
        capture = self._started()
        if self.running:
            capture.write_mark(kind, name, value)

    def snapshot(self) -> Timeline:
        """Return the timeline of the last `capacity` events, while running or after."""
        return build_timeline(self._started().ring.read())

    def timeline(self) -> Timeline:
        """Return the timeline of a stopped recording.

        Raises:
            RecordingError: it runs still; then `snapshot` is meant.
        """
        self._started()
        if self.running:
            raise RecordingError("the recording runs; call stop() first, or snapshot() for what there is so far")
        if self._timeline is None:
            self._timeline = self.snapshot()
        return self._timeline

    def where(self) -> list[ThreadStack]:
        """Return what is open now on each thread: its modules, outermost first."""
        return open_stacks(self._started().ring.read())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline to `path`, of a running recording a snapshot; the suffix picks the format.

        Raises:
            WriteError: the file cannot be written; one that was there is intact.
        """
        (self.snapshot() if self.running else self.timeline()).save(path)

    def _started(self) -> Capture:
        if self._capture is None:
            raise RecordingError("the recording was not started; use it in a with block, or call start()")
        return self._capture

    def _save_on_signal(self) -> None:
        assert self._path is not None
        try:
            self.save(self._path)
        except ModtraceError as error:
            _log.error("the recording could not be saved on the signal: %s", error)

    def _save_at_exit(self) -> None:
        self._stop_and_log("at exit")

    def _on_block_left(self) -> None:
        self._stop_and_log("when its block was left")

    def _stop_and_log(self, when: str) -> None:
        """Stop where nobody could handle an error of saving: log it."""
        try:
            self.stop()
        except ModtraceError as error:
            _log.error("the recording could not be saved %s: %s", when, error)

    def _after_fork(self) -> None:
        """In a forked child: the ring, its file and the path to save to are the parent's."""
        atexit.unregister(self._save_at_exit)
        if self._capture is not None:
            self._capture.after_fork()
        if self._signal is not None:
            self._signal.after_fork()


def _checked(name: str, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    text: object = os.fspath(path)
    if not isinstance(text, str):
        raise RecordingError(f"{name} is {path!r}; give it as text or as a pathlib.Path")
    if "\0" in text:
        raise RecordingError(f"{name} is {path!r}; the name of a file holds no NUL")
    return path


def current() -> Recording | None:
    """Return the recording that runs in this process, None where none does."""
    recording = running()
    assert recording is None or isinstance(recording, Recording)
    return recording
