"""What takes a large share of a step: parts, modules on the host alone, and what runs more often than it must."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...._arrays import Int64Array
from ...._tables import counted
from ...memory import format_bytes
from ..module_rows import ModuleTimes
from ..parts import OTHER, PARTS
from ..slow_steps import short_ms
from .finding import LEAST_STEPS, Finding, Measured, only_option, times_text
from .inside import PARAMETRIZATIONS
from .noted import NotedSteps, Operator, calls_text, tensors_of
from .occasions import LARGE_EVALUATION, LOADER_BEGINS, collections_text
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
    "evaluation": LARGE_EVALUATION,
}
_OF_ALL = 0.5
"""What part of such a share a part has of the median step at least: the shortest tenths are of different steps."""
_LARGE_UNTRAINED_LOSS = 0.10
"""For a loss that has hardly any backward: what it does beside is no loss."""
_LARGE_BETWEEN, _BRIEF = 0.15, 0.5
"""For the time between calls if nothing is trained, in which the model does nothing at all; and times what is too short
there, and for loops over parameters, as it is known what they are."""
_REGULAR = 0.38
"""Share of its median that this time has at least in 9 of 10 steps, if it is work: that had 0.43 to 0.74, and times
between 40 requests that come at random 0.26 to 0.34, of more 0.15."""
_WAITS = ("data loading", "communication")
"""Parts whose medians count, of communication alone."""
_IS_WAIT = 0.5
"""Share of the median step from which on time outside of modules counts as they do: what stops threads is in all."""
_LOSS_BACKWARD = 10
"""A loss with a longer backward, in times of its forward, is no loss."""
_LARGE_LOOP = 0.05
"""For a loop over parameters beside the optimizer, for which torch._foreach needs few operators: as for saving, since
it is known what it is."""
_LARGE_BY_CHOICE = 0.20
"""For an optimizer with hooks, or with a group for each tensor: there is something to change."""
_MANY_GROUPS, _IN_GROUP = 32, 2
"""From how many groups on, and below how many tensors in each: rates that differ by layer make groups of six and more.
For each group an optimizer begins anew."""
_LARGE_ONE_BY_ONE = 0.08
"""For one that was told to update tensors one by one, which foreach=True undoes: real programs have 6 % at least."""
_MANY_OPTIMIZERS = 8
"""From how many on the same holds: one with all tensors in its groups does as much."""
_FLATTEN = ("LBFGS",)
"""Those of torch that make one tensor of all, and loop over what they know of earlier steps."""
_LARGE_BY_DEFAULT = 0.50
"""For one that updates them so on a CPU, as torch does: tiny models have up to 40 %."""
_LARGE_BESIDE = 0.15
"""For what is in that part beside the steps of optimizers, which go over each parameter more often."""
_LARGE_RANGE = 0.30
"""For a range of the user's, who named it: it is likely part of the work."""
_MOST_STEPS = 0.5
"""How often a module has to run in a step, for its time to be that of steps."""
_ALWAYS = 3
"""How often a module has to build a graph in vain for it to do so always: what is counted needs no usual time."""
_SAME_WORK = 2.0
"""How many times as long as those with a backward forwards without a graph take at most if they compute the same again,
once for each of these: who plays, or generates, calls the model more often, or with other batches."""
_LOOP_CALLS, _SHORT_NS, _LOOP_SHARE = 32, 1_000_000, 0.2
"""Calls in a call of the module around, the forward of each, and their share of the median step: layers that share
their parameters are called up to 24 times, what solves an equation or denoises takes longer, and a module with a few
operators takes 0.1 ms to begin with."""
_CALLS_EACH = 2
"""How often each of several modules is called at least on average."""
_HOST_SHARE, _BACKWARD_SHARE = 0.10, 0.2
"""Shares of the median step, and of a module's own forward: operators that compute have a backward of that size."""
_SURE_HOST_SHARE, _NO_BACKWARD_SHARE = 0.04, 0.05
"""The same of a module without inner ones that has hardly any backward, which no operator that trains explains: those
that add what inner ones return have none either."""
_BACKWARD_SHARE_OF_HOLDERS = 0.6
"""The same of a module that holds others: operators between them, as those of attention, have a longer backward than
forward. Only what exceeds that counts."""
_LARGE_PARAMETRIZED = 0.05
"""Share of the median step, as for loops over parameters: it is known what it is."""
_HOST_SHARE_OF_CALLS = 0.25
"""The same if nothing is trained, of modules whose inner modules have modules: the others may call operators."""


