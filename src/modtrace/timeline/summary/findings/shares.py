"""Rules for large shares of a step: parts, modules on the host, and work that runs more often than it must.

Minimum shares are of the median step, and of its 10th percentile where a rule compares 10th percentiles.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...._arrays import Int64Array
from ...._tables import counted
from ..module_rows import ModuleTimes
from ..parts import OTHER, PARTS
from ..slow_steps import short_ms
from .finding import MIN_STEPS_FOR_MEDIANS, Finding, RuleInput, only_option, times_text
from .inside import PARAMETRIZATIONS
from .noted import NotedSteps, Operator, calls_text, tensors_of
from .occasions import LOADER_START, MIN_EVALUATION_SHARE, collections_text
from .siblings import find_recompute, list_pattern

# Minimum share of a step by part. Without a fault, 41 real programs had 6 to 28 % in optimizers, up to 24 % in loaders
# and 1 to 3 % in losses. Communication is waiting: all of it is lost.
_MIN_PART_SHARE = {
    "data loading": 0.20,
    "optimizer": 0.30,
    "loss": 0.20,
    "communication": 0.10,
    OTHER: 0.20,
    "gc": 0.05,
    "saving": 0.05,
    "evaluation": MIN_EVALUATION_SHARE,
}
_MEDIAN_FACTOR = 0.5
"""Factor on the minimum share of a part for its median: 10th percentiles of part and step come from different steps."""
_MIN_UNTRAINED_LOSS_SHARE = 0.10
"""Minimum share of a loss with hardly any backward: such a part does other work than computing the loss."""
_MIN_BETWEEN_SHARE = 0.15
"""Minimum share of the time between calls if nothing is trained: the model is idle meanwhile."""
_KNOWN_CAUSE_FACTOR = 0.5
"""Factor on `min_ns` for time between calls and for loops over parameters, whose cause is known."""
_MIN_REGULARITY = 0.38
"""Minimum ratio of 10th percentile to median for work between calls: work had 0.43 to 0.74, waits 0.15 to 0.34."""
_WAIT_PARTS = ("data loading", "communication")
"""Parts that are judged by medians, as some steps need not wait; communication only by these."""
_WAIT_LIKE_SHARE = 0.5
"""Minimum share of `other` to be judged by medians too: all steps have shorter stops by the system."""
_MAX_LOSS_BACKWARD_RATIO = 10
"""Maximum ratio of backward to forward for a loss: a longer backward belongs to other operators outside modules."""
_MIN_PARAMETER_LOOP_SHARE = 0.05
"""Minimum share of a loop over parameters outside the optimizer, for which torch._foreach needs few operators."""
_MIN_PYTHON_SHARE = 0.10
"""Minimum share of `other` with hardly any operators, which is Python or waiting. Clipping calls many of them."""
_MIN_CHANGEABLE_OPTIMIZER_SHARE = 0.20
"""Minimum share of an optimizer with hooks or many small groups, which a user can change."""
_MANY_GROUPS = 32
"""Minimum number of groups of an optimizer for many small ones."""
_MAX_GROUP_TENSORS = 2
"""Limit of their mean number of tensors; rates by layer make groups of six."""
_MIN_FOREACH_OFF_SHARE = 0.08
"""Minimum share of an optimizer with foreach=False; in real programs it is at least 6 %."""
_MIN_OWN_LOADING_SHARE = 0.12
"""Minimum share of data loading without workers, which could take over; real programs had at most 8 %."""
_MIN_FLOAT64_LOSS_SHARE = 0.08
"""Minimum share of a loss whose operators compute in float64 in a model of float32: the cause is known."""
_MANY_OPTIMIZERS = 8
"""Minimum number of optimizers, or of calls of a helper such as clipping in a step, that one could replace."""
_FLATTENING_OPTIMIZERS = ("LBFGS",)
"""Optimizers of torch that join all tensors into one, and loop over their history of earlier steps."""
_MIN_ONE_BY_ONE_SHARE = 0.50
"""Minimum share of an optimizer that updates tensors one by one on a CPU, torch's default; tiny models reach 40 %."""
_MIN_HELPER_SHARE = 0.15
"""Minimum share of clipping, a scheduler or the like, which visits parameters less often than the optimizer."""
_MIN_RANGE_SHARE = 0.30
"""Minimum share of a range of the user, which is likely part of the work."""
_DDP = "DistributedDataParallel"
_MIN_PER_STEP = 0.5
"""Minimum mean count in a step of an event that most steps have."""
_MIN_UNUSED_RUNS = 3
"""Minimum number of unused graphs for a module that builds one in each run; counts need no usual time."""
_SAME_WORK_RATIO = 2.0
"""Maximum ratio of forward times with and without a graph for the same work, unlike rollouts and generations."""
_MIN_LOOP_CALLS = 32
"""Minimum number of calls in a call of the parent module: layers that share their parameters have up to 24."""
_MAX_LOOP_CALL_NS = 1_000_000
"""Maximum forward time of such a call in ns: a few operators take 0.1 ms, solving an equation or denoising far more."""
_MIN_CALL_LOOP_SHARE = 0.2
_MIN_MODULE_CALLS = 2
"""Minimum mean number of calls of each module in such a loop; the layers of a list are called once each."""
_MIN_HOST_SHARE = 0.10
"""Minimum share of host time in a module's own forward."""
_MAX_BACKWARD_RATIO = 0.2
"""Maximum ratio of own backward to own forward for host time: operators have a longer backward."""
_MIN_SURE_HOST_SHARE = 0.04
"""Minimum share of host time in modules without inner ones, whose time no trained operator explains."""
_MAX_NO_BACKWARD_RATIO = 0.05
"""Maximum ratio of own backward to own forward for such modules, which have hardly any backward."""
_MAX_HOLDER_BACKWARD_RATIO = 0.6
"""Maximum ratio for modules with inner ones, whose time is reduced by it: attention between these has a backward."""
_MIN_PARAMETRIZED_SHARE = 0.05
"""Minimum share of parametrized weights if nothing is trained: as for loops over parameters, the cause is known."""
_MIN_TRAINED_PARAMETRIZED_SHARE = 0.30
"""Minimum share of parametrized weights in training, which must compute them in each step."""
_MIN_UNTRAINED_HOST_SHARE = 0.25
"""Minimum share of host time if nothing is trained, only in modules with two levels inside: others run operators."""


