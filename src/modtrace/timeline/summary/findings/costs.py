"""Rules for costs other than the time of steps: growing or held memory, idle devices, a low rate of FLOPs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...memory import NO_MODULE, OUTSIDE_CALLS, format_bytes
from ..flop_summary import FlopSummary
from .finding import TRACE, Finding, RuleInput
from .noted import MIN_GROWTH, NotedSteps
from .siblings import list_pattern

_MIN_SURE_GROWTH = 2 << 20
"""Minimum growth in bytes a step without a list that grows too: varying sizes add up to 1.3 MiB."""
_MIN_HELD_SHARE = 0.3
"""Minimum share of the peak that one module holds; one of many equal layers holds less."""
_MIN_HELD_BYTES = 8 << 20
"""Minimum number of bytes that this module holds."""
_MIN_RATIO_TO_NEXT = 3
"""Minimum ratio of its memory to the memory of the next module with another list pattern."""
_LOW_MFU = 0.2
"""Limit of a low MFU; efficient trainings of transformers have 0.35 to 0.55."""
_DRY_LATENCY_NS = 50_000
"""Maximum time in ns from a call to its start on the stream, if no work is queued there."""
_MIN_DRY_SHARE = 0.2
"""Minimum share of time in which streams are in no module."""


def find_costs(rule_input: RuleInput, notes: NotedSteps) -> Iterator[Finding]:
    """Yield findings about memory, devices and FLOPs."""
    yield from _find_growth(rule_input)
    yield from _find_process_growth(rule_input, notes)
    yield from _find_holders(rule_input)
    yield from _find_dry_streams(rule_input)
    yield from low_mfu(rule_input.summary.flops)


def _find_growth(rule_input: RuleInput) -> Iterator[Finding]:
    grows, growths = rule_input.memory.get("grows", 0), rule_input.growth_by_holder
    if grows <= 0:
        return
    names = {row.fqn for row in rule_input.rows}
    largest = max(growths, key=lambda name: growths[name], default="")
    memory = rule_input.summary.memory
    grown_in = memory.grown_in if memory is not None else ""
    outside = f"outside of modules, {grown_in}," if grown_in else "outside of modules"
    holders = ", ".join(
        f"{outside if name == NO_MODULE else name} {format_bytes(count)}"
        for name, count in sorted(growths.items(), key=lambda item: -item[1])[:3]
    )
    evidence = f"{format_bytes(grows)} more at the end of each step" + (f": {holders}" if holders else "")
    in_range = grown_in.removeprefix("in ") if grown_in.startswith("in ") and largest == NO_MODULE else None
    where = largest if largest in names else in_range
    show = "--memory" if memory is not None else "--tree"
    yield rule_input.finding("memory grows from step to step", where, evidence=evidence, show=show)


def _find_process_growth(rule_input: RuleInput, notes: NotedSteps) -> Iterator[Finding]:
    """Yield a finding if the memory of the process grows steadily, with the list that grows.

    Without a list, memory has to grow more, and in training: a cache of generated tokens grows until the next request.
    """
    if rule_input.memory or notes.growth_bytes < (MIN_GROWTH if notes.list_growth else _MIN_SURE_GROWTH):
        return
    if not rule_input.trains and not notes.list_growth:
        return
    grown = max(notes.list_growth, key=lambda name: notes.list_growth[name], default="")
    evidence = f"the process holds about {format_bytes(notes.growth_bytes)} more after each step"
    evidence += f"; {grown} gets {notes.list_growth[grown]:.3g} values more" if grown else ""
    where = next((row.fqn for row in rule_input.rows if row.fqn == grown.rpartition(".")[0]), None)
    title = "memory grows from step to step"
    yield Finding(title, where, None, 0, 0.0, evidence, "modtrace run --memory SCRIPT")


def _find_holders(rule_input: RuleInput) -> Iterator[Finding]:
    memory = rule_input.summary.memory
    if memory is None:
        return
    holders = [holder for holder in memory.holders if holder.fqn not in ("other", NO_MODULE, *OUTSIDE_CALLS)]
    min_bytes = max(_MIN_HELD_SHARE * memory.peak_bytes, _MIN_HELD_BYTES)
    if not holders or (largest := holders[0]).fqn in rule_input.growth_by_holder or largest.bytes < min_bytes:
        return
    pattern = list_pattern(rule_input, largest.fqn)
    elsewhere = [holder.bytes for holder in holders[1:] if list_pattern(rule_input, holder.fqn) != pattern]
    if elsewhere and largest.bytes < _MIN_RATIO_TO_NEXT * elsewhere[0]:
        return
    evidence = f"{format_bytes(largest.bytes)} of {format_bytes(memory.peak_bytes)}"
    if largest.saved_bytes:
        evidence += f", about {format_bytes(largest.saved_bytes)} of it for the backward: checkpointing would free that"
    title = f"holds {largest.bytes / memory.peak_bytes:.0%} of the memory at the peak"
    yield rule_input.finding(title, largest.fqn, evidence=evidence, show="--memory")


def _find_dry_streams(rule_input: RuleInput) -> Iterator[Finding]:
    device = rule_input.summary.device
    if device is None or not device.length_ns:
        return
    idle_ns = device.length_ns - device.in_modules_ns
    latency = np.repeat([row.latency_p50_ns for row in device.rows], [row.calls for row in device.rows])
    if idle_ns < _MIN_DRY_SHARE * device.length_ns or not len(latency) or np.median(latency) > _DRY_LATENCY_NS:
        return
    ns_per_step = idle_ns / max(rule_input.steps, 1)
    evidence = (
        f"streams are in modules {1 - idle_ns / device.length_ns:.0%} of the time, and reach a call "
        f"{np.median(latency) / 1e3:.0f} µs after the host (median): they have nothing queued"
    )
    yield rule_input.finding("the device waits for the host", evidence=evidence, show="--by step", ns=ns_per_step)


def low_mfu(flops: FlopSummary | None) -> list[Finding]:
    """Return a finding if the device's peak is known, and steps reach little of it."""
    step_mfus = [step.mfu for step in flops.by_step if step.mfu is not None] if flops is not None else []
    if flops is None or not step_mfus or (mfu := float(np.median(step_mfus))) >= _LOW_MFU:
        return []
    evidence = f"MFU {mfu:.1%} of {flops.peak_tflops:,.6g} TFLOP/s (median of the steps)"
    command = f"modtrace summary {TRACE} --flops"
    return [Finding("few of the device's FLOPs are used", None, None, 0, 0.0, evidence, command)]
