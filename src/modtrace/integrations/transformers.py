"""`ModtraceCallback` for the Trainer of transformers.

Example:
    >>> from modtrace.integrations.transformers import ModtraceCallback
    >>> Trainer(model, args, callbacks=[ModtraceCallback("trace-%r.pftrace", steps=(100, 103))], …).train()
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from .training_recorder import RecordingCallback


class ModtraceCallback(RecordingCallback, TrainerCallback):  # type: ignore[misc]
    """Records a training: its steps are the Trainer's, and evaluation and saving are marks.

    Where a recording runs already, as under `modtrace run`, it only marks these in that. The outermost span of a batch
    is the model's call, which as a rule computes the loss itself. `Trainer.compute_loss` is not a method of a module: a
    span of it would only put another name before all others.

    Args:
        path, steps, options: as of `RecordingCallback`.
    """

    _evaluates = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._begin_step(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # The Trainer has counted it by now.
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

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._end()