def find_large_parts(rule_input: RuleInput, notes: NotedSteps, explained: Container[str | None]) -> Iterator[Finding]:
    """Yield a finding for each part with a large share of the steps, except the `explained` parts."""
    if rule_input.steps < MIN_STEPS_FOR_MEDIANS:
        return
    gap_ns = rule_input.gap_ns.sum(axis=1)
    step_ns, p10_step_ns = float(np.median(rule_input.duration_ns + gap_ns)), rule_input.p10_step_ns(gaps=True)
    tensors = tensors_of(rule_input.optimizers)
    helper = _find_large_optimizer_helper(rule_input, notes)
    if helper is not None:
        yield helper
    for part in rule_input.part_names:
        part_ns = rule_input.part_ns(part, gaps=True)
        if part == "optimizer" and helper is not None:
            part_ns = part_ns - helper.ns_per_step
        backward_ns = _backward_outside_modules(rule_input, part)
        if part == "loss":  # other operators outside modules have a backward too
            backward_ns[backward_ns > _MAX_LOSS_BACKWARD_RATIO * part_ns] = 0
        part_ns = part_ns + backward_ns
        ns_per_step, backward_ns_per_step = float(np.median(part_ns)), float(np.median(backward_ns))
        between = part == OTHER and float(np.median(gap_ns)) > ns_per_step / 2
        min_share = _MIN_BETWEEN_SHARE if between else _min_part_share(rule_input, notes, part, ns_per_step)
        is_float64 = part == "loss" and notes.is_float64_outside(ns_per_step - backward_ns_per_step)
        is_known = between or is_float64 or (min_share == _MIN_PARAMETER_LOOP_SHARE and part in ("loss", OTHER))
        if is_untrained := part == "loss" and 0 < backward_ns_per_step < _MAX_BACKWARD_RATIO * ns_per_step:
            min_share = _MIN_UNTRAINED_LOSS_SHARE
        if is_float64:
            min_share = min(min_share, _MIN_FLOAT64_LOSS_SHARE)
        # The 10th percentile, as for modules: a busy machine lengthens parts with many operators.
        p10_ns, min_ns = float(np.percentile(part_ns, 10)), rule_input.min_ns * (_KNOWN_CAUSE_FACTOR if is_known else 1)
        is_large = part != "communication" and p10_ns >= max(min_share * p10_step_ns, min_ns)
        is_large &= ns_per_step >= _MEDIAN_FACTOR * min_share * step_ns
        # Some steps do not wait, since the data or the other ranks are ready.
        is_wait = part in _WAIT_PARTS or (part == OTHER and not between and ns_per_step >= _WAIT_LIKE_SHARE * step_ns)
        is_large |= is_wait and ns_per_step >= max(min_share * step_ns, min_ns)
        # A server waits for requests, which come irregularly.
        is_large &= not between or p10_ns >= _MIN_REGULARITY * ns_per_step
        if is_large and part not in explained:
            evidence = f"{short_ms(ns_per_step)} of {short_ms(step_ns)} (medians)"
            if part == "optimizer":
                for fqn, percent in notes.largest_percent.items():
                    evidence += f"; {percent}% of the parameters' values are those of {fqn}"
            lines = notes.lines_text(part, ns_per_step)
            if part != OTHER or between or not lines:
                evidence += _details(rule_input, part, backward_ns_per_step, between=between)
            # If some steps have none of the part, some of the sampled steps may have none either.
            slow_lines = notes.longest_gap_text(part, ns_per_step) if p10_ns < _MEDIAN_FACTOR * ns_per_step else ""
            evidence += f"; {lines}" if lines else slow_lines
            forward_ns = ns_per_step - backward_ns_per_step
            is_loop = notes.is_loop(forward_ns, 0) or notes.is_over_parameters(forward_ns, tensors)
            if part == OTHER or is_untrained or is_float64 or (part == "loss" and is_loop):
                losses = [row.fqn for row in rule_input.rows if part == "loss" and row.module_class.endswith("Loss")]
                in_losses = [notes.module_operators[fqn][0] for fqn in losses if fqn in notes.module_operators]
                evidence += notes.outside_text(forward_ns, tensors, in_losses)
            evidence += "; it computes in float64, the model does not" if is_float64 else ""
            is_described = any(
                optimizer.get("how") or optimizer.get("class") in _FLATTENING_OPTIMIZERS
                for optimizer in rule_input.optimizers
            )
            if part == "optimizer" and not is_described:
                evidence += notes.own_optimizer_text(tensors)
            yield _make_finding(rule_input, part, ns_per_step, evidence, between=between)