def find_large_parts(measured: Measured, notes: NotedSteps, explained: Container[str | None]) -> Iterator[Finding]:
    """Yield the parts with a large share of the steps, but for those that are explained."""
    if measured.steps < LEAST_STEPS:
        return
    gap_ns = measured.gap_ns.sum(axis=1)
    step_ns, low_step_ns = measured.duration_ns + gap_ns, measured.low_step_ns(gaps=True)
    beside = _beside_optimizers(measured, notes)
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
        per_step = float(np.median(took))
        between = part == OTHER and float(np.median(gap_ns)) > per_step / 2
        least = _LARGE_BETWEEN if between else _least_share(measured, notes, part, per_step)
        is_known = between or (least == _LARGE_LOOP and part in ("loss", OTHER))
        if is_untrained := part == "loss" and 0 < np.median(alone_ns) < _BACKWARD_SHARE * per_step:
            least = _LARGE_UNTRAINED_LOSS
        # As for modules: a busy machine makes what has many operators longer than it is.
        low_ns, least_ns = float(np.percentile(took, 10)), measured.brief_ns * (_BRIEF if is_known else 1)
        is_large = part != "communication" and low_ns >= max(least * low_step_ns, least_ns)
        is_large &= per_step >= _OF_ALL * least * float(np.median(step_ns))
        # Some steps wait for nothing, as it is there already.
        is_wait = part in _WAITS or (part == OTHER and not between and per_step >= _IS_WAIT * float(np.median(step_ns)))
        is_large |= is_wait and per_step >= max(least * float(np.median(step_ns)), least_ns)
        # A server waits for requests, which come irregularly.
        is_large &= not between or low_ns >= _REGULAR * per_step
        if is_large and part not in explained:
            evidence = f"{short_ms(per_step)} of {short_ms(float(np.median(step_ns)))} (medians)"
            for fqn, percent in notes.largest.items():
                evidence += f"; {percent}% of the parameters' values are those of {fqn}" * (part == "optimizer")
            lines = notes.lines_text(part, per_step)
            if part != OTHER or between or not lines:
                evidence += _details(measured, part, float(np.median(alone_ns)), between=between)
            # If some steps have none of it, neither have some that were looked at.
            at_times = notes.longest_gap_text(part, per_step) if low_ns < _OF_ALL * per_step else ""
            evidence += f"; {lines}" if lines else at_times
            own_ns = per_step - float(np.median(alone_ns))
            is_loop = notes.is_loop(own_ns, 0) or notes.is_over_parameters(own_ns, tensors_of(measured.optimizers))
            if part == OTHER or is_untrained or (part == "loss" and is_loop):
                losses = [row.fqn for row in measured.rows if part == "loss" and row.module_class.endswith("Loss")]
                in_losses = [notes.inside[fqn][0] for fqn in losses if fqn in notes.inside]
                evidence += notes.outside_text(own_ns, tensors_of(measured.optimizers), in_losses)
            if part == "optimizer" and not any(
                one.get("how") or one.get("class") in _FLATTEN for one in measured.optimizers
            ):
                evidence += notes.own_optimizer_text(tensors_of(measured.optimizers))
            yield _large_part(measured, part, per_step, evidence, between=between)


def _least_share(measured: Measured, notes: NotedSteps, part: str, per_step: float) -> float:
    """Return from which share of a step on a part is large."""
    if part not in (*PARTS, OTHER):
        return _LARGE_RANGE
    if part == "optimizer":
        optimizers = measured.optimizers
        if any("foreach=False" in str(one.get("how")) for one in optimizers):
            return _LARGE_ONE_BY_ONE
        has_choice = any(one.get("hooks") or _has_small_groups(one) for one in optimizers)
        if has_choice or measured.first_tensors >= _MANY_OPTIMIZERS:
            return _LARGE_BY_CHOICE
        if any(one.get("how") == "one by one" for one in optimizers):
            return _LARGE_BY_DEFAULT
    tensors = tensors_of(measured.optimizers)
    is_loop = part == OTHER and notes.is_loop(per_step, tensors)
    if part == "loss" and np.median(measured.of_part(OTHER)) < per_step / 2:
        is_loop = notes.is_over_parameters(per_step, tensors)
    return _LARGE_LOOP if is_loop else _LARGE.get(part, np.inf)


