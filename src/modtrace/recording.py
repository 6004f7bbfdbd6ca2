"""The recording session: what `modtrace.record` returns."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Callable
from types import TracebackType

from torch import nn

from ._errors import ModtraceError, RecordingError
from .current_recording import is_running, running, starting, stopping
from .on_signal import SaveOnSignal, raised_by_handler
from .record_options import DEFAULT_CAPACITY, ENGINES, EngineName
from .ring import Kind, NameTable, Ring
from .ring.slot_format import NO_NAME
from .timeline import ThreadStack, Timeline, build_timeline, open_stacks
from .track.engine import Engine, choose_engine, make_engine
from .track.recording_metadata import recording_metadata
from .track.sampling import Sampler
from .write import check_writable

__all__ = ["Recording", "current", "record"]

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
            check_writable(path)
        self._path = path
        self._engine_name = engine
        self._capacity = capacity
        self._ring_path = ring
        self._model = weakref.ref(model) if isinstance(model, nn.Module) else model
        self._max_steps = max_steps
        self._host_name = host_name
        self._sampler = sampler
        self._signal = None if on_signal is None else SaveOnSignal(on_signal, self._save_on_signal)
        self._engine: Engine | None = None
        self._ring: Ring | None = None
        self._timeline: Timeline | None = None
        self._steps = 0
        self._failed = False
        self.saved = False
        self.replaceable = False

    def __enter__(self) -> Recording:
        self.start()
        return self

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
        state = "not started" if self._ring is None else "running" if self.running else "stopped"
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
        return self._started()[0].kind

    def start(self) -> None:
        """Start recording: from now on each call of a module is recorded.

        Raises:
            RecordingError: another recording runs, this one was started before, or its signal cannot be listened to.
            RingError: the ring's file cannot be made or its space not be reserved.
            EngineError: the native engine is asked for and is not built.
        """
        if self._signal is not None:
            self._signal.start()
        try:
            self._start()
        except BaseException:
            if self._signal is not None:
                self._signal.stop()
            raise
        atexit.register(self._save_at_exit)

    def _start(self) -> None:
        with starting(self):
            if self._ring is not None:
                raise RecordingError("this recording was started before; make a new one with modtrace.record()")
            kind = choose_engine(self._engine_name)
            metadata = recording_metadata(kind, self._capacity, self._host_name)
            self._ring = Ring(self._capacity, self._ring_path, metadata)
            model = self._model() if isinstance(self._model, weakref.ref) else self._model
            self._engine = make_engine(kind, self._ring, model, self._on_error)
            self._sampler.start(self._engine, self._ring.names, self._on_error)
            self._engine.start()

    def stop(self) -> None:
        """Stop recording, restore `nn.Module.__call__`, and save where a path was given; does nothing when stopped.

        Thread-safe; calls that are open then have no end in the timeline.

        Raises:
            WriteError: the file cannot be written; the timeline is still there, `save` can try another path.
        """
        if self._end() and self._path is not None:
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
        """Mark a moment, which traces show under this text."""
        self._write_mark(Kind.MARK, lambda names: names.text(text), 0)

    def _write_mark(self, kind: Kind, name: Callable[[NameTable], int], value: int) -> None:
        engine, ring = self._started()
        if self.running and not self._failed:
            try:
                engine.write_event(kind, name(ring.names), value)
            except Exception as error:
                self._on_error(error)

    def snapshot(self) -> Timeline:
        """Return the timeline of the last `capacity` events, while running or after."""
        ring = self._started()[1]
        return build_timeline(ring.read())

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
        return open_stacks(self._started()[1].read())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline to `path`, of a running recording a snapshot; the suffix picks the format.

        Raises:
            WriteError: the file cannot be written; one that was there is intact.
        """
        (self.snapshot() if self.running else self.timeline()).save(path)

    def _started(self) -> tuple[Engine, Ring]:
        if self._engine is None or self._ring is None:
            raise RecordingError("the recording was not started; use it in a with block, or call start()")
        return self._engine, self._ring

    def _end(self) -> bool:
        with stopping(self) as was_running:
            if not was_running:
                return False
            engine, ring = self._started()
            engine.stop()
            self._sampler.stop()
        atexit.unregister(self._save_at_exit)
        if self._signal is not None:
            self._signal.stop()
        try:
            ring.close()
        except OSError as error:
            self._report(error)
        return True

    def _on_error(self, error: BaseException) -> None:
        """Stop recording after an error inside modtrace, and log it; called from within the user's own calls.

        An interrupt, or what the handler of a signal raised while our code ran, is the user's: it is raised.
        """
        if not isinstance(error, Exception) or raised_by_handler(error):
            raise error
        if self._failed:
            return
        self._failed = True
        if self._engine is not None:
            self._engine.stop()
            self._sampler.stop()
        self._report(error)

    def _report(self, error: BaseException) -> None:
        _log.error(
            "the recording stopped after an error inside modtrace; the training goes on", exc_info=error, stacklevel=3
        )

    def _save_on_signal(self) -> None:
        assert self._path is not None
        try:
            self.save(self._path)
        except ModtraceError as error:
            _log.error("the recording could not be saved on the signal: %s", error)

    def _save_at_exit(self) -> None:
        self._stop_and_log("at exit")

    def _stop_and_log(self, when: str) -> None:
        """Stop where nobody could handle an error of saving: log it."""
        try:
            self.stop()
        except ModtraceError as error:
            _log.error("the recording could not be saved %s: %s", when, error)

    def _after_fork(self) -> None:
        """In a forked child: the ring, its file and the path to save to are the parent's."""
        atexit.unregister(self._save_at_exit)
        self._failed = True
        if self._engine is not None:
            self._engine.after_fork()
            self._sampler.stop()
        if self._signal is not None:
            self._signal.after_fork()


