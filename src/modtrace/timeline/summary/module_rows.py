"""The rows of a summary: the times of one module, and the tree of rows by name."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from ..._arrays import Int64Array
from ..contents import Name


class ModuleTimes(NamedTuple):
    """The times of one module over the whole timeline; times are integer nanoseconds.

    A self time excludes inner modules. A total is the self time of the module and its inner modules in the same phase;
    a call within a call of the same module counts once. The totals of the three phases do not overlap. A call inside
    backward counts to its module and to the modules that contain it by name, not to the module whose backward called
    it. GPU times are sums of the durations of kernels, memcpys and memsets, even if they overlap; communication is
    counted apart. They are 0 in a summary without GPU columns.

    Attributes:
        fqn: the module's fully qualified name (`GPT.transformer.h.0`); empty in a summary by class.
        module_class: the name of its class (`Block`).
        calls: number of forward calls, without recomputes.
        forward_ns: total of forward on the CPU.
        forward_self_ns: the part of `forward_ns` outside inner modules.
        backward_ns: total of backward on the CPU, without the calls inside it.
        backward_self_ns: the part of `backward_ns` outside inner modules.
        recompute_ns: total of recompute on the CPU.
        recompute_self_ns: the part of `recompute_ns` outside inner modules.
        step_p50_ns: median of the total of all phases in a step, over the steps in which the module ran.
        step_p95_ns: 95th percentile of these totals.
        retained_bytes: bytes that a forward call kept, see `MemoryModule`; None if memory was not recorded.
        peak_bytes: maximum held inside a call or backward, see `MemoryModule`; None if memory was not recorded.
        flops_forward: FLOPs of forward, with inner modules; None if they were not counted or are unknown.
        flops_backward: FLOPs of backward.
        flops_recompute: FLOPs of recompute.
        in_steps_ns: the part of the total of all phases in whole steps without evaluations; for other processes the
            whole total. If no step is whole, all steps count.
        kernels: number of kernels that the module itself launched.
        gpu_forward_ns: GPU time launched in forward, by the module or its inner modules.
        gpu_forward_self_ns: the part of `gpu_forward_ns` that the module itself launched.
        gpu_backward_ns: GPU time launched in backward, by the module or its inner modules.
        gpu_backward_self_ns: the part of `gpu_backward_ns` that the module itself launched.
        gpu_recompute_ns: GPU time launched in recompute, by the module or its inner modules.
        gpu_recompute_self_ns: the part of `gpu_recompute_ns` that the module itself launched.
        kernel_ns: time of kernels in the GPU self times of all phases.
        memcpy_ns: time of memcpys in the GPU self times of all phases.
        memset_ns: time of memsets in the GPU self times of all phases.
        collectives: number of communication operations that the module itself launched: all device work of NCCL's or
            RCCL's collectives, and the collectives of gloo, which run on the CPU.
        communication_ns: total duration of these in all phases; not part of any other GPU time.
        communication_overlap_ns: the part of `communication_ns` while the same device computed (gloo: while any module
            ran).
    """

    fqn: str
    module_class: str
    calls: int = 0
    forward_ns: int = 0
    forward_self_ns: int = 0
    backward_ns: int = 0
    backward_self_ns: int = 0
    recompute_ns: int = 0
    recompute_self_ns: int = 0
    step_p50_ns: int = 0
    step_p95_ns: int = 0
    retained_bytes: int | None = None
    peak_bytes: int | None = None
    flops_forward: int | None = None
    flops_backward: int | None = None
    flops_recompute: int | None = None
    in_steps_ns: int = 0
    kernels: int = 0
    gpu_forward_ns: int = 0
    gpu_forward_self_ns: int = 0
    gpu_backward_ns: int = 0
    gpu_backward_self_ns: int = 0
    gpu_recompute_ns: int = 0
    gpu_recompute_self_ns: int = 0
    kernel_ns: int = 0
    memcpy_ns: int = 0
    memset_ns: int = 0
    collectives: int = 0
    communication_ns: int = 0
    communication_overlap_ns: int = 0

    @property
    def total_ns(self) -> int:
        """The CPU totals of all phases together, in nanoseconds."""
        return self.forward_ns + self.backward_ns + self.recompute_ns

    @property
    def mean_ns(self) -> int:
        """The CPU total of all phases per call, in whole nanoseconds; 0 without a call."""
        return self.total_ns // self.calls if self.calls else 0

    @property
    def self_ns(self) -> int:
        """The CPU self times of all phases together, in nanoseconds."""
        return self.forward_self_ns + self.backward_self_ns + self.recompute_self_ns

    @property
    def gpu_self_ns(self) -> int:
        """The GPU self times of all phases together, in nanoseconds; without communication."""
        return self.kernel_ns + self.memcpy_ns + self.memset_ns


CPU_FIELDS = ModuleTimes._fields[: ModuleTimes._fields.index("kernels")]
"""The fields of `ModuleTimes` that every summary has; the other fields need a profiled GPU."""


class GpuStepTimes(NamedTuple):
    """GPU work that was launched in one step; times are integer nanoseconds.

    Attributes:
        step: number of the step.
        gpu_ns: total duration of kernels, memcpys and memsets, without communication.
        communication_ns: total duration of collectives, including gloo's on the CPU.
        communication_overlap_ns: the part of `communication_ns` while the same device computed.
    """

    step: int
    gpu_ns: int = 0
    communication_ns: int = 0
    communication_overlap_ns: int = 0


class GpuTotals(NamedTuple):
    """GPU time of a whole trace, in integer nanoseconds; the rows of its summary add up to it.

    Attributes:
        kernel_ns: total duration of kernels, without communication.
        memcpy_ns: total duration of memcpys.
        memset_ns: total duration of memsets.
        communication_ns: total duration of collectives, including gloo's on the CPU.
        communication_overlap_ns: the part of `communication_ns` while the same device computed.
    """

    kernel_ns: int
    memcpy_ns: int
    memset_ns: int
    communication_ns: int = 0
    communication_overlap_ns: int = 0


GroupBy = Literal["module", "class"]


class Groups(NamedTuple):
    """The groups of a timeline's modules; each group is a row of the summary."""

    fqns: list[str]  # fully qualified name of each group's module; empty if a group is a class
    classes: list[str]  # class of each group's modules
    of_name: Int64Array  # int64[names], the group of each name of the timeline
    # (inner_name, outer_group) are the pairs of a name and each group that it counts to: its own group, and those of
    # the modules that contain it by name. Each pair is there once.
    inner_name: Int64Array  # int64[pairs], indices of names, ascending
    outer_group: Int64Array  # int64[pairs], indices of groups

    def __len__(self) -> int:
        return len(self.classes)


