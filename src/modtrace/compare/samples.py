"""What each module, and each part of the step, took in each step of a recording: the samples that are compared."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from .._errors import ModtraceError
from .._typing import Int64Array
from ..timeline import PHASES, Timeline
from ..timeline.nesting import self_times
from ..timeline.select import on_gpu, without_gpu
from ..timeline.summary import GroupBy, find_step_bounds, measure_steps, warm_up_steps
from ..timeline.summary.slow_steps import divide_steps

Key = tuple[str, str]
"""Fully qualified name and phase; the phase is one of `SAMPLED_PHASES`."""

SAMPLED_PHASES = (*PHASES, *(f"GPU {phase}" for phase in PHASES))

MAX_STEPS = 2_000
_NONE = -2
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_PARALLEL_CLASSES = {"DistributedDataParallel", "DataParallel"}


class Samples(NamedTuple):
    """Times per step, of the whole steps after the warm-up; a module that was not called in a step took 0.

    For a file of several ranks they are means over the ranks that called the module; their steps have equal numbers.

    Attributes:
        self_ns: of each module and phase int64[steps], self times on the CPU, and on the streams of GPUs.
        calls: of each module and phase int64[steps], how many spans there were.
        duration_ns: int64[steps], what the whole steps took, without evaluations.
        warm_up: how many whole steps were left out at the beginning.
        classes: of each module its class, in the order in which they were first called.
        parts: of each part of the step int64[steps], as `divide_steps` says it: of the first process.
    """

    self_ns: Mapping[Key, Int64Array]
    calls: Mapping[Key, Int64Array]
    duration_ns: Int64Array
    warm_up: int
    classes: Mapping[str, str]
    parts: Mapping[str, Int64Array] = {}


def take_samples(timeline: Timeline, by: GroupBy = "module", step_by: str | None = None) -> Samples:
    """Return the samples of a recording; `by` and `step_by` as in `Timeline.summary`.

    Raises:
        ModtraceError: no step is whole, or `step_by` names no range and no class.
    """
    columns = timeline.columns
    on_cpu = without_gpu(timeline)
    whole = [step for step in measure_steps(on_cpu, step_by) if step.whole][-MAX_STEPS:]
    if not whole:
        raise ModtraceError("a recording without whole steps cannot be compared; call rec.step() after each step")
    duration_ns = np.array([step.training_ns for step in whole], np.int64)
    warm_up = warm_up_steps(duration_ns)
    steps = np.array([step.step for step in whole[warm_up:]], np.int64)
    name_fqns = [plain_fqn(name.fqn) if by == "module" else name.module_class for name in timeline.names]
    fqns = list(dict.fromkeys(name_fqns))
    index_of = {fqn: index for index, fqn in enumerate(fqns)}
    module = np.array([index_of[fqn] for fqn in name_fqns], np.int64)
    step_of = find_step_bounds(on_cpu, step_by).of_spans(timeline)
    position = np.searchsorted(steps, step_of)
    chosen = np.flatnonzero(np.append(steps, _NONE)[position] == step_of)
    phase = columns.phase[chosen] + len(PHASES) * on_gpu(timeline)[chosen]
    row = (module[columns.name[chosen]] * len(SAMPLED_PHASES) + phase) * len(steps) + position[chosen]
    key_of_row, inverse = np.unique(row // len(steps), return_inverse=True)
    place = inverse * len(steps) + row % len(steps)
    shape = (len(key_of_row), len(steps))
    # Sums of less than 2^53 ns, which is 104 days, are exact.
    total_ns = np.bincount(place, self_times(columns)[chosen], shape[0] * shape[1]).reshape(shape)
    ranks = _ranks_of(timeline, module[columns.name], len(fqns))[key_of_row // len(SAMPLED_PHASES), None]
    self_ns = np.rint(total_ns / ranks).astype(np.int64)
    calls = np.rint(np.bincount(place, minlength=total_ns.size).reshape(shape) / ranks).astype(np.int64)
    keys = [
        (fqns[key // len(SAMPLED_PHASES)], SAMPLED_PHASES[key % len(SAMPLED_PHASES)]) for key in key_of_row.tolist()
    ]
    called, first = np.unique(columns.name, return_index=True)
    classes: dict[str, str] = {}
    for name in called[np.argsort(first)].tolist():
        classes.setdefault(name_fqns[name], timeline.names[name].module_class)
    divided = {step.step: step.parts for step in divide_steps(on_cpu, step_by)}
    part_names = dict.fromkeys(part for number in steps.tolist() for part in divided[number])
    return Samples(
        dict(zip(keys, self_ns, strict=True)),
        dict(zip(keys, calls, strict=True)),
        duration_ns[warm_up:],
        warm_up,
        classes,
        {part: np.array([divided[number].get(part, 0) for number in steps.tolist()]) for part in part_names},
    )


def _ranks_of(timeline: Timeline, module: Int64Array, count: int) -> Int64Array:
    """Return how many processes each of `count` modules has spans in; `module` says whose each span is."""
    processes = {process: number for number, process in enumerate(dict.fromkeys(t.process for t in timeline.tracks))}
    process = np.array([processes[track.process] for track in timeline.tracks] or [0], np.int64)
    pairs = np.unique(module * max(len(processes), 1) + process[timeline.columns.track])
    return np.bincount(pairs // max(len(processes), 1), minlength=count)


def plain_fqn(fqn: str, renamed: Mapping[str, str] | None = None) -> str:
    """Return the name without the wrappers of compile, FSDP, DDP and checkpointing, and as it is called here."""
    parts = [part for part in fqn.split(".") if part not in _WRAPPERS]
    if parts[0] in _PARALLEL_CLASSES and parts[1:2] == ["module"]:
        del parts[1]
    return renamed_fqn(".".join(parts), renamed or {})


def renamed_fqn(fqn: str, renamed: Mapping[str, str]) -> str:
    """Return what a module is called, where `renamed` says so of it or of a module that contains it: the innermost."""
    old = next((name for name in names_around(fqn) if name in renamed), None) if renamed else None
    return fqn if old is None else renamed[old] + fqn[len(old) :]


def names_around(fqn: str) -> list[str]:
    """Return the name itself and those it begins with, up to a dot; the longest first."""
    return [fqn, *(fqn[:end] for end in range(len(fqn) - 1, 0, -1) if fqn[end] == ".")]
