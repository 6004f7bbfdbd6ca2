"""The memory of a process from a ring's events: its holders, its growth per step, and a failed allocation."""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..._arrays import Int64Array, is_any
from ...ring import Events, Kind
from ...ring.slot_format import ALLOCATED, CUDA_ALLOCATED, HOLDER_BITS, HOLDER_MASK, NO_NAME, REFUSED
from ..memory import KINDS, NO_MODULE, OUTSIDE_CALLS, format_bytes
from .analysis import RingAnalysis
from .intervals import is_core_event
from .name_lookup import NameLookup

_NO_MODULE = (NO_MODULE, *KINDS)
_MOMENTS = (Kind.STEP, Kind.OPTIMIZER_STEP, Kind.GRADIENTS, Kind.HELD)
_WARM_UP_STEPS = 2
_MIN_STEPS_OF_GROWTH = 8
_MIN_GROWTH_SHARE = 0.01
"""Minimum growth to be reported, as a share of all memory held."""
_MAX_HOLDERS = 3
_KEYS = ("held", "by", "last", "grows", "grows_by", "refused", "place", "step", "saved", "at_peak")
"""The keys of the fields of `HeldMemory` in JSON and in the metadata of saved files."""
_BLOCK = re.compile(r".*?\.\d+(?=\.|$)")
_IN_LIST = re.compile(r"\.\d+(\..*)?$")


class HeldMemory(NamedTuple):
    """The memory that tensors hold, in bytes."""

    held_bytes: int  # held at the failed allocation, or if none failed at the end of the last step
    # Bytes by holder, largest first: fully qualified name, `no module`, `backward`, `optimizer` or `parameters`.
    bytes_by_holder: dict[str, int]
    last_bytes: int  # held at the last event
    growth_bytes: int = 0  # growth per step; 0 if memory does not grow steadily
    growth_by_holder: Mapping[str, int] = {}  # growth per step by holder, in bytes
    refused_bytes: int | None = None  # size of the failed allocation; None if none failed
    place: str = ""  # place of the failed allocation: `forward GPT.blocks.3`
    step: int | None = None  # last step that had ended at the failed allocation; None if none had
    # Mean bytes that the calls of each module, without inner calls, save for a recent backward pass.
    saved_by_module: Mapping[str, int] = {}
    # The time of the peak, `time_ns`, and the bytes of `OUTSIDE_CALLS` then; empty if the ring does not have them.
    peak_holders: Mapping[str, int] = {}

    @property
    def sentences(self) -> list[str]:
        """Sentences on the failed allocation and on growth."""
        sentences = []
        if self.refused_bytes is not None:
            moment = "" if self.step is None else f", after step {self.step}"
            sentences.append(
                f"could not allocate {format_bytes(self.refused_bytes)} in {self.place}{moment}; {self.holding}"
            )
            sentences[0] += self._backward_text()
        if self.growth_bytes:
            parts = [
                f"{name} {format_bytes(count)}"
                for name, count in _sum_lists(self.growth_by_holder)
                if 10 * count >= self.growth_bytes
            ]
            by = f": {', '.join(parts[:_MAX_HOLDERS])}" if parts else ""
            sentences.append(f"tensor memory grows by {format_bytes(self.growth_bytes)} a step{by}")
        return sentences

    @property
    def holding(self) -> str:
        """The largest holders as text; modules of a list are summed as `GPT.blocks.*`."""
        parts = [
            f"{name} {format_bytes(count)} ({100 * count / max(self.held_bytes, 1):.0f}%)"
            for name, count in _sum_lists(self.bytes_by_holder)[:_MAX_HOLDERS]
            if count > 0
        ]
        return f"held: {format_bytes(self.held_bytes)}" + (f", by {', '.join(parts)}" if parts else "")

    def _backward_text(self) -> str:
        """Estimate the memory saved for backward, and the memory freed by checkpointing the list that saves most."""
        saved = {name: min(count, self.bytes_by_holder.get(name, 0)) for name, count in self.saved_by_module.items()}
        total = sum(saved.values())
        if 10 * total < self.held_bytes or not total:
            return ""
        text = f"; about {format_bytes(total)} of it saved for backward"
        blocks = Counter[str]()
        for name, count in saved.items():
            if block := _BLOCK.match(name):
                blocks[block[0]] += count
        lists = Counter[str]()
        for name in blocks:
            lists[_IN_LIST.sub(".*", name)] += blocks[name]
        for name, count in lists.most_common(1):
            # One block at a time is recomputed, and holds as much as before.
            freed = count - max(blocks[block] for block in blocks if _IN_LIST.sub(".*", block) == name)
            text += f"; checkpointing {name} would free about {format_bytes(freed)} (an estimate)" if freed else ""
        return text

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and `sentences` as JSON values."""
        return dict(zip(_KEYS, self, strict=True)) | {"sentences": self.sentences}


def _sum_lists(by: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return names and bytes, largest first, with several modules of a list summed as `GPT.blocks.*`."""
    members = Counter(_IN_LIST.sub(".*", name) for name in by)
    groups = Counter[str]()
    for name, count in by.items():
        group = _IN_LIST.sub(".*", name)
        groups[group if members[group] > 1 else name] += count
    return groups.most_common()


