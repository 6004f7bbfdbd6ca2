"""What each module took in each step of a recording: the samples that are compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from .._errors import ModtraceError
from .._typing import Int64Array
from ..timeline import PHASES, Timeline
from ..timeline.gpu_tracks import without_gpu
from ..timeline.summary import measure_steps, self_times, warm_up_steps

__all__ = ["Key", "Samples", "plain_fqn", "take_samples"]

Key = tuple[str, str]
"""Fully qualified name and phase."""

MAX_STEPS = 2_000
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_PARALLEL_CLASSES = {"DistributedDataParallel", "DataParallel"}


class Samples(NamedTuple):
    """Times per step, of the whole steps behind the warm-up; a module that was not called in a step took 0.

    Attributes:
        self_ns: of each module and phase int64[steps], self times on the CPU.
        calls: of each module and phase int64[steps], how many spans there were.
        duration_ns: int64[steps], what the whole steps took.
        warm_up: how many whole steps were left out at the beginning.
    """

    self_ns: Mapping[Key, Int64Array]
    calls: Mapping[Key, Int64Array]
    duration_ns: Int64Array
    warm_up: int


def take_samples(timeline: Timeline, renamed: Mapping[str, str]) -> Samples:
    """Return the samples of a recording.

    Args:
        timeline: the recording.
        renamed: names, also of modules that contain others, and what they are called here instead.

    Raises:
        ModtraceError: no whole step is marked.
    """
    timeline = without_gpu(timeline)
    columns = timeline.columns
    whole = [step for step in measure_steps(timeline) if step.whole][-MAX_STEPS:]
    if not whole:
        raise ModtraceError("a recording without whole steps cannot be compared; call rec.step() after each step")
    duration_ns = np.array([step.duration_ns for step in whole], np.int64)
    warm_up = warm_up_steps(duration_ns)
    steps = np.array([step.step for step in whole[warm_up:]], np.int64)
    name_keys = [plain_fqn(name.fqn, renamed) for name in timeline.names]
    fqns = list(dict.fromkeys(name_keys))
    index_of = {fqn: index for index, fqn in enumerate(fqns)}
    module = np.array([index_of[fqn] for fqn in name_keys], np.int64)
    position = np.searchsorted(steps, columns.step)
    chosen = np.flatnonzero(np.append(steps, -1)[position] == columns.step)
    row = (module[columns.name[chosen]] * len(PHASES) + columns.phase[chosen]) * len(steps) + position[chosen]
    key_of_row, inverse = np.unique(row // len(steps), return_inverse=True)
    place = inverse * len(steps) + row % len(steps)
    shape = (len(key_of_row), len(steps))
    self_ns = np.zeros(shape[0] * shape[1], np.int64)
    np.add.at(self_ns, place, self_times(columns)[chosen])
    calls = np.bincount(place, minlength=len(self_ns)).reshape(shape)
    keys = [(fqns[key // len(PHASES)], PHASES[key % len(PHASES)]) for key in key_of_row.tolist()]
    return Samples(
        dict(zip(keys, self_ns.reshape(shape), strict=True)),
        dict(zip(keys, calls, strict=True)),
        duration_ns[warm_up:],
        warm_up,
    )


def plain_fqn(fqn: str, renamed: Mapping[str, str]) -> str:
    """Return the name without the wrappers of compile, FSDP, DDP and checkpointing, and as it is called here."""
    parts = [part for part in fqn.split(".") if part not in _WRAPPERS]
    if parts[0] in _PARALLEL_CLASSES and parts[1:2] == ["module"]:
        del parts[1]
    plain = ".".join(parts)
    for old, new in renamed.items():
        if plain == old or plain.startswith(f"{old}."):
            return new + plain[len(old) :]
    return plain