def _min_part_share(rule_input: RuleInput, notes: NotedSteps, part: str, ns_per_step: float) -> float:
    if part not in (*PARTS, OTHER):
        return _MIN_RANGE_SHARE
    if part == "data loading" and not rule_input.has_workers:
        return _MIN_OWN_LOADING_SHARE
    if part == "optimizer":
        optimizers = rule_input.optimizers
        if any("foreach=False" in str(optimizer.get("how")) for optimizer in optimizers):
            return _MIN_FOREACH_OFF_SHARE
        is_changeable = any(optimizer.get("hooks") or _has_small_groups(optimizer) for optimizer in optimizers)
        if is_changeable or rule_input.first_tensor_count >= _MANY_OPTIMIZERS:
            return _MIN_CHANGEABLE_OPTIMIZER_SHARE
        if any(optimizer.get("how") == "one by one" for optimizer in optimizers):
            return _MIN_ONE_BY_ONE_SHARE
    tensors = tensors_of(rule_input.optimizers)
    is_loop = part == OTHER and notes.is_loop(ns_per_step, tensors)
    if part == "loss" and np.median(rule_input.part_ns(OTHER)) < ns_per_step / 2:
        is_loop = notes.is_over_parameters(ns_per_step, tensors)
    if part == OTHER and not is_loop and notes.is_python_outside(ns_per_step):
        return _MIN_PYTHON_SHARE
    return _MIN_PARAMETER_LOOP_SHARE if is_loop else _MIN_PART_SHARE.get(part, np.inf)


