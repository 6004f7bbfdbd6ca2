"""Which modules' nodes each kernel of Inductor's runs, in the order in which a compiled graph calls them.

Inductor names the nodes of a kernel at each place where it writes a call of it; we note them there. They stay with what
it compiled, and so in torch's caches. There they have the names of nodes: graphs of one key share these, while their
modules may differ. For the FX graph cache these are names of AOTAutograd's graph, for AOTAutograd's cache names of the
captured one.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from torch._guards import TracingContext
from torch._ops import HigherOrderOperator, OpOverload

from .._after_import import call_after_import
from .._interrupts import WeakMap, raised_by_handler
from ..timeline.contents import FROM_CACHE
from .unseen import unseen_by_modes

InnerModule = tuple[str, str]
"""Where a module is found in the function that was compiled (`L['self'].blocks.0`), and its class."""
Owner = tuple[InnerModule, int]
"""Whose a node is: its module, and the phase."""

OF_NO_MODULE = "", ""
FORWARD, BACKWARD, RECOMPUTE = range(3)

_NAMING = "set_kernel_post_grad_provenance_tracing"
_NAMING_MODULE = "torch._inductor.debug"
_NAMED_IN = (_NAMING_MODULE, "torch._inductor.codegen.cpp", "torch._inductor.codegen.triton")
_WRITING_MODULE = "torch._inductor.scheduler"
_GRAPH_MODULE = "torch._inductor.output_code"
_KEPT = "modtrace_kernels"
"""The attribute of a compiled graph that has its kernels."""

_OF_CAPTURED = {"seq_nr", "source_fn_stack"}
"""Notes of which each captured node has at least one, and no node that a pass makes has any."""
_MOST_USERS, _DEPTH = 64, 32
_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm)
_FOR_SHAPE = {"aten::avg_pool2d_backward", "aten::avg_pool3d_backward"}
"""Operators that read of their second input its shape alone."""
_VIEWS = ("aten::_unsafe_view", "aten::reshape", "<built-in function getitem>")


def owner_of(node: Any, *, is_backward: bool) -> Owner:
    """Return whose a node is, by what torch notes at it: the innermost module, and the phase."""
    meta = _notes_at(node)
    of_backward = meta.get("fwd_nn_module_stack")
    stack = meta.get("nn_module_stack") or of_backward
    source, kind = next(reversed(stack.values())) if stack else OF_NO_MODULE
    phase = FORWARD
    if is_backward:
        phase = BACKWARD if of_backward or meta.get("partitioner_tag") != "is_forward" else RECOMPUTE
    return (str(source), getattr(kind, "__name__", str(kind))), phase


def _notes_at(node: Any) -> Mapping[str, Any]:
    """Return torch's notes at a node. One that a pass of torch's made has those of the first that uses its results."""
    using = [node]
    for user in using:
        if user.meta.get("nn_module_stack") or not _OF_CAPTURED.isdisjoint(user.meta):
            return user.meta  # type: ignore[no-any-return]
        if len(using) < _MOST_USERS:
            using += [node_after for node_after in user.users if node_after not in using]
    return node.meta  # type: ignore[no-any-return]


def factors_of(node: Any) -> str:
    """Return what a node multiplies as matrices, empty for other nodes: it stays if a sum becomes part of the node."""
    is_product = getattr(node.target, "overloadpacket", None) in _PRODUCTS
    return " @ ".join(str(factor) for factor in node.args[-2:]) if is_product else ""


class GraphKernels(NamedTuple):
    """The kernels of one compiled graph."""

    key: str  # by which a profile names its calls
    # Of each call of a kernel its name, and for each module and phase the bytes of its nodes.
    kernels: tuple[tuple[str, tuple[tuple[Owner, int], ...]], ...] = ()
    unknown: str = ""  # why they are not known; else empty


class KernelLog:
    """The kernels of what is made of one captured graph: its backward is often compiled when that runs first.

    Attributes:
        made: those that are known.
    """

    def __init__(self) -> None:
        self.made: list[GraphKernels] = []
        self._listeners: WeakMap[Any, dict[int, Callable[[Any], None]]] = WeakMap()

    def add(self, kernels: GraphKernels) -> None:
        """Add those of one more graph, and tell it."""
        self.made.append(kernels)
        for notes, listeners in [*self._listeners.items()]:
            for listener in [*listeners.values()]:
                listener(notes)

    def tell(self, notes: Any, key: int, listener: Callable[[Any], None]) -> None:
        """Call `listener` with `notes` when there are more, as long as these live; a key has one listener."""
        self._listeners[notes] = {**(self._listeners.get(notes) or {}), key: listener}


class _Graph:
    """A graph that is compiled now, or will be when its backward runs.

    Attributes:
        log: where its kernels go.
        captured: the module of each node of the graph that was captured, by name.
        owners: whose each node is of what AOTAutograd made of that, by name; None before: what is compiled until then
            comes from AOTAutograd's cache.
        is_backward: whether it is of backward.
        named: the kernels that were named since: each with its nodes: their names in both graphs, the phase, the bytes.
        operator: the last one of them, if it is an operator that Inductor may name too.
    """

    operator: Any = None

    def __init__(
        self,
        log: KernelLog,
        captured: Mapping[str, InnerModule],
        owners: Mapping[str, Owner] | None = None,
        *,
        is_backward: bool = False,
    ) -> None:
        self.log, self.captured, self.owners, self.is_backward = log, captured, owners, is_backward
        # What a pass of Inductor's makes goes by another node of its module, as does what the captured graph has not.
        self.like = {owner: name for name, owner in (owners or {}).items()}
        self.captured_like = {module: name for name, module in captured.items()}
        self.named: list[tuple[str, tuple[tuple[str, str, int, int], ...]]] = []


_graphs: WeakMap[Any, _Graph | None] = WeakMap()
"""By torch's context of what it compiles, which it keeps for backward; None: several wait for their backward there."""


