"""What modules do themselves, outside of inner ones: in which operators of torch, or in Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ...contents import FLOAT64
from ...slices import MANY_NODES
from ..slow_steps import short_ms
from .finding import MIN_STEPS, Finding, RuleInput, only_option
from .noted import DOUBLES, MOVES, NotedSteps, Operator, calls_text, float64_ns
from .siblings import place_of

_SHORT_NS = 200_000
"""How long operators last at most on average, with what calls them, if many of them are a loop: what computes much in
each of its rounds gains nothing by fewer of them."""
_MOST, _MUCH = 0.5, 0.3
"""Shares of the time of a module's operators, or of its own forward."""
_MAKES = frozenset(
    {"arange", "eye", "full", "linspace", "meshgrid", "one_hot", "ones", "randperm", "tril", "triu", "tril_", "triu_"}
    | {"ones_like", "full_like", "masked_fill", "masked_fill_", "outer"}
)
"""Operators that make masks and tables, mostly the same in each call."""

_SORTS = frozenset(
    {"argsort", "bincount", "histc", "histogram", "inverse", "kthvalue", "logdet", "matrix_exp", "median", "mode", "qr"}
    | {"msort", "nanmedian", "nanquantile", "quantile", "sort", "svd", "unique_dim", "unique_consecutive", "_unique2"}
)
"""Operators that sort or factorize, besides those of linalg: no layer consists of them. What routes to experts, or
samples words, sorts few values, in little time."""
_LINALG, _PLAIN_LINALG = "linalg_", frozenset({"vector_norm", "norm", "matmul", "vecdot", "multi_dot", "cross"})
PARAMETRIZATIONS = ".parametrizations."
"""In the names of modules that compute weights from others."""

_PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "einsum"})
"""Operators that attention by hand calls twice, for its scores, and for what these weigh: more often with positions."""
_ALL_PRODUCTS = _PRODUCTS | {"linear", "addmm", "mm"}
_ATTENTION = frozenset({"scaled_dot_product_attention", "softmax", "_softmax"})
_NOT_IN_ATTENTION = frozenset({"add", "add_", "dropout"})
"""What `scaled_dot_product_attention` is not sure to do with less: a bias that is learned, dropout on a CPU."""

_TABLE = 10.0
"""How many times as long as its forward the backward of a table is at least, if most of it is for rows that no input
names: both take as much for the others."""


_LEAST = 0.05
"""Share of a step that such work takes at least: as for loops outside of modules, since it is known what it is."""
_LEAST_PYTHON = 0.10
"""For Python, and for `cat`, which positions need too, where nothing is trained: models of transformers that are small
have up to 0.06 of Python while they generate."""


_OF_ALL = 0.5
"""What part of that it is of the mean step at least: of few steps, in which a busy machine stops others, the shortest
tenth of a module's and that of the step are of different ones."""


class Own(NamedTuple):
    """What the modules of one place and class do themselves in a step."""

    fqns: list[str]  # the one that takes the longest first
    module_class: str
    calls: float
    forward_ns: float
    backward_ns: float
    all: Operator  # the operators together; those that build a graph alone, without their time, if none were counted
    longest: list[Operator]
    calling_ns: float  # what Python takes at most to call the operators, these modules and inner ones
    float64_ns: float

    def share(self, chosen: Callable[[str], bool]) -> float:
        """Return which share of the time of operators those have that are chosen by name."""
        return sum(each.ns for each in self.longest if chosen(each.name)) / max(self.all.ns, 1.0)

    @property
    def python_ns(self) -> float:
        """What no operator takes, without what it takes to call these, and inner modules."""
        return max(0.0, self.forward_ns - self.all.ns - self.calling_ns) if self.all.ns else 0.0


class _Kind(NamedTuple):
    """A kind of work that hardly any module needs.

    Attributes:
        what: how findings call it.
        ns: what it takes in a step; 0 if it is none.
        why: what is said of it, after the figures.
        part: of a step, that it is in.
        of_calls: share of a step that it takes at least where nothing is trained.
    """

    what: str
    ns: Callable[[Own], float]
    why: str
    part: str = "forward"
    of_calls: float = _LEAST