def _make_finding(rule_input: RuleInput, part: str, ns_per_step: float, evidence: str, *, between: bool) -> Finding:
    """Return the finding of a large part; `between`: most of its time is between calls."""
    ranges, is_range = rule_input.ranges_of(part), part not in (*PARTS, OTHER)
    where = part if is_range else ranges[0].range if ranges and part not in ("gc", OTHER) else None
    title = f"{part} takes a large share"
    if part == OTHER:
        location = "outside of modules and ranges"
        location = f"between calls, {location}," if between else f"{location} (other)"
        title = f"time {location} takes a large share"
    elif is_range:
        title = "takes a large share"
    elif where is not None and where.endswith(".load"):
        title = "loading what was saved takes a large share"
    show = "--ranges" if ranges and part != OTHER else "--by step"
    finding = rule_input.finding(title, where, part, evidence=evidence, show=show, ns=ns_per_step, gaps=True)
    return finding._replace(next="modtrace ranks slow DIR") if part == "communication" else finding


def _details(rule_input: RuleInput, part: str, backward_ns: float, *, between: bool) -> str:
    """Return clauses on the work of a part, after its figures; `backward_ns`: its backward outside modules."""
    ranges = rule_input.ranges_of(part)
    match part:
        case "data loading":
            work = (
                "waiting for the loader's workers"
                if rule_input.has_workers
                else "work of the training process: no workers"
            )
            text = f", {work}"
            loader_calls = [range_times.calls for range_times in ranges if range_times.range.endswith(LOADER_START)]
            starts = sum(loader_calls) / rule_input.steps
            if starts >= _MIN_PER_STEP:
                text += f"; the loader starts again {times_text(starts)} a step: "
                text += "it shuffles again, and starts new workers"
            return text
        case "loss" if backward_ns:
            return f", {short_ms(backward_ns)} of it in backward, outside of modules"
        case "optimizer" | "saving" | "loss" if ranges:
            clauses = [_description(optimizer) for optimizer in rule_input.optimizers if part == "optimizer"]
            if clauses and (count := rule_input.first_tensor_count) >= _MANY_OPTIMIZERS:
                clauses = [f"{count:,} optimizers or more; {clauses[0]}"]
            for range_times in ranges[:2]:
                mean_ns = range_times.total_ns / max(range_times.calls, 1)
                clauses.append(f"{range_times.range} {short_ms(mean_ns)} a call")
            return "".join(f"; {clause}" for clause in clauses)
        case "communication":
            totals = rule_input.communication.items()
            operators_per_step = [Operator(name, total.calls / rule_input.steps, 0.0) for name, total in totals]
            frequent = [operator for operator in operators_per_step if operator.calls >= _MIN_PER_STEP]
            text = f", to send data or wait for other ranks; a step has {calls_text(frequent)}" if frequent else ""
            in_backward = f"; {short_ms(backward_ns)} of it in backward passes, in no module's backward"
            is_ddp = any(row.module_class == _DDP for row in rule_input.rows)
            if is_ddp and any(operator.name == "broadcast" for operator in frequent):
                text += f"; {_DDP} broadcasts buffers in each forward, unless it has broadcast_buffers=False"
            return text + (in_backward if backward_ns else "") + _accumulation_text(rule_input, frequent)
        case _ if part == OTHER and between:
            return ": the program prepares its input, or waits"
        case _ if part == OTHER:
            ns_after = rule_input.other_ns_after
            previous = max(ns_after, key=lambda name: ns_after[name])
            return f"; {ns_after[previous] / (sum(ns_after.values()) or 1):.0%} of it follows {previous}"
        case "evaluation":
            return rule_input.graph_of_evaluations
        case "gc":
            return f"; {collections_text(rule_input)}"
    return ""


