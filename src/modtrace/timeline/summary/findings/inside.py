"""Rules for the own work of modules, outside inner ones: kinds of torch operators, or Python."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ...contents import FLOAT64
from ...slices import MANY_NODES
from ..slow_steps import short_ms
from .finding import MIN_STEPS_FOR_MEDIANS, Finding, RuleInput, only_option
from .noted import FLOAT64_TITLE, MOVES, NotedSteps, Operator, calls_text, float64_ns
from .siblings import list_pattern

_MAX_SHORT_NS = 200_000
"""Maximum mean time in ns of an operator and its call for a loop: fewer rounds save nothing if each computes much."""
HOST_TIME = "spends host time in its own forward, outside of inner modules and operators"
_MIN_SHARE_FOR_MOST = 0.5
"""Minimum share of the time of a module's operators, or of its own forward, for most of it."""
_MIN_SHARE_FOR_MUCH = 0.3
"""Minimum share of the same time for much of it."""
_MAKERS = frozenset(
    {"arange", "eye", "full", "linspace", "meshgrid", "one_hot", "ones", "randperm", "tril", "triu", "tril_", "triu_"}
    | {"ones_like", "full_like", "masked_fill", "masked_fill_", "outer"}
)
"""Operators that make masks and tables, usually the same in each call."""
_SORTERS = frozenset(
    {"argsort", "bincount", "histc", "histogram", "inverse", "kthvalue", "logdet", "matrix_exp", "median", "mode", "qr"}
    | {"msort", "nanmedian", "nanquantile", "quantile", "sort", "svd", "unique_dim", "unique_consecutive", "_unique2"}
)
"""Operators that sort or factorize, besides linalg's. No layer consists of them: routing to experts and sampling
of tokens sort few values, in little time."""
_LINALG = "linalg_"
_PLAIN_LINALG = frozenset({"vector_norm", "norm", "matmul", "vecdot", "multi_dot", "cross"})
PARAMETRIZATIONS = ".parametrizations."
"""Part of the names of modules that compute weights from others."""
_PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "einsum"})
"""Operators that attention by hand calls twice, for scores and for weighted values; more often with positions."""
_ALL_PRODUCTS = _PRODUCTS | {"linear", "addmm", "mm"}
_ATTENTION = frozenset({"scaled_dot_product_attention", "softmax", "_softmax"})
_NOT_IN_ATTENTION = frozenset({"add", "add_", "dropout"})
"""Operators that `scaled_dot_product_attention` may not save: a learned bias, dropout on a CPU."""
_MIN_HEADS = 3
"""Minimum number of attentions in a call for a loop over heads: a decoder's block can have two."""
_NORMS = frozenset({"sqrt", "rsqrt", "pow"})
"""Operators of norms, in which `mul` and `sum` are not a product."""
_RESIZES = re.compile(r"_?upsample_\w+|(constant_|reflection_|replication_)?pad(_nd|\dd)?")
"""Names of operators that interpolate or pad; those with antialiasing begin with `_`."""
_MIN_TABLE_BACKWARD_RATIO = 10.0
"""Minimum ratio of backward to forward of a table if most of its gradient is for rows that no input names. The rows of
the input take the same in both."""
_MIN_WORK_SHARE = 0.05
"""Minimum share of a step for such work: as for loops outside modules, the cause is known."""
_MIN_UNTRAINED_WORK_SHARE = 0.10
"""Minimum share of Python and `cat` if nothing is trained; small transformers spend 0.06 of a generation in Python."""
_MIN_RESIZE_SHARE = 0.10
"""Minimum share of a step for interpolation and padding: decoders that double a size have less."""
_MEAN_FACTOR = 0.5
"""Factor on the minimum share for the mean step: 10th percentiles of module and step come from different steps."""


