"""`Recording`: what `modtrace.record` returns."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType

from torch.profiler import ProfilerAction

from .._errors import ModtraceError, RecordingError
from .._interrupts import hold_ctrl_c, raised_by_handler
from ..live.follow import KEEP_PREFIX
from ..public import Timeline
from ..record_options import EngineKind
from ..ring import Kind
from ..timeline import RingAnalysis, RingPieces, ThreadStack
from ..timeline.summary.overview import kept_sentence
from ..track.optimizer_steps import OptimizerSteps
from ..track.ranges import NamedRange
from ..write import REPORT, write
from .capture import Capture, CaptureOptions
from .current import block_exit, change_alone, is_running, start_alone, stop_alone
from .kept_windows import KeptWindows
from .loader_workers import WorkerRings
from .outputs import Cycles, Outputs, Schedule, log_saved
from .signals import SaveOnSignal

_log = logging.getLogger("modtrace")
_MAX_OPTIMIZERS = 16  # number of different optimizers that a recording describes


class Recording:
    """A recording of the times at which modules run; made by `record`.

    Use it in a with block, or call `start` and `stop`. It can be started once. While it runs, any thread may call its
    methods, except that `start` and `stop` of a recording with `on_signal` belong to the main thread. Methods that need
    a started recording raise `RecordingError` before `start`.

    Example:
        >>> recording = modtrace.record(ring="run.modtrace").start()
        >>> train_step()
        >>> recording.step()
        >>> recording.stop()
        >>> recording.timeline().summary()
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        ring: str | os.PathLike[str] | None,
        options: CaptureOptions,
        max_steps: int | None,
        schedule: Schedule | None,
        on_signal: int | None,
        worker_rings: WorkerRings | None,
        kept_windows: KeptWindows,
    ) -> None:
        self._kept_windows = kept_windows
        if on_signal is not None and path is None and not self._kept_windows.on_signal:
            raise RecordingError("on_signal needs a path to save to, or keep_when='signal'")
        self._cycles = Cycles(schedule)
        self._outputs = Outputs(path, ring, self._cycles)
        self._max_steps, self._worker_rings = max_steps, worker_rings
        self._saves_on_signal = on_signal is not None and path is not None
        self._on_signal = signal.SIGUSR1 if on_signal is None and self._kept_windows.on_signal else on_signal
        self._signal = None if self._on_signal is None else SaveOnSignal(self._on_signal, self._on_signal_came)
        self._start_once = threading.Lock()  # locked by the first start, and never released after it
        self._capture: Capture | None = None
        self._timeline: Timeline | None = None
        self._written: tuple[Timeline, int] | None = None
        self._optimizer_steps = OptimizerSteps(self._on_optimizer_step, self._note_optimizer)
        self._optimizers: list[dict[str, object]] = []
        self._options = options
        self._marked_steps = self._followed_steps = 0
        self._block: object = None
        self._entered = self._unsaved = self._cycle_ended = self._was_stopped = False
        self.internal = RecordingInternals(self)

    def __enter__(self) -> Recording:
        self._entered = True
        self.start()
        return self

    @block_exit
    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        except ModtraceError as failure:
            if error is None:  # otherwise the user needs to see their own error
                raise
            _log.error("the recording could not be saved: %s", failure)

    def __repr__(self) -> str:
        state = "not started" if self._capture is None else "running" if self.running else "stopped"
        return f"<Recording: {state}>"

    @property
    def running(self) -> bool:
        """Whether the recording was started and not stopped yet."""
        return is_running(self)

    @property
    def path(self) -> str | None:
        """The file to save to, with `%r` and the like filled in; with a schedule, the current or next cycle's file."""
        return self._outputs.path

    @property
    def saved_paths(self) -> list[str]:
        """The files saved to `path` so far: when the recording stopped, a signal came or a cycle ended."""
        return list(self._outputs.saved)

    @property
    def steps(self) -> int:
        """Number of training steps since the start, as `step` marked them, otherwise by the optimizers.

        If no optimizer of torch steps, steps end with backward passes; only the timeline knows these.
        """
        return self._marked_steps or self._optimizer_steps.ended

    @property
    def engine(self) -> EngineKind:
        """The name of the engine: "native" or "python".

        Raises:
            RecordingError: the recording was not started.
        """
        return self._require_capture().engine.kind

    def start(self) -> Recording:
        """Start recording each call of a module.

        Returns:
            The recording: `recording = modtrace.record("step.pftrace").start()`.

        Raises:
            RecordingError: another recording runs, this one was started before, its signal can have no handler, or
                another rank writes to the same path.
            RingError: the ring's file cannot be made, or its space cannot be reserved.
            EngineError: the recording needs the native engine, and it is not built.
        """
        if not self._start_once.acquire(blocking=False):
            raise RecordingError("this recording was started before; make a new one with modtrace.record()")
        try:
            start_alone(self)
        except BaseException:
            stop_alone(self)
            self._capture = None
            self._start_once.release()
            raise
        self._kept_windows.watch(None if self._capture is None else self._capture.ring, self.internal.warn)
        return self

    def _switch_on(self) -> None:
        if self._signal is not None:
            self._signal.start()
        atexit.register(self._stop_and_log, "at exit")
        self._optimizer_steps.start()
        self._follow_schedule()
        if self._worker_rings is not None:
            self._worker_rings.start()

    def _follow_schedule(self) -> None:
        """Make and start a capture if the schedule records the new step."""
        if self._cycles.action is ProfilerAction.NONE:
            return
        if self._capture is None or self._cycle_ended:
            self._timeline = self._written = None
            first_step = None if self._cycles.is_scheduled else self.internal.first_step
            make = partial(Capture, options=self._options, first_step=first_step)
            self._capture = self._outputs.make_capture(make, self.internal.warn)
            for optimizer in self._optimizers:
                self._capture.note_optimizer(optimizer)
            self._cycle_ended = False
        capture = self._require_capture()
        if self._cycles.action is not ProfilerAction.WARMUP and not capture.is_started:
            self._unsaved = True
            capture.start()

    def _switch_off(self) -> None:
        """Undo what `_switch_on` did; can be called again after an interrupt."""
        if self._worker_rings is not None:
            self._worker_rings.stop()
        if self._capture is not None:
            self._capture.stop()
        self._optimizer_steps.stop()
        atexit.unregister(self._stop_and_log)
        if self._signal is not None:
            self._signal.stop()
        if self._capture is not None:
            self._capture.close()
        self._block = None

    def stop(self) -> None:
        """Stop recording, restore `nn.Module.__call__`, and save if a path was given; does nothing after a stop.

        Thread-safe; calls that are open at that time have no end in the timeline. A Ctrl-C waits for the save, unless
        it is pressed again a second later. If a signal's handler raises during this method, the recording has
        nevertheless stopped, but may not be saved.

        Raises:
            WriteError: the file cannot be written; the timeline stays readable, and `save` can try another path.
        """
        self._was_stopped = True
        self._stop()

    def _stop(self) -> None:
        hint = f"the recording {self._outputs.destination} is being saved; press Ctrl-C again to abort that"
        hold_ctrl_c(self._stop_and_save, lambda: self.internal.warn(hint))

    def _stop_and_save(self) -> None:
        try:
            was_running = stop_alone(self)
        except BaseException:
            stop_alone(self)
            raise
        if not was_running:
            return
        internal = self.internal
        if self._capture is not None and (model := self._capture.unmatched_model()) is not None:
            internal.warn(f"model: no {model}, nor a part of one, was called; names start at the outermost modules")
        internal.save_unsaved()
        if (self._timeline or self._written) is not None and (text := kept_sentence(internal.saved_timeline()[0])):
            internal.warn(text)
        if (path := self.saved_paths[-1] if self.saved_paths else internal.ring_path) is not None:
            internal.on_saved(path)

    def step(self) -> None:
        """Mark the end of a training step; events since the last step have its number, from `first_step`.

        Optimizers also end steps; once `step` is called, only its calls end steps. After `max_steps` steps the
        recording stops and saves; an error while saving is logged.
        """
        self._write_mark(Kind.STEP, None, self.internal.first_step + self._marked_steps)
        self._marked_steps += 1
        # The optimizer has usually stepped just before the first call of `step`, in the same step.
        if self._marked_steps > self._followed_steps:
            self._on_steps_ended(self._marked_steps)

    def _on_optimizer_step(self, step: int, _complete: bool) -> None:
        if self._marked_steps or not self.running:
            return
        self._write_mark(Kind.OPTIMIZER_STEP, None, self.internal.first_step + step)
        if self._optimizer_steps.ended > self._followed_steps:
            self._on_steps_ended(self._optimizer_steps.ended)

    def _note_optimizer(self, optimizer: dict[str, object]) -> None:
        # A program may make any number of optimizers, equal or not.
        if self.running and optimizer not in self._optimizers and len(self._optimizers) < _MAX_OPTIMIZERS:
            self._optimizers.append(optimizer)
            if self._capture is not None:
                self._capture.note_optimizer(optimizer)

    def _on_steps_ended(self, count: int) -> None:
        self._followed_steps = count
        if self._max_steps is not None and count >= self._max_steps:
            self._stop_and_log("after max_steps")
        elif self.running:
            try:
                if self._cycles.next(count):
                    change_alone(self, self._end_cycle)
                    self.internal.save_unsaved()
                    self._unsaved = False
                    self._cycles.number += 1
                change_alone(self, self._follow_schedule)
            except Exception as error:
                if raised_by_handler(error):
                    raise
                _log.error("the recording cannot follow its schedule, and stops: %s", error)
                self._stop_and_log("when it stopped")

    def _end_cycle(self) -> None:
        capture = self._require_capture()
        capture.stop()
        capture.close()
        self._cycle_ended = True

    def mark(self, text: str) -> None:
        """Mark the current time; traces show the mark with this text.

        Raises:
            TypeError: `text` is not a str.
        """
        if not isinstance(text, str):
            raise TypeError(f"the text of a mark is a str, not {type(text).__name__}")
        self._write_mark(Kind.MARK, text, 0)

    def keep(self, why: str) -> None:
        """Keep the current steps as a small trace, `run.kept/step57-keep-WHY.pftrace` next to the ring or the path.

        With `keep_when` the watcher saves the trace, once two further steps have ended. Without it, a thread of this
        process saves the last steps at once, one window at a time and up to 20 in all.

        Does nothing after the recording has ended by itself, for example after `max_steps`.

        Raises:
            TypeError: `why` is not a str.
            RecordingError: the program has stopped the recording.
        """
        if not isinstance(why, str):
            raise TypeError(f"the reason to keep is a str, not {type(why).__name__}")
        if self._was_stopped:
            raise RecordingError(
                f"keep({why!r}): the recording has stopped; call keep() before stop(), or save its last steps by "
                "recording.timeline().steps(-3).save(path)"
            )
        self._write_mark(Kind.MARK, f"{KEEP_PREFIX}{why}", 0)
        if self.running and self._capture is not None:
            self._kept_windows.keep_now(why, self._outputs.ring_path or self.path, self.snapshot, self.internal.warn)

    def step_metrics(self) -> dict[int, dict[str, float]]:
        """Return metrics for TensorBoard, W&B or MLflow, by step number, of the new steps since the last call.

        The watcher of `keep_when` reads the ring in another process, so it knows a step a moment after its end.
        `keep_when=()` starts a watcher that saves nothing by itself.

        Returns:
            Milliseconds of each step and its parts: `{57: {"modtrace/step_ms": 104.2, "modtrace/gc_ms": …}}`.

        Raises:
            RecordingError: the recording has no `keep_when`.

        Example:
            >>> for step, metrics in recording.step_metrics().items():
            ...     wandb.log(metrics, step=step)
        """
        return self._kept_windows.take_step_metrics(self._outputs.ring_path)

    def range(self, name: str) -> NamedRange:
        """Return a context manager and decorator for a range of this name: `with recording.range("augment"):`.

        The range is not recorded while this recording does not run, or if it has `ranges=False`. See `modtrace.range`.

        Raises:
            TypeError: the name is not a str.
        """
        return NamedRange(name, lambda: self.running)

    def _write_mark(self, kind: Kind, text: str | None, value: int) -> None:
        if not self.running:
            self._require_capture()
        elif self._capture is not None and self._capture.is_started:
            self._capture.write_mark(kind, text, value)

    def snapshot(self) -> Timeline:
        """Return the timeline of the last `capacity` events, while running or after.

        Raises:
            RecordingError: nothing was recorded yet.
        """
        timeline = RingPieces(*self._require_capture().reader(self.running)).join()
        return Timeline.of(timeline if self._worker_rings is None else self._worker_rings.add_to(timeline))

    def timeline(self) -> Timeline:
        """Return the timeline of a stopped recording.

        Raises:
            RecordingError: the recording was not started, or is running; `snapshot` reads a running one.
        """
        self._require_capture()
        if self.running:
            raise RecordingError("the recording runs; call stop() first, or snapshot() for the events so far")
        if self._timeline is None:
            self._timeline = self.snapshot()
        return self._timeline

    def where(self) -> list[ThreadStack]:
        """Return the open modules of each thread, outermost first; its open ranges if it is in no module.

        Raises:
            RecordingError: the recording was not started, or its schedule has recorded no step yet.
        """
        return RingAnalysis(self._require_capture().ring.read()).open_stacks

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline, or a snapshot of a running recording, to `path`; the suffix picks the format.

        Raises:
            WriteError: the file cannot be written; an older file at `path` is intact.
        """
        is_report = os.fspath(path).lower().endswith(REPORT)
        if is_report or self.running or self._timeline is not None or self._worker_rings is not None:
            (self.snapshot() if self.running else self.timeline()).save(path)
            return
        pieces = RingPieces(*self._require_capture().reader(running=False))
        write(pieces, path)
        if pieces.joined is None:
            self._written = Timeline.of(pieces.rest()), pieces.spans
        else:
            self._timeline = Timeline.of(pieces.joined)

    def _require_capture(self) -> Capture:
        if self._capture is None:
            not_started = "the recording was not started; use it in a with block, or call start()"
            raise RecordingError("the schedule has recorded no step yet" if self._start_once.locked() else not_started)
        return self._capture

    def _save_before_end(self) -> None:
        _save_or_log(self.internal.save_unsaved, "on the signal")
        if self.saved_paths:
            with contextlib.suppress(OSError):  # the disk is full
                self._require_capture().ring.names.note({"kind": "saved"})
            self.internal.warn(f"SIGTERM: the recording so far is in {self.saved_paths[-1]}")

    def _on_signal_came(self) -> None:
        if self._kept_windows.on_signal and self.running:
            self.keep("signal")
        if self._saves_on_signal:
            _save_or_log(self.internal.save_unsaved, "on the signal")

    def _stop_and_log(self, when: str) -> None:
        _save_or_log(self._stop, when)

    def _after_fork(self) -> None:
        """End in a forked child: the ring, its file and the path to save to belong to the parent."""
        atexit.unregister(self._stop_and_log)
        self._optimizer_steps.regions.stop()
        if self._capture is not None:
            self._capture.after_fork()
        if self._signal is not None:
            self._signal.after_fork()


def _save_or_log(save: Callable[[], None], when: str) -> None:
    """Call `save`, and log its error: no caller could handle it."""
    try:
        save()
    except ModtraceError as error:
        _log.error("the recording could not be saved %s: %s", when, error)


class RecordingInternals:
    """The internal side of a recording, for the command line, `MODTRACE=`, children and trainers.

    Attributes:
        first_step: the number of the first step.
        on_saved: called with the path of the trace or the ring, once the recording has stopped.
        warn: called with a sentence for the user.
        is_replaceable: whether an explicit `record` replaces this recording, which then saves no empty file.
        replaced_by: the recording that replaced this one.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.first_step = 0
        self.on_saved: Callable[[str], None] = log_saved
        self.warn: Callable[[str], None] = _log.warning
        self.is_replaceable = False
        self.replaced_by: Recording | None = None

    @property
    def ring_path(self) -> str | None:
        """The path of the ring's file; None for a ring in memory."""
        return self._recording._outputs.ring_path

    @property
    def lines_path(self) -> Path | None:
        """The file in which the watcher of `keep_when` writes a JSON line per step; None without a watcher."""
        return self._recording._kept_windows.lines_path(self.ring_path)

    @property
    def is_empty(self) -> bool:
        """Whether the recording holds no call of a module, no collective and no step."""
        recording = self._recording
        if recording.steps or recording._capture is None:
            return not recording.steps
        timeline = recording.snapshot() if recording.running else recording.timeline()
        return not (len(timeline.columns) or len(timeline.collectives.start))

    def save_on_term(self) -> None:
        """Also save if SIGTERM ends the process, before it ends as usual; call this before `start`."""
        recording = self._recording
        recording._signal = SaveOnSignal(recording._on_signal, recording._on_signal_came, recording._save_before_end)

    def save_unsaved(self) -> None:
        """Save the recording if a path was given and its current content is not saved yet."""
        recording = self._recording
        if recording._unsaved and not (self.is_replaceable and self.is_empty):
            recording._outputs.save(recording.save)
            recording._unsaved = recording.running

    def saved_timeline(self) -> tuple[Timeline, int]:
        """Return the timeline of a stopped recording, and the number of its spans.

        After a large ring was saved, the timeline is without its spans.
        """
        recording = self._recording
        if recording._timeline is None and recording._written is not None:
            return recording._written
        return recording.timeline(), len(recording.timeline().columns)
