"""The rows of a summary: what one module took, and which row contains which by name."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from ..._arrays import Int64Array
from ..contents import Name


class ModuleTimes(NamedTuple):
    """The times of one module over the whole timeline; times are integer nanoseconds.

    A self time leaves out what inner modules took. A total is the self time of the module and of those inside it, in
    the same phase; a call within a call of the same module counts once. The totals of the three phases have no moment
    in common. A call inside backward counts to its module and to those that contain it by name, not to the module in
    whose backward it happens to be. GPU times are sums of the durations of kernels, memcpys and memsets, wherever
    they overlap, without communication, which is counted apart; they are 0 in a summary without GPU columns.

    Attributes:
        fqn: the module's fully qualified name (`GPT.transformer.h.0`); empty in a summary by class.
        module_class: the name of its class (`Block`).
        calls: how often its forward ran; a recompute is not a call.
        forward_ns: total of forward on the CPU.
        forward_self_ns: of it, outside inner modules.
        backward_ns: total of backward on the CPU, without the calls inside it.
        backward_self_ns: of it, outside inner modules.
        recompute_ns: total of recompute on the CPU.
        recompute_self_ns: of it, outside inner modules.
        step_p50_ns: median, over the steps in which it ran, of the total of all phases in a step.
        step_p95_ns: of these totals, the one that 95 % of the steps do not exceed.
        retained_bytes: what a forward call kept, see `MemoryModule`; None if memory was not recorded.
        peak_bytes: the most that tensors held inside a call or backward, less what they held at its begin; the same.
        flops_forward: FLOPs of forward, with inner modules, as for times; None if they were not counted or are unknown.
        flops_backward: the same of backward.
        flops_recompute: the same of recompute.
        in_steps_ns: of the total of all phases what is in whole steps, without evaluations, and all of other processes.
            If no step is whole, all steps count.
        kernels: kernels that the module itself launched.
        gpu_forward_ns: GPU time launched in forward, by it or its inner modules.
        gpu_forward_self_ns: of it, launched by itself.
        gpu_backward_ns: the same of backward, recompute included.
        gpu_backward_self_ns: of it, launched by itself.
        gpu_recompute_ns: the same of recompute.
        gpu_recompute_self_ns: of it, launched by itself.
        kernel_ns: of the GPU self times together, kernels.
        memcpy_ns: of the GPU self times together, memcpys.
        memset_ns: of the GPU self times together, memsets.
        collectives: operations of communication that the module itself launched: kernels of NCCL or RCCL, what else was
            launched for a collective, and collectives of gloo, which run on the CPU.
        communication_ns: durations of these, in all phases together; in no other GPU time.
        communication_overlap_ns: of this, while the same device computed (for gloo: while any module ran).
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
        """The CPU total of all phases per call, in whole nanoseconds; 0 where no call was seen."""
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
"""The fields of `ModuleTimes` that every summary has; the others are known only where there was a GPU."""


class GpuStepTimes(NamedTuple):
    """Work that was launched on GPUs in one step; times are integer nanoseconds.

    Attributes:
        step: its number.
        gpu_ns: durations of the kernels, memcpys and memsets that compute.
        communication_ns: durations of what belongs to collectives, those of gloo on the CPU too.
        communication_overlap_ns: of it, while the same device computed.
    """

    step: int
    gpu_ns: int = 0
    communication_ns: int = 0
    communication_overlap_ns: int = 0


class GpuTotals(NamedTuple):
    """GPU time of a whole trace, in integer nanoseconds; the rows of its summary add up to it.

    Attributes:
        kernel_ns: durations of all kernels that compute.
        memcpy_ns: durations of all memcpys.
        memset_ns: durations of all memsets.
        communication_ns: durations of all that belongs to collectives, those of gloo on the CPU too.
        communication_overlap_ns: of it, while the same device computed.
    """

    kernel_ns: int
    memcpy_ns: int
    memset_ns: int
    communication_ns: int = 0
    communication_overlap_ns: int = 0


GroupBy = Literal["module", "class"]


class Groups(NamedTuple):
    """The groups of a timeline's modules; each gets a row."""

    fqns: list[str]  # for each group the fully qualified name of its module; empty if a group is a class
    classes: list[str]  # for each group the class of its modules
    of_name: Int64Array  # int64[names], for each name of the timeline its group
    inner_name: Int64Array  # int64[pairs], a name, ascending, …
    # Int64[pairs], … and a group that it counts to: its own and, once each, those of the modules that contain it by
    # their fully qualified names.
    outer_group: Int64Array

    def __len__(self) -> int:
        return len(self.classes)


@lru_cache(1)  # a ring is summed up in pieces that mostly have the same names
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
    """Return for each fully qualified name those of the others that contain it, the innermost first."""
    names = set(fqns)
    outer: dict[str, list[str]] = {}
    for fqn in fqns:
        parts = fqn.split(".")
        prefixes = (".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
        outer[fqn] = [prefix for prefix in prefixes if prefix in names]
    return outer


_COUNTED = frozenset(ModuleTimes._fields[ModuleTimes._fields.index("kernel_ns") :]) | {"kernels"}
_SELF_FIELDS = tuple(field for field in ModuleTimes._fields if field.endswith("_self_ns") or field in _COUNTED)


def in_tree_order(rows: Sequence[ModuleTimes]) -> list[tuple[ModuleTimes, str, str]]:
    """Return each row after the one that contains it by name; siblings keep the order they have in `rows`.

    With it are its name below the row around it (`h.0`) and the lines of the tree in front of it (`│  ├─ `).
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
    """Return the rows on the first `depth` levels; the self times of those below are added to the row around them."""
    outer = outer_modules([row.fqn for row in rows])
    kept = {row.fqn: row for row in rows if len(outer[row.fqn]) < depth}
    for row in rows:
        if row.fqn not in kept:
            outer_row = kept[outer[row.fqn][-depth]]
            sums = {field: getattr(outer_row, field) + getattr(row, field) for field in _SELF_FIELDS}
            kept[outer_row.fqn] = outer_row._replace(**sums)
    return list(kept.values())
