"""`ModtraceCallback` for the Trainer of transformers.

Example:
    >>> from modtrace.integrations.transformers import ModtraceCallback
    >>> Trainer(model, args, callbacks=[ModtraceCallback("trace-%r.pftrace", steps=(100, 103))], …).train()
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from copy import copy
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import INTEGRATION_TO_CALLBACK
from transformers.trainer_callback import CallbackHandler

from .training_recorder import RecordingCallback


class ModtraceCallback(RecordingCallback, TrainerCallback):  # type: ignore[misc]
    """Records a training: its steps are the Trainer's, and evaluation and saving are marks.

    With `keep_when` the Trainer's loggers (TensorBoard, W&B, MLflow …) get the milliseconds of each step and its parts,
    see `Recording.step_metrics`. They get them when the Trainer logs, at the Trainer's number of steps at the step's
    end. If a recording already runs, for example with `modtrace run`, the callback uses it. The outermost span
    of a batch is the model's call, which usually computes the loss. `Trainer.compute_loss` is not a module's method,
    and a span for it would only put its name before all others.

    Args:
        path, steps, options: see `RecordingCallback`.
    """

    _evaluates = False
    _loggers: Sequence[TrainerCallback] = ()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # Only the handler that calls this callback knows the other callbacks.
        frame = inspect.currentframe()
        while frame is not None and not isinstance(frame.f_locals.get("self"), CallbackHandler):
            frame = frame.f_back
        if frame is not None:
            classes, callbacks = tuple(INTEGRATION_TO_CALLBACK.values()), frame.f_locals["self"].callbacks
            self._loggers = [callback for callback in callbacks if isinstance(callback, classes)]

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._start_step(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # The Trainer has already counted this step.
        self._end_step(state.global_step - 1)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._evaluates:
            self._evaluates = True
            self._mark("evaluation: first batch done")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._evaluates = False
        self._mark("evaluation done")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._mark("checkpoint saved")

    def on_log(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        for step, metrics in self._step_metrics().items():
            state_at_step = copy(state)
            state_at_step.global_step = step + 1  # the number at which the Trainer logs the loss of this step
            for logger in self._loggers:
                logger.on_log(args, state_at_step, control, **{**keywords, "logs": metrics})

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._end()