def _large_part(measured: Measured, part: str, per_step: float, evidence: str, *, between: bool) -> Finding:
    """Return the finding of a large part; `between`: it is mostly between calls."""
    ranges, is_range = measured.ranges_of(part), part not in (*PARTS, OTHER)
    where = part if is_range else ranges[0].range if ranges and part not in ("gc", OTHER) else None
    what = f"{part} takes a large share"
    if part == OTHER:
        place = "between calls, outside of modules and ranges," if between else "outside of modules and ranges (other)"
        what = f"time {place} takes a large share"
    elif is_range:
        what = "takes a large share"
    elif where is not None and where.endswith(".load"):
        what = "loading what was saved takes a large share"
    show = "--ranges" if ranges and part != OTHER else "--by step"
    finding = measured.finding(what, where, part, evidence=evidence, show=show, ns=per_step, gaps=True)
    return finding._replace(next="modtrace ranks slow DIR") if part == "communication" else finding


def _details(measured: Measured, part: str, alone_ns: float, *, between: bool) -> str:
    """Say what a part was spent on, after its figures; `alone_ns`: what of it is backward outside of modules."""
    ranges = measured.ranges_of(part)
    match part:
        case "data loading":
            waits = any("MultiProcessing" in each.range for each in ranges)
            text = ", waiting for the loader's workers" if waits else ", work of the training process: no workers"
            begun = sum(each.calls for each in ranges if each.range.endswith(LOADER_BEGINS)) / measured.steps
            anew = f"; the loader begins anew {times_text(begun)} a step: it shuffles, and starts its workers, again"
            return text + (anew if begun >= _MOST_STEPS else "")
        case "loss" if alone_ns:
            return f", {short_ms(alone_ns)} of it in backward, outside of modules"
        case "optimizer" | "saving" | "loss" if ranges:
            said = [_described(one) for one in measured.optimizers if part == "optimizer"]
            if said and (count := measured.first_tensors) >= _MANY_OPTIMIZERS:
                said = [f"{count:,} optimizers or more; {said[0]}"]
            said += [f"{each.range} {short_ms(each.total_ns / max(each.calls, 1))} a call" for each in ranges[:2]]
            return "".join(f"; {each}" for each in said)
        case "communication":
            operators = measured.summary.overview.communication if measured.summary.overview else {}
            a_step = [Operator(name, total.calls / measured.steps, 0.0) for name, total in operators.items()]
            often = [each for each in a_step if each.calls >= _MOST_STEPS]
            text = f", for what is sent, or for other ranks; a step has {calls_text(often)}" if often else ""
            in_backward = f"; {short_ms(alone_ns)} of it in backward passes, in no module's backward"
            return text + (in_backward if alone_ns else "") + _accumulation_text(measured, often)
        case "other" if between:
            return ": what the program prepares, or waits for"
        case "other":
            after = max(measured.other_ns, key=lambda name: measured.other_ns[name])
            return f"; {measured.other_ns[after] / (sum(measured.other_ns.values()) or 1):.0%} of it follows {after}"
        case "evaluation":
            return measured.graph_of_evaluations
        case "gc":
            return f"; {collections_text(measured)}"
    return ""


def _accumulation_text(measured: Measured, often: Sequence[Operator]) -> str:
    """Say how often DistributedDataParallel runs in a step, if it is more than once, and collectives are as many."""
    runs = [
        int(backed)
        for row, backed in zip(measured.rows, measured.runs.backed, strict=True)
        if row.module_class == "DistributedDataParallel"
    ]
    times = max(runs, default=0) / measured.steps
    if times < 2 or not any(each.calls >= times for each in often):
        return ""
    return (
        f"; the model runs {times_text(times)} a step: if gradients are summed up, no_sync() leaves these to the last"
    )


def _beside_optimizers(measured: Measured, notes: NotedSteps) -> Finding | None:
    """Return that clipping, a scheduler or the like, the longest of them, takes a large share of the steps."""
    for each in measured.ranges_of("optimizer"):
        calls = each.calls / measured.steps
        per_step = each.p50_ns * calls
        is_step = each.range.endswith(".step") and not each.range.startswith("LRScheduler.")
        zeros = notes.zeros if "zero_grad" in each.range else []
        least = _LARGE_LOOP if calls >= _MANY_OPTIMIZERS or zeros else _LARGE_BESIDE
        if not is_step and per_step >= max(least * measured.usual_ns, measured.brief_ns):
            evidence = f"{times_text(calls)} a step, {short_ms(each.p50_ns)} each (median)"
            evidence += ": a loop, where one call takes all parameters" if calls >= _MANY_OPTIMIZERS else ""
            evidence += f"; it runs {calls_text(zeros)}: set_to_none=True, torch's default, fills none" if zeros else ""
            what, where, part = "takes a large share", each.range, "optimizer"
            return measured.finding(what, where, part, evidence=evidence, show="--ranges", ns=per_step)
    return None


