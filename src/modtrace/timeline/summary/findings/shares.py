"""What takes a large share of a step: parts, modules on the host alone, and what runs more often than it must."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

import numpy as np

from ...._terminal import counted
from ...._typing import Int64Array
from ...memory import format_bytes
from ..module_rows import ModuleTimes
from ..parts import OTHER, PARTS
from ..slow_steps import short_ms
from .finding import LEAST_STEPS, TRACE, Finding, Measured, only_option, times_text
from .occasions import collections_text
from .siblings import place_of

# What real programs spend is below: 41 of them run unchanged had 6 to 28 % in optimizers, and up to 24 % in loaders if
# these were no fault; a loss has 1 to 3 %. Communication is waiting: any is a loss.
_LARGE = {
    "data loading": 0.20,
    "optimizer": 0.30,
    "loss": 0.20,
    "communication": 0.10,
    OTHER: 0.20,
    "gc": 0.05,
    "saving": 0.05,
    "evaluation": 0.10,
}
_WAITS = ("data loading", "communication")
"""Parts of which some steps have none, as what is waited for is there already."""
_LOSS_BACKWARD = 10
"""A loss with a longer backward, in times of its forward, is no loss."""
_LARGE_BY_CHOICE = 0.20
"""For an optimizer with hooks, or that was told to update tensors one by one: there is something to change."""
_LARGE_BY_DEFAULT = 0.50
"""For one that updates them so on a CPU, as torch does: tiny models have up to 40 %."""
_LARGE_BESIDE = 0.15
"""For what is in that part beside the steps of optimizers, which go over each parameter more often."""
_LARGE_RANGE = 0.30
"""For a range of the user's, who named it: it is likely part of the work."""
_MOST_STEPS = 0.5
"""How often a module has to run in a step, for its time to be that of steps."""
_LEAST_NS = 1_000_000
"""Time of a part in a step: shorter ones are those of tiny models, in which Python itself is most."""
_HOST_SHARE, _BACKWARD_SHARE = 0.10, 0.2
"""Shares of the median step, and of a module's own forward: operators that compute have a backward of that size."""
_HOST_SHARE_OF_CALLS = 0.25
"""The same if nothing is trained, of modules whose inner modules have modules: the others may call operators."""


def find_large_parts(measured: Measured, explained: Container[str | None]) -> Iterator[Finding]:
    """Yield the parts with a large share of the steps, but for those that are explained."""
    if measured.steps < LEAST_STEPS:
        return
    optimizers, gap_ns = measured.optimizers, measured.gap_ns.sum(axis=1)
    step_ns = measured.duration_ns + gap_ns
    beside = _beside_optimizers(measured)
    if beside is not None:
        yield beside
    for part in measured.parts:
        took = measured.of_part(part, gaps=True)
        if part == "optimizer" and beside is not None:
            took = took - beside.ns_per_step
        alone_ns = _backward_alone(measured, part)
        if part == "loss":  # operators outside of modules that are no loss have a backward too
            alone_ns[alone_ns > _LOSS_BACKWARD * took] = 0
        took = took + alone_ns
        per_step, low = float(np.median(took)), 50 if part in _WAITS else 10
        is_range = part not in (*PARTS, OTHER)
        least = _LARGE_RANGE if is_range else _LARGE.get(part, np.inf)
        if part == "optimizer" and any(
            "foreach=False" in str(one.get("how")) or one.get("hooks") for one in optimizers
        ):
            least = _LARGE_BY_CHOICE
        elif part == "optimizer" and any(one.get("how") == "one by one" for one in optimizers):
            least = _LARGE_BY_DEFAULT
        # As for modules: a busy machine makes what has many operators longer than it is.
        low_ns = np.percentile(took, low)
        is_large = low_ns >= max(least * np.percentile(step_ns, low), _LEAST_NS)
        between = part == OTHER and float(np.median(gap_ns)) > per_step / 2
        # A server waits for requests, which come irregularly.
        is_large &= not between or low_ns >= per_step / 2
        if part in explained or not is_large:
            continue
        ranges = measured.ranges_of(part)
        where = part if is_range else ranges[0].range if ranges and part not in ("gc", OTHER) else None
        what = f"{part} takes a large share"
        evidence = f"{short_ms(per_step)} of {short_ms(float(np.median(step_ns)))} (medians)"
        command = "--ranges" if ranges else "--by step"
        if part == "data loading":
            waits = any("MultiProcessing" in each.range for each in ranges)
            evidence += ", waiting for the loader's workers" if waits else ", work of the training process: no workers"
        elif part == "loss" and np.any(alone_ns):
            evidence += f", {short_ms(float(np.median(alone_ns)))} of it in backward, outside of modules"
        elif part in ("optimizer", "saving", "loss") and ranges:
            evidence += "".join(f"; {_described(one)}" for one in optimizers if part == "optimizer")
            evidence += "".join(
                f"; {each.range} {short_ms(each.total_ns / max(each.calls, 1))} a call" for each in ranges[:2]
            )
        elif part == "communication":
            what = "waiting for other ranks takes a large share"
            operators = measured.summary.overview.communication if measured.summary.overview else {}
            evidence += "".join(f"; {total.calls:,} {name}" for name, total in list(operators.items())[:2])
            if in_backward := float(np.median(alone_ns)):
                evidence += f"; {short_ms(in_backward)} of it in backward passes, in no module's backward"
        elif between:
            what = "time between calls, outside of modules and ranges, takes a large share"
            evidence += ": what the program prepares, or waits for"
        elif part == OTHER:
            what = "time outside of modules and ranges (other) takes a large share"
            after = max(measured.other_ns, key=lambda name: measured.other_ns[name])
            whole = sum(measured.other_ns.values()) or 1
            evidence += f"; {measured.other_ns[after] / whole:.0%} of it follows {after}"
        elif part == "gc":
            evidence += f"; {collections_text(measured)}"
        elif is_range:
            what = "takes a large share"
        share = measured.share(per_step, gaps=True)
        command = "ranks slow DIR" if part == "communication" else f"summary {TRACE} {command}"
        yield Finding(what, where, part, round(per_step), share, evidence, f"modtrace {command}")


