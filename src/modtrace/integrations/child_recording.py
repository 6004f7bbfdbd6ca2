"""The recording of a child process, which starts when the child first calls a module.

So processes without such a call (resource trackers, the server of `forkserver`, pools for other work) leave no file,
and a fork costs only a wrapper around `nn.Module.__call__`. Workers of a DataLoader are not recorded.
"""

import logging
import os
from collections.abc import Callable
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.utils.data import get_worker_info

from .._errors import ModtraceError
from .._interrupts import Exclusive, in_forked_child
from ..recording import Recording, current, record
from ..track.call_patch import Patch, Wrapper
from ..track.unseen import skip_frame
from .job import Job

_exclusive = Exclusive()


def _make_wrapper(wrapper: Wrapper) -> Callable[..., Any]:
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807  # its name in torch
        __tracebackhide__ = __traceback_hide__ = True
        call_first = wrapper.observer
        if is_dynamo_compiling() or call_first is None:
            return wrapper.wrapped(self, *args, **kwargs)
        is_outermost = vars(nn.Module)["__call__"] is wrapper.function
        call_first()
        # Other code's wrappers around this one have already started, and must not be called twice.
        return (nn.Module.__call__ if is_outermost else wrapper.wrapped)(self, *args, **kwargs)

    return skip_frame(__call__)


_PATCH = Patch(_make_wrapper)


_BEFORE_EXIT = -100
"""Priority of the save among the finalizers of `multiprocessing`, which runs priorities from 0 on before it."""
_log = logging.getLogger("modtrace")
_recording_and_job: tuple[Recording, Job] | None = None
"""The recording of this process, and the job for which its forked children record themselves."""


def record_this_child(job: Job) -> None:
    """Record this process from its first call of a module on, unless a recording runs by then.

    That call is recorded too. Modules that run only inside compiled functions do not start the recording.
    """
    has_started = False

    def start_if_first() -> None:
        nonlocal has_started
        if not has_started:
            has_started = True
            _PATCH.uninstall()
            _start(job)

    _PATCH.install(lambda: _exclusive.run(start_if_first))


def record_forked_children(recording: Recording, job: Job) -> None:
    """Make children that are forked from now on record themselves, unless the user's recording replaces this one."""
    global _recording_and_job
    if _recording_and_job is None:
        # Runs after the end of the parent's recording in the child, which the import of `recording` registered.
        in_forked_child(_after_fork)
    _recording_and_job = recording, job


def _after_fork() -> None:
    assert _recording_and_job is not None
    recording, job = _recording_and_job
    if recording.internal.replaced_by is None:
        record_this_child(job)


def _start(job: Job) -> None:
    if get_worker_info() is not None or current() is not None:
        return
    try:
        recording = record(**job.child_arguments())
        recording.internal.is_replaceable = True
        recording.internal.on_saved = partial(job.note, "saved")
        recording.start()
    except Exception as error:
        _log.error("the child process %d is not recorded: %s", os.getpid(), error)
        return
    job.note("begin", recording.internal.ring_path or "")
    record_forked_children(recording, job)
    # Forked children of `multiprocessing` do not run `atexit`.
    Finalize(None, _save, (recording,), exitpriority=_BEFORE_EXIT)


def _save(recording: Recording) -> None:
    try:
        recording.stop()
    except ModtraceError as error:
        _log.error("the recording of the child process %d could not be saved: %s", os.getpid(), error)
