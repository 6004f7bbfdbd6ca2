"""The base of the callbacks of all trainers: a recording of a training, or of a range of its steps."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .._errors import RecordingError
from ..recording import Recording, current, record

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..record_options import RecordOptions


class RecordingCallback:
    """Records the steps of a training with the training's numbers, or marks them in a recording that already runs.

    Args:
        path: the `path` of `modtrace.record` to save to when the training or the range ends; `%r` is the rank.
        steps: the range of steps to record (first, stop), counted over the training from 0; None records all.
        options: keyword arguments of `modtrace.record`.

    Attributes:
        recording: the recording that this callback started; None before.

    Raises:
        RecordingError: the range is empty.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        steps: tuple[int, int] | None = None,
        **options: Unpack[RecordOptions],
    ) -> None:
        if steps is not None and not 0 <= steps[0] < steps[1]:
            raise RecordingError(f"steps is {steps}; give the first step, from 0, and the first step after the range")
        self._path, self._steps, self._options = path, steps, options
        self.recording: Recording | None = None

    def _start_step(self, step: int) -> None:
        """Start the recording if it does not run yet and should record this step."""
        if self.recording is None and current() is None and (self._steps is None or step in range(*self._steps)):
            self.recording = record(self._path, **self._options)
            self.recording.internal.first_step = step
            self.recording.start()

    def _end_step(self, step: int) -> None:
        """Mark the end of this step, and stop after the last step."""
        running = current()
        if running is not None:
            running.step()
        if self._steps is not None and step + 1 >= self._steps[1]:
            self._end()

    def _mark(self, text: str) -> None:
        running = current()
        if running is not None:
            running.mark(text)

    def _step_metrics(self) -> dict[int, dict[str, float]]:
        """Return the metrics for loggers of the steps since the last call; empty without a watcher of `keep_when`."""
        running = self.recording or current()
        return {} if running is None or running.internal.lines_path is None else running.step_metrics()

    def _end(self) -> None:
        """Stop and save; raises WriteError if the file cannot be written."""
        if self.recording is not None:
            self.recording.stop()
