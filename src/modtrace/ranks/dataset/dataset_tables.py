"""A dataset as tables, read where they are asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from ..._errors import ModtraceError
from ..rank_tables import CollectiveTable, SpanTable, StepTable
from ..slow import Bounds
from .arrow_tables import collectives_from_arrow, spans_from_arrow, steps_from_arrow
from .dataset_folder import TABLES, read_head, read_parts

__all__ = ["DatasetTables"]

_TEXTS = ("phase", "fqn", "module_class", "operator", "group", "kind")


class DatasetTables:
    """Reads a dataset: only the row groups that hold the steps and the ranks that are asked for.

    Args:
        path: its folder.

    Attributes:
        path: the folder.
        ranks: what is known of each rank, in their order.

    Raises:
        ModtraceError: it is none, of another version, or cannot be read; so do the methods.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        head, parts = read_head(self.path), read_parts(self.path)
        self.ranks = sorted((entry for entries in parts.values() for entry in entries), key=lambda entry: entry["rank"])
        if not self.ranks:
            raise ModtraceError(f"{self.path}: it holds no rank yet; run `modtrace ranks pack` again")
        self._steps_per_bucket = head.steps_per_bucket
        self._names = list(parts)

    def files(self, table: str) -> list[Path]:
        """Return the files of one of `TABLES`."""
        return [self.path / table / f"{name}.parquet" for name in self._names]

    def buckets(self, *tables: str) -> list[tuple[int, int]]:
        """Return the first step of each bucket and the one behind its last, in order.

        Args:
            tables: which of `TABLES` has something in it; none: any of them.
        """
        length = self._steps_per_bucket
        numbers: set[int] = set()
        with self._damage_named():
            for table in tables or TABLES:
                for fragment in self._dataset(table).get_fragments():
                    steps = [group.statistics["step"] for group in fragment.row_groups]
                    for bounds in steps:
                        numbers.update(range(bounds["min"] // length, bounds["max"] // length + 1))
        return [(number * length, (number + 1) * length) for number in sorted(numbers)]

    def bounds(self) -> Bounds:
        """Return how far the times of each rank are off."""
        return Bounds(
            [one["rank"] for one in self.ranks],
            [one["bound_ns"] for one in self.ranks],
            [one["clock"] for one in self.ranks],
        )

    def collectives(self, first: int, last: int) -> CollectiveTable:
        """Return the collectives of the steps from `first` to before `last`, of all ranks."""
        with self._damage_named():
            return collectives_from_arrow(self._dataset("collectives").to_table(filter=_steps(first, last)))

    def spans(self, ranks: Sequence[int], first: int, last: int) -> SpanTable:
        """Return the spans of some ranks in the steps from `first` to before `last`."""
        low, high = min(ranks), max(ranks)
        chosen = _steps(first, last) & (pc.field("rank") >= low) & (pc.field("rank") <= high)
        chosen &= pc.field("rank").isin(list(ranks))
        with self._damage_named():
            return spans_from_arrow(self._dataset("spans").to_table(filter=chosen))

    def steps(self, first: int, last: int) -> StepTable:
        """Return when the steps from `first` to before `last` ended."""
        with self._damage_named():
            return steps_from_arrow(self._dataset("steps").to_table(filter=_steps(first, last)))

    def _dataset(self, table: str) -> Any:
        return _open(tuple((str(file), file.stat().st_mtime_ns) for file in self.files(table)))

    @contextmanager
    def _damage_named(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError, LookupError, ValueError) as error:
            raise ModtraceError(f"{self.path}: cannot be read: {error}; delete it and pack again") from error


@lru_cache(maxsize=2 * len(TABLES))  # each bucket asks for them
def _open(files: tuple[tuple[str, int], ...]) -> Any:
    """Open the Parquet files of a table, known by their paths and the times at which they were changed."""
    options = ds.ParquetReadOptions(dictionary_columns=list(_TEXTS))
    return ds.dataset([path for path, _ in files], format=ds.ParquetFileFormat(read_options=options))


def _steps(first: int, last: int) -> Any:
    return (pc.field("step") >= first) & (pc.field("step") < last)