class OwnWork(NamedTuple):
    """The own work in a step of the modules of one list pattern and class."""

    fqns: list[str]  # names of the modules, the slowest first
    module_class: str
    calls: float
    forward_ns: float
    backward_ns: float
    all: Operator  # sum of the operators; if none were counted, number of operators that make nodes, without time
    longest: list[Operator]
    calling_ns: float  # maximum Python time to call the operators, these modules and inner ones
    float64_ns: float

    def share(self, is_chosen: Callable[[str], bool]) -> float:
        """Return the share of the operators' time in operators with chosen names."""
        return sum(operator.ns for operator in self.longest if is_chosen(operator.name)) / max(self.all.ns, 1.0)

    @property
    def python_ns(self) -> float:
        """Forward time minus operators, and minus the Python time to call these and inner modules."""
        return max(0.0, self.forward_ns - self.all.ns - self.calling_ns) if self.all.ns else 0.0


class _WorkKind(NamedTuple):
    """A kind of work that hardly any module needs.

    Attributes:
        title: title of the finding.
        ns: function that returns the time of this work in a step; 0 if the work is of another kind.
        advice: clause after the figures.
        part: part of a step that contains the work.
        min_share_without_training: minimum share of a step if nothing is trained.
        min_share: minimum share of a step in training.
    """

    title: str
    ns: Callable[[OwnWork], float]
    advice: str
    part: str = "forward"
    min_share_without_training: float = _MIN_WORK_SHARE
    min_share: float = _MIN_WORK_SHARE


def _is_loop(work: OwnWork) -> bool:
    operators = work.all.calls / max(work.calls, 1e-9)
    return operators >= MANY_NODES and work.forward_ns <= _MAX_SHORT_NS * work.all.calls


def _move_share(work: OwnWork) -> float:
    return work.share(lambda name: name.removesuffix(FLOAT64) in MOVES | _MAKERS)


def _is_sorter(name: str) -> bool:
    plain = name.removesuffix(FLOAT64)
    return plain in _SORTERS or (plain.startswith(_LINALG) and plain.removeprefix(_LINALG) not in _PLAIN_LINALG)


def _float64_ns(work: OwnWork) -> float:
    share = work.float64_ns / max(work.all.ns, 1.0)
    return share * (work.forward_ns + work.backward_ns) if share >= _MIN_SHARE_FOR_MOST else 0.0


def _sorting_ns(work: OwnWork) -> float:
    share = work.share(_is_sorter)
    is_parametrization = PARAMETRIZATIONS in work.fqns[0]
    return share * work.forward_ns if share >= _MIN_SHARE_FOR_MOST and not is_parametrization else 0.0


def _attention_ns(work: OwnWork) -> float:
    """Return the time of attention by hand outside its products, which a single operator could save."""
    calls = {operator.name: operator.calls for operator in work.longest}
    products = sum(count for name, count in calls.items() if name in _PRODUCTS)
    weights = sum(count for name, count in calls.items() if name.endswith("softmax"))
    if not 0 < 2 * weights == products or not _NOT_IN_ATTENTION.isdisjoint(calls):
        return 0.0
    return work.share(lambda name: name not in _ALL_PRODUCTS) * (work.forward_ns + work.backward_ns)


def _heads_ns(work: OwnWork) -> float:
    """Return the time of attention besides linear layers if a call has one attention for each of several heads."""
    count = sum(operator.calls for operator in work.longest if operator.name in _ATTENTION)
    share = work.share(lambda name: name != "linear") if count >= _MIN_HEADS * work.calls > 0 else 0.0
    return share * (work.forward_ns + work.backward_ns)


def _product_ns(work: OwnWork) -> float:
    """Return the time of `mul` and `sum`, with their backward, if they have a large share and are of no norm."""
    calls = {operator.name.removesuffix(FLOAT64): operator.calls for operator in work.longest}
    is_product = 0 < calls.get("sum", 0.0) <= calls.get("mul", 0.0) and _NORMS.isdisjoint(calls)
    share = work.share(lambda name: name.removesuffix(FLOAT64) in ("mul", "sum"))
    return share * (work.forward_ns + work.backward_ns) if is_product and share >= _MIN_SHARE_FOR_MUCH else 0.0


def _resizing_ns(work: OwnWork) -> float:
    share = work.share(lambda name: _RESIZES.fullmatch(name.removesuffix(FLOAT64)) is not None)
    return share * (work.forward_ns + work.backward_ns) if share >= _MIN_SHARE_FOR_MOST else 0.0


