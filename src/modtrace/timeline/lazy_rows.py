"""Columns that read as a sequence of records."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar, overload

from .._typing import AnyArray

if TYPE_CHECKING:
    from typing_extensions import Self

_Row_co = TypeVar("_Row_co", covariant=True)


class LazyRows(Sequence[_Row_co]):
    """Columns of which a record is made when it is asked for, so a million are cheap to hold."""

    _CHUNK = 1 << 14

    def take(self, rows: AnyArray | slice) -> Self:
        """Return some of the rows: those of these indices, of a mask or a slice."""
        raise NotImplementedError

    def _make(self, rows: slice) -> Iterator[_Row_co]:
        """Yield the rows from the start of a slice to before its stop."""
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> _Row_co: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> _Row_co | Self:
        if isinstance(index, slice):
            return self.take(index)
        position = range(len(self))[index]
        return next(self._make(slice(position, position + 1)))

    def __iter__(self) -> Iterator[_Row_co]:
        starts = range(0, len(self), self._CHUNK)
        return itertools.chain.from_iterable(self._make(slice(start, start + self._CHUNK)) for start in starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} {type(self).__name__.lower()}>"