def _is_loop(own: Own) -> bool:
    count = own.all.calls / max(own.calls, 1e-9)
    return count >= MANY_NODES and own.forward_ns <= _SHORT_NS * own.all.calls


def _share_of_work(own: Own, share: float, *, with_backward: bool, least: float) -> float:
    return share * (own.forward_ns + own.backward_ns * with_backward) if share >= least else 0.0


def _is_move(name: str) -> bool:
    return name.removesuffix(FLOAT64) in MOVES | _MAKES


def _sorts(name: str) -> bool:
    plain = name.removesuffix(FLOAT64)
    return plain in _SORTS or (plain.startswith(_LINALG) and plain.removeprefix(_LINALG) not in _PLAIN_LINALG)


def _attention_ns(own: Own) -> float:
    """Return what attention by hand takes beside its products, where one operator could do all."""
    calls = {each.name: each.calls for each in own.longest}
    products = sum(count for name, count in calls.items() if name in _PRODUCTS)
    weights = sum(count for name, count in calls.items() if name.endswith("softmax"))
    if not 0 < 2 * weights == products or not _NOT_IN_ATTENTION.isdisjoint(calls):
        return 0.0
    return own.share(lambda name: name not in _ALL_PRODUCTS) * (own.forward_ns + own.backward_ns)


def _cache_ns(own: Own) -> float:
    """Return what attention without a backward takes to put tensors together, if that is most of it."""
    if own.backward_ns or _ATTENTION.isdisjoint(each.name for each in own.longest):
        return 0.0
    return _share_of_work(own, own.share(lambda name: name == "cat"), with_backward=False, least=_MOST)


def _table_ns(own: Own) -> float:
    is_table = own.module_class in ("Embedding", "EmbeddingBag")
    return own.backward_ns if is_table and own.backward_ns >= _TABLE * own.forward_ns else 0.0


# The first kind that a place has counts.
_KINDS = (
    _Kind(
        DOUBLES,
        lambda own: _share_of_work(own, own.float64_ns / max(own.all.ns, 1.0), with_backward=True, least=_MOST),
        "float32 takes half or less",
    ),
    _Kind(
        "has a gradient of its whole table",
        _table_ns,
        "most of it is for rows that no input names: sparse=True has only the others",
        "backward",
    ),
    _Kind(
        "runs many short operators: a loop in Python",
        lambda own: (own.forward_ns + own.backward_ns) if _is_loop(own) else 0.0,
        "fewer and larger ones take less",
    ),
    _Kind(
        "sorts or factorizes in each call",
        lambda own: (
            _share_of_work(own, own.share(_sorts), with_backward=False, least=_MOST)
            * (PARAMETRIZATIONS not in own.fqns[0])
        ),
        "that takes many times as long as what layers consist of",
    ),
    _Kind(
        "computes attention by hand, with all weights in memory",
        _attention_ns,
        "scaled_dot_product_attention keeps none (in nn.MultiheadAttention need_weights=False), which is quicker",
    ),
    _Kind(
        "puts the tensors of its attention together anew in each call",
        _cache_ns,
        "a cache of a fixed size, as StaticCache of transformers, takes what is new in its place",
        of_calls=_LEAST_PYTHON,
    ),
    _Kind(
        "copies tensors, or makes them anew, in each call",
        lambda own: _share_of_work(own, own.share(_is_move), with_backward=False, least=_MUCH),
        "once is enough for what is the same each time",
    ),
    _Kind(
        "spends host time in its own forward, outside of inner modules and operators",
        lambda own: own.python_ns if own.python_ns >= _MOST * own.forward_ns else 0.0,
        "Python or waiting",
        of_calls=_LEAST_PYTHON,
    ),
)