def _cache_ns(work: OwnWork) -> float:
    """Return the time in which attention without a backward joins tensors, if that is most of its time."""
    if work.backward_ns or _ATTENTION.isdisjoint(operator.name for operator in work.longest):
        return 0.0
    share = work.share(lambda name: name == "cat")
    return share * work.forward_ns if share >= _MIN_SHARE_FOR_MOST else 0.0


def _table_ns(work: OwnWork) -> float:
    is_table = work.module_class in ("Embedding", "EmbeddingBag")
    is_whole = work.backward_ns >= _MIN_TABLE_BACKWARD_RATIO * work.forward_ns
    return work.backward_ns if is_table and is_whole else 0.0


# Modules are reported for the first kind that fits.
_KINDS = (
    _WorkKind(FLOAT64_TITLE, _float64_ns, "float32 takes half or less"),
    _WorkKind(
        "has a gradient of its whole table",
        _table_ns,
        "most of these rows are in no input: with sparse=True only the used rows get gradients",
        "backward",
    ),
    _WorkKind(
        "runs many short operators: a loop in Python",
        lambda work: (work.forward_ns + work.backward_ns) if _is_loop(work) else 0.0,
        "fewer and larger ones take less",
    ),
    _WorkKind(
        "sorts or factorizes in each call",
        _sorting_ns,
        "this takes many times as long as the products and sums of a layer",
    ),
    _WorkKind(
        "computes its attention head by head: a loop",
        _heads_ns,
        "one call takes all heads, in a dimension of their own",
    ),
    _WorkKind(
        "computes attention by hand, with all weights in memory",
        _attention_ns,
        "scaled_dot_product_attention keeps none (in nn.MultiheadAttention need_weights=False), which is quicker",
    ),
    _WorkKind(
        "concatenates the keys and values of its attention in each call",
        _cache_ns,
        "a cache of fixed size, such as StaticCache of transformers, only writes the new tokens",
        min_share_without_training=_MIN_UNTRAINED_WORK_SHARE,
    ),
    _WorkKind(
        "copies tensors, or makes them anew, in each call",
        lambda work: _move_share(work) * work.forward_ns if _move_share(work) >= _MIN_SHARE_FOR_MUCH else 0.0,
        "tensors that stay the same can be made once, before the loop",
    ),
    _WorkKind(
        "multiplies and sums (mul, sum) where a product of matrices would do",
        _product_ns,
        "matmul or einsum does not store the products before they are summed",
    ),
    _WorkKind(
        "spends much time interpolating or padding tensors in each call",
        _resizing_ns,
        "use smaller sizes, and resize tensors that stay the same only once",
        min_share_without_training=_MIN_RESIZE_SHARE,
        min_share=_MIN_RESIZE_SHARE,
    ),
    _WorkKind(
        HOST_TIME,
        lambda work: work.python_ns if work.python_ns >= _MIN_SHARE_FOR_MOST * work.forward_ns else 0.0,
        "Python or waiting",
        min_share_without_training=_MIN_UNTRAINED_WORK_SHARE,
    ),
)


