"""The workers of a DataLoader: each records itself in a small ring, and the recording joins these rings.

torch's function that a worker runs is replaced once per process. A forked worker inherits the folder of the rings; a
spawned worker gets it with the function.
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
"""Maximum number of events of each worker."""
_LOOP_MODULE, _FETCH_MODULE = "torch.utils.data._utils.worker", "torch.utils.data._utils.fetch"

_log = logging.getLogger("modtrace")


class WorkerRings:
    """The rings of the workers that start between `start` and `stop`, in a folder that is deleted with this object.

    After this process and its forked children have ended in any way, another process removes the folder.
    """

    def __init__(self, record: Callable[..., Any], engine: EngineName) -> None:
        self._folder = tempfile.mkdtemp(prefix="modtrace-workers-")
        self._worker_arguments = record, engine, self._folder
        weakref.finalize(self, _remove, self._folder, _remove_after_this_process(self._folder), os.getpid())

    def start(self) -> None:
        """Make workers that start from now on record themselves."""
        global _active_arguments
        call_after_import(_LOOP_MODULE, _install)
        _active_arguments = self._worker_arguments

    def stop(self) -> None:
        """Make workers that start from now on run without a recording; running ones go on."""
        global _active_arguments
        _active_arguments = None

    def add_to(self, timeline: Timeline) -> Timeline:
        """Return a timeline with the workers' events so far, each worker as a process with the timeline's steps.

        The result's `stats` count only losses of `timeline`.
        """
        parts = [timeline]
        for name in sorted(os.listdir(self._folder)):
            with contextlib.suppress(ModtraceError):  # the worker is just making its ring
                part = build_timeline(read_ring(os.path.join(self._folder, name)))
                part = replace_processes(part, partial(Process._replace, program=name.split(",")[0]))
                step = steps_at(timeline, part.slices.start, starts=True)
                parts.append(replace(part, slices=replace(part.slices, step=step.astype(part.slices.step.dtype))))
        return timeline if len(parts) == 1 else replace(join(parts), stats=timeline.stats)


_active_arguments: tuple[Callable[..., Any], EngineName, str] | None = None
"""The arguments for workers that start now: `record`, the engine, and the folder of their rings."""


class _WorkerLoop:
    """Replaces torch's function that a worker runs, and records the worker."""

    def __init__(self, loop: Callable[..., None], arguments: Any = None) -> None:
        self.loop, self._arguments = loop, arguments

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        recording = None
        if (arguments := self._arguments or _active_arguments) is not None:
            try:
                worker = inspect.signature(self.loop).bind(*args, **kwargs).arguments["worker_id"]
                recording = _record_worker(worker, *arguments)
            except Exception as error:
                _log.error("a worker is not recorded: %s", error)
        try:
            self.loop(*args, **kwargs)
        finally:
            if recording is not None:
                recording.stop()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any]]:
        return _make_in_new_process, (_active_arguments,)


def _record_worker(worker: int, record: Callable[..., Any], engine: EngineName, folder: str) -> Any:
    """Start a recording of this worker to a ring in the folder, and record its fetches as ranges."""
    ring = os.path.join(folder, f"worker {worker},{os.getpid()}")
    recording = record(ring=ring, engine=engine, capacity=_CAPACITY)
    recording.internal.is_replaceable, recording.internal.on_saved = True, lambda _: None
    recording.start()
    for value in vars(importlib.import_module(_FETCH_MODULE)).values():
        if isinstance(value, type) and "fetch" in vars(value):
            wrap_function(vars(value)["fetch"], "enumerate(DataLoader)#{}.fetch", "data loading")
    return recording


def _make_in_new_process(arguments: Any) -> _WorkerLoop:
    loop = importlib.import_module(_LOOP_MODULE)._worker_loop
    return _WorkerLoop(getattr(loop, "loop", loop), arguments)


def _install() -> None:
    module: Any = importlib.import_module(_LOOP_MODULE)
    if not isinstance(module._worker_loop, _WorkerLoop):
        module._worker_loop = _WorkerLoop(module._worker_loop)


def _remove_after_this_process(folder: str) -> int:
    """Make a shell remove a folder once this process has closed the returned descriptor, or has ended."""
    read_fd, write_fd = os.pipe()
    remove = f"sh -c 'read _; rm -rf -- \"$0\"' {shlex.quote(folder)}"
    with contextlib.suppress(OSError, AttributeError):  # another system's C library has no such function
        # In a session of its own, the shell does not get signals for the program's group.
        run_without_child(
            f"{{ $(command -v setsid) {remove} <&3 & }} 3</proc/{os.getpid()}/fd/{read_fd} >/dev/null 2>&1"
        )
    os.close(read_fd)
    return write_fd


def _remove(folder: str, write_fd: int, pid: int) -> None:
    if pid == os.getpid():  # not in a forked child
        shutil.rmtree(folder, ignore_errors=True)
        os.close(write_fd)
