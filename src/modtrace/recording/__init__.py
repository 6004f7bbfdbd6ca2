"""Recordings: their start and stop, what writes their events, and what a signal saves.

`record` makes one: options that make no sense fail there, before the training begins.
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
from ..record_options import DEFAULT_CAPACITY, EngineName, check_capacity, check_count, check_engine, check_role
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

__all__ = ["NamedRange", "Recording", "current", "range", "record"]

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
    """Return a recording of when each module runs forward, backward and again (recompute); it is not started yet.

    One recording runs at a time in a process. What fails inside it is logged once and the recording stops; the
    training goes on. `modtrace run` and `MODTRACE=` take these options too, by these names.

    A step ends by itself where an optimizer steps: one that steps again begins the next. Several optimizers that take
    turns share a step, and gradients that are accumulated before are one. Once `step` is called, only its calls count.

    Args:
        path: where to save at the end; the suffix picks the format: `.pftrace`, `.json` (both also with `.gz`),
            `.html`, `.zip`, `.speedscope.json`, `.folded`. None saves nothing until `save`. In it and in `ring`, `%r`
            is the rank, `%p` the process id, `%h` a hash of the host's name, and `%%` a percent sign.
        engine: "native", "python", or "auto": native where it is built (`modtrace build`), else python.
        capacity: how many events are kept, 32 bytes each; the oldest are overwritten.
        ring: a file behind the ring: it survives SIGKILL, and another process can read it. If the ring of an ended
            process has this name (`run.modtrace`), that becomes `run.1.modtrace`, or takes the next number. If one that
            runs has it, the new ring takes the number, and a warning says so.
        model: root of the names: this module or, if a text, every module whose class has this name. None: each
            outermost called module, or the module that contains it, if that was called before, on any thread, or calls
            it in a method of its own.
        max_steps: stop, and save where a path is given, after so many steps.
        schedule: which steps to record, as `torch.profiler.schedule` makes it. Each of its cycles goes to a file of its
            own, `step.cycle0.pftrace`, which is written when the cycle ends; the last one is what `timeline` returns.
        shapes: also record shapes and dtypes of the tensors that go into each call.
        memory_interval: also sample the memory of the process, and of the current GPU as torch's allocator counts it.
            It is read when modules are called, at most once in so many seconds.
        memory: also record how many bytes tensors hold, on a GPU of CUDA as soon as the process allocates there, else
            on the CPU, whenever a call begins or ends: what each module keeps (`retained_bytes`), the most inside it
            (`peak_bytes`), and who holds it at the peak. It needs the native engine.
        on_signal: save to `path` whenever this signal comes (`signal.SIGUSR1`), and go on.
        stacks_on_signal: write the Python stacks of all threads to `RING.stacks` whenever this signal comes
            (`signal.SIGUSR2`), by faulthandler; `modtrace where --stacks` sends it. The handler stays until the
            process ends.
        host_name: write the host's name into the recording instead of a hash of it.
        strip_wrappers: name modules as if those that wrap others were not there, so that names compare between runs:
            `GPT.blocks.0`, not `DistributedDataParallel.module.blocks.0`. Wrappers that only pass calls on (of
            torch.compile, PEFT, Fabric, activation checkpoints) are shown as what they wrap. Those that do work of
            their own (DistributedDataParallel, FSDP) have spans around it.
        device_times: also record when the device (a GPU) is in chosen calls, by events on its streams, without a
            profiler and without waiting for it. A number chooses so many levels of calls: 1 is the outermost calls
            only, 2 also those that they make. True is 2 levels. A text chooses the calls whose fully qualified name
            matches this pattern, like a shell's: `"GPT.blocks.*"`, of any level, or `"GPT.blocks.*,3"`, of 3 levels. It
            needs the native engine; where there is no device, one warning says so, and the recording goes on.
        ranges: also record named ranges: what `torch.profiler.record_function` names, in torch and in your code,
            without a profiler, and clipping, scalers, schedulers, others' optimizers, compilations and saving; also
            garbage collections of at least 0.1 ms.
        flops: also count the FLOPs of matrix products, convolutions, attention and what `register_flop_formula` of
            torch has a formula for. They are counted once per shapes of inputs: at the first outermost call with new
            shapes, until its backward is over. It needs the native engine.
        workers: also record the fetches, ranges and modules of the worker processes that a `DataLoader` starts
            meanwhile. Each worker is a process of the timeline.
        keep: how many rings of ended processes to keep under numbers; older ones are removed.
        keep_when: save small traces around steps that meet a condition, in `run.kept` beside `ring`, which it needs:
            `"step > 3x; gc > 200ms"`, as `modtrace watch` takes it. Another process, which this one starts and does not
            wait for, reads the ring and saves them. `()` keeps only what `Recording.keep` asks for; `"signal"` keeps
            when SIGUSR1 comes, or the signal of `on_signal`, which then needs no path.
        role: what this process does in its job ("trainer", "rollout"). It is called `trainer 3` then, not `rank 3`, and
            its rank is one among those of its role. None: what torchrun's `--role` says, if anything.

    Raises:
        RecordingError: the arguments make no sense, `%r` has no value, or this is a free-threaded build of CPython.
        WriteError: nothing can be saved at `path`.

    Example:
        >>> with modtrace.record("step.pftrace") as recording:
        ...     train_step()
    """
    check_can_record()
    if stacks_on_signal is not None:
        if stacks_on_signal not in set(signal.Signals):
            raise RecordingError(f"stacks_on_signal is {stacks_on_signal!r}; it must be a signal, as signal.SIGUSR2")
        if ring is None:
            raise RecordingError("stacks_on_signal needs a ring: the stacks are written beside its file")
    if keep_when is not None and schedule is not None:
        raise RecordingError("keep_when watches recordings without a schedule only")
    if workers and schedule is not None:
        raise RecordingError("workers are recorded without a schedule only")
    options = CaptureOptions(
        engine=_checked(check_engine, engine),
        capacity=_checked(check_capacity, capacity),
        host_name=host_name,
        role=role_in(os.environ) if role is None else _checked(check_role, role),
        model=_where_names_start(model),
        events=EngineOptions(None, strip_wrappers, _device_choice(device_times), ranges, memory, flops),
        sampler=Sampler(shapes, memory_interval),
        stacks_on_signal=stacks_on_signal,
        keep=_checked(partial(check_count, "keep"), keep),
        workers=workers,
    )
    for name in options.events.native_only if engine == "python" else ():
        instead = ", or memory_interval=0" if name == "memory" else ""
        raise RecordingError(f"{name} needs the native engine; give engine='native' or 'auto'{instead}")
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


def _where_names_start(model: nn.Module | str | None) -> weakref.ref[nn.Module] | str | None:
    if isinstance(model, nn.Module):
        return weakref.ref(model)
    if not isinstance(model, str | None):
        raise RecordingError(f"model is {model!r}; give a module, or the name of a class as text")
    return model


def _device_choice(wanted: bool | int | str) -> DeviceChoice | None:
    if wanted is False:
        return None
    text = wanted if isinstance(wanted, str) else f"*,{_DEFAULT_DEPTH if wanted is True else wanted}"
    match = re.fullmatch(r"(?P<pattern>[^,]+)(?:,(?P<levels>[1-9]\d*))?", text)
    if match is None:
        raise RecordingError(
            f"device_times is {wanted!r}; it must be True, a number of levels of calls, 1 or more, or a pattern of "
            "names, as 'GPT.blocks.*' or 'GPT.blocks.*,3'"
        )
    return DeviceChoice(match["pattern"], None if match["levels"] is None else int(match["levels"]))