def _backward_alone(measured: Measured, part: str) -> Int64Array:
    """Return int64[steps], how long backward passes last while no module's backward runs: of the loss, or waiting.

    It is no loss if there are other ranks to wait for, or if passes over kept graphs may differentiate gradients, and
    waiting only beside what counts as communication already.
    """
    steps, with_ranks = measured.summary.steps.counted.columns, bool(measured.ranges_of("communication"))
    is_kept = part == "loss" and measured.runs.passes_again.sum() >= _MOST_STEPS * measured.steps
    is_known = len(steps.step) == measured.steps and part in ("loss", "communication") and not is_kept
    if not is_known or with_ranks == (part == "loss"):
        return np.zeros(measured.steps, np.int64)
    own_ns = measured.of_part("backward") + measured.of_part("recompute") if with_ranks else steps.backward_pass_ns
    return np.asarray(np.maximum(own_ns - steps.backward_ns - steps.recompute_ns, 0))


def _has_small_groups(optimizer: Mapping[str, Any]) -> bool:
    groups, tensors = int(optimizer.get("groups", 0)), int(optimizer.get("tensors", 0))
    return groups >= _MANY_GROUPS and tensors < _IN_GROUP * groups


def _described(optimizer: Mapping[str, Any]) -> str:
    """Say how an optimizer updates how many tensors, and whether its step has hooks: what is known of that."""
    tensors, how, hooks = (optimizer.get(name) for name in ("tensors", "how", "hooks"))
    said: str = optimizer.get("class", "an optimizer")
    said += f" updates {counted(tensors, 'tensor')} {how}" if tensors is not None and how else ""
    said += f" in {optimizer['groups']:,} groups, of which one can have all" if _has_small_groups(optimizer) else ""
    return said + (f" and has {counted(hooks, 'hook')}" if hooks else "")