def _accumulation_text(rule_input: RuleInput, frequent: Sequence[Operator]) -> str:
    """Return a clause if DistributedDataParallel, and a collective with it, runs more than once in a step."""
    rows_and_calls = zip(rule_input.rows, rule_input.call_counts.calls_with_backward, strict=True)
    runs = [int(calls) for row, calls in rows_and_calls if row.module_class == _DDP]
    runs_per_step = max(runs, default=0) / rule_input.steps
    if runs_per_step < 2 or not any(operator.calls >= runs_per_step for operator in frequent):
        return ""
    text = f"; the model runs {times_text(runs_per_step)} a step: if gradients are accumulated, "
    return f"{text}no_sync() communicates only in the last pass"


def _find_large_optimizer_helper(rule_input: RuleInput, notes: NotedSteps) -> Finding | None:
    """Return a finding for the longest range such as clipping or a scheduler that has a large share of the steps."""
    for range_times in rule_input.ranges_of("optimizer"):
        calls = range_times.calls / rule_input.steps
        ns_per_step = range_times.p50_ns * calls
        is_step = range_times.range.endswith(".step") and not range_times.range.startswith("LRScheduler.")
        fills = notes.zero_fills if "zero_grad" in range_times.range else []
        min_share = _MIN_PARAMETER_LOOP_SHARE if calls >= _MANY_OPTIMIZERS or fills else _MIN_HELPER_SHARE
        if not is_step and ns_per_step >= max(min_share * rule_input.median_step_ns, rule_input.min_ns):
            evidence = f"{times_text(calls)} a step, {short_ms(range_times.p50_ns)} each (median)"
            evidence += ": a loop; one call can take all parameters" if calls >= _MANY_OPTIMIZERS else ""
            evidence += f"; it runs {calls_text(fills)}: set_to_none=True, torch's default, fills none" if fills else ""
            title, where, part = "takes a large share", range_times.range, "optimizer"
            return rule_input.finding(title, where, part, evidence=evidence, show="--ranges", ns=ns_per_step)
    return None


def _backward_outside_modules(rule_input: RuleInput, part: str) -> Int64Array:
    """Return int64[steps], ns of backward passes while no module's backward runs: of the loss, or of communication.

    With other ranks, this time is waiting. Otherwise it belongs to the loss, unless kept graphs are differentiated.
    """
    steps, with_ranks = rule_input.summary.steps.counted.columns, bool(rule_input.ranges_of("communication"))
    is_kept = part == "loss" and rule_input.call_counts.extra_passes.sum() >= _MIN_PER_STEP * rule_input.steps
    is_known = len(steps.step) == rule_input.steps and part in ("loss", "communication") and not is_kept
    if not is_known or with_ranks == (part == "loss"):
        return np.zeros(rule_input.steps, np.int64)
    pass_ns = rule_input.part_ns("backward") + rule_input.part_ns("recompute") if with_ranks else steps.backward_pass_ns
    return np.asarray(np.maximum(pass_ns - steps.backward_ns - steps.recompute_ns, 0))


def _has_small_groups(optimizer: Mapping[str, Any]) -> bool:
    groups, tensors = int(optimizer.get("groups", 0)), int(optimizer.get("tensors", 0))
    return groups >= _MANY_GROUPS and tensors < _MAX_GROUP_TENSORS * groups


def _description(optimizer: Mapping[str, Any]) -> str:
    """Return a clause with an optimizer's class, tensors, way to update them, and hooks, as far as known."""
    tensors, how, hooks = (optimizer.get(name) for name in ("tensors", "how", "hooks"))
    text: str = optimizer.get("class", "an optimizer")
    text += f" updates {counted(tensors, 'tensor')} {how}" if tensors is not None and how else ""
    text += f" in {optimizer['groups']:,} groups; one can hold all tensors" if _has_small_groups(optimizer) else ""
    return text + (f" and has {counted(hooks, 'hook')}" if hooks else "")


