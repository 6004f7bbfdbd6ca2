"""The texts that stand for collectives in a ring, and the groups that they run on."""

from __future__ import annotations

from typing import Any

import torch

from ...ring import NameTable
from ...ring.collective_text import collective_text, format_ranks

__all__ = ["OPERATORS", "CollectiveNames"]

OPERATORS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "allgather": "all_gather",
    "_allgather_base": "all_gather_into_tensor",
    "allgather_coalesced": "all_gather_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "barrier": "barrier",
    "monitored_barrier": "monitored_barrier",
    "send": "send",
    "recv": "recv",
    "recv_any_source": "recv_any_source",
}
"""The operators of c10d, without their last underscore, by what `torch.distributed` calls them."""


class CollectiveNames:
    """Names collectives for a ring, and notes each group once.

    Args:
        names: the ring's name table.
    """

    def __init__(self, names: NameTable) -> None:
        self._names = names
        self._noted: set[str] = set()

    def __call__(self, operator: tuple[str, str, int, str]) -> int:
        """Return the id of the text of an operator of c10d on a group.

        Args:
            operator: its name, the group's name, for a send or receive the rank in the group at the other end, -1 where
                there is none, and the type of the device that runs it, empty for the CPU.
        """
        name, group_name, peer, device = operator
        if group_name not in self._noted:
            self._noted.add(group_name)
            ranks, description = _describe_group(group_name)
            self._names.group(group_name, format_ranks(ranks), description)
        name = name.removesuffix("_")
        return self._names.text(collective_text(OPERATORS.get(name, name), group_name, peer, device))


def _describe_group(group_name: str) -> tuple[list[int], str]:
    """Return the global ranks of a group, none where torch does not know them, and what torch says it is for."""
    world: Any = torch.distributed.distributed_c10d._world
    for group, ranks in list(world.pg_group_ranks.items()):
        # Where this process is no member, torch has a number in place of the group.
        if getattr(group, "group_name", None) == group_name:
            return sorted(ranks), str(getattr(group, "group_desc", ""))
    return [], ""