def find_inside(measured: RuleInput, notes: NotedSteps) -> Iterator[Finding]:
    """Yield modules that take a large share of a step in what can be done with less, if operators were counted."""
    if measured.steps < MIN_STEPS:
        return
    # As its own time is: on a busy machine a median step is several times as long.
    step_ns, all_ns = measured.p10_step_ns(), measured.total_ns / measured.steps
    is_usual = notes.float64_share() > _MOST
    for place, members in _by_place(measured, notes):
        each = [_sum(measured, [index], [known], notes) for index, known in members]
        for number, kind in enumerate(_KINDS):
            # Of modules of one class, some may be told to work in another way.
            chosen = [member for member, own in zip(members, each, strict=True) if kind.ns(own)]
            if not chosen:
                continue
            own = _sum(measured, [index for index, _ in chosen], [known for _, known in chosen], notes)
            per_step = kind.ns(own)
            least = _LEAST if measured.trains else kind.of_calls
            if per_step < max(least * step_ns, measured.min_ns * measured.samples_per_step, _OF_ALL * least * all_ns):
                continue
            if number == 0 and (is_usual or own.fqns[0] in notes.doubles):
                continue  # a rule of its own names modules with parameters of float64
            several = f" in {len(own.fqns)} modules {place} ({own.module_class})" if len(own.fqns) > 1 else ""
            several += f" of {len(members)}" * (1 < len(own.fqns) < len(members))
            evidence = f"own forward {short_ms(own.forward_ns)} a step{several}"
            evidence += f", own backward {short_ms(own.backward_ns)}" if measured.trains else ""
            a_call = Operator("", own.all.calls / own.calls, own.all.ns / own.calls)
            often = [one for one in own.longest if one.calls >= _MOST * own.calls]  # few are noted of each module
            longest = f"{calls_text(often, own.calls)}, in all " if often else ""
            evidence += f"; a call runs {longest}{a_call.calls:,.4g} operators"
            evidence += f" of {short_ms(a_call.ns)}: {kind.why}" if a_call.ns else f": {kind.why}"
            evidence += f"; {said}" if (said := notes.hooks_text(own.fqns[0])) else ""
            yield measured.finding(
                kind.what, own.fqns[0], kind.part, evidence=evidence, show=only_option(place), ns=per_step
            )
            break


def _by_place(measured: RuleInput, notes: NotedSteps) -> Iterator[tuple[str, list[tuple[int, Sequence[Operator]]]]]:
    """Yield the modules of each place, by row, with what they call themselves, if all of them are noted."""
    by_place: dict[tuple[str, str], list[int]] = {}
    for index, row in enumerate(measured.rows):
        if measured.calls[index] > 0 and row.calls and not measured.is_wrapper(row):
            by_place.setdefault((place_of(measured, row.fqn), row.module_class), []).append(index)
    none = Operator("", 0.0, float(bool(notes.inside)))
    for (place, _), members in by_place.items():
        known = [notes.inside.get(measured.rows[index].fqn, [none]) for index in members]
        if not notes.inside:
            nodes = (measured.runs.own_nodes[members] / max(measured.steps, 1)).tolist()
            known = [[Operator("", made, 0.0)] for made in nodes]
        elif not notes.all_inside and [none] in known:
            continue
        yield place, list(zip(members, known, strict=True))


def _sum(measured: RuleInput, members: Sequence[int], known: Sequence[Sequence[Operator]], notes: NotedSteps) -> Own:
    rows = [measured.rows[index] for index in members]
    forward, backward = (sum(each) for each in zip(*map(measured.own_ns, members), strict=True))
    longest = dict[str, Operator]()
    for name, calls, ns in (one for each in known for one in each):
        old = longest.get(name, Operator(name, 0.0, 0.0))
        longest[name] = Operator(name, old.calls + calls, old.ns + ns)
    rows.sort(key=lambda row: -row.self_ns)
    doubles_ns = float64_ns([*longest.values()])
    together, _ = longest.pop(""), longest.pop(FLOAT64, None)
    calls, inner_calls = (float(each[list(members)].sum()) for each in (measured.calls, measured.inner_calls))
    return Own(
        [row.fqn for row in rows],
        rows[0].module_class,
        calls,
        forward,
        backward,
        together,
        sorted(longest.values(), key=lambda each: -each.ns),
        notes.operator_call_ns * together.calls + notes.module_call_ns * (calls + inner_calls),
        doubles_ns,
    )
