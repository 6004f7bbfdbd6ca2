"""`ModtraceCallback` for the Trainer of Lightning.

Example:
    >>> from modtrace.integrations.lightning import ModtraceCallback
    >>> Trainer(callbacks=[ModtraceCallback("trace-%r.pftrace", steps=(100, 103))]).fit(model, batches)
"""

from __future__ import annotations

import sys
from typing import Any

from ..track.naming.modules import MethodCall
from .training_recorder import RecordingCallback

if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
else:
    from lightning.pytorch import Callback


class ModtraceCallback(RecordingCallback, Callback):  # type: ignore[misc]
    """Records a training: `training_step` is a span, and a step ends with the batch in which an optimizer stepped.

    Validation and saving are marks. With `keep_when` the trainer's loggers (TensorBoard, W&B, MLflow …) get the
    milliseconds of each step and its parts, see `Recording.step_metrics`, when the trainer logs. If a recording already
    runs, for example with `modtrace run`, the callback uses it.

    Args:
        path, steps, options: see `RecordingCallback`.
    """

    _step = _optimizer_steps = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._step = self._optimizer_steps = trainer.global_step
        pl_module.training_step = MethodCall(pl_module, "training_step").as_function()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._start_step(self._step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # `global_step` does not change while gradients are accumulated.
        if trainer.global_step != self._optimizer_steps:
            self._optimizer_steps = trainer.global_step
            self._end_step(self._step)
            self._step += 1
            if self._step % trainer.log_every_n_steps == 0:
                self._log_metrics(trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._mark("validation begins")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._mark("validation done")

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self._mark("checkpoint saved")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._log_metrics(trainer)
        self._finish(pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._finish(pl_module)

    def _log_metrics(self, trainer: Any) -> None:
        for step, metrics in self._step_metrics().items():
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=step)

    def _finish(self, pl_module: Any) -> None:
        vars(pl_module).pop("training_step", None)
        self._end()