def find_inside(rule_input: RuleInput, notes: NotedSteps) -> Iterator[Finding]:
    """Yield the modules with a large share of a step in work that has a cheaper way, by their operators."""
    if rule_input.steps < MIN_STEPS_FOR_MEDIANS:
        return
    # The 10th percentile, as for own times: on a busy machine a median step is several times as long.
    step_ns, mean_step_ns = rule_input.p10_step_ns(), rule_input.total_ns / rule_input.steps
    is_usual = notes.float64_share() > _MIN_SHARE_FOR_MOST
    for pattern, members in _group_rows(rule_input, notes):
        works = [_sum(rule_input, [member], notes) for member in members]
        for kind in _KINDS:
            # Among modules of one class, some may do another kind of work.
            chosen_members = [member for member, work in zip(members, works, strict=True) if kind.ns(work)]
            if not chosen_members:
                continue
            work = _sum(rule_input, chosen_members, notes)
            ns_per_step = kind.ns(work)
            min_share = kind.min_share if rule_input.trains else kind.min_share_without_training
            min_ns = max(min_share * step_ns, _MEAN_FACTOR * min_share * mean_step_ns)
            if ns_per_step < max(min_ns, rule_input.min_ns * rule_input.samples_per_step):
                continue
            if kind.title == HOST_TIME and ns_per_step > mean_step_ns:
                continue  # calls wait at once, on threads or greenlets: together no time of a step
            if kind.title == FLOAT64_TITLE and (is_usual or work.fqns[0] in notes.float64_modules):
                continue  # another rule reports modules with parameters of float64
            several = f" in {len(work.fqns)} modules {pattern} ({work.module_class})" if len(work.fqns) > 1 else ""
            if 1 < len(work.fqns) < len(members):
                several += f" of {len(members)}"
            evidence = f"own forward {short_ms(work.forward_ns)} a step{several}"
            evidence += f", own backward {short_ms(work.backward_ns)}" if rule_input.trains else ""
            call_operators, call_ns = work.all.calls / work.calls, work.all.ns / work.calls
            # A recording notes only a few operators of each module.
            frequent = [operator for operator in work.longest if operator.calls >= _MIN_SHARE_FOR_MOST * work.calls]
            longest = f"{calls_text(frequent, work.calls)}, in all " if frequent else ""
            evidence += f"; a call runs {longest}{call_operators:,.4g} operators"
            evidence += f" of {short_ms(call_ns)}: {kind.advice}" if call_ns else f": {kind.advice}"
            evidence += f"; {hooks}" if (hooks := notes.hooks_text(work.fqns[0])) else ""
            title, show = kind.title, only_option(pattern)
            yield rule_input.finding(title, work.fqns[0], kind.part, evidence=evidence, show=show, ns=ns_per_step)
            break


def _group_rows(rule_input: RuleInput, notes: NotedSteps) -> Iterator[tuple[str, list[tuple[int, Sequence[Operator]]]]]:
    """Yield the modules of each list pattern, as row and own operators, if the operators of all of them are known."""
    by_pattern: dict[tuple[str, str], list[int]] = {}
    for index, row in enumerate(rule_input.rows):
        if rule_input.calls[index] > 0 and row.calls and not rule_input.is_wrapper(row):
            by_pattern.setdefault((list_pattern(rule_input, row.fqn), row.module_class), []).append(index)
    no_operators = [Operator("", 0.0, float(bool(notes.module_operators)))]
    for (pattern, _), rows in by_pattern.items():
        operators = [notes.module_operators.get(rule_input.rows[index].fqn, no_operators) for index in rows]
        if not notes.module_operators:
            nodes = (rule_input.call_counts.own_nodes[rows] / max(rule_input.steps, 1)).tolist()
            operators = [[Operator("", count, 0.0)] for count in nodes]
        elif not notes.has_all_modules and no_operators in operators:
            continue
        yield pattern, list(zip(rows, operators, strict=True))


def _sum(rule_input: RuleInput, members: Sequence[tuple[int, Sequence[Operator]]], notes: NotedSteps) -> OwnWork:
    """Return the work of modules together, each given as row and own operators."""
    indices = [index for index, _ in members]
    rows = sorted((rule_input.rows[index] for index in indices), key=lambda row: -row.self_ns)
    forward_ns, backward_ns = (sum(ns) for ns in zip(*map(rule_input.own_ns, indices), strict=True))
    by_name = dict[str, Operator]()
    for name, calls, ns in (operator for _, operators in members for operator in operators):
        sums = by_name.get(name, Operator(name, 0.0, 0.0))
        by_name[name] = Operator(name, sums.calls + calls, sums.ns + ns)
    doubles_ns = float64_ns([*by_name.values()])
    total, _ = by_name.pop(""), by_name.pop(FLOAT64, None)
    calls, inner_calls = float(rule_input.calls[indices].sum()), float(rule_input.inner_calls[indices].sum())
    return OwnWork(
        [row.fqn for row in rows],
        rows[0].module_class,
        calls,
        forward_ns,
        backward_ns,
        total,
        sorted(by_name.values(), key=lambda operator: -operator.ns),
        notes.operator_call_ns * total.calls + notes.module_call_ns * (calls + inner_calls),
        doubles_ns,
    )