def current() -> Recording | None:
    """Return the recording that runs in this process, None where none does."""
    recording = running()
    assert recording is None or isinstance(recording, Recording)
    return recording


def record(
    path: str | os.PathLike[str] | None = None,
    *,
    engine: EngineName = "auto",
    capacity: int = DEFAULT_CAPACITY,
    ring: str | os.PathLike[str] | None = None,
    model: nn.Module | str | None = None,
    max_steps: int | None = None,
    shapes: bool = False,
    memory_interval: float | None = None,
    on_signal: int | None = None,
    host_name: bool = False,
) -> Recording:
    """Return a recording of when each module runs forward, backward and again (recompute); it is not started yet.

    One recording runs at a time in a process. What fails inside it is logged once and the recording stops; the
    training goes on. `modtrace run` and `MODTRACE=` take the same options, by the same names.

    Args:
        path: where to save at the end; the suffix picks the format: `.pftrace`, `.json` (both also with `.gz`),
            `.html`, `.zip`. None saves nothing until `save`.
        engine: "native", "python", or "auto": native where it is built (`modtrace build`), else python.
        capacity: events kept, 32 bytes each; the oldest are overwritten.
        ring: a file behind the ring: it survives SIGKILL, and another process can read it.
        model: names start at this module, or (a text) at a module whose class has this name; None starts them at each
            outermost called module.
        max_steps: stop, and save where a path is given, after so many calls of `step`.
        shapes: also record shapes and dtypes of the tensors that go into each call.
        memory_interval: also sample memory when modules are called, at most once in so many seconds.
        on_signal: save to `path` whenever this signal comes (`signal.SIGUSR1`), and go on.
        host_name: write the host's name into the recording instead of a hash of it.

    Raises:
        RecordingError: the arguments make no sense.
        WriteError: nothing can be saved at `path`.

    Example:
        >>> with modtrace.record("step.pftrace") as rec:
        ...     train_step()
        ...     rec.step()
    """
    return Recording(
        path,
        engine=engine,
        capacity=capacity,
        ring=ring,
        model=model,
        max_steps=max_steps,
        sampler=Sampler(shapes, memory_interval),
        on_signal=on_signal,
        host_name=host_name,
    )
