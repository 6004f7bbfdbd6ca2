"""The workers of a DataLoader: each records itself in a small ring, and the recording that ran then joins these.

torch's function that a worker runs is replaced once per process. A forked worker inherits the folder of the rings; one
that is started anew gets it with the function.
"""

import contextlib
import importlib
import inspect
import logging
import os
import shlex
import shutil
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from .._after_import import call_after_import
from .._errors import ModtraceError
from .._processes import run_without_child
from ..record_options import EngineName
from ..ring import read_ring
from ..timeline import Process, Timeline, build_timeline
from ..timeline.join import join, replace_processes
from ..timeline.select import steps_at
from ..track.torch_ranges import wrap_function

_CAPACITY = 1 << 13
"""Events that are kept of each worker."""
_LOOP_MODULE, _FETCH_MODULE = "torch.utils.data._utils.worker", "torch.utils.data._utils.fetch"

_log = logging.getLogger("modtrace")


class WorkerRings:
    """The rings of the workers that start between `start` and `stop`, in a folder that is gone when this is.

    Another process removes the folder when this process has ended however it ended, and so have its forked children.
    """

    def __init__(self, record: Callable[..., Any], engine: EngineName) -> None:
        self._folder = tempfile.mkdtemp(prefix="modtrace-workers-")
        self._started = record, engine, self._folder
        weakref.finalize(self, _remove, self._folder, _remove_after_this_process(self._folder), os.getpid())

    def start(self) -> None:
        """Begin: workers that start from now on record themselves."""
        global _active
        call_after_import(_LOOP_MODULE, _install)
        _active = self._started

    def stop(self) -> None:
        """End; workers that run go on."""
        global _active
        _active = None

    def joined(self, timeline: Timeline) -> Timeline:
        """Return a timeline with what the workers have recorded so far, each as a process; their spans have its steps.

        What the result says of losses is of the timeline alone.
        """
        parts = [timeline]
        for name in sorted(os.listdir(self._folder)):
            with contextlib.suppress(ModtraceError):  # it is being made
                part = build_timeline(read_ring(os.path.join(self._folder, name)))
                part = replace_processes(part, partial(Process._replace, program=name.split(",")[0]))
                step = steps_at(timeline, part.slices.start, starts=True)
                parts.append(replace(part, slices=replace(part.slices, step=step.astype(part.slices.step.dtype))))
        return timeline if len(parts) == 1 else replace(join(parts), stats=timeline.stats)


_active: tuple[Callable[..., Any], EngineName, str] | None = None
"""For workers that start now: `record`, which engine, and the folder of their rings."""


class _WorkerLoop:
    """Takes the place of torch's function that a worker runs, and records it."""

    def __init__(self, loop: Callable[..., None], active: Any = None) -> None:
        self.loop, self._active = loop, active

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        recording = None
        if (active := self._active or _active) is not None:
            try:
                worker = inspect.signature(self.loop).bind(*args, **kwargs).arguments["worker_id"]
                recording = _record_worker(worker, *active)
            except Exception as error:
                _log.error("nothing is recorded of a worker: %s", error)
        try:
            self.loop(*args, **kwargs)
        finally:
            if recording is not None:
                recording.stop()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any]]:
        return _in_new_process, (_active,)


def _record_worker(worker: int, record: Callable[..., Any], engine: EngineName, folder: str) -> Any:
    """Start a recording of this worker, into a ring in the folder, and make its fetches ranges."""
    ring = os.path.join(folder, f"worker {worker},{os.getpid()}")
    recording = record(ring=ring, engine=engine, capacity=_CAPACITY)
    recording.internal.is_replaceable, recording.internal.on_saved = True, lambda _: None
    recording.start()
    for kind in vars(importlib.import_module(_FETCH_MODULE)).values():
        if isinstance(kind, type) and "fetch" in vars(kind):
            wrap_function(vars(kind)["fetch"], "enumerate(DataLoader)#{}.fetch", "data loading")
    return recording


def _in_new_process(active: Any) -> _WorkerLoop:
    loop = importlib.import_module(_LOOP_MODULE)._worker_loop
    return _WorkerLoop(getattr(loop, "loop", loop), active)


def _install() -> None:
    module: Any = importlib.import_module(_LOOP_MODULE)
    if not isinstance(module._worker_loop, _WorkerLoop):
        module._worker_loop = _WorkerLoop(module._worker_loop)


def _remove_after_this_process(folder: str) -> int:
    """Have a shell remove a folder once this process has ended; return the descriptor for which it waits to close."""
    read, write = os.pipe()
    remove = f"sh -c 'read _; rm -rf -- \"$0\"' {shlex.quote(folder)}"
    with contextlib.suppress(OSError, AttributeError):  # no such function in another system's library
        # A session of its own: signals for the program's group are not for it.
        run_without_child(f"{{ $(command -v setsid) {remove} <&3 & }} 3</proc/{os.getpid()}/fd/{read} >/dev/null 2>&1")
    os.close(read)
    return write


def _remove(folder: str, awaited: int, pid: int) -> None:
    if pid == os.getpid():  # and no forked child
        shutil.rmtree(folder, ignore_errors=True)
        os.close(awaited)
