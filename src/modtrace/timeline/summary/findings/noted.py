"""Findings of the notes of few steps, see `STEP_NOTES`: operators in no module, hooks, anomaly detection, float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...._tables import counted
from ...contents import FLOAT64, OPTIMIZERS, STEP_NOTES
from ...memory import format_bytes
from ..slow_steps import short_ms
from .finding import TRACE, Finding, RuleInput, only_option, python_slowness, whole_text

_MANY_CALLS = 8
"""Minimum number of an operator's calls in a step for a loop; a loss, or torch's own clipping, calls few operators."""
_MANY_IN_LOOP = 64
"""Number of calls in a step that make a loop certain, if there are more parameters, or if their number is not known."""
_MAX_CALLS_PER_PARAMETER = 4
"""Number of calls in a step that make a loop certain if there are more parameters, or an unknown number of them."""
_MAX_OTHER_TENSORS = 0.1
"""Maximum number of other tensors, such as buffers, in a loop over parameters: a share of the parameters."""
_COPIES = frozenset({"clone", "copy_", "to", "_to_copy"})
_MIN_SAMPLES = 3
"""Minimum number of sampled steps for a setting to be called always on: a profiler or debugger is on in fewer."""
_ENGINE_OPERATORS = frozenset({"sum", "add", "add_", "view"})
"""Operators that torch itself runs between nodes, to add up gradients."""
_MIN_OPERATOR_SHARE = 0.3
"""Minimum share of a time that operators have if they are its cause: calling them can cost the same again."""
_PYTHON_TEXT = "hardly any of it in operators of torch: Python, or waiting"
_OPERATOR_CALL_NS, _MODULE_CALL_NS = 20_000, 50_000
"""Maximum Python time in ns to call an operator, or a module, on a busy machine, times `python_slowness`. A node costs
torch the same as an operator."""
_MIN_GAP_SHARE = 0.3
"""Minimum share of a time between two lines of the program for these lines to be reported."""
_MIN_SLOW_GAP_SHARE = 0.5
"""Minimum share of the mean excess of slow steps between two lines for these lines to be reported."""
_MIN_HOOKS_SHARE = 0.05
"""Minimum share of the median step for hooks, which watch the computation and are no part of it."""
_FORWARD_PER_BACKWARD = 0.5
"""Ratio of forward to backward time for the operators of a module that holds others, such as attention."""
_GROWTHS, _STEADY = 3, 0.5
"""Number of intervals in which memory has to grow, each time by this share of the fastest growth. Memory of allocators
and caches grows more and more slowly."""
_MIN_GROWTH, _MIN_SURE_GROWTH = 1 << 20, 2 << 20
"""Minimum growth in bytes a step, with a list that grows too, or without one. Varying sizes add up to 1.3 MiB a step,
the recording itself less than a tenth of that."""
_STEADY_AT_END = 0.75
"""Minimum share of the fastest growth for the last interval, half of all steps. Kept objects go on growing, while
varying sizes add half as much there."""
_MIN_NEW_SHARE = 0.4
"""Minimum share of steps with an optimizer known to be new, to say each step: at least half of new ones are known."""
_MIN_UNTRAINED_SHARE, _PARAMETER_GRADIENT_SHARE = 0.05, 0.5
"""Minimum share of the median step for gradients that no optimizer uses, and minimum share of a module's backward that
computes gradients of parameters."""
DOUBLES = "computes in float64, most others do not"
_FLOAT32_SAVING = 0.5
"""Share of the time in float64 that float32 saves."""
_MIN_DOUBLES_SHARE = 0.05
"""Minimum share of the median step for modules that compute in float64 if most do not."""


MOVES = _COPIES | {"contiguous", "float", "double", "half", "bfloat16", "type", "_to_copy", "repeat", "clone"}
"""Operators that copy or convert, and compute nothing."""
_MAX_NOTED_MODULES = 64
"""How many modules have their operators noted at most."""


class Operator(NamedTuple):
    """An operator of torch, with its calls and nanoseconds in a step."""

    name: str
    calls: float
    ns: float


class Gap(NamedTuple):
    """Two lines of the program, and how long a step is between them in no module, backward pass or range."""

    after: str
    ended: str  # what ends there: "forward", "backward", "step", or the category of a range
    before: str
    begun: str  # what begins there
    part: str  # of the step: "loss" or "other"
    ns: int
    longest_ns: int  # in one of the steps that were looked at

    def to_text(self) -> str:
        """Say where it is."""
        ended, begun = ("range" if kind == "user" else kind for kind in (self.ended, self.begun))
        if self.after == self.before:
            return f"between {ended} and {begun} at {self.after}"
        return f"between {self.after} ({ended}) and {self.before} ({begun})"


class NotedSteps:
    """Notes of a recording.

    Attributes:
        ns_of_operator: what Python takes at most to call an operator.
        ns_of_call: the same of a module.
        is_counted: whether operators were counted.
        outside: those outside of modules, backward passes and optimizers, the longest first.
        inside: of modules, those that they call themselves: all of them together, all of float64, then the longest.
        all_inside: whether all modules are in it that call any.
        in_optimizers: those in optimizers, as torch names these.
        zero_fills: those in optimizers that fill gradients with zeros.
        gaps: the longest times between modules, backward passes and ranges.
        slow_gaps: these, and those of slow steps.
        hooks: how many forward hooks modules have, by name.
        largest: what percent of all parameters' values one module has, if these are most, by name.
        gradient_hooks: how many hooks gradients have.
        doubles: the modules with parameters of float64.
        all_double: whether all parameters are of float64.
        tables: those with other tensors of float64.
        casts: how often a backward pass casts a gradient in a step, as of what was multiplied by a table of float64.
        untrained: those whose parameters could get gradients, though no optimizer has these.
        size_percent: in percent how many parameters modules in lists have of what most there have, if not as many.
        drop: those that drop some of what goes through them, or normalize it by batches.
        always_on: what slows a program and was on in each step that was looked at.
        grows: by how many bytes a step the process's memory grows; 0 if it does not, or not steadily.
        keeps: which lists and the like grow as steadily, and by how many values a step.
        in_hooks: the operators in backward passes outside of nodes, without those of torch itself.
        hooks_ns: what a backward pass takes beside its nodes, and what torch takes for these, in a step.
    """

    def __init__(self, notes: Mapping[str, Any], looks: float = 1.0) -> None:
        """Take notes, each of a look at one of so many `looks` in a step, as at a call of those of a `generate`."""
        steps, operators = notes.get("steps", 0), notes.get("operators", {})
        looked = steps / looks
        self.ns_of_operator, self.ns_of_call = (
            _OPERATOR_CALL_NS * python_slowness(notes),
            _MODULE_CALL_NS * python_slowness(notes),
        )
        self.outside = _operators(operators.get("outside", ()), looked)
        inside: Mapping[str, Sequence[tuple[str, int, int]]] = notes.get("inside", {})
        self.inside = {
            fqn: own for fqn, noted in inside.items() if (own := _operators(noted, looked)) and not own[0].name
        }
        self.all_inside = len(inside) < _MAX_NOTED_MODULES
        self.gaps = _gaps(notes.get("gaps", ()), steps)
        self.slow_gaps = [*self.gaps, *_gaps(notes.get("slow_gaps", ()), 1)]
        self.in_optimizers = _operators(operators.get("in_optimizers", ()), steps)
        self.zero_fills = [each for each in self.in_optimizers if each.name in ("zero_", "_foreach_zero_")]
        in_passes = {each.name: each for each in _operators(operators.get("in_passes", ()), steps)}
        self.is_counted = bool(self.outside or in_passes)
        nodes, with_hooks = in_passes.pop("nodes", None), in_passes.pop("nodes and hooks", None)
        self.hooks_ns = 0.0
        if nodes and with_hooks:
            of_engine_ns = sum(in_passes[name].ns for name in _ENGINE_OPERATORS & in_passes.keys())
            self.hooks_ns = max(0.0, with_hooks.ns - nodes.ns - of_engine_ns - self.ns_of_operator * nodes.calls)
        self.in_hooks = [each for name, each in in_passes.items() if name not in _ENGINE_OPERATORS]
        self.hooks: Mapping[str, int] = notes.get("hooks", {})
        self.largest: Mapping[str, int] = notes.get("largest", {})
        self.gradient_hooks: int = notes.get("gradient_hooks", 0)
        on = notes.get("settings", {})
        self.always_on = {name for name, count in on.items() if steps >= _MIN_SAMPLES and count == steps}
        self.grows = _steady_growth(notes.get("resident", ()))
        self.keeps = _lengthens(notes.get("lengthen", {}))
        self.doubles: Sequence[str] = notes.get("doubles", ())
        self.all_double = 0 < notes.get("parameters", 0) == notes.get("float64_parameters", 0)
        self.tables: Sequence[str] = notes.get("tables", ())
        self.casts = sum(in_passes[name].calls for name in ("to", f"to{FLOAT64}") if name in in_passes)
        self.untrained: Sequence[str] = notes.get("untrained", ())
        self.size_percent: Mapping[str, int] = notes.get("size_percent", {})
        self.drop: Sequence[str] = notes.get("drop", ())
        self._unlike: Sequence[str] = notes.get("unlike", ())

    def float64_share(self) -> float:
        """Return which share of the time of operators inside of modules is in float64."""
        return sum(map(float64_ns, self.inside.values())) / max(sum(own[0].ns for own in self.inside.values()), 1.0)

    def inside_text(self, fqn: str, calls: float) -> str:
        """Say which operators a module runs itself in a call; nothing if that is not known, or if it is one."""
        own = self.inside.get(fqn, ())
        if not own or own[0].calls < 2 * calls:
            return ""
        longest = calls_text([each for each in own[1:] if each.name != FLOAT64], calls)
        return f"it runs {longest} itself in a call, in all {own[0].calls / calls:,.4g} operators"

    def python_text(self, fqn: str, forward_ns: float) -> str:
        """Say that hardly any of so much own forward of a module is in operators, if these were counted."""
        is_known = fqn in self.inside or (bool(self.inside) and self.all_inside)
        ns = sum(one.ns for one in self.inside.get(fqn, ())[:1])
        is_python = is_known and ns < _MIN_OPERATOR_SHARE * forward_ns
        return _PYTHON_TEXT if is_python else ""

    def has_siblings(self, place: str) -> bool:
        """Whether most modules in a place of a list, or around it, have one size as far as known: stages do not."""
        return not any(f"{place}.".startswith(f"{other}.") for other in self._unlike)

    def loop(self) -> list[Operator]:
        """Return the operators that run often outside of modules."""
        return [each for each in self.outside if each.calls >= _MANY_CALLS]

    def is_loop(self, ns: float, tensors: int) -> bool:
        """Whether so much time is a loop, as over the parameters of an optimizer: each has an operator of its own."""
        # Clipping as torch does it asks for each norm to be on the first one's device, where it is.
        loop = [each for each in self.loop() if each.name != "to" or each.ns >= _MIN_OPERATOR_SHARE * ns]
        is_over = any(each.calls >= min(tensors or _MANY_IN_LOOP, _MANY_IN_LOOP) for each in loop)
        # What calls an operator takes no longer than it: else something else does.
        called_ns = sum(each.ns + min(each.ns, self.ns_of_operator * each.calls) for each in loop)
        return is_over and called_ns >= _MIN_OPERATOR_SHARE * ns

    def is_over_parameters(self, ns: float, tensors: int) -> bool:
        """Whether so much time is a loop over the parameters of an optimizer."""
        return self.is_loop(ns, tensors) and any(_is_over(each.calls, tensors) for each in self.loop())

    def outside_text(self, ns: float, tensors: int, beside: Sequence[Operator] = ()) -> str:
        """Say which operators run in a time outside of modules, and that it is Python if there are hardly any.

        If some of the time is in modules, as in those of losses, the operators of these are `beside`.
        """
        if not self.is_counted:
            return ""
        is_python = sum(each.ns for each in (*self.outside, *beside)) < _MIN_OPERATOR_SHARE * ns
        shown = self.loop() or [each for each in self.outside if each.ns >= _MIN_OPERATOR_SHARE * ns]
        text = f"; {_PYTHON_TEXT}" if is_python else ""
        text += f"; a step runs {calls_text(shown)} there, {short_ms(sum(each.ns for each in shown))}" if shown else ""
        each_tensor = [one.name for one in shown if _is_over(one.calls, tensors)]
        if not each_tensor:
            return text + (": a loop" if any(each.calls >= _MANY_IN_LOOP for each in shown) else "")
        copies = _COPIES - {"to"} if is_python else _COPIES  # in hardly any time it copies nothing
        over = "copies of" if copies.intersection(each_tensor) else "for each of" if is_python else "a loop over"
        return f"{text}: {over} the {tensors:,} parameters"

    def own_optimizer_text(self, tensors: int) -> str:
        """Say which operators an optimizer runs often, of which it is not known how it updates tensors."""
        often = [each for each in self.in_optimizers if each.calls >= _MANY_IN_LOOP]
        over = f"a loop over {tensors:,} parameters" if tensors else "a loop"
        return f"; a step runs {calls_text(often)} there: {over}, for which torch._foreach needs few" if often else ""

    def lines_text(self, part: str, ns: float) -> str:
        """Say between which lines much of the time of a part passes; nothing if that is not known."""
        longest = _longest(self.gaps, part, lambda gap: gap.ns)
        if longest is None or longest.ns < _MIN_GAP_SHARE * ns:
            return ""
        return f"{min(1.0, longest.ns / ns):.0%} of it {longest.to_text()}"

    def longest_gap_text(self, part: str, ns: float) -> str:
        """Say between which lines a slow step has most of so much time of a part, if one was looked at."""
        longest = _longest(self.slow_gaps, part, lambda gap: gap.longest_ns)
        if longest is None or longest.longest_ns < _MIN_SLOW_GAP_SHARE * ns:
            return ""
        return f"; {short_ms(longest.longest_ns)} of such a step {longest.to_text()}"

    def size_text(self, fqn: str) -> str:
        """Say how many times as many parameters as its siblings a module has; nothing if it has as many."""
        return f"has {self.size_percent[fqn] / 100:.2g} times their parameters" if fqn in self.size_percent else ""

    def hooks_text(self, fqn: str) -> str:
        """Say that a module has forward hooks; nothing if it has none."""
        return f"has {counted(self.hooks[fqn], 'forward hook')}" if fqn in self.hooks else ""


def program_facts(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return what a recording notes of its program beside times, each as a text that is another if the program is."""
    optimizers = [one for one in metadata.get(OPTIMIZERS, ()) if "stepped" not in one]
    kinds = dict.fromkeys(f"{one['class']} ({one['how']})" for one in optimizers if one.keys() >= {"class", "how"})
    facts = {"optimizer": ", ".join(kinds)} if kinds else {}
    notes: Mapping[str, Any] = metadata.get(STEP_NOTES, {})
    if values := notes.get("parameters"):
        facts["parameters"] = f"{values:,} values{', some of float64' if notes.get('doubles') else ''}"
    if notes.get("steps", 0) >= _MIN_SAMPLES:
        facts["anomaly detection"] = "on" if "anomaly detection" in NotedSteps(notes).always_on else "off"
        facts["hooks of gradients"] = f"{notes.get('gradient_hooks', 0):,}"
    return facts


