"""The recording around a user's script: from its import of torch to its end, or to its last wanted step."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

import click

from .._errors import ModtraceError
from .._on_import import after_import

if TYPE_CHECKING:
    from ..recording import Recording

__all__ = ["Recorded"]


class Recorded:
    """Starts once torch is there; marks a step after each optimizer step.

    It waits for torch because a script may set what torch reads when it is imported, `OMP_NUM_THREADS` and the like.

    Args:
        path: where to save.
        engine: as of `modtrace.record`.
        capacity: as of `modtrace.record`.
        ring: as of `modtrace.record`.
        steps: after how many optimizer steps to stop; None records to the end.
    """

    def __init__(
        self,
        path: str,
        engine: Literal["auto", "native", "python"],
        capacity: int,
        ring: str | None,
        steps: int | None,
    ) -> None:
        # The script may change directory.
        self._path = os.path.abspath(path)
        self._shown = path
        self._engine = engine
        self._capacity = capacity
        self._ring = ring and os.path.abspath(ring)
        self._steps = steps
        self._done = 0
        self._process = os.getpid()
        self._recording: Recording | None = None
        self._handle: Any = None
        self._finished = False
        self.failure: ModtraceError | None = None
        after_import("torch", self._start)

    def _start(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        from ..recording import record

        try:
            self._recording = record(engine=self._engine, capacity=self._capacity, ring=self._ring)
            self._recording.start()
        except ModtraceError as error:
            self.failure = error
            raise
        self._handle = register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, *_: object) -> None:
        assert self._recording is not None
        self._recording.step()
        self._done += 1
        if self._done == self._steps:
            self.finish()

    def finish(self) -> None:
        """Stop and save, the first time; says where on stderr.

        Raises:
            WriteError: the trace cannot be saved.
            ModtraceError: the recording could not be started, and the script did not let that stop it.
        """
        if self.failure is not None:
            raise self.failure
        if self._finished or os.getpid() != self._process:
            return  # a forked child that ran to the script's end: the recording is its parent's
        self._finished = True
        if self._recording is None:
            click.echo("modtrace: torch was never imported; nothing is recorded", err=True)
            return
        self._handle.remove()
        self._recording.stop()
        self._recording.save(self._path)
        slices = len(self._recording.timeline().columns)
        click.echo(f"modtrace: {slices} slices of {self._done} steps are in {self._shown}", err=True)
