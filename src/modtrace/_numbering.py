"""Numbers for keys, given out in the order in which the keys come."""

from collections.abc import Hashable
from typing import TypeVar

_Key = TypeVar("_Key", bound=Hashable)


class Numbering(dict[_Key, int]):
    """Numbers each key when it is first asked for; the keys are in the order of their numbers.

    Args:
        first: the first number.

    Example:
        >>> numbers = Numbering[str]()
        >>> numbers["a"], numbers["b"], numbers["a"]
        (0, 1, 0)
    """

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self._first = first

    def __missing__(self, key: _Key) -> int:
        number = self[key] = len(self) + self._first
        return number