def _longest(gaps: Iterable[Gap], part: str, ns: Callable[[Gap], float]) -> Gap | None:
    return max((gap for gap in gaps if gap.part == part), key=ns, default=None)


def _operators(noted: Sequence[tuple[str, int, int]], steps: float) -> list[Operator]:
    return [Operator(name, calls / steps, ns / steps) for name, calls, ns in noted if steps > 0]


def _gaps(noted: Sequence[tuple[Any, ...]], steps: int) -> list[Gap]:
    """Return gaps with the median of the steps that were looked at, the lower of two: some may have none of a gap."""
    return [
        Gap._make((*where, sorted([*times, 0], reverse=True)[min(steps // 2, len(times))], max(times, default=0)))
        for *where, times in noted
        if steps > 0 and all(where)
    ]


def _steady_growth(resident: Sequence[tuple[int, int]]) -> int:
    """Return how much memory grows in a step, if it grew by about as much in each of the last three times."""
    at, held = np.array(resident[1:][-1 - _GROWTHS :], np.float64).reshape(-1, 2).T
    if len(at) <= _GROWTHS or np.any(np.diff(at) <= 0):
        return 0
    growth = np.diff(held) / np.diff(at)
    is_steady = growth.min() >= max(_MIN_GROWTH, _STEADY * growth.max()) and growth[-1] >= _STEADY_AT_END * growth.max()
    return int(np.median(growth)) if is_steady else 0


def _lengthens(noted: Mapping[str, Sequence[tuple[int, int]]]) -> dict[str, float]:
    """Return the names of what got about as many values a step each time, and how many."""
    found = {}
    for name, looks in noted.items():
        at, length = np.array(looks[-1 - _GROWTHS :], np.float64).reshape(-1, 2).T
        if len(at) > _GROWTHS and np.all(np.diff(at) > 0):
            growth = np.diff(length) / np.diff(at)
            if growth.min() >= _STEADY * growth.max() > 0:
                found[name] = float(np.median(growth))
    return found


def float64_ns(own: Sequence[Operator]) -> float:
    """Return how long operators take that take tensors of float64: all of them, where these are noted together."""
    doubles = {each.name: each.ns for each in own if each.name.endswith(FLOAT64)}
    return doubles.get(FLOAT64, sum(doubles.values()))


def _is_over(calls: float, tensors: int) -> bool:
    """Whether an operator runs for each parameter equally often, and for few tensors beside."""
    is_for_each = (
        bool(tensors) and calls >= tensors and (calls <= _MAX_CALLS_PER_PARAMETER * tensors or calls % tensors == 0)
    )
    return is_for_each and calls / tensors % 1 <= _MAX_OTHER_TENSORS


def calls_text(operators: Sequence[Operator], calls: float = 1.0) -> str:
    """Say how often operators run: so many `calls` together."""
    return ", ".join(f"{whole_text(each.calls / calls)} × {each.name}" for each in operators[:3])


def tensors_of(optimizers: Sequence[Mapping[str, Any]]) -> int:
    """Return how many tensors the largest of some optimizers updates; 0 if that is not known."""
    return max((optimizer.get("tensors", 0) for optimizer in optimizers), default=0)


def find_noted(measured: RuleInput, notes: NotedSteps) -> Iterator[Finding]:
    """Yield hooks that take a large share, anomaly detection, and modules that compute in float64 unlike others."""
    yield from _growth(measured, notes)
    if not measured.trains:
        yield from _dropout(measured, notes)
        return
    by_step = f"modtrace summary {TRACE} --by step"
    if "torch.profiler" in notes.always_on:
        evidence = "a profiler that records each step makes all of them slower; give it a schedule"
        yield Finding("torch.profiler is on in each step", None, None, 0, 0.0, evidence, by_step)
    if "anomaly detection" in notes.always_on:
        evidence = (
            "torch.autograd.set_detect_anomaly: each operator keeps a stack, and each gradient is searched for NaN"
        )
        per_step = notes.hooks_ns
        what = "anomaly detection is on in each step"
        yield Finding(what, None, "backward", round(per_step), measured.share(per_step), evidence, by_step)
    elif notes.gradient_hooks and notes.hooks_ns >= _MIN_HOOKS_SHARE * measured.median_step_ns:
        evidence = (
            f"{counted(notes.gradient_hooks, 'hook')} of parameters' gradients: {short_ms(notes.hooks_ns)} a step"
        )
        often = [each for each in notes.in_hooks if each.calls >= _MANY_CALLS]
        evidence += f", which run {calls_text(often)}" if often else ""
        share = measured.share(notes.hooks_ns)
        yield Finding(
            "hooks of gradients take a large share", None, "backward", round(notes.hooks_ns), share, evidence, by_step
        )
    if (anew := measured.optimizer_count - measured.first_tensor_count) > _MIN_NEW_SHARE * measured.run_steps:
        evidence = f"{anew:,} times or more in {counted(measured.run_steps, 'step')}, for the same parameters: what it "
        evidence += "knows of earlier steps, such as momentum, is lost, and allocated again"
        where = next((each.range for each in measured.ranges_of("optimizer") if each.range.endswith(".step")), None)
        yield Finding("an optimizer is made anew in each step", where, "optimizer", 0, 0.0, evidence, by_step)
    yield from _forward_hooks(measured, notes)
    yield from _doubles(measured, notes)
    yield from _untrained(measured, notes)


def _growth(measured: RuleInput, notes: NotedSteps) -> Iterator[Finding]:
    """Yield that memory grows, and which list does; a cache of what is generated grows until the next begins."""
    if measured.memory or notes.grows < (_MIN_GROWTH if notes.keeps else _MIN_SURE_GROWTH):
        return
    if not measured.trains and not notes.keeps:
        return
    kept = max(notes.keeps, key=lambda name: notes.keeps[name], default="")
    evidence = f"the process holds about {format_bytes(notes.grows)} more after each step"
    evidence += f"; {kept} gets {notes.keeps[kept]:.3g} values more" if kept else ""
    where = next((row.fqn for row in measured.rows if row.fqn == kept.rpartition(".")[0]), None)
    what = "memory grows from step to step"
    yield Finding(what, where, None, 0, 0.0, evidence, "modtrace run --memory, which says who holds it")


def _dropout(measured: RuleInput, notes: NotedSteps) -> Iterator[Finding]:
    """Yield that dropout, or what normalizes by batches, is in training mode where nothing is trained."""
    known = [index for index, row in enumerate(measured.rows) if row.fqn in notes.drop and measured.runs.calls[index]]
    if not known or measured.runs.calls_with_backward.any():
        return
    first, per_step = measured.rows[known[0]], float(measured.module_median_ns[known].sum())
    where = (measured.outer[first.fqn] or [first.fqn])[-1]
    do = "normalize by each batch" if "Norm" in first.module_class else "drop values"
    evidence = f"{counted(len(known), 'module')}, such as {first.fqn}, {do} though nothing is trained: "
    evidence += "model.eval() was not called"
    command = f"modtrace summary {TRACE} {only_option(first.fqn)}"
    share = measured.share(per_step)
    yield Finding("runs in training mode", where, "forward", round(per_step), share, evidence, command)


def _forward_hooks(measured: RuleInput, notes: NotedSteps) -> Iterator[Finding]:
    """Yield that modules with forward hooks take longer than what they compute, as their backward shows."""
    taken: dict[str, float] = {}
    for index, row in enumerate(measured.rows):
        if row.fqn in notes.hooks and measured.runs.calls_with_backward[index]:
            forward_ns, backward_ns = measured.own_ns(index)
            inner = float(measured.inner_calls[index])
            usual = backward_ns * (_FORWARD_PER_BACKWARD if inner else 1.0)
            taken[row.fqn] = max(0.0, forward_ns - usual - notes.ns_of_call * (float(measured.calls[index]) + inner))
    per_step = sum(taken.values())
    if not taken or per_step < _MIN_HOOKS_SHARE * measured.median_step_ns:
        return
    longest = max(taken, key=lambda fqn: taken[fqn])
    evidence = f"{counted(len(taken), 'module')} with forward hooks {'take' if len(taken) > 1 else 'takes'} "
    evidence += f"{short_ms(per_step)} a step beside what their backward lets expect, most in {longest}"
    command = f"modtrace summary {TRACE} {only_option(longest)}"
    yield Finding(
        "has a forward hook that takes long",
        longest,
        "forward",
        round(per_step),
        measured.share(per_step),
        evidence,
        command,
    )


def _untrained(measured: RuleInput, notes: NotedSteps) -> Iterator[Finding]:
    """Yield that parameters get gradients that no optimizer uses."""
    own_ns = {row.fqn: measured.own_ns(index)[1] for index, row in enumerate(measured.rows)}
    taken = {fqn: own_ns[fqn] for fqn in notes.untrained if fqn in own_ns}
    per_step = _PARAMETER_GRADIENT_SHARE * sum(taken.values())
    if not taken or per_step < _MIN_UNTRAINED_SHARE * measured.median_step_ns:
        return
    longest = max(taken, key=lambda fqn: taken[fqn])
    evidence = f"own backward of {counted(len(taken), 'module')} with parameters that no optimizer has: "
    evidence += f"{short_ms(sum(taken.values()))} a step, of which requires_grad_(False) saves half or more"
    what, show = "gets gradients that no optimizer uses", "--sort backward"
    yield measured.finding(what, longest, "backward", evidence=evidence, show=show, ns=per_step)


def _doubles(measured: RuleInput, notes: NotedSteps) -> Iterator[Finding]:
    """Yield modules with parameters of float64, or, where gradients are cast, with tables of it; or that all are."""
    index_of = {row.fqn: index for index, row in enumerate(measured.rows)}
    if notes.all_double:
        outermost = [row for row in measured.rows if not measured.outer[row.fqn]]
        all_ns = float(sum(measured.module_median_ns[index_of[row.fqn]] for row in outermost))
        if _FLOAT32_SAVING * all_ns >= measured.min_ns:
            evidence = "all parameters are of float64, in which modules take "
            evidence += f"{short_ms(all_ns)} a step: float32 takes half or less, if its 7 digits are enough"
            where, show = outermost[int(np.argmax([row.in_steps_ns for row in outermost]))].fqn, "--tree"
            yield measured.finding(
                "computes in float64", where, evidence=evidence, show=show, ns=_FLOAT32_SAVING * all_ns
            )
    tables = notes.tables if notes.casts >= 1 else ()
    for fqns, kind, why in (notes.doubles, "parameters", ""), (tables, "tables", ", and gradients are cast"):
        known = [index_of[fqn] for fqn in fqns if fqn in index_of]
        if not known or 2 * len(known) >= len(measured.rows) - len(measured.holders):
            continue
        each = [
            float(measured.module_median_ns[at]) if fqns is notes.doubles else sum(measured.own_ns(at)) for at in known
        ]
        if (per_step := sum(each)) < _MIN_DOUBLES_SHARE * measured.median_step_ns:
            continue
        where = measured.rows[known[int(np.argmax(each))]].fqn
        evidence = f"{kind} of float64 in {counted(len(known), 'module')}, which take {short_ms(per_step)} a step{why}"
        show = only_option(where)
        yield measured.finding(DOUBLES, where, evidence=evidence, show=show, ns=per_step)