def find_host_time(measured: Measured, notes: NotedSteps) -> Iterator[Finding]:
    """Yield modules whose own forward is long and whose own backward is short: they run Python, or wait."""
    if measured.steps < LEAST_STEPS:
        return
    rows, trains, hold = measured.rows, measured.trains, measured.holders
    compose = {outer for around in measured.outer.values() for outer in around[1:]}
    own_ns, waits_ns = measured.own_low_ns, _waits_in_forward(measured)
    by_place: dict[tuple[str, str], list[int]] = {}
    for index, row in enumerate(rows):
        if (
            measured.calls[index] >= _MOST_STEPS
            # On a CPU random numbers take longer than all else: 0.05 of it in backward.
            and "Drop" not in row.module_class
            and (measured.runs.backed[index] if trains else row.fqn in compose)
            and row.backward_self_ns
            < (_BACKWARD_SHARE_OF_HOLDERS if row.fqn in hold else _BACKWARD_SHARE)
            * (measured.runs.own_ns[index] - measured.stops_ns(index))
            and not measured.is_wrapper(row)
        ):
            by_place.setdefault((place_of(measured, row.fqn), row.module_class), []).append(index)
    for (place, module_class), members in by_place.items():
        each = [min(max(own_ns[index], 0.0), measured.runs.own_ns[index] / max(measured.steps, 1)) for index in members]
        own_backward_ns = sum(rows[index].backward_self_ns for index in members) / measured.steps
        own_forward_ns = per_step = sum(each) - waits_ns
        ratio = own_backward_ns * measured.steps / max(int(measured.runs.own_ns[members].sum()), 1)
        per_step *= 1 if ratio < _BACKWARD_SHARE else 1 - ratio
        is_sure = ratio < _NO_BACKWARD_SHARE and hold.isdisjoint(rows[index].fqn for index in members)
        least = _HOST_SHARE_OF_CALLS if not trains else _SURE_HOST_SHARE if is_sure else _HOST_SHARE
        if per_step < max(least * measured.usual_ns, measured.brief_ns * measured.looks):
            continue
        first = rows[members[int(np.argmax(each))]]
        several = f" in {len(members)} modules {place} ({module_class})" if len(members) > 1 else ""
        evidence = f"own forward {short_ms(own_forward_ns)} a step{several}" + (
            f", own backward {short_ms(own_backward_ns)}: Python or waiting"
            if trains
            else f" of {short_ms(measured.usual_ns)}, between inner modules: operators of its own, Python or waiting"
        )
        evidence += f"; {hooked}" if (hooked := notes.hooks_text(first.fqn)) else ""
        what = f"spends host time in its own forward, outside of inner modules{' and operators' if trains else ''}"
        yield measured.finding(what, first.fqn, "forward", evidence=evidence, show=only_option(place), ns=per_step)


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
    # Of compiled autograd no nodes are seen: its backward may be that of any graph.
    is_unseen = not measured.runs.backed.any() and measured.of_part("backward").any()
    for index, row in enumerate(measured.rows):
        calls, backed, unused, alone_ns, backed_ns = (int(each[index]) for each in measured.runs[:5])
        per_step = alone_ns / measured.steps
        if per_step < max(measured.least_ns, measured.brief_ns):
            continue
        unused *= row.fqn not in measured.casts
        if not is_unseen and not backed and unused >= max(_MOST_STEPS * max(calls, measured.steps), _ALWAYS):
            yield _unused_graph(measured, row, calls, alone_ns)
        if not measured.trains or not 0 < backed < calls:
            continue
        alone = calls - backed
        times = alone_ns / alone * backed / max(backed_ns, 1)
        is_same = _MOST_STEPS * measured.steps <= alone <= backed and 1 / _SAME_WORK <= times <= _SAME_WORK
        if named.isdisjoint(measured.outer[row.fqn]) and (unused or is_same):
            evidence = (
                f"forward {times_text(calls / measured.steps)} a step, backward {times_text(backed / measured.steps)}; "
                f"forwards without a backward take {short_ms(alone_ns / alone)} each"
            )
            what = "runs forward more often than backward"
            yield measured.finding(what, row.fqn, "forward", evidence=evidence, show="--tree", ns=per_step)
        named.add(row.fqn)
    yield from _passes_again(measured)
    yield from _recompute(measured)
    yield from _loops(measured)
    yield from _parametrizations(measured)


def _passes_again(measured: Measured) -> Iterator[Finding]:
    """Yield the outermost modules whose graph is kept for one more backward pass in most steps."""
    runs = measured.runs
    columns = (each.tolist() for each in (runs.backed, runs.passes_again, runs.passes_again_ns))
    for row, backed, again, ns in zip(measured.rows, *columns, strict=True):
        per_step = ns / measured.steps
        if again >= _MOST_STEPS * measured.steps and per_step >= max(measured.least_ns, measured.brief_ns):
            evidence = (
                f"forward {times_text(backed / measured.steps)} a step, backward "
                f"{times_text((backed + again) / measured.steps)}: its graph is kept (retain_graph, create_graph) for "
                f"more, of {short_ms(ns / again)} each; one is enough for losses that are added before, "
                "and detach() keeps one out of what it does not train"
            )
            what = "runs backward more often than forward"
            yield measured.finding(what, row.fqn, "backward", evidence=evidence, show="--tree", ns=per_step)


def _parametrizations(measured: Measured) -> Iterator[Finding]:
    """Yield that weights are computed from others in each call, though nothing is trained that changes them."""
    known = [
        index
        for index, row in enumerate(measured.rows)
        if PARAMETRIZATIONS in row.fqn and "." not in row.fqn.rpartition(PARAMETRIZATIONS)[2]
    ]
    per_step = float(measured.step_ns[known].sum())
    if measured.runs.backed.any() or per_step < max(_LARGE_PARAMETRIZED * measured.usual_ns, measured.brief_ns):
        return
    longest = measured.rows[max(known, key=lambda index: measured.step_ns[index])].fqn
    evidence = f"{counted(len(known), 'weight')}, {short_ms(per_step)} a step, though nothing is trained: "
    evidence += "parametrize.remove_parametrizations(), or parametrize.cached() around calls, computes them once"
    what, where = "computes its parametrized weights in each call", longest.rpartition(PARAMETRIZATIONS)[0]
    show = only_option(f"*{PARAMETRIZATIONS}*")
    yield measured.finding(what, where, "forward", evidence=evidence, show=show, ns=per_step)


