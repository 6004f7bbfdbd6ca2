"""`ModtraceCallback` for the Trainer of transformers.

Example:
    >>> from modtrace.integrations.transformers import ModtraceCallback
    >>> Trainer(model, args, callbacks=[ModtraceCallback("trace-%r.pftrace", steps=(100, 103))], …).train()
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from .training_recorder import TrainingRecorder

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..record_options import RecordOptions
    from ..recording import Recording

__all__ = ["ModtraceCallback"]


class ModtraceCallback(TrainerCallback):  # type: ignore[misc]
    """Records a training: its steps are the Trainer's, and evaluation and saving are marks.

    Where a recording runs already, as under `modtrace run`, it only marks these in that.

    Args:
        path: where to save when the training or the range ends, as of `modtrace.record`: `%r` is the rank.
        steps: the first global step to record, from 0, and the one before which it ends; None records all.
        options: keyword arguments of `modtrace.record`.

    Attributes:
        recording: the one that was started, None before.

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
        self._recorder = TrainingRecorder(path, steps, options)
        self._evaluates = False

    @property
    def recording(self) -> Recording | None:
        """The one that was started, None before."""
        return self._recorder.recording

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._recorder.begin_step(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # The Trainer has counted it by now.
        self._recorder.end_step(state.global_step - 1)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._evaluates:
            self._evaluates = True
            self._recorder.mark("evaluation: first batch done")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._evaluates = False
        self._recorder.mark("evaluation done")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._recorder.mark("checkpoint saved")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._recorder.end()
