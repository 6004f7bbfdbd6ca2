"""Modules inside of regions that torch.compile made: their nodes, FLOPs and kernels in each graph.

A region's graphs are in the metadata of a timeline as JSON values:

    graph          dynamo's number of the graph
    unknown        why nothing is known of its nodes, or ""
    work           of each module its name (`blocks.0: Block`, "" for the region), its nodes in forward, backward and
                   recompute, and their FLOPs; without inner modules, -1 if they are not known
    kernel_times   in a merged trace, of each module its path, the time of its kernels in these phases, with inner
                   modules, and of that its share of kernels that are fused with other modules'
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from ..._tables import GIGA, LONG_MS, MODULE, NAME, NUMBER, PERCENT, TEXT, Column, Table, fields_of
from ..contents import compiled_graphs

_COUNTS = 6


class CompiledModule(NamedTuple):
    """One module in a compiled graph, with those inside it; None for what is not known.

    Attributes:
        fqn: the module's fully qualified name.
        module_class: the name of its class; empty for the region.
        region: the span in which it runs.
        graph: torch.compile's number of the graph (`0/1`: compiled for the second time).
        nodes_forward: operators in the forward graph.
        nodes_backward: those in the backward graph.
        nodes_recompute: of the forward, those that the backward graph runs again.
        flops_forward: what the operators with a formula cost in one call.
        flops_backward: the same, in backward.
        flops_recompute: the same, of what runs again.
        unknown: why nothing is known; else empty.
        kernel_ns_forward: what the kernels took that a profiler saw, in all calls.
        kernel_ns_backward: the same, in backward.
        kernel_ns_recompute: the same, of what runs again.
        kernel_ns_divided: of these, the module's share of kernels that are fused with other modules'.
    """

    fqn: str
    module_class: str
    region: str
    graph: str
    nodes_forward: int | None = None
    nodes_backward: int | None = None
    nodes_recompute: int | None = None
    flops_forward: int | None = None
    flops_backward: int | None = None
    flops_recompute: int | None = None
    unknown: str = ""
    kernel_ns_forward: int | None = None
    kernel_ns_backward: int | None = None
    kernel_ns_recompute: int | None = None
    kernel_ns_divided: int | None = None

    @property
    def divided_share(self) -> float | None:
        """Which share of the module's time is that of kernels that are fused with other modules'."""
        times = self.kernel_ns_forward, self.kernel_ns_backward, self.kernel_ns_recompute
        total = sum(time or 0 for time in times)
        return (self.kernel_ns_divided or 0) / total if total else None


_TIMED = tuple(name for name in CompiledModule._fields if name.startswith("kernel_ns_"))
_COUNTED = tuple(name for name in CompiledModule._fields if name.startswith(("nodes_", "flops_")))


def compiled_modules(metadata: Mapping[str, Any]) -> list[CompiledModule]:
    """Return the modules inside of what was compiled, in the order in which they run."""
    return [row for region, graph in compiled_graphs(metadata) for row in _modules_of(region, graph)]


def _modules_of(region: str, graph: Mapping[str, Any]) -> list[CompiledModule]:
    classes, totals = {"": ""}, {"": [0] * _COUNTS}
    for name, *counts in graph.get("work", ()):
        path, _, module_class = name.rpartition(": ")
        classes.setdefault(path, module_class)
        for outer in {"", *accumulate(path.split("."), "{}.{}".format)}:
            total = totals.setdefault(outer, [0] * _COUNTS)
            totals[outer] = [-1 if -1 in pair else sum(pair) for pair in zip(total, counts, strict=True)]
    times = {path: took for path, *took in graph.get("kernel_times", ())}
    number, unknown = str(graph.get("graph", "")), graph.get("unknown", "")
    rows = []
    for path, module_class in classes.items():
        row = CompiledModule(f"{region}.{path}" if path else region, module_class, region, number, unknown=unknown)
        numbers: dict[str, Any] = {key: n for key, n in zip(_COUNTED, totals[path], strict=True) if n >= 0}
        row = row if unknown else row._replace(**numbers)
        rows.append(row._replace(**dict(zip(_TIMED, times.get(path, ()), strict=False))))
    return rows


_COLUMNS = (
    Column("module", "fqn", MODULE),
    Column("class", "module_class", NAME, 3),
    Column("region", "region", MODULE, 6),
    Column("graph", "graph", TEXT),
    Column("kernels ms forward", "kernel_ns_forward", LONG_MS),
    Column("kernels ms backward", "kernel_ns_backward", LONG_MS),
    Column("kernels ms recompute", "kernel_ns_recompute", LONG_MS, 1, hidden_if="zero"),
    Column("divided %", "divided_share", PERCENT),
    Column("nodes", "nodes_forward", NUMBER, 2),
    Column("backward nodes", "nodes_backward", NUMBER, 4),
    Column("recompute nodes", "nodes_recompute", NUMBER, 5, hidden_if="zero"),
    Column("GFLOP forward", "flops_forward", GIGA),
    Column("GFLOP backward", "flops_backward", GIGA),
    Column("GFLOP recompute", "flops_recompute", GIGA, 1, hidden_if="zero"),
)
_NOTE = "with inner modules, so that rows overlap; GFLOP: of one call, of operators that torch has a formula for"
_KERNELS = (
    "kernels: of the whole profile; one that is fused of several modules is divided by the bytes that each one's nodes "
    "read and write, else equally; divided: which share of the time that is"
)


def compiled_table(modules: Sequence[CompiledModule]) -> Table:
    """Return the table of modules inside of what was compiled, and of which graphs nothing is known and why."""
    unknown = dict.fromkeys((row.region, row.graph, row.unknown) for row in modules if row.unknown)
    lines = [f"not known of {region}, graph {graph or '?'}: {reason}" for region, graph, reason in unknown]
    notes = (_NOTE, _KERNELS) if any(row.kernel_ns_forward is not None for row in modules) else (_NOTE,)
    return Table(_COLUMNS, modules, fields_of(CompiledModule), lines, notes, "module")