def _loops(measured: Measured) -> Iterator[Finding]:
    """Yield the outermost modules that are called many times, for a short time each, in each call of one around.

    Where none is around, it is in each step, of modules that train: a policy that plays waits for its next input.
    """
    calls_of = {row.fqn: float(calls) for row, calls in zip(measured.rows, measured.calls, strict=True)}
    by_place: dict[str, list[int]] = {}
    for index, row in enumerate(measured.rows):
        if measured.outer[row.fqn] or measured.runs.backed[index] >= _MOST_STEPS * measured.runs.calls[index]:
            by_place.setdefault(place_of(measured, row.fqn), []).append(index)
    named: set[str] = set()
    for place, members in sorted(by_place.items(), key=lambda item: item[0].count(".")):
        rows, calls = [measured.rows[index] for index in members], float(measured.calls[members].sum())
        per_step, around = float(measured.step_ns[members].sum()), measured.outer[rows[0].fqn]
        holders = {fqn for row in rows for fqn in measured.outer[row.fqn][:1]}
        times = calls / max(sum(calls_of[fqn] for fqn in holders), 1e-9) if holders else calls
        a_call = sum(row.forward_ns for row in rows) / max(sum(row.calls for row in rows), 1)
        # As for parts: a busy machine makes a mean several times as long.
        a_call *= min(1.0, float(measured.low_ns[members].sum()) / max(per_step, 1.0))
        # A list of many layers that follow each other is no loop: each is called once.
        is_list = times < _CALLS_EACH * len(rows) / max(len(holders), 1)
        if times < _LOOP_CALLS or is_list or a_call > _SHORT_NS or per_step < _LOOP_SHARE * measured.usual_ns:
            continue
        if named.isdisjoint(around):
            evidence = f"a call of {around[0]} calls it" if around else "a step calls it"
            evidence += f" {times_text(times)}, {short_ms(a_call)} each in forward"
            evidence += f" ({len(rows)} modules {place})" if len(rows) > 1 else ""
            evidence += ": a loop in Python, of which fewer and larger calls take less"
            first, what = max(rows, key=lambda row: row.in_steps_ns), "is called in a loop, for a short time each"
            yield measured.finding(what, first.fqn, "forward", evidence=evidence, show=only_option(place), ns=per_step)
        named.update(row.fqn for row in rows)


def _unused_graph(measured: Measured, row: ModuleTimes, calls: int, forward_ns: int) -> Finding:
    evidence = f"forward {times_text(calls / measured.steps)} a step, {short_ms(forward_ns / calls)} each, and never a "
    evidence += "backward: under torch.no_grad() it takes less time and memory"
    around = measured.outer[row.fqn]
    evidence += f"; no loss needs what it computes in {around[0]}" if around else ""
    what = "builds a graph that no backward pass uses"
    return measured.finding(what, row.fqn, "forward", evidence=evidence, show=only_option(row.fqn))


def _recompute(measured: Measured) -> Iterator[Finding]:
    total_ns = int(measured.of_part("recompute").sum())
    per_step = total_ns / max(measured.steps, 1)
    if not total_ns or per_step < measured.least_ns:
        return
    overview = measured.summary.overview
    whole = overview.recomputed if overview is not None else {}
    again = {row.fqn: row for row in measured.rows if row.recompute_ns and row.module_class in whole}
    outermost = [row for fqn, row in again.items() if again.keys().isdisjoint(measured.outer.get(fqn, ()))]
    places: dict[str, list[str]] = {}
    for row in outermost:
        places.setdefault(place_of(measured, row.fqn), []).append(row.fqn)
    names = [place if fqns[1:] else fqns[0] for place, fqns in places.items()]
    evidence = f"checkpointing runs {', '.join(names[:3])} again: {short_ms(per_step)} a step"
    rows = measured.summary.memory.rows if measured.summary.memory is not None else ()
    saves = sum(
        max(0, (row.retained_recompute_bytes or 0) - (row.retained_bytes or 0))
        for row in rows
        if row.fqn in again and again.keys().isdisjoint(measured.outer.get(row.fqn, ()))
    )
    evidence += f", and saves about {format_bytes(saves)}" if saves else ""
    where = outermost[0].fqn if outermost else None
    what, show = "runs again in backward (recompute)", "--sort recompute"
    yield measured.finding(what, where, "recompute", evidence=evidence, show=show, ns=per_step)
