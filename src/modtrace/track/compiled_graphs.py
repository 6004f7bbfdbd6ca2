"""The graphs that AOTAutograd makes of a captured graph: the number of nodes of each module, and their FLOPs.

torch passes each graph to its compiler as the first argument of a function, where modtrace reads it once and does not
change it. Each node names its module; a node of a backward graph also names the forward module. A node that a backward
graph recomputes has a mark of the forward. Graphs from AOTAutograd's cache do not pass these functions.
"""

import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._guards import CompileContext, TracingContext
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from .._interrupts import raised_by_handler
from ..timeline.contents import COMPILED_BEFORE, FROM_AUTOGRAD_CACHE
from ..timeline.slices import UNKNOWN_FLOPS
from .compiled_kernels import InnerModule, KernelLog, Owner, factors_of, note_kernels, note_owners, owner_of
from .greenlets import PerGreenlet
from .native.flops import Formula, formula_by_operator
from .unseen import skip_all, unseen_by_modes

GRAPHS_MODULE = "torch._functorch._aot_autograd.graph_compile"
"""The module of torch that passes the graphs on."""
_IMPORTING_MODULE = "torch._functorch.aot_autograd"
"""The module of torch that imports that one."""
_COMPILE_FUNCTIONS = ("_aot_stage2b_inference_compile", "_aot_stage2b_fw_compile", "_aot_stage2b_bw_compile")

_NO_GRAPH = "its backend does not use AOTAutograd"
NO_WORK = (0,) * 6


class GraphWork(NamedTuple):
    """A captured graph: the work of each module in it, and its kernels."""

    graph: str = ""  # dynamo's number of the graph (`0/1`: the first frame, compiled for the second time)
    # Each module's nodes in forward, backward and recompute, then their FLOPs, -1 if not known. A node counts for its
    # innermost module.
    work: tuple[tuple[InnerModule, tuple[int, ...]], ...] = ()
    unknown: str = COMPILED_BEFORE  # reason why its nodes are not known; empty if they are
    kernels: KernelLog | None = None  # kernels that are compiled of the graph; None if its compilation was not seen


class _Thread:
    """The work of each module in the graph that one thread compiles; None if it compiles none."""

    work: dict[InnerModule, list[int]] | None = None


_threads = PerGreenlet(_Thread)


def read_graphs(captured: Any, compile_captured: Callable[[], Any]) -> tuple[Any, GraphWork]:
    """Call the compiler of a captured graph. Returns the compiler's result, and the work in AOTAutograd's graphs."""
    thread, earlier_hits = _threads.get(), _cache_hits()
    outer_work, thread.work = thread.work, {}
    kernels = note_kernels(captured)
    try:
        compiled = compile_captured()
        work = tuple((module, tuple(counts)) for module, counts in thread.work.items())
    finally:
        thread.work = outer_work
    unknown = "" if work else _missing() or (FROM_AUTOGRAD_CACHE if _cache_hits() > earlier_hits else _NO_GRAPH)
    return compiled, GraphWork(str(CompileContext.current_compile_id() or ""), work, unknown, kernels)


@cache
def watch_graphs() -> None:
    """Wrap the functions by which torch passes graphs on, to read the graphs; once per process."""
    module = sys.modules[GRAPHS_MODULE]
    for name in _COMPILE_FUNCTIONS:
        function = getattr(module, name, None)
        if function is not None:
            setattr(module, name, _reading(function, is_backward=name == _COMPILE_FUNCTIONS[-1]))


def _missing() -> str:
    """Return a sentence about the first function that this version of torch lacks; empty if it has all."""
    module = sys.modules.get(GRAPHS_MODULE, sys.modules.get(_IMPORTING_MODULE))
    if module is None:
        return ""
    missing = [name for name in _COMPILE_FUNCTIONS if not hasattr(module, name)]
    return f"torch {torch.__version__} does not pass graphs by {missing[0]}" if missing else ""


def _cache_hits() -> int:
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return int((counters.get("aot_autograd") or {}).get("autograd_cache_hit", 0))


def _reading(function: Callable[..., Any], *, is_backward: bool) -> Callable[..., Any]:
    """Return a function that reads the graph it is passed, then passes it on."""

    def call(graph: Any, *args: Any, **kwargs: Any) -> Any:
        thread = _threads.get()
        # During a program's compilation Inductor compiles search patterns too, without a context.
        if thread.work is None or TracingContext.try_get() is None:
            return function(graph, *args, **kwargs)
        owners: dict[str, Owner] = {}
        try:
            with unseen_by_modes():
                _add_nodes(thread.work, owners, graph, is_backward=is_backward)
                note_owners(owners, is_backward=is_backward)
        except Exception as error:  # another version of torch has another `meta`
            if raised_by_handler(error):
                raise
            thread.work.clear()
        return function(graph, *args, **kwargs)

    return skip_all(call)


def _add_nodes(work: dict[InnerModule, list[int]], owners: dict[str, Owner], graph: Any, *, is_backward: bool) -> None:
    formulas = formula_by_operator()
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        module, phase = owners[node.name] = owner_of(node, is_backward=is_backward)
        if factors := factors_of(node):
            owners[factors] = module, phase
        counts = work.setdefault(module, [*NO_WORK])
        flops = _flops_of(node, formulas)
        counts[phase] += 1
        total = counts[3 + phase]
        counts[3 + phase] = UNKNOWN_FLOPS if UNKNOWN_FLOPS in (flops, total) else total + flops


def _flops_of(node: Any, formulas: dict[str, Formula]) -> int:
    """Return the FLOPs of a node; -1 if its shapes are not fixed, its formula fails, or it contains a graph."""
    target, positional = node.target, node.args
    if isinstance(target, HigherOrderOperator):
        # An operator that saves the state of random numbers runs another operator, with the arguments after that.
        index = next((index for index, argument in enumerate(positional) if isinstance(argument, OpOverload)), None)
        if index is None:
            return UNKNOWN_FLOPS
        target, positional = positional[index], positional[index + 1 :]
    packet = getattr(target, "overloadpacket", None)
    formula = formulas.get(getattr(packet, "_qualified_op_name", ""))
    if formula is None:
        return 0
    args, kwargs = map_arg((positional, node.kwargs), lambda argument: argument.meta.get("val"))
    shapes = [leaf.shape for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if any(type(size) is not int for shape in shapes for size in shape):
        return UNKNOWN_FLOPS
    try:
        return int(formula(*args, **kwargs, out_val=node.meta.get("val")))
    except (Exception, SystemExit) as error:
        if raised_by_handler(error):
            raise
        return UNKNOWN_FLOPS