def find_host_time(rule_input: RuleInput, notes: NotedSteps) -> Iterator[Finding]:
    """Yield modules whose own forward is long and whose own backward is short: they run Python, or wait."""
    if rule_input.steps < MIN_STEPS_FOR_MEDIANS:
        return
    rows, trains, holders = rule_input.rows, rule_input.trains, rule_input.holders
    outer_holders = {fqn for fqns in rule_input.outer.values() for fqn in fqns[1:]}
    own_ns, waits_ns = rule_input.own_p10_ns, _waits_in_forward(rule_input)
    by_pattern: dict[tuple[str, str], list[int]] = {}
    for index, row in enumerate(rows):
        max_ratio = _MAX_HOLDER_BACKWARD_RATIO if row.fqn in holders else _MAX_BACKWARD_RATIO
        if (
            rule_input.calls[index] >= _MIN_PER_STEP
            # On a CPU, making random numbers dominates dropout: its backward is 0.05 of its forward.
            and "Drop" not in row.module_class
            and (rule_input.call_counts.calls_with_backward[index] if trains else row.fqn in outer_holders)
            and row.backward_self_ns
            < max_ratio * (rule_input.call_counts.own_forward_ns[index] - rule_input.stops_ns(index))
            and not rule_input.is_wrapper(row)
        ):
            by_pattern.setdefault((list_pattern(rule_input, row.fqn), row.module_class), []).append(index)
    for (pattern, module_class), members in by_pattern.items():
        forwards_ns = rule_input.call_counts.own_forward_ns[members]
        member_ns = np.minimum(np.maximum(own_ns[members], 0.0), forwards_ns / max(rule_input.steps, 1))
        own_backward_ns = sum(rows[index].backward_self_ns for index in members) / rule_input.steps
        own_forward_ns = ns_per_step = float(sum(member_ns)) - waits_ns
        ratio = own_backward_ns * rule_input.steps / max(int(forwards_ns.sum()), 1)
        ns_per_step *= 1 if ratio < _MAX_BACKWARD_RATIO else 1 - ratio
        is_sure = ratio < _MAX_NO_BACKWARD_RATIO and holders.isdisjoint(rows[index].fqn for index in members)
        trained_share = _MIN_SURE_HOST_SHARE if is_sure else _MIN_HOST_SHARE
        min_share = trained_share if trains else _MIN_UNTRAINED_HOST_SHARE
        if ns_per_step < max(min_share * rule_input.median_step_ns, rule_input.min_ns * rule_input.samples_per_step):
            continue
        first = rows[members[int(np.argmax(member_ns))]]
        several = f" in {len(members)} modules {pattern} ({module_class})" if len(members) > 1 else ""
        text = f", own backward {short_ms(own_backward_ns)}: Python or waiting"
        if not trains:
            step_text = short_ms(rule_input.median_step_ns)
            text = f" of {step_text}, between inner modules: operators of its own, Python or waiting"
        evidence = f"own forward {short_ms(own_forward_ns)} a step{several}{text}"
        evidence += f"; {hooks}" if (hooks := notes.hooks_text(first.fqn)) else ""
        title = f"spends host time in its own forward, outside of inner modules{' and operators' if trains else ''}"
        show = only_option(pattern)
        yield rule_input.finding(title, first.fqn, "forward", evidence=evidence, show=show, ns=ns_per_step)


def _waits_in_forward(rule_input: RuleInput) -> float:
    """Return the ns in a step's forward that modules wait for other ranks, in the part `communication`."""
    waits_ns = float(rule_input.part_ns("communication").mean())
    if not waits_ns:
        return 0.0
    forward_ns_per_call = [row.forward_self_ns / max(row.calls, 1) for row in rule_input.rows]
    forward_ns = float((rule_input.part_ns("forward") + rule_input.part_ns("loss")).mean())
    return min(waits_ns, max(0.0, float(np.dot(forward_ns_per_call, rule_input.calls)) - forward_ns))


