"""What costs no time that is measured: memory that grows or has one holder, idle devices, a low rate of FLOPs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...memory import OUTSIDE, OUTSIDE_CALLS, format_bytes
from ..flop_summary import FlopSummary
from .finding import TRACE, Finding, RuleInput
from .siblings import place_of

_HOLDS, _LEAST_HELD = 0.3, 8 << 20
"""Share of the peak, and bytes: so much held by one module is not one of many layers."""
_MORE_THAN_NEXT = 3
"""How many times as much it holds as the next module in another place."""
_LOW_MFU = 0.2
"""Well-kept trainings of transformers have 0.35 to 0.55."""
_DRY_LATENCY_NS = 50_000
"""Time from a call to its begin on the stream: a stream that has work queued takes longer."""
_DRY_SHARE = 0.2
"""Share of the time in which streams are in no module: less is not worth a finding."""


def find_costs(measured: RuleInput) -> Iterator[Finding]:
    """Yield findings about memory, devices and FLOPs."""
    yield from _growth(measured)
    yield from _holders(measured)
    yield from _dry_streams(measured)
    yield from low_mfu(measured.summary.flops)


def _growth(measured: RuleInput) -> Iterator[Finding]:
    grows, holders = measured.memory.get("grows", 0), measured.growth_by_holder
    if grows <= 0:
        return
    names = {row.fqn for row in measured.rows}
    largest = max(holders, key=lambda name: holders[name], default="")
    memory = measured.summary.memory
    place = memory.grown_in if memory is not None else ""
    outside = f"outside of modules, {place}," if place else "outside of modules"
    kept = ", ".join(
        f"{outside if name == OUTSIDE else name} {format_bytes(count)}"
        for name, count in sorted(holders.items(), key=lambda one: -one[1])[:3]
    )
    evidence = f"{format_bytes(grows)} more at the end of each step" + (f": {kept}" if kept else "")
    in_range = place.removeprefix("in ") if place.startswith("in ") and largest == OUTSIDE else None
    where = largest if largest in names else in_range
    show = "--memory" if memory is not None else "--tree"
    yield measured.finding("memory grows from step to step", where, evidence=evidence, show=show)


def _holders(measured: RuleInput) -> Iterator[Finding]:
    memory = measured.summary.memory
    if memory is None:
        return
    held = [each for each in memory.holders if each.fqn not in ("other", OUTSIDE, *OUTSIDE_CALLS)]
    if (
        not held
        or held[0].fqn in measured.growth_by_holder
        or held[0].bytes < max(_HOLDS * memory.peak_bytes, _LEAST_HELD)
    ):
        return
    place = place_of(measured, held[0].fqn)
    others = [each for each in held[1:] if place_of(measured, each.fqn) != place]
    if others and held[0].bytes < _MORE_THAN_NEXT * others[0].bytes:
        return
    evidence = f"{format_bytes(held[0].bytes)} of {format_bytes(memory.peak_bytes)}"
    if held[0].saved_bytes:
        evidence += f", about {format_bytes(held[0].saved_bytes)} of it for the backward: checkpointing would free that"
    what = f"holds {held[0].bytes / memory.peak_bytes:.0%} of the memory at the peak"
    yield measured.finding(what, held[0].fqn, evidence=evidence, show="--memory")


def _dry_streams(measured: RuleInput) -> Iterator[Finding]:
    device = measured.summary.device
    if device is None or not device.length_ns:
        return
    idle_ns = device.length_ns - device.in_modules_ns
    latency = np.repeat([row.latency_p50_ns for row in device.rows], [row.calls for row in device.rows])
    if idle_ns < _DRY_SHARE * device.length_ns or not len(latency) or np.median(latency) > _DRY_LATENCY_NS:
        return
    per_step = idle_ns / max(measured.steps, 1)
    evidence = (
        f"streams are in modules {1 - idle_ns / device.length_ns:.0%} of the time, and reach a call "
        f"{np.median(latency) / 1e3:.0f} µs after the host (median): they have nothing queued"
    )
    yield measured.finding("the device waits for the host", evidence=evidence, show="--by step", ns=per_step)


def low_mfu(flops: FlopSummary | None) -> list[Finding]:
    """Return a finding if the peak of the device is known, and few of its FLOPs are used."""
    used = [step.mfu for step in flops.by_step if step.mfu is not None] if flops is not None else []
    if flops is None or not used or (mfu := float(np.median(used))) >= _LOW_MFU:
        return []
    evidence = f"MFU {mfu:.1%} of {flops.peak_tflops:,.6g} TFLOP/s (median of the steps)"
    command = f"modtrace summary {TRACE} --flops"
    return [Finding("few of the device's FLOPs are used", None, None, 0, 0.0, evidence, command)]