def held_memory(analysis: RingAnalysis, read_until: Callable[[int], RingAnalysis] | None = None) -> HeldMemory | None:
    """Return the memory of tensors in a ring; None if the ring did not count it.

    If the analysis lacks the events of calls, `read_until` returns the last ones before a serial number.
    """
    events, texts = analysis.all_events, analysis.lookup.texts
    is_counter = events.kind == Kind.COUNTER
    on_cpu, on_gpu, refused = (
        np.flatnonzero(is_counter & (events.name == texts.index(text))) if text in texts else np.zeros(0, np.int64)
        for text in (ALLOCATED, CUDA_ALLOCATED, REFUSED)
    )
    samples = on_gpu if len(on_gpu) else on_cpu
    if not len(samples):
        return None
    owners = _owners(analysis)
    ends = np.flatnonzero(events.kind == Kind.HELD)
    until = int(refused[-1]) if len(refused) else int(ends[-1]) + 1 if len(ends) else len(events)
    held, last = _last_value(samples, events.value[samples], np.array([until, len(events)])).tolist()
    by = Counter({name: int(_last_value(*owner, np.array([until]))[0]) for name, owner in owners.items()})
    memory = HeldMemory(
        *(held, dict(by.most_common()), last, *_growth(analysis, samples, owners)),
        saved_by_module=_saved(analysis),
        peak_holders=_find_peak_holders(analysis, samples),
    )
    if not len(refused):
        return memory
    if read_until is not None:
        calls_before = read_until(int(events.serial[until]))
    else:
        slots = analysis.snapshot.slots._replace(events=events.take(np.arange(until)))
        calls_before = RingAnalysis(analysis.snapshot._replace(slots=slots))
    thread = analysis.lookup.threads[events.thread[until]]
    calls = next((stack.calls for stack in calls_before.open_stacks if (stack.thread, stack.tid) == thread), ())
    place = f"{calls[-1].phase} {calls[-1].fqn}" if calls else NO_MODULE
    is_earlier = analysis.events.serial[analysis.step_ends.event] < events.serial[until]
    steps = analysis.step_ends.number[is_earlier]
    return memory._replace(
        refused_bytes=int(events.value[until]), place=place, step=int(steps[-1]) if len(steps) else None
    )


def samples_at_moments(events: Events, lookup: NameLookup) -> Events:
    """Return the memory samples that are needed: of each counter the first, the largest, the last before each moment.

    Moments are ends of steps, changes of holders, failed allocations, and the end of the events.
    """
    is_sample = events.kind == Kind.COUNTER
    refused = lookup.texts.index(REFUSED) if REFUSED in lookup.texts else NO_NAME
    moments = np.flatnonzero(is_any(events.kind, _MOMENTS) | is_sample & (events.name == refused))
    is_needed = np.zeros(len(events), np.bool_)
    for name in np.unique(events.name[is_sample]).tolist():
        samples = np.flatnonzero(is_sample & (events.name == name))
        is_needed[samples[np.diff(np.searchsorted(moments, samples), append=-1) != 0]] = True
        is_needed[[samples[0], samples[int(np.argmax(events.value[samples]))]]] = True
    return events.take(is_needed)


_Owner = tuple[Int64Array, Int64Array]
"""Indexes of the events with the bytes that a module holds, and the bytes."""