def note_kernels(captured: Any) -> KernelLog:
    """Note the kernels of what is compiled next, of the graph that was captured. Returns where they go."""
    log = KernelLog()
    try:
        if (context := TracingContext.try_get()) is not None:
            modules = {node.name: owner_of(node, is_backward=False)[0] for node in captured.graph.nodes}
            _graphs[context] = _Graph(log, modules)
    except Exception as error:  # another version of torch notes something otherwise
        if raised_by_handler(error):
            raise
    return log


def note_owners(owners: Mapping[str, Owner], *, is_backward: bool) -> None:
    """Note whose each node is, by its name, of the graph of AOTAutograd's that is compiled next, or in backward."""
    context, graph = TracingContext.try_get(), _graph()
    if context is not None and graph is not None:
        waits = graph.owners is not None and graph.is_backward
        _graphs[context] = None if waits else _Graph(graph.log, graph.captured, owners, is_backward=is_backward)


def _graph() -> _Graph | None:
    context = TracingContext.try_get()
    return None if context is None else _graphs.get(context)


def watch_kernels() -> None:
    """See what Inductor names and makes from now on, once per process."""
    call_after_import(_NAMING_MODULE, _watch_naming)
    call_after_import(_WRITING_MODULE, _watch_operators)
    call_after_import(_GRAPH_MODULE, _watch_graphs)


@cache
def _watch_naming() -> None:
    # What imports it later takes it from where it is defined.
    naming = getattr(sys.modules[_NAMING_MODULE], _NAMING, None)
    if naming is not None:
        noting = _before(naming, _name_kernel)
        for module in map(sys.modules.get, _NAMED_IN):
            if module is not None and getattr(module, _NAMING, None) is naming:
                setattr(module, _NAMING, noting)


@cache
def _watch_operators() -> None:
    scheduler: Any = getattr(sys.modules[_WRITING_MODULE], "Scheduler", None)
    if hasattr(scheduler, "codegen_extern_call"):
        scheduler.codegen_extern_call = _before(scheduler.codegen_extern_call, _name_operator)


