"""The modules whose nodes each Inductor kernel runs, in the order in which a compiled graph calls the kernels.

Inductor names the nodes of a kernel wherever it writes a call of the kernel; modtrace notes the nodes there. The notes
stay with the compiled graph, and so in torch's caches. They hold names of nodes, not modules: graphs that share a cache
key have the same names, but may have other modules. The FX graph cache needs the names in AOTAutograd's graph, and
AOTAutograd's cache those in the captured graph.
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
from ..timeline.slices import BACKWARD, FORWARD, RECOMPUTE
from .unseen import unseen_by_modes

InnerModule = tuple[str, str]
"""A module inside a compiled function: its source there (`L['self'].blocks.0`), and its class."""
Owner = tuple[InnerModule, int]
"""The owner of a node: its module, and the phase."""

OF_NO_MODULE = "", ""

_NAMING = "set_kernel_post_grad_provenance_tracing"
_NAMING_MODULE = "torch._inductor.debug"
_NAMING_USERS = (_NAMING_MODULE, "torch._inductor.codegen.cpp", "torch._inductor.codegen.triton")
_WRITING_MODULE = "torch._inductor.scheduler"
_GRAPH_MODULE = "torch._inductor.output_code"
_KERNELS_ATTRIBUTE = "modtrace_kernels"
"""The attribute under which a compiled graph keeps its kernels."""

_CAPTURED_META_KEYS = {"seq_nr", "source_fn_stack"}
"""Keys of `node.meta`: a captured node has at least one of them, a node that a compiler pass creates has none."""
_MAX_USERS, _MAX_DEPTH = 64, 32
_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm)
_SHAPE_READERS = {"aten::avg_pool2d_backward", "aten::avg_pool3d_backward"}
"""Operators that read only the shape of their second input."""
_VIEWS = ("aten::_unsafe_view", "aten::reshape", "<built-in function getitem>")


def owner_of(node: Any, *, is_backward: bool) -> Owner:
    """Return the owner of a node according to its `meta`: the innermost module, and the phase."""
    meta = _meta_of(node)
    forward_stack = meta.get("fwd_nn_module_stack")  # only nodes of backward have it
    stack = meta.get("nn_module_stack") or forward_stack
    source, module_class = next(reversed(stack.values())) if stack else OF_NO_MODULE
    phase = FORWARD
    if is_backward:
        phase = BACKWARD if forward_stack or meta.get("partitioner_tag") != "is_forward" else RECOMPUTE
    return (str(source), getattr(module_class, "__name__", str(module_class))), phase


def _meta_of(node: Any) -> Mapping[str, Any]:
    """Return the `meta` of a node; if a compiler pass made it, of the first captured node that uses its results."""
    users = [node]
    for user in users:
        if user.meta.get("nn_module_stack") or not _CAPTURED_META_KEYS.isdisjoint(user.meta):
            return user.meta  # type: ignore[no-any-return]
        if len(users) < _MAX_USERS:
            users += [next_user for next_user in user.users if next_user not in users]
    return node.meta  # type: ignore[no-any-return]


def factors_of(node: Any) -> str:
    """Return the operands of a matrix product as text (`a @ b`), or "". They survive if Inductor fuses a sum."""
    is_product = getattr(node.target, "overloadpacket", None) in _PRODUCTS
    return " @ ".join(str(factor) for factor in node.args[-2:]) if is_product else ""


class GraphKernels(NamedTuple):
    """The kernels of one compiled graph."""

    key: str  # cache key of the graph, by which a profile names its calls
    # Each call of a kernel: its name, and for each module and phase the bytes of the nodes that it runs.
    kernels: tuple[tuple[str, tuple[tuple[Owner, int], ...]], ...] = ()
    unknown: str = ""  # reason why the kernels are not known; empty if they are


class KernelLog:
    """The kernels of the graphs made of one captured graph: the backward is often compiled when it first runs.

    Attributes:
        made: the compiled graphs whose kernels are known so far.
    """

    def __init__(self) -> None:
        self.made: list[GraphKernels] = []
        self._listeners: WeakMap[Any, dict[int, Callable[[Any], None]]] = WeakMap()

    def add(self, kernels: GraphKernels) -> None:
        """Add the kernels of one more graph, and call the listeners."""
        self.made.append(kernels)
        for owner, listeners in [*self._listeners.items()]:
            for listener in [*listeners.values()]:
                listener(owner)

    def add_listener(self, owner: Any, key: int, listener: Callable[[Any], None]) -> None:
        """Call `listener` with `owner` whenever kernels are added, while `owner` lives; a key has one listener."""
        self._listeners[owner] = {**(self._listeners.get(owner) or {}), key: listener}


class _Graph:
    """A graph that is compiled now, or will be when its backward runs.

    Attributes:
        log: receives its kernels.
        captured: the module of each node of the captured graph, by the node's name.
        owners: the owner of each node of AOTAutograd's graph, by the node's name. None before there is such a graph:
            a graph that is compiled until then comes from AOTAutograd's cache.
        is_backward: whether the graph is of backward.
        kernels: the kernels named so far, with their nodes: the names in both graphs, the phase, the bytes.
        operator: the last of the kernels, if it is an operator that Inductor may name too.
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
        # A node that one graph lacks, such as one made by a compiler pass, is named as another node of its module.
        self.node_by_owner = {owner: name for name, owner in (owners or {}).items()}
        self.captured_by_module = {module: name for name, module in captured.items()}
        self.kernels: list[tuple[str, tuple[tuple[str, str, int, int], ...]]] = []