def _owners(analysis: RingAnalysis) -> dict[str, _Owner]:
    events = analysis.all_events
    index = np.flatnonzero(events.kind == Kind.HELD)
    name, value = events.name[index], events.value[index]
    owners: dict[str, _Owner] = {}
    for key in np.unique(np.where(name == NO_NAME, -1 - (value & HOLDER_MASK), name)).tolist():
        rows = name == key if key >= 0 else (name == NO_NAME) & (value & HOLDER_MASK == -1 - key)
        owner = analysis.lookup.names[key].fqn if key >= 0 else _NO_MODULE[-1 - key]
        owner_index, owner_bytes = owners.get(owner, (np.zeros(0, np.int64), np.zeros(0, np.int64)))
        owners[owner] = np.append(owner_index, index[rows]), np.append(owner_bytes, value[rows] >> HOLDER_BITS)
    return owners


def _saved(analysis: RingAnalysis) -> dict[str, int]:
    """Return the mean bytes that the calls of each module save for a backward pass."""
    events = analysis.all_events
    index = np.flatnonzero(events.kind == Kind.SAVED)
    name, value = events.name[index], events.value[index]
    headers = np.flatnonzero(name == NO_NAME)  # each has the number of passes so far
    passes = value[headers]
    if not len(passes) or passes[-1] == 0:
        return {}
    # The records up to the last header with fewer passes; none if there is no such header.
    earlier = np.flatnonzero(passes < passes[-1])[-1:]
    until, new_passes = int(headers[earlier + 1].sum()), int(passes[-1] - passes[earlier].sum())
    saved = Counter[str]()
    for key in np.unique(name[name != NO_NAME]).tolist():
        rows = np.flatnonzero(name == key)
        earlier_bytes = int(value[rows[rows < until][-1:]].sum())
        saved[analysis.lookup.names[key].fqn] += (int(value[rows[-1]]) - earlier_bytes) // new_passes
    return dict(saved)


def _find_peak_holders(analysis: RingAnalysis, samples: Int64Array) -> dict[str, int]:
    """Return the holders at the peak; empty if the ring's last record of a peak is for a different peak."""
    events = analysis.all_events
    index = np.flatnonzero(events.kind == Kind.HELD_AT_PEAK)[-len(OUTSIDE_CALLS) - 1 :]
    value, peak = events.value[index], samples[events.value[samples].argmax()]
    if (
        (value & HOLDER_MASK).tolist() != [0, 1, 2, 3]
        or peak > index[0]
        or value[0] >> HOLDER_BITS != events.value[peak]
    ):
        return {}
    time_ns = int(analysis.clock.to_other(events.time_ns[peak : peak + 1])[0])
    return {"time_ns": time_ns, **dict(zip(OUTSIDE_CALLS, (value[1:] >> HOLDER_BITS).tolist(), strict=True))}


def _growth(analysis: RingAnalysis, samples: Int64Array, owners: dict[str, _Owner]) -> tuple[int, dict[str, int]]:
    """Return the growth of all memory in bytes per step, and the growth of each owner's memory."""
    ends = analysis.step_ends.event
    if not len(ends):
        calls = analysis.intervals
        ends = np.sort(calls.start_position[~calls.is_node & (calls.depth == 0) & calls.has_start]) // 2
    ends = np.flatnonzero(is_core_event(analysis.all_events))[ends]
    at_ends = _last_value(samples, analysis.all_events.value[samples], ends)
    total = _steady_growth(at_ends)
    if total * (len(ends) - _WARM_UP_STEPS) <= _MIN_GROWTH_SHARE * at_ends[-1:].sum():
        return 0, {}
    growth = {name: _steady_growth(_last_value(*owner, ends)) for name, owner in owners.items()}
    return total, {name: grown for name, grown in growth.items() if grown}


def _steady_growth(held: Int64Array) -> int:
    """Return the growth in bytes per step of memory that seldom shrinks; 0 if it shrinks often or stays."""
    held = held[_WARM_UP_STEPS:]
    if len(held) < _MIN_STEPS_OF_GROWTH:
        return 0
    change = np.diff(held)
    middle = len(held) // 2
    slower, faster = sorted([int(held[middle] - held[0]), int(held[-1] - held[middle])])
    if slower <= 0 or 4 * slower < faster or -10 * change[change < 0].sum() > change.clip(0).sum():
        return 0
    return int(held[-1] - held[0]) // (len(held) - 1)


def _last_value(index: Int64Array, value: Int64Array, events: Int64Array) -> Int64Array:
    """Return the last value written before each of the events; the first value for earlier events."""
    return value[np.maximum(np.searchsorted(index, events) - 1, 0)]
