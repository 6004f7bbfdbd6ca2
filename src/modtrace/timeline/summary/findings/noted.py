"""Rules for the notes of sampled steps, see `STEP_NOTES`: operators outside modules, hooks, settings, float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...._tables import counted
from ...contents import FLOAT64, OPTIMIZERS, STEP_NOTES
from ..slow_steps import short_ms
from .finding import Finding, RuleInput, only_option, python_slowness, whole_text

_MANY_CALLS = 8
"""Minimum number of an operator's calls in a step for a loop; a loss, or torch's own clipping, calls few operators."""
_MANY_IN_LOOP = 64
"""Number of calls in a step that make a loop certain, if there are more parameters, or if their number is not known."""
_MAX_CALLS_PER_PARAMETER = 4
"""Maximum number of an operator's calls for each parameter, unless their number is an exact multiple."""
_MIN_TENSORS_OF_MULTIPLE = 16
"""Minimum number of parameters for such a multiple to be no chance, as it is with 6 of them in a loop over samples."""
_MAX_OTHER_TENSORS = 0.1
"""Maximum number of other tensors, such as buffers, in a loop over parameters: a share of the parameters."""
_MIN_OVER_PARAMETERS_SHARE = 0.5
"""Minimum share of the frequent operators' time in operators that run for each parameter, for a loop over these."""
_COPIES = frozenset({"clone", "copy_", "to", "_to_copy"})
_MIN_SAMPLES = 3
"""Minimum number of sampled steps for a setting to be called always on: a profiler or debugger is on in fewer."""
_ENGINE_OPERATORS = frozenset({"sum", "add", "add_", "view"})
"""Operators that torch itself runs between nodes, to add up gradients."""
_MIN_OPERATOR_SHARE = 0.3
"""Minimum share of a time that operators have if they are its cause: calling them can cost the same again."""
_PYTHON_TEXT = "hardly any of it in operators of torch: Python, or waiting"
_OPERATOR_CALL_NS = 20_000
"""Maximum Python time in ns to call an operator, or a node, on a busy machine, times `python_slowness`."""
_MODULE_CALL_NS = 50_000
"""Maximum Python time in ns to call a module, on the same machine and times the same factor."""
_MIN_GAP_SHARE = 0.3
"""Minimum share of a time between two lines of the program for these lines to be reported."""
_MIN_SLOW_GAP_SHARE = 0.5
"""Minimum share of the mean excess of slow steps between two lines for these lines to be reported."""
_MIN_HOOKS_SHARE = 0.05
"""Minimum share of the median step for hooks, which watch the computation and are no part of it."""
_FORWARD_PER_BACKWARD = 0.5
"""Ratio of forward to backward time for the operators of a module that holds others, such as attention."""
_GROWTH_INTERVALS = 3
"""Number of intervals of growth."""
_MIN_STEADY_SHARE = 0.5
"""Minimum share of the fastest growth in each interval: growth of caches slows down."""
MIN_GROWTH = 1 << 20
"""Minimum growth in bytes a step, with a list that grows too."""
_MIN_STEADY_SHARE_AT_END = 0.75
"""Minimum share of the fastest growth in the last interval, half of all steps: varying sizes add half as much."""
_MIN_NEW_SHARE = 0.4
"""Minimum share of steps with an optimizer known to be new for a finding: recordings know half of them or more."""
_MIN_UNTRAINED_SHARE = 0.05
"""Minimum share of the median step for unused gradients."""
_PARAMETER_GRADIENT_SHARE = 0.5
"""Minimum share of unused gradients in a module's own backward."""
MIN_SAME_INPUTS = 0.5
"""Minimum number of calls in a step with the inputs of an earlier one, for a finding: most steps have one."""
FLOAT64_TITLE = "computes in float64, most others do not"
_FLOAT32_SAVING = 0.5
"""Share of the time in float64 that float32 saves."""
_MIN_FLOAT64_SHARE = 0.05
"""Minimum share of the median step for modules that compute in float64 if most do not."""


MOVES = _COPIES | {"contiguous", "float", "double", "half", "bfloat16", "type", "repeat", "repeat_interleave", "tile"}
"""Operators that only copy or convert."""
_MAX_NOTED_MODULES = 64
"""Maximum number of modules whose operators a recording notes."""


class Operator(NamedTuple):
    """An operator of torch, with its mean number of calls and time in a step."""

    name: str
    calls: float
    ns: float