_graphs: WeakMap[Any, _Graph | None] = WeakMap()
"""Graphs by torch's `TracingContext`, which torch keeps for backward; None: several graphs wait for their backward."""


def note_kernels(captured: Any) -> KernelLog:
    """Note the kernels that are compiled next for a captured graph. Returns the log that receives them."""
    log = KernelLog()
    try:
        if (context := TracingContext.try_get()) is not None:
            modules = {node.name: owner_of(node, is_backward=False)[0] for node in captured.graph.nodes}
            _graphs[context] = _Graph(log, modules)
    except Exception as error:  # another version of torch has another `meta`
        if raised_by_handler(error):
            raise
    return log


def note_owners(owners: Mapping[str, Owner], *, is_backward: bool) -> None:
    """Note the owner of each node, by its name, of AOTAutograd's graph that is compiled next, or for backward."""
    context, graph = TracingContext.try_get(), _graph()
    if context is not None and graph is not None:
        waits = graph.owners is not None and graph.is_backward
        _graphs[context] = None if waits else _Graph(graph.log, graph.captured, owners, is_backward=is_backward)


def _graph() -> _Graph | None:
    context = TracingContext.try_get()
    return None if context is None else _graphs.get(context)


def watch_kernels() -> None:
    """Wrap the functions of Inductor that name kernels and make graphs, once per process."""
    call_after_import(_NAMING_MODULE, _watch_naming)
    call_after_import(_WRITING_MODULE, _watch_operators)
    call_after_import(_GRAPH_MODULE, _watch_graphs)


@cache
def _watch_naming() -> None:
    # Modules that import it later take the wrapper from the module that defines it.
    naming = getattr(sys.modules[_NAMING_MODULE], _NAMING, None)
    if naming is not None:
        wrapper = _calling_first(naming, _name_kernel)
        for module in map(sys.modules.get, _NAMING_USERS):
            if module is not None and getattr(module, _NAMING, None) is naming:
                setattr(module, _NAMING, wrapper)


@cache
def _watch_operators() -> None:
    scheduler: Any = getattr(sys.modules[_WRITING_MODULE], "Scheduler", None)
    if hasattr(scheduler, "codegen_extern_call"):
        scheduler.codegen_extern_call = _calling_first(scheduler.codegen_extern_call, _name_operator)