def _beside_optimizers(measured: Measured) -> Finding | None:
    """Return that clipping, a scheduler or the like, the longest of them, takes a large share of the steps."""
    for each in measured.ranges_of("optimizer"):
        calls = each.calls / measured.steps
        per_step = each.p50_ns * calls
        is_step = each.range.endswith(".step") and not each.range.startswith("LRScheduler.")
        if not is_step and per_step >= max(_LARGE_BESIDE * measured.usual_ns, _LEAST_NS):
            evidence = f"{times_text(calls)} a step, {short_ms(each.p50_ns)} each (median)"
            share, command = measured.share(per_step), f"modtrace summary {TRACE} --ranges"
            return Finding("takes a large share", each.range, "optimizer", round(per_step), share, evidence, command)
    return None


def _backward_alone(measured: Measured, part: str) -> Int64Array:
    """Return int64[steps], how long backward passes last while no module's backward runs: of the loss, or waiting.

    It is no loss if there are other ranks to wait for, and waiting only beside what counts as communication already.
    """
    steps, with_ranks = measured.summary.steps.counted.columns, bool(measured.ranges_of("communication"))
    if len(steps.step) != measured.steps or part not in ("loss", "communication") or with_ranks == (part == "loss"):
        return np.zeros(measured.steps, np.int64)
    own_ns = measured.of_part("backward") + measured.of_part("recompute") if with_ranks else steps.backward_pass_ns
    return np.asarray(np.maximum(own_ns - steps.backward_ns - steps.recompute_ns, 0))


def _described(optimizer: Mapping[str, Any]) -> str:
    """Say how an optimizer updates how many tensors, and whether its step has hooks: what is known of that."""
    tensors, how, hooks = (optimizer.get(name) for name in ("tensors", "how", "hooks"))
    said = str(optimizer.get("class", "an optimizer"))
    said += f" updates {counted(tensors, 'tensor')} {how}" if type(tensors) is int and how else ""
    return said + (f" and has {counted(hooks, 'hook')}" if type(hooks) is int and hooks else "")


def find_host_time(measured: Measured) -> Iterator[Finding]:
    """Yield modules whose own forward is long and whose own backward is short: they run Python, or wait."""
    if measured.steps < LEAST_STEPS:
        return
    rows, step_ns, trains = measured.rows, measured.low_ns, measured.trains
    compose = {outer for around in measured.outer.values() for outer in around[1:]}
    hold = {around[0] for around in measured.outer.values() if around}
    index_of = {row.fqn: index for index, row in enumerate(rows)}
    own_ns, waits_ns = step_ns.astype(np.float64), _waits_in_forward(measured)
    for index, row in enumerate(rows):
        if around := measured.outer[row.fqn]:
            own_ns[index_of[around[0]]] -= step_ns[index]
    by_place: dict[tuple[str, str], list[int]] = {}
    for index, row in enumerate(rows):
        if (
            measured.calls[index] >= _MOST_STEPS
            and (measured.runs[1, index] if trains else row.fqn in compose)
            and row.backward_self_ns < _BACKWARD_SHARE * row.forward_self_ns
            # Of a wrapper whose model has a name of its own no step says what it takes itself.
            and (row.fqn in hold or row.forward_self_ns == row.forward_ns)
        ):
            by_place.setdefault((place_of(measured, row.fqn), row.module_class), []).append(index)
    for (place, module_class), members in by_place.items():
        each = [
            min(
                max(own_ns[index], 0.0), rows[index].forward_self_ns / max(rows[index].calls, 1) * measured.calls[index]
            )
            for index in members
        ]
        per_step = sum(each) - waits_ns
        if per_step < max((_HOST_SHARE if trains else _HOST_SHARE_OF_CALLS) * measured.usual_ns, _LEAST_NS):
            continue
        first = rows[members[int(np.argmax(each))]]
        several = f" in {len(members)} modules {place} ({module_class})" if len(members) > 1 else ""
        own_backward_ns = sum(rows[index].backward_self_ns for index in members) / measured.steps
        evidence = f"own forward {short_ms(per_step)} a step{several}" + (
            f", own backward {short_ms(own_backward_ns)}: Python or waiting"
            if trains
            else f" of {short_ms(measured.usual_ns)}, between inner modules: operators of its own, Python or waiting"
        )
        command = f"modtrace summary {TRACE} {only_option(place)}"
        what = f"spends host time in its own forward, outside of inner modules{' and operators' if trains else ''}"
        yield Finding(what, first.fqn, "forward", round(per_step), measured.share(per_step), evidence, command)