@cache
def _watch_graphs() -> None:
    graph: Any = getattr(sys.modules[_GRAPH_MODULE], "CompiledFxGraph", None)
    if graph is None:
        return
    init = graph.__init__

    @wraps(init)
    def keep(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        compiling = _graph()
        if compiling is not None and compiling.owners is not None and not _missing():
            setattr(self, _KEPT, tuple(compiling.named))

    graph.__init__ = keep
    graph.post_compile = _before(graph.post_compile, _take_kernels)


def _missing() -> str:
    module = sys.modules.get(_NAMING_MODULE)
    lacks = module is not None and not hasattr(module, _NAMING)
    return f"torch {torch.__version__} does not name kernels by {_NAMING}" if lacks else ""


def _before(function: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    """Return a function that first notes what it is called with, while a graph is compiled that we see."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        compiling = _graph()
        if compiling is not None:
            try:
                with unseen_by_modes():
                    note(compiling, *args, **kwargs)
            except Exception as error:  # another version of torch calls it with something else
                if raised_by_handler(error):
                    raise
        return function(*args, **kwargs)

    return call


def _name_operator(graph: _Graph, _: Any, scheduled: Any) -> None:
    """Name an operator that is called next: Inductor names none that write to what they are given."""
    operator = scheduled.node
    if name := getattr(operator, "python_kernel_name", None):
        _name_kernel(graph, operator, name)
        graph.operator = operator


def _name_kernel(graph: _Graph, schedule: Any, kernel_name: str, *_: Any, **__: Any) -> None:
    if schedule is graph.operator:
        graph.named.pop()
    graph.operator = None
    nodes = [node for node in _nodes_of(schedule) if node.op == "call_function"]
    if len(nodes) == 1 and isinstance(nodes[0].target, HigherOrderOperator):
        # With the state of random numbers, as in a checkpoint: a profile has the operator that it runs.
        inner = (argument for argument in nodes[0].args if isinstance(argument, OpOverload))
        kernel_name = next((f"torch.ops.{operator}" for operator in inner), kernel_name)
    nodes = [node for node in nodes if not _is_view(node)] or nodes
    noted = []
    for node in nodes:
        owners = graph.owners or {}
        owner = owners.get(factors_of(node)) or owner_of(node, is_backward=graph.is_backward)
        name = node.name if owners.get(node.name) == owner else graph.like.get(owner, "")
        noted.append((name, graph.captured_like.get(owner[0], ""), owner[1], _bytes_of(node)))
    graph.named.append((kernel_name, tuple(noted)))


def _take_kernels(graph: _Graph, compiled: Any, *_: Any, **__: Any) -> None:
    key, kept = str(getattr(compiled, "_fx_graph_cache_key", None)), getattr(compiled, _KEPT, None)
    kernels = []
    for name, nodes in kept or ():
        parts: dict[Owner, int] = {}
        for node, captured, phase, nbytes in nodes:
            module = graph.captured.get(captured, OF_NO_MODULE)
            owner = (module, phase) if graph.owners is None else graph.owners.get(node, (OF_NO_MODULE, phase))
            parts[owner] = parts.get(owner, 0) + nbytes
        kernels.append((name, tuple(parts.items())))
    context = TracingContext.try_get()
    if context is not None and graph.owners is not None:
        _graphs[context] = _Graph(graph.log, graph.captured, is_backward=graph.is_backward)
    graph.log.add(GraphKernels(key, tuple(kernels), (_missing() or FROM_CACHE) if kept is None else ""))


def _nodes_of(schedule: Any) -> Iterable[Any]:
    """Return the FX nodes of a kernel: those of its parts, or the one that an operator runs."""
    if not isinstance(schedule, (list, tuple)):
        if (origin := getattr(schedule, "origin_node", None)) is not None:
            return [origin]
        # One with several results is said to be of what made its inputs too.
        of_operator = [node for node in schedule.origins if node.target is getattr(schedule, "op_overload", None)]
        return of_operator or sorted(schedule.origins)[-1:]
    parts = [part for item in schedule if hasattr(item, "get_nodes") for part in item.get_nodes()]
    nodes: dict[Any, None] = {}
    for part in parts:
        if part.node is not None:
            computed = _computed_by(part)
            if all(node.op == "placeholder" for node in computed):
                # As a weight that is laid out otherwise for them.
                computed = [user for node in computed for user in node.users]
            nodes |= dict.fromkeys(computed)
    return nodes


def _computed_by(part: Any) -> list[Any]:
    """Return the nodes that a part of a kernel computes. Inductor says it is of some that made what it reads too."""
    origins, is_input = dict.fromkeys(sorted(part.node.origins)), dict[Any, bool]()
    reads = {dependency.name for dependency in part.read_writes.reads}
    buffers = [part.scheduler.name_to_buf[name].node for name in reads if name in part.scheduler.name_to_buf]
    makers = {max(buffer.origins) for buffer in buffers if getattr(buffer, "origins", ())}

    def inputs(node: Any) -> Iterable[Any]:
        for used in _read_by(node):
            # What Inductor has no code for, such as an item of several results, is its only input.
            while used not in origins and used not in makers and len(only_input := _read_by(used)) == 1:
                (used,) = only_input
            yield used

    def is_given(node: Any, depth: int = 0) -> bool:
        if node not in is_input:
            is_input[node] = node in makers or node.name in reads
            if node.op == "call_function" and not is_input[node] and depth < _DEPTH:
                is_input[node] = all(is_given(used, depth + 1) for used in _read_by(node))
        return is_input[node]

    for node in origins:  # in order, so that depth stays small
        is_given(node)
    computed = [*origins][-1:]
    for node in computed:
        # Constants are of all who need the same.
        computed += [
            used
            for used in inputs(node)
            if used in origins and is_input[used] and used not in makers and used not in computed and _read_by(used)
        ]
    return computed


def _read_by(node: Any) -> list[Any]:
    """Return what a node reads the values of: no sizes, nor what it takes for its shape."""
    unread = node.args[1] if _name_of(node) in _FOR_SHAPE else None
    return [
        used
        for used in node.all_input_nodes
        if used is not unread and not isinstance(used.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat))
    ]


def _is_view(node: Any) -> bool:
    return bool(getattr(node.target, "is_view", False)) or _name_of(node) in _VIEWS


def _name_of(node: Any) -> str:
    return str(getattr(getattr(node.target, "overloadpacket", None), "_qualified_op_name", node.target))


def _bytes_of(node: Any) -> int:
    """Return how many bytes a node reads and writes by itself; shapes that vary count as nothing."""
    values = [node.meta.get("val"), *(argument.meta.get("val") for argument in node.all_input_nodes)]
    tensors = [part for value in values for part in (value if isinstance(value, (tuple, list)) else [value])]
    total = 0
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and all(type(size) is int for size in tensor.shape):
            total += tensor.numel() * tensor.element_size()
    return total