def find_reruns(rule_input: RuleInput, notes: NotedSteps) -> Iterator[Finding]:
    """Yield modules that run more often than they must: extra runs, recompute, loops, parametrizations."""
    seen: set[str] = set()
    # Nodes of compiled autograd are not recorded: its backward may belong to any graph.
    is_unseen = not rule_input.call_counts.calls_with_backward.any() and rule_input.part_ns("backward").any()
    for index, row in enumerate(rule_input.rows):
        calls, backwards, unused, plain_ns, trained_ns = (int(values[index]) for values in rule_input.call_counts[:5])
        ns_per_step = plain_ns / rule_input.steps
        if ns_per_step < max(rule_input.min_share_ns, rule_input.min_ns):
            continue
        unused = 0 if row.fqn in rule_input.cast_modules else unused
        min_unused = max(_MIN_PER_STEP * max(calls, rule_input.steps), _MIN_UNUSED_RUNS)
        if not is_unseen and not backwards and unused >= min_unused:
            yield _make_unused_graph_finding(rule_input, row, calls, plain_ns)
        if not rule_input.trains or not 0 < backwards < calls:
            continue
        plain_calls = calls - backwards
        ratio = plain_ns / plain_calls * backwards / max(trained_ns, 1)
        is_same = 1 / _SAME_WORK_RATIO <= ratio <= _SAME_WORK_RATIO
        is_same &= _MIN_PER_STEP * rule_input.steps <= plain_calls <= backwards
        if seen.isdisjoint(rule_input.outer[row.fqn]) and (unused or is_same):
            forwards_text, backwards_text = (times_text(count / rule_input.steps) for count in (calls, backwards))
            evidence = f"forward {forwards_text} a step, backward {backwards_text}; "
            evidence += f"forwards without a backward take {short_ms(plain_ns / plain_calls)} each"
            share_text = "all" if unused >= plain_calls else "some"
            evidence += f"; {share_text} of these build a graph that no backward pass uses" if unused else ""
            evidence += f"; {same}" if (same := notes.same_inputs_text(row.fqn)) else ""
            title = "runs forward more often than backward"
            yield rule_input.finding(title, row.fqn, "forward", evidence=evidence, show="--tree", ns=ns_per_step)
        seen.add(row.fqn)
    yield from _find_extra_passes(rule_input)
    yield from find_recompute(rule_input)
    yield from _find_loops(rule_input)
    yield from _find_parametrizations(rule_input)


def _find_extra_passes(rule_input: RuleInput) -> Iterator[Finding]:
    """Yield the outermost modules whose graph is kept for one more backward pass in most steps."""
    counts = rule_input.call_counts
    columns = (values.tolist() for values in (counts.calls_with_backward, counts.extra_passes, counts.extra_pass_ns))
    for row, backwards, extra, ns in zip(rule_input.rows, *columns, strict=True):
        ns_per_step = ns / rule_input.steps
        if extra >= _MIN_PER_STEP * rule_input.steps and ns_per_step >= max(rule_input.min_share_ns, rule_input.min_ns):
            evidence = (
                f"forward {times_text(backwards / rule_input.steps)} a step, backward "
                f"{times_text((backwards + extra) / rule_input.steps)}: its graph is kept (retain_graph, create_graph) "
                f"for more, of {short_ms(ns / extra)} each; add the losses and call backward once, "
                "or detach() what a loss should not train"
            )
            title = "runs backward more often than forward"
            yield rule_input.finding(title, row.fqn, "backward", evidence=evidence, show="--tree", ns=ns_per_step)


def _find_parametrizations(rule_input: RuleInput) -> Iterator[Finding]:
    """Yield a finding if parametrized weights take long: each call computes them, also if nothing is trained."""
    weights = [
        index
        for index, row in enumerate(rule_input.rows)
        if PARAMETRIZATIONS in row.fqn and "." not in row.fqn.rpartition(PARAMETRIZATIONS)[2]
    ]
    ns_per_step = float(rule_input.module_median_ns[weights].sum())
    is_trained = bool(rule_input.call_counts.calls_with_backward.any())
    min_share = _MIN_TRAINED_PARAMETRIZED_SHARE if is_trained else _MIN_PARAMETRIZED_SHARE
    if ns_per_step < max(min_share * rule_input.median_step_ns, rule_input.min_ns):
        return
    longest = rule_input.rows[max(weights, key=lambda index: rule_input.module_median_ns[index])]
    where = longest.fqn.rpartition(PARAMETRIZATIONS)[0]
    evidence = f"{counted(len(weights), 'weight')}, {short_ms(ns_per_step)} a step, "
    if is_trained:
        inner = next((row for row in rule_input.rows if row.fqn.startswith(f"{longest.fqn}.")), longest)
        evidence += f"the longest by {inner.module_class}, forward and backward: a cheaper parametrization, or "
        evidence += "parametrize.cached() around several calls of a step, takes less"
    else:
        evidence += "though nothing is trained: parametrize.remove_parametrizations(), or parametrize.cached() around "
        evidence += "calls, computes them once"
    title, part = "computes its parametrized weights in each call", None if is_trained else "forward"
    show = only_option(f"*{PARAMETRIZATIONS}*")
    yield rule_input.finding(title, where, part, evidence=evidence, show=show, ns=ns_per_step)


