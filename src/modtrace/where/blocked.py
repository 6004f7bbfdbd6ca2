"""How far one process is with collectives, sends and receives, and in which one it is stuck."""

from __future__ import annotations

from typing import NamedTuple

from ..timeline import Group

__all__ = ["ANY_PEER", "Blocked", "GroupProgress", "PeerProgress"]

ANY_PEER = -1
"""The peer of a receive from whoever sends first."""


class Blocked(NamedTuple):
    """A collective, a send or a receive that was called and is not complete.

    Attributes:
        operator: as `torch.distributed` calls it.
        counter: which collective of its group it is; of a send or receive which one with its peer.
        since_ns: when the wait for it began, or its call; monotonic nanoseconds.
        tid: of the thread that called it, as the operating system has it; 0 where that is not known.
        details: what else is known of it, as texts.
    """

    operator: str
    counter: int
    since_ns: int
    tid: int = 0
    details: tuple[str, ...] = ()


class GroupProgress(NamedTuple):
    """How far one process is with the collectives of one group.

    Attributes:
        group: the group.
        last: the counter of the last one that was called; -1 where none was.
        recent: the operators of the last ones, in order; empty texts where they are not known.
        blocked: the first one that is not complete, as far as the engine can know; else None.
    """

    group: Group
    last: int
    recent: tuple[str, ...]
    blocked: Blocked | None

    def operator(self, counter: int) -> str:
        """Return which operator has this counter; empty where that is not known."""
        index = len(self.recent) - 1 - (self.last - counter)
        return self.recent[index] if 0 <= index < len(self.recent) else ""


class PeerProgress(NamedTuple):
    """How far one process is with its sends to, or its receives from, one other.

    Attributes:
        group: the group that they are called on.
        operator: "send" or "recv".
        peer: the rank in the group at the other end, or `ANY_PEER`.
        last: the counter of the last one that was called.
        blocked: the first one that is not complete; else None.
    """

    group: Group
    operator: str
    peer: int
    last: int
    blocked: Blocked | None