class Gap(NamedTuple):
    """Time in a step between two lines of the program, in no module, backward pass or range."""

    first_line: str
    ended: str  # event at the first line: end of "forward", "backward" or "step", or of a range: its category
    last_line: str
    begun: str  # event at the last line: start of the same
    part: str  # part of the step: "loss" or "other"
    ns: int  # median of the sampled steps
    longest_ns: int  # maximum of the sampled steps

    def to_text(self) -> str:
        """Return a phrase with the lines."""
        ended, begun = ("range" if event == "user" else event for event in (self.ended, self.begun))
        if self.first_line == self.last_line:
            return f"between {ended} and {begun} at {self.first_line}"
        return f"between {self.first_line} ({ended}) and {self.last_line} ({begun})"


class NotedSteps:
    """The notes of a recording on its sampled steps, as means of a step.

    Attributes:
        operator_call_ns: maximum Python time to call an operator.
        module_call_ns: maximum Python time to call a module.
        is_counted: whether operators outside modules were counted.
        outside_operators: operators outside modules, backward passes and optimizers, the longest first.
        module_operators: by module, the operators that it calls: their sum, the sum of float64, then the longest.
        has_all_modules: whether `module_operators` has all modules that call any.
        in_optimizers: operators in optimizers, by torch's names.
        zero_fills: operators in optimizers that fill gradients with zeros.
        gaps: longest times between modules, backward passes and ranges.
        slow_gaps: these times, and such times of slow steps.
        forward_hooks: by module, number of forward hooks.
        largest_percent: percent of all parameters' values that one module has, if most, by its name.
        gradient_hooks: number of hooks of gradients.
        float64_modules: modules with parameters of float64.
        is_all_float64: whether all parameters are of float64.
        float64_table_modules: modules with other tensors of float64.
        casts_per_step: number of gradients that a backward pass casts, such as after a product with a float64 table.
        same_inputs: by module, number of calls in a step with the inputs of an earlier one.
        untrained_modules: modules whose parameters could get gradients, but belong to no optimizer.
        size_percent: by module in a list, percent of its siblings' usual number of parameters, if it has another.
        mode_dependent_modules: modules that drop values, or normalize them by batch.
        always_on: settings that slow a program and were on in each sampled step.
        growth_bytes: growth of the process's memory in bytes a step; 0 if it is not steady.
        list_growth: by name of a list or the like that grows as steadily, number of new values a step.
        tensor_growth: the same of tensors that modules or the program hold.
        in_hooks: operators in backward passes outside nodes, except torch's own.
        hooks_ns: time of a backward pass outside its nodes and torch's calls of these, in a step.
    """

    def __init__(self, notes: Mapping[str, Any], samples_per_step: float = 1.0) -> None:
        """Divide notes by steps; a sample is a step, or one of `samples_per_step` model calls, as in a `generate`."""
        steps, operators = notes.get("steps", 0), notes.get("operators", {})
        sampled_steps = steps / samples_per_step
        slowness = python_slowness(notes)
        self.operator_call_ns, self.module_call_ns = _OPERATOR_CALL_NS * slowness, _MODULE_CALL_NS * slowness
        self.outside_operators = _operators(operators.get("outside", ()), sampled_steps)
        inside: Mapping[str, Sequence[tuple[str, int, int]]] = notes.get("inside", {})
        by_module = {fqn: _operators(rows, sampled_steps) for fqn, rows in inside.items()}
        self.module_operators = {fqn: rows for fqn, rows in by_module.items() if rows and not rows[0].name}
        self.has_all_modules = len(inside) < _MAX_NOTED_MODULES
        self.gaps = _gaps(notes.get("gaps", ()), steps)
        self.slow_gaps = [*self.gaps, *_gaps(notes.get("slow_gaps", ()), 1)]
        self.in_optimizers = _operators(operators.get("in_optimizers", ()), steps)
        self.zero_fills = [operator for operator in self.in_optimizers if operator.name in ("zero_", "_foreach_zero_")]
        in_passes = {operator.name: operator for operator in _operators(operators.get("in_passes", ()), steps)}
        self.is_counted = "outside" in operators and bool(self.outside_operators or in_passes)
        nodes, with_hooks = in_passes.pop("nodes", None), in_passes.pop("nodes and hooks", None)
        self.hooks_ns = 0.0
        if nodes and with_hooks:
            engine_ns = sum(in_passes[name].ns for name in _ENGINE_OPERATORS & in_passes.keys())
            self.hooks_ns = max(0.0, with_hooks.ns - nodes.ns - engine_ns - self.operator_call_ns * nodes.calls)
        self.in_hooks = [operator for name, operator in in_passes.items() if name not in _ENGINE_OPERATORS]
        self.forward_hooks: Mapping[str, int] = notes.get("hooks", {})
        self.largest_percent: Mapping[str, int] = notes.get("largest", {})
        self.gradient_hooks: int = notes.get("gradient_hooks", 0)
        settings = notes.get("settings", {})
        self.always_on = {name for name, count in settings.items() if steps >= _MIN_SAMPLES and count == steps}
        self.growth_bytes = _steady_growth(notes.get("resident", ()))
        self.list_growth = _list_growth(notes.get("lengthen", {}))
        self.tensor_growth = _list_growth(notes.get("tensors_lengthen", {}))
        self.float64_modules: Sequence[str] = notes.get("doubles", ())
        self.is_all_float64 = 0 < notes.get("parameters", 0) == notes.get("float64_parameters", 0)
        self.float64_table_modules: Sequence[str] = notes.get("tables", ())
        self.casts_per_step = sum(in_passes[name].calls for name in ("to", f"to{FLOAT64}") if name in in_passes)
        same: Mapping[str, int] = notes.get("same_inputs", {})
        self.same_inputs = {fqn: count / sampled_steps for fqn, count in same.items() if steps > 0}
        self.untrained_modules: Sequence[str] = notes.get("untrained", ())
        self.size_percent: Mapping[str, int] = notes.get("size_percent", {})
        self.mode_dependent_modules: Sequence[str] = notes.get("drop", ())
        self._unlike: Sequence[str] = notes.get("unlike", ())

    def float64_share(self) -> float:
        """Return the share of the time of modules' operators that is in float64."""
        total_ns = sum(operators[0].ns for operators in self.module_operators.values())
        return sum(map(float64_ns, self.module_operators.values())) / max(total_ns, 1.0)

    def inside_text(self, fqn: str, calls: float) -> str:
        """Return a clause with the operators of a module in a call; empty if they are unknown, or fewer than two."""
        operators = self.module_operators.get(fqn, ())
        if not operators or operators[0].calls < 2 * calls:
            return ""
        longest = calls_text([operator for operator in operators[1:] if operator.name != FLOAT64], calls)
        return f"it runs {longest} itself in a call, in all {operators[0].calls / calls:,.4g} operators"

    def python_text(self, fqn: str, forward_ns: float) -> str:
        """Return a clause if hardly any of a module's own forward is in operators, and these were counted."""
        is_known = fqn in self.module_operators or (bool(self.module_operators) and self.has_all_modules)
        ns = sum(total.ns for total in self.module_operators.get(fqn, ())[:1])
        is_python = is_known and ns < _MIN_OPERATOR_SHARE * forward_ns
        return _PYTHON_TEXT if is_python else ""

    def has_siblings(self, pattern: str) -> bool:
        """Return whether most modules of a list pattern have one size, as far as known: stages do not."""
        return not any(f"{pattern}.".startswith(f"{unlike}.") for unlike in self._unlike)

    def frequent_outside(self) -> list[Operator]:
        """Return the operators that run often outside modules."""
        return [operator for operator in self.outside_operators if operator.calls >= _MANY_CALLS]

    def is_loop(self, ns: float, tensors: int) -> bool:
        """Return whether a loop explains the time `ns`, for example over the parameters of an optimizer."""
        # torch's clipping calls `to` for each norm, which is on the right device already.
        min_ns = _MIN_OPERATOR_SHARE * ns
        looped = [operator for operator in self.frequent_outside() if operator.name != "to" or operator.ns >= min_ns]
        is_many = any(operator.calls >= min(tensors or _MANY_IN_LOOP, _MANY_IN_LOOP) for operator in looped)
        # A call costs no more than its operator; if more time passes, another cause takes it.
        called_ns = sum(operator.ns + min(operator.ns, self.operator_call_ns * operator.calls) for operator in looped)
        return is_many and called_ns >= min_ns

    def is_over_parameters(self, ns: float, tensors: int) -> bool:
        """Return whether a loop over the parameters of an optimizer explains the time `ns`."""
        is_any_over = any(_is_over_parameters(operator.calls, tensors) for operator in self.frequent_outside())
        return is_any_over and self.is_loop(ns, tensors)

    def is_python_outside(self, ns: float) -> bool:
        """Return whether the time `ns` outside modules has few operators and short ones, if these were counted."""
        is_short = sum(operator.ns for operator in self.outside_operators) < _MIN_OPERATOR_SHARE * ns
        return self.is_counted and is_short and not self.frequent_outside()

    def growth_text(self, fqn: str) -> str:
        """Return a clause with the list or tensor of a module that grows fastest; empty if none does."""
        growths = {**self.list_growth, **self.tensor_growth}
        growths = {name: growth for name, growth in growths.items() if name.rpartition(".")[0] == fqn}
        grown = max(growths, key=lambda name: growths[name], default="")
        return f"; {grown} gets {round(growths[grown]):,} values more in each" if grown else ""

    def is_float64_outside(self, ns: float) -> bool:
        """Return whether float64 takes much of a time outside modules, unless all parameters are float64."""
        return not self.is_all_float64 and float64_ns(self.outside_operators) >= _MIN_OPERATOR_SHARE * ns > 0

    def outside_text(self, ns: float, tensors: int, in_modules: Sequence[Operator] = ()) -> str:
        """Return clauses with the operators of a time outside modules, or that it is Python if there are hardly any.

        `in_modules` are the operators of modules that have some of this time, such as losses.
        """
        if not self.is_counted:
            return ""
        min_ns = _MIN_OPERATOR_SHARE * ns
        is_python = sum(operator.ns for operator in (*self.outside_operators, *in_modules)) < min_ns
        operators = self.frequent_outside() or [
            operator for operator in self.outside_operators if operator.ns >= min_ns
        ]
        loop_ns = sum(operator.ns for operator in operators)
        text = f"; {_PYTHON_TEXT}" if is_python else ""
        if operators:
            text += f"; a step runs {calls_text(operators)} there, {short_ms(loop_ns)}"
        over_parameters = [operator for operator in operators if _is_over_parameters(operator.calls, tensors)]
        names = [operator.name for operator in over_parameters]
        # With few parameters another loop can run a multiple of their number by chance.
        ns_over_parameters = sum(operator.ns for operator in over_parameters)
        if not names or ns_over_parameters < _MIN_OVER_PARAMETERS_SHARE * loop_ns:
            return text + (": a loop" if any(operator.calls >= _MANY_IN_LOOP for operator in operators) else "")
        copies = _COPIES - {"to"} if is_python else _COPIES  # `to` that takes hardly any time copies nothing
        over = "copies of" if copies.intersection(names) else "for each of" if is_python else "a loop over"
        return f"{text}: {over} the {tensors:,} parameters"

    def own_optimizer_text(self, tensors: int) -> str:
        """Return a clause with the frequent operators of an optimizer that torch has no name for."""
        frequent = [operator for operator in self.in_optimizers if operator.calls >= _MANY_IN_LOOP]
        over = f"a loop over {tensors:,} parameters" if tensors else "a loop"
        text = f"; a step runs {calls_text(frequent)} there: {over}, for which torch._foreach needs few"
        return text if frequent else ""

    def lines_text(self, part: str, ns: float) -> str:
        """Return a phrase with the lines between which much of a part's time passes; empty if they are unknown."""
        longest = _longest(self.gaps, part, lambda gap: gap.ns)
        if longest is None or longest.ns < _MIN_GAP_SHARE * ns:
            return ""
        return f"{min(1.0, longest.ns / ns):.0%} of it {longest.to_text()}"

    def longest_gap_text(self, part: str, ns: float) -> str:
        """Return a clause with the lines between which a slow step spends most of a part, if one was sampled."""
        longest = _longest(self.slow_gaps, part, lambda gap: gap.longest_ns)
        if longest is None or longest.longest_ns < _MIN_SLOW_GAP_SHARE * ns:
            return ""
        return f"; {short_ms(longest.longest_ns)} of such a step {longest.to_text()}"

    def size_text(self, fqn: str) -> str:
        """Return a clause with a module's size relative to its siblings; empty if they have the same size."""
        return f"has {self.size_percent[fqn] / 100:.2g} times their parameters" if fqn in self.size_percent else ""

    def same_inputs_text(self, fqn: str) -> str:
        """Return a clause if a module gets the same inputs several times in most steps."""
        return "with the same inputs" if self.same_inputs.get(fqn, 0.0) >= MIN_SAME_INPUTS else ""

    def hooks_text(self, fqn: str) -> str:
        """Return a clause with the number of a module's forward hooks; empty if it has none."""
        return f"has {counted(self.forward_hooks[fqn], 'forward hook')}" if fqn in self.forward_hooks else ""


