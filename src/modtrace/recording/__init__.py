"""Recordings: their start and stop, the engines that write their events, and the files that they save.

`record` makes a recording; invalid options raise there, before the training starts.
"""

import os
import re
import signal
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from torch import nn

from .._errors import RecordingError, check_can_record
from .._ranks import role_in
from ..record_options import (
    DEFAULT_CAPACITY,
    EngineKind,
    EngineName,
    check_capacity,
    check_count,
    check_engine,
    check_role,
)
from ..track.event_sink import DeviceChoice, EngineOptions
from ..track.ranges import NamedRange
from ..track.ranges import named_range as range  # noqa: A004  # only as modtrace.range
from ..track.sampling import Sampler
from .capture import CaptureOptions
from .current import current
from .kept_windows import KeptWindows
from .loader_workers import WorkerRings
from .outputs import Schedule
from .recording import Recording

__all__ = ["EngineKind", "NamedRange", "Recording", "current", "range", "record"]

_DEFAULT_DEPTH = 2
_Value = TypeVar("_Value")


def record(
    path: str | os.PathLike[str] | None = None,
    *,
    engine: EngineName = "auto",
    capacity: int = DEFAULT_CAPACITY,
    ring: str | os.PathLike[str] | None = None,
    model: nn.Module | str | None = None,
    max_steps: int | None = None,
    schedule: Schedule | None = None,
    shapes: bool = False,
    memory_interval: float | None = None,
    memory: bool = False,
    on_signal: int | None = None,
    stacks_on_signal: int | None = None,
    host_name: bool = False,
    strip_wrappers: bool = True,
    device_times: bool | int | str = False,
    ranges: bool = True,
    flops: bool = False,
    workers: bool = False,
    keep: int = 3,
    keep_when: str | Sequence[str] | None = None,
    role: str | None = None,
) -> Recording:
    """Return a new recording of the times at which modules run: forward, backward and recompute. Start it to record.

    One recording runs at a time in a process. An error inside it is logged once, and stops the recording; the
    training goes on. `modtrace run` and `MODTRACE=` have the same options under these names.

    A step ends when an optimizer steps; if that optimizer steps again, the next step starts. Several optimizers that
    take turns share a step, and accumulated gradients are one. Once `step` is called, only its calls end steps.

    Args:
        path: the file to save at the end; the suffix picks the format: `.pftrace`, `.json` (both also with `.gz`),
            `.html`, `.zip`, `.speedscope.json`, `.folded`. None saves nothing until `save`. In `path` and `ring`, `%r`
            is the rank, `%p` the process id, `%h` a hash of the host's name, and `%%` a percent sign.
        engine: "native", "python", or "auto": native if it is built (`modtrace build`), otherwise python.
        capacity: maximum number of events, 32 bytes each; the oldest are overwritten.
        ring: the file of the ring: it survives SIGKILL, and another process can read it. If the ring of an ended
            process has this name (`run.modtrace`), it becomes `run.1.modtrace`, or gets the next number. If a running
            process uses the name, the new ring gets the number, and a warning reports it.
        model: root of the names: this module, or every module whose class has this name. None: each outermost called
            module. If a module that contains it was called before, on any thread, or calls it in a method of its own,
            that module is the root.
        max_steps: stop after this number of steps, and save if a path is given.
        schedule: the steps to record, as `torch.profiler.schedule` returns it. Each cycle has its own file,
            `step.cycle0.pftrace`, which is written when the cycle ends; `timeline` returns the last cycle.
        shapes: also record shapes and dtypes of each call's input tensors.
        memory_interval: also sample the memory of the process, and of the current GPU by torch's allocator, when
            modules are called; the minimum interval in seconds.
        memory: also record the bytes that tensors hold whenever a call starts or ends, on a CUDA GPU as soon as the
            process allocates there, otherwise on the CPU. Gives the bytes that each module keeps (`retained_bytes`),
            the maximum inside it (`peak_bytes`), and the holders at the peak. Needs the native engine.
        on_signal: save to `path` whenever this signal comes (`signal.SIGUSR1`), and continue.
        stacks_on_signal: let faulthandler write the Python stacks of all threads to `RING.stacks` whenever this signal
            comes (`signal.SIGUSR2`); `modtrace where --stacks` sends it. The handler stays until the process ends.
        host_name: write the host's name into the recording instead of a hash of it.
        strip_wrappers: leave modules that wrap others out of names, so that names are equal in different runs:
            `GPT.blocks.0`, not `DistributedDataParallel.module.blocks.0`. Wrappers that only pass calls on (of
            torch.compile, PEFT, Fabric, activation checkpoints) are shown as the module that they wrap. Wrappers with
            work of their own (DistributedDataParallel, FSDP) have spans.
        device_times: also record when the device (a GPU) runs chosen calls, by events on its streams, without a
            profiler and without waiting for it. A number chooses levels of calls: 1 is only the outermost calls, 2
            also the calls inside them. True is 2 levels. A text is a shell pattern of fully qualified names:
            `"GPT.blocks.*"` chooses all levels of these calls, `"GPT.blocks.*,3"` three levels. Needs the native
            engine; without a device, one warning reports it, and the recording continues.
        ranges: also record named ranges: `torch.profiler.record_function`, in torch and in your code,
            without a profiler, and clipping, scalers, schedulers, others' optimizers, compilations and saving; also
            garbage collections of 0.1 ms or more.
        flops: also count the FLOPs of matrix products, convolutions, attention and operators with a formula by
            torch's `register_flop_formula`. They are counted once for each set of input shapes: at the first outermost
            call with new shapes, until its backward is over. Needs the native engine.
        workers: also record the fetches, ranges and modules of the worker processes that a `DataLoader` starts during
            the recording. Each worker is a process of the timeline.
        keep: number of rings of ended processes to keep under numbers; older rings are removed.
        keep_when: save small traces around steps that meet a condition of `modtrace watch`, such as
            `"step > 3x; gc > 200ms"`, in `run.kept` next to `ring`, which it needs. Another process, which this one
            starts and does not wait for, reads the ring and saves them. `()` saves only for calls of `Recording.keep`;
            `"signal"` saves when SIGUSR1 comes, or the signal of `on_signal`, which then needs no path.
        role: the role of this process in its job ("trainer", "rollout"). The process is then called `trainer 3`, not
            `rank 3`, and its rank counts in its role. None: the role of torchrun's `--role`, if any.

    Raises:
        RecordingError: an argument is invalid, `%r` has no value, or this is a free-threaded build of CPython.
        WriteError: nothing can be saved at `path`.

    Example:
        >>> with modtrace.record("step.pftrace") as recording:
        ...     train_step()
    """
    check_can_record()
    if stacks_on_signal is not None:
        if stacks_on_signal not in set(signal.Signals):
            raise RecordingError(f"stacks_on_signal is {stacks_on_signal!r}; give a signal, such as signal.SIGUSR2")
        if ring is None:
            raise RecordingError("stacks_on_signal needs a ring: the stacks are written next to its file")
    if keep_when is not None and schedule is not None:
        raise RecordingError("keep_when cannot be used with a schedule; leave out one of them")
    if workers and schedule is not None:
        raise RecordingError("workers cannot be used with a schedule; leave out one of them")
    options = CaptureOptions(
        engine=_checked(check_engine, engine),
        capacity=_checked(check_capacity, capacity),
        host_name=host_name,
        role=role_in(os.environ) if role is None else _checked(check_role, role),
        model=_check_model(model),
        events=EngineOptions(None, strip_wrappers, _parse_device_times(device_times), ranges, memory, flops),
        sampler=Sampler(shapes, memory_interval),
        stacks_on_signal=stacks_on_signal,
        keep=_checked(partial(check_count, "keep"), keep),
        workers=workers,
    )
    for name in options.events.native_only if engine == "python" else ():
        alternative = ", or memory_interval=0" if name == "memory" else ""
        raise RecordingError(f"{name} needs the native engine; give engine='native' or 'auto'{alternative}")
    return Recording(
        path,
        ring=ring,
        options=options,
        max_steps=None if max_steps is None else _checked(partial(check_count, "max_steps"), max_steps),
        schedule=schedule,
        on_signal=on_signal,
        worker_rings=WorkerRings(record, engine) if workers else None,
        kept_windows=KeptWindows(keep_when, ring),
    )


def _checked(check: Callable[[object], _Value], value: object) -> _Value:
    try:
        return check(value)
    except ValueError as error:
        raise RecordingError(str(error)) from None


def _check_model(model: nn.Module | str | None) -> weakref.ref[nn.Module] | str | None:
    if isinstance(model, nn.Module):
        return weakref.ref(model)
    if not isinstance(model, str | None):
        raise RecordingError(f"model is {model!r}; give a module, or the name of a class as text")
    return model


def _parse_device_times(option: bool | int | str) -> DeviceChoice | None:
    if option is False:
        return None
    text = option if isinstance(option, str) else f"*,{_DEFAULT_DEPTH if option is True else option}"
    match = re.fullmatch(r"(?P<pattern>[^,]+)(?:,(?P<levels>[1-9]\d*))?", text)
    if match is None:
        raise RecordingError(
            f"device_times is {option!r}; it must be True, a number of levels of calls, 1 or more, or a pattern of "
            "names, such as 'GPT.blocks.*' or 'GPT.blocks.*,3'"
        )
    return DeviceChoice(match["pattern"], None if match["levels"] is None else int(match["levels"]))