def _find_loops(rule_input: RuleInput) -> Iterator[Finding]:
    """Yield the outermost modules that are called many times, for a short time each, in each call of their parent.

    A module without a parent counts by its calls in a step, if it trains: a policy's rollout waits for its next input.
    """
    calls_by_fqn = {row.fqn: float(calls) for row, calls in zip(rule_input.rows, rule_input.calls, strict=True)}
    by_pattern: dict[str, list[int]] = {}
    for index, row in enumerate(rule_input.rows):
        has_backward = (
            rule_input.call_counts.calls_with_backward[index] >= _MIN_PER_STEP * rule_input.call_counts.calls[index]
        )
        if rule_input.outer[row.fqn] or has_backward:
            by_pattern.setdefault(list_pattern(rule_input, row.fqn), []).append(index)
    in_loops: set[str] = set()
    for pattern, members in sorted(by_pattern.items(), key=lambda item: item[0].count(".")):
        rows, calls = [rule_input.rows[index] for index in members], float(rule_input.calls[members].sum())
        ns_per_step, outer = float(rule_input.module_median_ns[members].sum()), rule_input.outer[rows[0].fqn]
        parents = {fqn for row in rows for fqn in rule_input.outer[row.fqn][:1]}
        calls_per_parent = calls / max(sum(calls_by_fqn[fqn] for fqn in parents), 1e-9) if parents else calls
        call_ns = sum(row.forward_ns for row in rows) / max(sum(row.calls for row in rows), 1)
        # As for parts: a busy machine makes a mean several times as long.
        call_ns *= min(1.0, float(rule_input.p10_ns[members].sum()) / max(ns_per_step, 1.0))
        # A list of many layers that follow each other is not a loop: each is called once.
        is_list = calls_per_parent < _MIN_MODULE_CALLS * len(rows) / max(len(parents), 1)
        is_long = call_ns > _MAX_LOOP_CALL_NS
        is_cheap = ns_per_step < _MIN_CALL_LOOP_SHARE * rule_input.median_step_ns
        if calls_per_parent < _MIN_LOOP_CALLS or is_list or is_long or is_cheap:
            continue
        if in_loops.isdisjoint(outer):
            evidence = f"a call of {outer[0]} calls it" if outer else "a step calls it"
            evidence += f" {times_text(calls_per_parent)}, {short_ms(call_ns)} each in forward"
            evidence += f" ({len(rows)} modules {pattern})" if len(rows) > 1 else ""
            evidence += ": a loop in Python; fewer and larger calls would be faster"
            first, show = max(rows, key=lambda row: row.in_steps_ns), only_option(pattern)
            title = "is called in a loop, for a short time each"
            yield rule_input.finding(title, first.fqn, "forward", evidence=evidence, show=show, ns=ns_per_step)
        in_loops.update(row.fqn for row in rows)


def _make_unused_graph_finding(rule_input: RuleInput, row: ModuleTimes, calls: int, forward_ns: int) -> Finding:
    evidence = f"forward {times_text(calls / rule_input.steps)} a step, {short_ms(forward_ns / calls)} each, "
    evidence += "and never a backward: under torch.no_grad() it takes less time and memory"
    outer = rule_input.outer[row.fqn]
    evidence += f"; no loss needs what it computes in {outer[0]}" if outer else ""
    title = "builds a graph that no backward pass uses"
    return rule_input.finding(title, row.fqn, "forward", evidence=evidence, show=only_option(row.fqn))