@lru_cache(1)  # most pieces of a ring have the same names
def group_modules(names: tuple[Name, ...], by: GroupBy) -> Groups:
    """Return the groups of all modules, numbered in the order of `names`; names with one `fqn` are one module."""
    class_of: dict[str, str] = {}
    for name in names:
        class_of.setdefault(name.fqn, name.module_class)
    key_of = {fqn: fqn if by == "module" else module_class for fqn, module_class in class_of.items()}
    group_of = {key: group for group, key in enumerate(dict.fromkeys(key_of.values()))}
    outer = outer_modules(list(class_of))
    pairs = [
        (name, group)
        for name, (_, fqn, _) in enumerate(names)
        for group in dict.fromkeys(group_of[key_of[module]] for module in (fqn, *outer[fqn]))
    ]
    inner_name, outer_group = np.array(pairs, np.int64).reshape(-1, 2).T
    return Groups(
        fqns=list(group_of) if by == "module" else [""] * len(group_of),
        classes=[class_of[key] for key in group_of] if by == "module" else list(group_of),
        of_name=np.array([group_of[key_of[name.fqn]] for name in names], np.int64),
        inner_name=inner_name,
        outer_group=outer_group,
    )


def outer_modules(fqns: Sequence[str]) -> dict[str, list[str]]:
    """Return, for each fully qualified name, the names of the list that contain it, the innermost first."""
    names = set(fqns)
    outer: dict[str, list[str]] = {}
    for fqn in fqns:
        parts = fqn.split(".")
        prefixes = (".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
        outer[fqn] = [prefix for prefix in prefixes if prefix in names]
    return outer


_COUNTED = frozenset(ModuleTimes._fields[ModuleTimes._fields.index("kernel_ns") :]) | {"kernels"}
_SELF_FIELDS = tuple(field for field in ModuleTimes._fields if field.endswith("_self_ns") or field in _COUNTED)


def sort_as_tree(rows: Sequence[ModuleTimes]) -> list[tuple[ModuleTimes, str, str]]:
    """Return (row, name, branch) in tree order: a row follows the row that contains it, siblings keep their order.

    `name` is relative to the containing row (`h.0`); `branch` has the lines of the tree in front of it (`│  ├─ `).
    """
    outer = outer_modules([row.fqn for row in rows])
    inner: dict[str | None, list[ModuleTimes]] = {}
    for row in rows:
        inner.setdefault(next(iter(outer[row.fqn]), None), []).append(row)
    ordered: list[tuple[ModuleTimes, str, str]] = []
    stack = [(row, "", "", "") for row in reversed(inner.get(None, []))]
    while stack:
        row, outer_fqn, branch, below = stack.pop()
        ordered.append((row, row.fqn[len(outer_fqn) + 1 if outer_fqn else 0 :], branch))
        children = inner.get(row.fqn, [])
        for index in range(len(children) - 1, -1, -1):
            turn, straight = ("└─ ", "   ") if index == len(children) - 1 else ("├─ ", "│  ")
            stack.append((children[index], row.fqn, below + turn, below + straight))
    return ordered


def fold_below(rows: Sequence[ModuleTimes], depth: int) -> list[ModuleTimes]:
    """Return the rows of the first `depth` levels; self times of deeper rows are added to the row around them."""
    outer = outer_modules([row.fqn for row in rows])
    upper_rows = {row.fqn: row for row in rows if len(outer[row.fqn]) < depth}
    for row in rows:
        if row.fqn not in upper_rows:
            outer_row = upper_rows[outer[row.fqn][-depth]]
            sums = {field: getattr(outer_row, field) + getattr(row, field) for field in _SELF_FIELDS}
            upper_rows[outer_row.fqn] = outer_row._replace(**sums)
    return list(upper_rows.values())