@cache
def _watch_graphs() -> None:
    graph: Any = getattr(sys.modules[_GRAPH_MODULE], "CompiledFxGraph", None)
    if graph is None:
        return
    init = graph.__init__

    @wraps(init)
    def init_with_kernels(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        compiling = _graph()
        if compiling is not None and compiling.owners is not None and not _missing():
            setattr(self, _KERNELS_ATTRIBUTE, tuple(compiling.kernels))

    graph.__init__ = init_with_kernels
    graph.post_compile = _calling_first(graph.post_compile, _take_kernels)


def _missing() -> str:
    """Return a sentence about the function that this version of torch lacks; empty if it has it."""
    module = sys.modules.get(_NAMING_MODULE)
    is_missing = module is not None and not hasattr(module, _NAMING)
    return f"torch {torch.__version__} does not name kernels by {_NAMING}" if is_missing else ""


def _calling_first(function: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    """Return a function that calls `note` and then `function`, if a watched graph is compiled."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        compiling = _graph()
        if compiling is not None:
            try:
                with unseen_by_modes():
                    note(compiling, *args, **kwargs)
            except Exception as error:  # another version of torch passes other arguments
                if raised_by_handler(error):
                    raise
        return function(*args, **kwargs)

    return call


def _name_operator(graph: _Graph, _: Any, scheduled: Any) -> None:
    """Name the operator that is called next: Inductor does not name operators that write to their arguments."""
    operator = scheduled.node
    if name := getattr(operator, "python_kernel_name", None):
        _name_kernel(graph, operator, name)
        graph.operator = operator


def _name_kernel(graph: _Graph, schedule: Any, kernel_name: str, *_: Any, **__: Any) -> None:
    if schedule is graph.operator:
        graph.kernels.pop()
    graph.operator = None
    nodes = [node for node in _nodes_of(schedule) if node.op == "call_function"]
    if len(nodes) == 1 and isinstance(nodes[0].target, HigherOrderOperator):
        # It sets the state of random numbers, as in a checkpoint. A profile shows the operator that it runs.
        operators = (argument for argument in nodes[0].args if isinstance(argument, OpOverload))
        kernel_name = next((f"torch.ops.{operator}" for operator in operators), kernel_name)
    nodes = [node for node in nodes if not _is_view(node)] or nodes
    node_notes = []
    for node in nodes:
        owners = graph.owners or {}
        owner = owners.get(factors_of(node)) or owner_of(node, is_backward=graph.is_backward)
        name = node.name if owners.get(node.name) == owner else graph.node_by_owner.get(owner, "")
        node_notes.append((name, graph.captured_by_module.get(owner[0], ""), owner[1], _bytes_of(node)))
    graph.kernels.append((kernel_name, tuple(node_notes)))


def _take_kernels(graph: _Graph, compiled: Any, *_: Any, **__: Any) -> None:
    key, kernel_notes = str(getattr(compiled, "_fx_graph_cache_key", None)), getattr(compiled, _KERNELS_ATTRIBUTE, None)
    kernels = []
    for name, nodes in kernel_notes or ():
        parts: dict[Owner, int] = {}
        for node, captured, phase, nbytes in nodes:
            module = graph.captured.get(captured, OF_NO_MODULE)
            owner = (module, phase) if graph.owners is None else graph.owners.get(node, (OF_NO_MODULE, phase))
            parts[owner] = parts.get(owner, 0) + nbytes
        kernels.append((name, tuple(parts.items())))
    context = TracingContext.try_get()
    if context is not None and graph.owners is not None:
        _graphs[context] = _Graph(graph.log, graph.captured, is_backward=graph.is_backward)
    graph.log.add(GraphKernels(key, tuple(kernels), (_missing() or FROM_CACHE) if kernel_notes is None else ""))


def _nodes_of(schedule: Any) -> Iterable[Any]:
    """Return the FX nodes of a kernel: the nodes of its parts, or the node of an operator."""
    if not isinstance(schedule, (list, tuple)):
        if (origin := getattr(schedule, "origin_node", None)) is not None:
            return [origin]
        # The origins of an operator with several results include the nodes that made its inputs.
        operator_nodes = [node for node in schedule.origins if node.target is getattr(schedule, "op_overload", None)]
        return operator_nodes or sorted(schedule.origins)[-1:]
    parts = [part for item in schedule if hasattr(item, "get_nodes") for part in item.get_nodes()]
    nodes: dict[Any, None] = {}
    for part in parts:
        if part.node is not None:
            computed = _computed_by(part)
            if all(node.op == "placeholder" for node in computed):
                # The part changes the layout of a weight, for the nodes that use it.
                computed = [user for node in computed for user in node.users]
            nodes |= dict.fromkeys(computed)
    return nodes


def _computed_by(part: Any) -> list[Any]:
    """Return the nodes that a part of a kernel computes. Inductor lists some nodes that made its inputs too."""
    origins, is_input = dict.fromkeys(sorted(part.node.origins)), dict[Any, bool]()
    reads = {dependency.name for dependency in part.read_writes.reads}
    buffers = [part.scheduler.name_to_buf[name].node for name in reads if name in part.scheduler.name_to_buf]
    makers = {max(buffer.origins) for buffer in buffers if getattr(buffer, "origins", ())}

    def inputs(node: Any) -> Iterable[Any]:
        for source in _read_by(node):
            # A node without code, such as an item of several results, counts as its only input.
            while source not in origins and source not in makers and len(only_input := _read_by(source)) == 1:
                (source,) = only_input
            yield source

    def needs_inputs_only(node: Any, depth: int = 0) -> bool:
        if node not in is_input:
            is_input[node] = node in makers or node.name in reads
            if node.op == "call_function" and not is_input[node] and depth < _MAX_DEPTH:
                is_input[node] = all(needs_inputs_only(source, depth + 1) for source in _read_by(node))
        return is_input[node]

    for node in origins:  # in order, so that depth stays small
        needs_inputs_only(node)
    computed = [*origins][-1:]
    for node in computed:
        # Nodes without inputs are constants, which several kernels share.
        candidates = [source for source in inputs(node) if source in origins and is_input[source]]
        computed += [
            source for source in candidates if source not in makers and source not in computed and _read_by(source)
        ]
    return computed


def _read_by(node: Any) -> list[Any]:
    """Return the nodes whose values a node reads, without sizes and without inputs of which it reads only the shape."""
    shape_input = node.args[1] if _name_of(node) in _SHAPE_READERS else None
    numbers = (int, float, torch.SymInt, torch.SymFloat)
    inputs = [source for source in node.all_input_nodes if source is not shape_input]
    return [source for source in inputs if not isinstance(source.meta.get("val"), numbers)]


def _is_view(node: Any) -> bool:
    return bool(getattr(node.target, "is_view", False)) or _name_of(node) in _VIEWS


def _name_of(node: Any) -> str:
    return str(getattr(getattr(node.target, "overloadpacket", None), "_qualified_op_name", node.target))


def _bytes_of(node: Any) -> int:
    """Return the number of bytes that a node reads and writes by itself; tensors of dynamic shapes count 0."""
    values = [node.meta.get("val"), *(argument.meta.get("val") for argument in node.all_input_nodes)]
    tensors = [part for value in values for part in (value if isinstance(value, (tuple, list)) else [value])]
    total = 0
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and all(type(size) is int for size in tensor.shape):
            total += tensor.numel() * tensor.element_size()
    return total