def program_facts(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts about a program in a recording besides times, each as a text to compare."""
    optimizers = [optimizer for optimizer in metadata.get(OPTIMIZERS, ()) if "stepped" not in optimizer]
    known = [optimizer for optimizer in optimizers if optimizer.keys() >= {"class", "how"}]
    texts = dict.fromkeys(f"{optimizer['class']} ({optimizer['how']})" for optimizer in known)
    facts = {"optimizer": ", ".join(texts)} if texts else {}
    notes: Mapping[str, Any] = metadata.get(STEP_NOTES, {})
    if values := notes.get("parameters"):
        facts["parameters"] = f"{values:,} values{', some of float64' if notes.get('doubles') else ''}"
    if notes.get("steps", 0) >= _MIN_SAMPLES:
        facts["anomaly detection"] = "on" if "anomaly detection" in NotedSteps(notes).always_on else "off"
        facts["hooks of gradients"] = f"{notes.get('gradient_hooks', 0):,}"
    return facts


def _longest(gaps: Iterable[Gap], part: str, ns: Callable[[Gap], float]) -> Gap | None:
    return max((gap for gap in gaps if gap.part == part), key=ns, default=None)


def _operators(rows: Sequence[tuple[str, int, int]], steps: float) -> list[Operator]:
    return [Operator(name, calls / steps, ns / steps) for name, calls, ns in rows if steps > 0]


def _gaps(rows: Sequence[tuple[Any, ...]], steps: int) -> list[Gap]:
    """Return gaps with the lower median of the sampled steps, some of which may lack a gap."""
    return [
        Gap._make((*where, sorted([*ns, 0], reverse=True)[min(steps // 2, len(ns))], max(ns, default=0)))
        for *where, ns in rows
        if steps > 0 and all(where)
    ]


def _steady_growth(resident: Sequence[tuple[int, int]]) -> int:
    """Return the growth of memory in bytes a step if it is about the same in the last intervals; otherwise 0."""
    step, size = np.array(resident[1:][-1 - _GROWTH_INTERVALS :], np.float64).reshape(-1, 2).T
    if len(step) <= _GROWTH_INTERVALS or np.any(np.diff(step) <= 0):
        return 0
    growth = np.diff(size) / np.diff(step)
    is_steady = (
        growth.min() >= max(MIN_GROWTH, _MIN_STEADY_SHARE * growth.max())
        and growth[-1] >= _MIN_STEADY_SHARE_AT_END * growth.max()
    )
    return int(np.median(growth)) if is_steady else 0


def _list_growth(lengths: Mapping[str, Sequence[tuple[int, int]]]) -> dict[str, float]:
    """Return by name the number of new values a step, of what grows by about the same in the last intervals."""
    growths = {}
    for name, samples in lengths.items():
        step, length = np.array(samples[-1 - _GROWTH_INTERVALS :], np.float64).reshape(-1, 2).T
        if len(step) > _GROWTH_INTERVALS and np.all(np.diff(step) > 0):
            growth = np.diff(length) / np.diff(step)
            if growth.min() >= _MIN_STEADY_SHARE * growth.max() > 0:
                growths[name] = float(np.median(growth))
    return growths


def float64_ns(operators: Sequence[Operator]) -> float:
    """Return the time of operators on float64: of the entry with their sum, if there is one."""
    doubles = {operator.name: operator.ns for operator in operators if operator.name.endswith(FLOAT64)}
    return doubles.get(FLOAT64, sum(doubles.values()))


def _is_over_parameters(calls: float, tensors: int) -> bool:
    """Return whether an operator with `calls` a step runs for each parameter, and for few other tensors."""
    is_multiple = tensors >= _MIN_TENSORS_OF_MULTIPLE and calls % tensors == 0
    is_for_each = calls <= _MAX_CALLS_PER_PARAMETER * tensors or is_multiple
    return 0 < tensors <= calls and is_for_each and calls / tensors % 1 <= _MAX_OTHER_TENSORS


def calls_text(operators: Sequence[Operator], calls: float = 1.0) -> str:
    """Return the number of calls of the first three operators, divided by `calls` of a module."""
    return ", ".join(f"{whole_text(operator.calls / calls)} × {operator.name}" for operator in operators[:3])


def tensors_of(optimizers: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of tensors that the largest of the optimizers updates; 0 if it is unknown."""
    return max((optimizer.get("tensors", 0) for optimizer in optimizers), default=0)


def find_noted(rule_input: RuleInput, notes: NotedSteps) -> Iterator[Finding]:
    """Yield findings from notes: settings, hooks, new optimizers, float64 and unused gradients."""
    if not rule_input.trains:
        yield from _find_training_mode(rule_input, notes)
        return
    show, ns_per_step = "--by step", notes.hooks_ns
    if "torch.profiler" in notes.always_on:
        evidence = "a profiler that records each step makes all of them slower; give it a schedule"
        yield rule_input.finding("torch.profiler is on in each step", evidence=evidence, show=show)
    if "anomaly detection" in notes.always_on:
        title = "anomaly detection is on in each step"
        evidence = (
            "torch.autograd.set_detect_anomaly: each operator keeps a stack, and each gradient is searched for NaN"
        )
        yield rule_input.finding(title, None, "backward", evidence=evidence, show=show, ns=ns_per_step)
    elif notes.gradient_hooks and ns_per_step >= _MIN_HOOKS_SHARE * rule_input.median_step_ns:
        evidence = f"{counted(notes.gradient_hooks, 'hook')} of parameters' gradients: {short_ms(ns_per_step)} a step"
        frequent = [operator for operator in notes.in_hooks if operator.calls >= _MANY_CALLS]
        evidence += f", which run {calls_text(frequent)}" if frequent else ""
        title = "hooks of gradients take a large share"
        yield rule_input.finding(title, None, "backward", evidence=evidence, show=show, ns=ns_per_step)
    new_optimizers = rule_input.optimizer_count - rule_input.first_tensor_count
    if new_optimizers > _MIN_NEW_SHARE * rule_input.run_steps:
        evidence = f"{new_optimizers:,} times or more in {counted(rule_input.run_steps, 'step')}, for the same "
        evidence += "parameters: its state, such as momentum, is lost and allocated again"
        names = (range_times.range for range_times in rule_input.ranges_of("optimizer"))
        where = next((name for name in names if name.endswith(".step")), None)
        title = "an optimizer is made anew in each step"
        yield rule_input.finding(title, where, "optimizer", evidence=evidence, show=show)
    yield from _find_forward_hooks(rule_input, notes)
    yield from _find_doubles(rule_input, notes)
    yield from _find_untrained(rule_input, notes)


def _find_training_mode(rule_input: RuleInput, notes: NotedSteps) -> Iterator[Finding]:
    """Yield a finding if dropout or a batch norm is in training mode although nothing is trained."""
    active = [
        index
        for index, row in enumerate(rule_input.rows)
        if row.fqn in notes.mode_dependent_modules and rule_input.call_counts.calls[index]
    ]
    if not active or rule_input.call_counts.calls_with_backward.any():
        return
    first, ns_per_step = rule_input.rows[active[0]], float(rule_input.module_median_ns[active].sum())
    where = (rule_input.outer[first.fqn] or [first.fqn])[-1]
    effect = "normalize by each batch" if "Norm" in first.module_class else "drop values"
    evidence = f"{counted(len(active), 'module')}, such as {first.fqn}, {effect} though nothing is trained: "
    evidence += "model.eval() was not called"
    title, show = "runs in training mode", only_option(first.fqn)
    yield rule_input.finding(title, where, "forward", evidence=evidence, show=show, ns=ns_per_step)


def _find_forward_hooks(rule_input: RuleInput, notes: NotedSteps) -> Iterator[Finding]:
    """Yield a finding if modules with forward hooks have longer forwards than their backward makes likely."""
    hooks_ns: dict[str, float] = {}
    for index, row in enumerate(rule_input.rows):
        if row.fqn in notes.forward_hooks and rule_input.call_counts.calls_with_backward[index]:
            forward_ns, backward_ns = rule_input.own_ns(index)
            inner = float(rule_input.inner_calls[index])
            expected_ns = backward_ns * (_FORWARD_PER_BACKWARD if inner else 1.0)
            calling_ns = notes.module_call_ns * (float(rule_input.calls[index]) + inner)
            hooks_ns[row.fqn] = max(0.0, forward_ns - expected_ns - calling_ns)
    ns_per_step = sum(hooks_ns.values())
    if not hooks_ns or ns_per_step < _MIN_HOOKS_SHARE * rule_input.median_step_ns:
        return
    longest = max(hooks_ns, key=lambda fqn: hooks_ns[fqn])
    evidence = f"{counted(len(hooks_ns), 'module')} with forward hooks {'take' if len(hooks_ns) > 1 else 'takes'} "
    evidence += f"{short_ms(ns_per_step)} a step more than their backward suggests, most of it in {longest}"
    title, show = "has a forward hook that takes long", only_option(longest)
    yield rule_input.finding(title, longest, "forward", evidence=evidence, show=show, ns=ns_per_step)


def _find_untrained(rule_input: RuleInput, notes: NotedSteps) -> Iterator[Finding]:
    """Yield a finding if parameters get gradients that no optimizer uses."""
    own_ns = {row.fqn: rule_input.own_ns(index)[1] for index, row in enumerate(rule_input.rows)}
    untrained_ns = {fqn: own_ns[fqn] for fqn in notes.untrained_modules if fqn in own_ns}
    ns_per_step = _PARAMETER_GRADIENT_SHARE * sum(untrained_ns.values())
    if not untrained_ns or ns_per_step < _MIN_UNTRAINED_SHARE * rule_input.median_step_ns:
        return
    longest = max(untrained_ns, key=lambda fqn: untrained_ns[fqn])
    evidence = f"own backward of {counted(len(untrained_ns), 'module')} with parameters that no optimizer has: "
    evidence += f"{short_ms(sum(untrained_ns.values()))} a step; requires_grad_(False) would save at least half of it"
    title, show = "gets gradients that no optimizer uses", "--sort backward"
    yield rule_input.finding(title, longest, "backward", evidence=evidence, show=show, ns=ns_per_step)


def _find_doubles(rule_input: RuleInput, notes: NotedSteps) -> Iterator[Finding]:
    """Yield findings for computing in float64: by all parameters, by parameters of some modules, or by tables.

    Tables count only if gradients are cast.
    """
    index_of = {row.fqn: index for index, row in enumerate(rule_input.rows)}
    if notes.is_all_float64:
        outermost = [row for row in rule_input.rows if not rule_input.outer[row.fqn]]
        all_ns = float(sum(rule_input.module_median_ns[index_of[row.fqn]] for row in outermost))
        if _FLOAT32_SAVING * all_ns >= rule_input.min_ns:
            evidence = "all parameters are float64; modules that compute in it take "
            evidence += f"{short_ms(all_ns)} a step: float32 takes half or less, if its 7 digits are enough"
            longest = outermost[int(np.argmax([row.in_steps_ns for row in outermost]))].fqn
            title, ns_per_step = "computes in float64", _FLOAT32_SAVING * all_ns
            yield rule_input.finding(title, longest, evidence=evidence, show="--tree", ns=ns_per_step)
    tables = notes.float64_table_modules if notes.casts_per_step >= 1 else ()
    for fqns, noun, reason in (notes.float64_modules, "parameters", ""), (tables, "tables", ", and gradients are cast"):
        members = [index_of[fqn] for fqn in fqns if fqn in index_of]
        if not members or 2 * len(members) >= len(rule_input.rows) - len(rule_input.holders):
            continue
        is_whole = fqns is notes.float64_modules
        ns_of_modules = [
            float(rule_input.module_median_ns[index]) if is_whole else sum(rule_input.own_ns(index))
            for index in members
        ]
        if (ns_per_step := sum(ns_of_modules)) < _MIN_FLOAT64_SHARE * rule_input.median_step_ns:
            continue
        where = rule_input.rows[members[int(np.argmax(ns_of_modules))]].fqn
        evidence = f"{noun} of float64 in {counted(len(members), 'module')}, which take {short_ms(ns_per_step)} a step"
        show = only_option(where)
        yield rule_input.finding(FLOAT64_TITLE, where, evidence=evidence + reason, show=show, ns=ns_per_step)