def _waits_in_forward(measured: Measured) -> float:
    """Return how long modules wait for other ranks in a step's forward, which is of the part `communication`."""
    waits_ns = float(measured.of_part("communication").mean())
    if not waits_ns:
        return 0.0
    a_call = [row.forward_self_ns / max(row.calls, 1) for row in measured.rows]
    forward_ns = float((measured.of_part("forward") + measured.of_part("loss")).mean())
    return min(waits_ns, max(0.0, float(np.dot(a_call, measured.calls)) - forward_ns))


def find_reruns(measured: Measured) -> Iterator[Finding]:
    """Yield the outermost modules whose forward runs more often than their backward, and what checkpointing costs."""
    named: set[str] = set()
    for index, row in enumerate(measured.rows):
        calls, backed, unused, alone_ns = (int(count) for count in measured.runs[:, index])
        per_step = alone_ns / measured.steps
        if per_step < measured.least_ns:
            continue
        if not backed and unused >= _MOST_STEPS * max(calls, measured.steps) and measured.steps >= LEAST_STEPS:
            yield _unused_graph(measured, row, calls, alone_ns)
        if not measured.trains or not 0 < backed < calls:
            continue
        if named.isdisjoint(measured.outer[row.fqn]):
            yield Finding(
                "runs forward more often than backward",
                row.fqn,
                "forward",
                round(per_step),
                measured.share(per_step),
                f"forward {times_text(calls / measured.steps)} a step, backward {times_text(backed / measured.steps)}; "
                f"forwards without a backward take {short_ms(alone_ns / (calls - backed))} each",
                f"modtrace summary {TRACE} --tree",
            )
        named.add(row.fqn)
    yield from _recompute(measured)


def _unused_graph(measured: Measured, row: ModuleTimes, calls: int, forward_ns: int) -> Finding:
    evidence = f"forward {times_text(calls / measured.steps)} a step, {short_ms(forward_ns / calls)} each, and never a "
    evidence += "backward: under torch.no_grad() it takes less time and memory"
    command = f"modtrace summary {TRACE} {only_option(row.fqn)}"
    return Finding("builds a graph that no backward pass uses", row.fqn, "forward", 0, 0.0, evidence, command)


def _recompute(measured: Measured) -> Iterator[Finding]:
    total_ns = int(measured.of_part("recompute").sum())
    per_step = total_ns / max(measured.steps, 1)
    if not total_ns or per_step < measured.least_ns:
        return
    overview = measured.summary.overview
    whole = overview.recomputed if overview is not None else {}
    again = {row.fqn: row for row in measured.rows if row.recompute_ns and row.module_class in whole}
    outermost = [row for fqn, row in again.items() if again.keys().isdisjoint(measured.outer.get(fqn, ()))]
    places = dict.fromkeys(place_of(measured, row.fqn) for row in outermost)
    evidence = f"checkpointing runs {', '.join(list(places)[:3])} again: {short_ms(per_step)} a step"
    rows = measured.summary.memory.rows if measured.summary.memory is not None else ()
    saves = sum(
        max(0, (row.retained_recompute_bytes or 0) - (row.retained_bytes or 0))
        for row in rows
        if row.fqn in again and again.keys().isdisjoint(measured.outer.get(row.fqn, ()))
    )
    evidence += f", and saves about {format_bytes(saves)}" if saves else ""
    where = outermost[0].fqn if outermost else None
    share = total_ns / measured.whole_ns
    command = f"modtrace summary {TRACE} --sort recompute"
    yield Finding("runs again in backward (recompute)", where, "recompute", round(per_step), share, evidence, command)
