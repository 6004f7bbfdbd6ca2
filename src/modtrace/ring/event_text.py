"""The texts of a ring for the names of ranges with their category, the names of collectives, and ranks of a group."""

import json
from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

_MAX_RANKS = 1 << 20

OPERATORS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "allgather": "all_gather",
    "_allgather_base": "all_gather_into_tensor",
    "allgather_coalesced": "all_gather_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
}
"""The operators that have another name in c10d (without its last underscore) than in `torch.distributed`."""
SAME_NAME = ("reduce_scatter", "broadcast", "reduce", "gather", "scatter", "barrier", "monitored_barrier")
PEER_OPERATORS = ("send", "recv")
ANY_SOURCE = "recv_any_source"
MESSAGES = (*PEER_OPERATORS, ANY_SOURCE)
COLLECTIVES = frozenset((*OPERATORS.values(), *SAME_NAME, *MESSAGES))
"""The names of the operators in `torch.distributed`."""


UNSEEN_BY_PYTHON = (
    "the Python engine does not see the collectives of DDP's reducer, or functional ones, in which ranks wait; record "
    "with the native engine (modtrace build)"
)


class CollectiveName(NamedTuple):
    """The name of a collective.

    Attributes:
        operator: its name in `torch.distributed` (`all_reduce`, `send`).
        group: torch's name of the process group (`0` for the default group).
        peer: the rank in the group at the other end of a send or receive; -1 without one.
        device: type of the device that runs the operator (`cuda`) while threads go on; empty for the CPU, and for calls
            without tensors, such as a barrier.
    """

    operator: str
    group: str
    peer: int = -1
    device: str = ""


def collective_text(operator: str, group: str, peer: int = -1, device: str = "") -> str:
    """Return the text of a collective's name: a JSON array (`["send", "0", 3]`, `["all_reduce", "0", -1, "cuda"]`)."""
    values = [operator, group, max(peer, -1), device]
    return json.dumps(values if device else values[: 2 if peer < 0 else 3])


def parse_collective(text: str) -> CollectiveName:
    """Parse the text of a collective's name; a text of a damaged ring becomes the operator."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return CollectiveName(text, "")
    match values:
        case [str(operator), str(group)]:
            return CollectiveName(operator, group)
        case [str(operator), str(group), int(peer)]:
            return CollectiveName(operator, group, peer if 0 <= peer < _MAX_RANKS else -1)
        case [str(operator), str(group), int(peer), str(device)]:
            return CollectiveName(operator, group, peer if 0 <= peer < _MAX_RANKS else -1, device)
    return CollectiveName(text, "")


def rank_list(ranks: Iterable[int]) -> str:
    """Return the text of ranks as ranges, with a stride if it is not 1: `0-3`, `0-24:8`, `0,5`."""
    remaining_ranks = sorted(set(ranks))
    parts = []
    while remaining_ranks:
        stride = remaining_ranks[1] - remaining_ranks[0] if len(remaining_ranks) > 1 else 1
        count = 1
        while count < len(remaining_ranks) and remaining_ranks[count] - remaining_ranks[count - 1] == stride:
            count += 1
        if count < 3 and stride > 1:
            count = 1
        first, last = remaining_ranks[0], remaining_ranks[count - 1]
        end = f"-{last}" if count > 1 else ""
        parts.append(f"{first}{end}" + (f":{stride}" if count > 1 and stride > 1 else ""))
        del remaining_ranks[:count]
    return ",".join(parts)


def parse_ranks(text: str) -> list[int]:
    """Return the ranks in a text of `rank_list`; raises ValueError for any other text."""
    ranks: list[int] = []
    for part in text.split(",") if text else []:
        bounds, _, stride = part.partition(":")
        first, _, last = bounds.partition("-")
        block = range(int(first), int(last or first) + 1, int(stride or 1))
        if not 0 <= block.start < _MAX_RANKS or not block.start < block.stop <= _MAX_RANKS or block.step < 1:
            raise ValueError(f"{part!r} is not a range of ranks")
        ranks.extend(block)
        if len(ranks) > _MAX_RANKS:
            raise ValueError(f"there are more than {_MAX_RANKS} ranks")
    return ranks


RangeCategory = Literal[
    "user", "data loading", "optimizer", "communication", "gc", "compile", "saving", "evaluation", "generate", "torch"
]
CATEGORIES: tuple[RangeCategory, ...] = get_args(RangeCategory)
"""The purposes of ranges: `user` for the user's ranges, `torch` for a range of torch that fits no other category.

No engine writes `evaluation`: the analysis finds evaluations among the calls.
"""

EVAL = "Module.eval#"
"""Prefix of the name of a call that switches a module to eval mode."""
TRAIN = "Module.train#"
"""Prefix of the name of a call that switches a module to train mode."""

_PLACES = {"optimizer": "the optimizer", "gc": "garbage collection", "compile": "compilation"}


class RangeName(NamedTuple):
    """The name of a range."""

    name: str  # the name that torch or the user gave it
    category: str  # one of `CATEGORIES`

    @property
    def place(self) -> str:
        """The place of a thread in this range, as a part of a sentence; a range of the user has its name."""
        return f"range {self.name}" if self.category == "user" else _PLACES.get(self.category, self.category)


def range_text(name: str, category: RangeCategory) -> str:
    """Return the text of a range's name: a JSON array, `["optimizer", "Optimizer.step#AdamW.step"]`."""
    return json.dumps([category, name])


def parse_range(text: str) -> RangeName:
    """Parse the text of a range's name; a text of a damaged ring becomes a name of category `user`."""
    try:
        match json.loads(text):
            case [str(category), str(name)] if category in CATEGORIES:
                return RangeName(name, category)
    except (ValueError, RecursionError):
        pass
    return RangeName(text, "user")
