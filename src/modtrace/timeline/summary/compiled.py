"""Modules inside regions that torch.compile compiled: their nodes, FLOPs and kernels in each graph.

A region's graphs are in the metadata of a timeline as JSON values:

    graph          dynamo's number of the graph
    unknown        the reason why its nodes are unknown, or ""
    work           per module: its name (`blocks.0: Block`, "" for the region), its numbers of nodes in forward,
                   backward and recompute, and their FLOPs; without inner modules, -1 if unknown
    kernel_times   in a merged trace, per module: its path, the times of its kernels in these phases with inner modules,
                   and its share of the time of kernels that are fused with other modules'
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from ..._tables import GIGA, LONG_MS, MODULE, NAME, NUMBER, PERCENT, TEXT, Column, Table, fields_of
from ..contents import compiled_graphs

_COUNTS = 6


class CompiledModule(NamedTuple):
    """One module in a compiled graph, with its inner modules; unknown values are None.

    Attributes:
        fqn: the module's fully qualified name.
        module_class: the name of its class; empty for the region.
        region: name of the span that contains the graph.
        graph: torch.compile's number of the graph (`0/1`: compiled for the second time).
        nodes_forward: number of operators in the forward graph.
        nodes_backward: number of operators in the backward graph.
        nodes_recompute: number of forward operators that the backward graph runs again.
        flops_forward: FLOPs of the forward operators with a formula, in one call.
        flops_backward: FLOPs of the backward operators.
        flops_recompute: FLOPs of the operators that run again.
        unknown: reason why the counts are unknown; else empty.
        kernel_ns_forward: time of the profiled kernels of all calls, in forward.
        kernel_ns_backward: time of these kernels in backward.
        kernel_ns_recompute: time of these kernels in recompute.
        kernel_ns_divided: the part of these times that is the module's share of kernels fused with other modules'.
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
        """The share of the module's kernel time that comes from kernels fused with other modules'; None if unknown."""
        times = self.kernel_ns_forward, self.kernel_ns_backward, self.kernel_ns_recompute
        total = sum(time or 0 for time in times)
        return (self.kernel_ns_divided or 0) / total if total else None


_TIME_FIELDS = tuple(name for name in CompiledModule._fields if name.startswith("kernel_ns_"))
_COUNT_FIELDS = tuple(name for name in CompiledModule._fields if name.startswith(("nodes_", "flops_")))


def compiled_modules(metadata: Mapping[str, Any]) -> list[CompiledModule]:
    """Return the modules inside compiled regions, in the order in which they run."""
    return [row for region, graph in compiled_graphs(metadata) for row in _modules_of(region, graph)]


def _modules_of(region: str, graph: Mapping[str, Any]) -> list[CompiledModule]:
    classes, totals = {"": ""}, {"": [0] * _COUNTS}
    for name, *counts in graph.get("work", ()):
        path, _, module_class = name.rpartition(": ")
        classes.setdefault(path, module_class)
        for outer in {"", *accumulate(path.split("."), "{}.{}".format)}:
            total = totals.setdefault(outer, [0] * _COUNTS)
            totals[outer] = [-1 if -1 in pair else sum(pair) for pair in zip(total, counts, strict=True)]
    times = {path: kernel_ns for path, *kernel_ns in graph.get("kernel_times", ())}
    number, unknown = str(graph.get("graph", "")), graph.get("unknown", "")
    rows = []
    for path, module_class in classes.items():
        row = CompiledModule(f"{region}.{path}" if path else region, module_class, region, number, unknown=unknown)
        numbers: dict[str, Any] = {key: n for key, n in zip(_COUNT_FIELDS, totals[path], strict=True) if n >= 0}
        row = row if unknown else row._replace(**numbers)
        rows.append(row._replace(**dict(zip(_TIME_FIELDS, times.get(path, ()), strict=False))))
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
_KERNELS_NOTE = (
    "kernels: of the whole profile; a kernel fused of several modules is divided by the bytes that each module's nodes "
    "read and write, or equally if these are unknown; divided: share of the time from such kernels"
)


def compiled_table(modules: Sequence[CompiledModule]) -> Table:
    """Return the table of modules inside compiled regions; above it, the graphs with unknown counts and the reasons."""
    unknown = dict.fromkeys((row.region, row.graph, row.unknown) for row in modules if row.unknown)
    lines = [f"not known of {region}, graph {graph or '?'}: {reason}" for region, graph, reason in unknown]
    notes = (_NOTE, _KERNELS_NOTE) if any(row.kernel_ns_forward is not None for row in modules) else (_NOTE,)
    return Table(_COLUMNS, modules, fields_of(CompiledModule), lines, notes, "module")
