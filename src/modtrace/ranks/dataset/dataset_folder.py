"""What a dataset says of itself: the steps in a bucket, and which ranks each of its parts holds.

```
DATASET/dataset.json            steps in a bucket, and which time it is
DATASET/parts/NAME.json         the ranks of a part, and the files they came from; written last
DATASET/spans/NAME.parquet      their spans; so collectives/ and steps/
```
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import orjson

from ..._errors import ModtraceError

__all__ = [
    "TABLES",
    "DatasetHead",
    "RankEntry",
    "is_dataset",
    "read_head",
    "read_parts",
    "write_head",
    "write_part",
]

_FORMAT = 1
"""The version of the layout; others are refused."""

TABLES = ("spans", "collectives", "steps")
"""The tables of a dataset, each in a folder of this name."""

_MARKER = "dataset.json"


class DatasetHead(NamedTuple):
    """What a dataset says as a whole.

    Attributes:
        steps_per_bucket: how many steps lie together.
        reference: which time it is, see `JobTime`.
    """

    steps_per_bucket: int
    reference: str


class RankEntry(TypedDict):
    """What a dataset says of one rank: its number, and of what its times are, see `RankTimeline`.

    `source` is the file it came from: path, size and time of change.
    """

    rank: int
    bound_ns: int
    method: str
    clock: str
    spans: int
    source: list[Any]


_ENTRY_TYPES = {"rank": int, "bound_ns": int, "method": str, "clock": str, "spans": int, "source": list}


def is_dataset(folder: str | os.PathLike[str]) -> bool:
    """Tell whether a folder looks like one that `pack` wrote."""
    return (Path(folder) / _MARKER).is_file()


def read_head(folder: Path) -> DatasetHead:
    """Return what a dataset says as a whole.

    Raises:
        ModtraceError: it is none, or of another version.
    """
    try:
        values = orjson.loads((folder / _MARKER).read_bytes())
        version = values["format"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise _no_dataset(folder) from error
    if version != _FORMAT:
        raise ModtraceError(f"{folder}: its format is {version}, and this version reads {_FORMAT}")
    steps, reference = values.get("steps_per_bucket"), values.get("reference")
    if not (isinstance(steps, int) and steps > 0 and isinstance(reference, str)):
        raise _no_dataset(folder)
    return DatasetHead(steps, reference)


def write_head(folder: Path, head: DatasetHead) -> None:
    """Write what a dataset says as a whole.

    Raises:
        OSError: it cannot be written.
    """
    _write_json(folder / _MARKER, {"format": _FORMAT, **head._asdict()})


def read_parts(folder: Path) -> dict[str, list[RankEntry]]:
    """Return the ranks of each part, by its name.

    Raises:
        ModtraceError: one cannot be read.
    """
    parts = {}
    for path in sorted((folder / "parts").glob("*.json")):
        try:
            entries = orjson.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ModtraceError(f"{path}: cannot be read: {error}; delete it and pack again") from error
        if not isinstance(entries, list) or not all(_is_entry(entry) for entry in entries):
            raise ModtraceError(f"{path}: it does not say which ranks it is of; delete it and pack again")
        parts[path.stem] = entries
    return parts


def write_part(folder: Path, name: str, entries: Sequence[RankEntry]) -> None:
    """Write which ranks a part holds, once its tables are there.

    Raises:
        OSError: it cannot be written.
    """
    _write_json(folder / "parts" / f"{name}.json", entries)


def _is_entry(entry: object) -> bool:
    return isinstance(entry, Mapping) and all(isinstance(entry.get(key), kind) for key, kind in _ENTRY_TYPES.items())


def _no_dataset(folder: Path) -> ModtraceError:
    return ModtraceError(f"{folder}: it is no dataset; make one with `modtrace ranks pack`")


def _write_json(path: Path, value: object) -> None:
    partial = path.with_suffix(".new")
    partial.write_bytes(orjson.dumps(value))
    os.replace(partial, path)
