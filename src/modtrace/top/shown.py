"""What the screen shows of a job, and what keys change in that."""

from __future__ import annotations

from dataclasses import dataclass

from .job_rates import SORT_KEYS

__all__ = ["KEYS_HELP", "View"]

KEYS_HELP = "q quit  p pause  s sort  - + fold  m modules or ranks  [ ] rank  ↑ ↓ scroll"
_PAGE = 10


@dataclass(slots=True)
class View:
    """What is shown.

    Attributes:
        sort: one of `SORT_KEYS`.
        max_depth: how many levels of modules; None: all.
        by_rank: a line per rank, and not per module.
        rank: which rank's modules, as an index into the ranks; None: those of all.
        paused: whether what is shown stays as it is.
        first: the first line that is shown.
        quits: whether the user wants to leave.
        help: the last line, which says what there is to press.
    """

    sort: str = "self"
    max_depth: int | None = None
    by_rank: bool = False
    rank: int | None = None
    paused: bool = False
    first: int = 0
    quits: bool = False
    help: str = KEYS_HELP

    def press(self, key: str, ranks: int, depth: int) -> None:
        """Do what a key stands for; others do nothing.

        Args:
            key: a character, or the name of a key (`up`, `page down`).
            ranks: how many there are.
            depth: how many levels of modules there are.
        """
        if key in ("q", "Q"):
            self.quits = True
        elif key in ("p", " "):
            self.paused = not self.paused
        elif key in ("s", "S"):
            step = 1 if key == "s" else -1
            self.sort = SORT_KEYS[(SORT_KEYS.index(self.sort) + step) % len(SORT_KEYS)]
        elif key == "-":
            self.max_depth = max(1, (depth if self.max_depth is None else min(self.max_depth, depth)) - 1)
        elif key in ("+", "="):
            self.max_depth = None if self.max_depth is None or self.max_depth + 1 >= depth else self.max_depth + 1
        elif key == "m":
            self.by_rank, self.first = not self.by_rank, 0
        elif key in ("[", "]") and ranks:
            self._next_rank(1 if key == "]" else -1, ranks)
        else:
            moved = {"up": -1, "down": 1, "page up": -_PAGE, "page down": _PAGE}.get(key, 0)
            self.first = max(0, self.first + moved)

    def _next_rank(self, step: int, ranks: int) -> None:
        # All of them stand before the first one.
        index = (0 if self.rank is None else min(self.rank, ranks - 1) + 1) + step
        index %= ranks + 1
        self.rank, self.by_rank, self.first = (index - 1 if index else None), False, 0
