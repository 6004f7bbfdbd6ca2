"""A folder of recordings → a dataset: Parquet files of spans, collectives and steps, see `dataset_tables`.

A part holds as many ranks as fit the memory. In each file a row group holds some steps, a bucket, of all its ranks, so
that whoever asks for a bucket reads one row group of each file: a map over buckets needs no shuffle.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .._errors import ModtraceError, WriteError
from .._system.processes import map_in_processes, processor_count
from .._typing import Int32Array
from .all_ranks import load_rank
from .dataset_tables import (
    TABLES,
    DatasetHead,
    RankEntry,
    arrow_collectives,
    arrow_spans,
    arrow_steps,
    parquet_options,
    read_head,
    read_parts,
    write_head,
    write_part,
)
from .job_time import JobTime, RankTime
from .rank_folder import RankRecording
from .rank_tables import collective_table, join_tables, span_table, step_end_table, take

_PART_BYTES = 128 << 20
"""Bytes of rings in a part; reading one takes several times as much memory."""
_MAX_RANKS_PER_PART = 512


_MAKERS: dict[str, tuple[Callable[..., Any], Callable[..., pa.Table]]] = {
    "spans": (span_table, arrow_spans),
    "collectives": (collective_table, arrow_collectives),
    "steps": (step_end_table, arrow_steps),
}
"""What makes each of `TABLES` from a timeline, and an Arrow table from that."""


class PackResult(NamedTuple):
    """What `pack` did.

    Attributes:
        ranks: how many ranks the dataset holds.
        packed: how many of them this run has packed; the others were there.
        spans: how many spans the dataset holds.
        nbytes: how large its files of spans are.
    """

    ranks: int
    packed: int
    spans: int
    nbytes: int


class _Part(NamedTuple):
    """Ranks that one process packs at a time."""

    files: list[RankRecording]
    times: list[RankTime]
    dataset: Path
    steps_per_bucket: int


def pack(
    files: Sequence[RankRecording],
    dataset: str | os.PathLike[str],
    *,
    steps_per_bucket: int = 10,
    processes: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> PackResult:
    """Write the recordings of ranks as a dataset; what is there already, of unchanged files, is left as it is.

    Args:
        files: the recordings.
        dataset: a folder, new or of an earlier run.
        steps_per_bucket: how many steps are stored together.
        processes: how many pack at a time; None: one per processor.
        progress: called with the number of ranks that were packed since the last call.

    Raises:
        WriteError: the folder holds something else, or cannot be written.
        ModtraceError: a recording cannot be read.
    """
    root = Path(dataset)
    job = JobTime(files)
    _begin(root, DatasetHead(steps_per_bucket, job.reference))
    try:
        known = _known_ranks(root, {file.rank: _fingerprint(file) for file in files})
        left = [file for file in files if file.rank not in known]
        groups = _group_by_size(left)
        parts = [_Part(group, [job[file.rank] for file in group], root, steps_per_bucket) for group in groups]
        for _, packed in map_in_processes(_pack_part, parts, processes or processor_count()):
            if progress is not None:
                progress(packed)
        entries = [entry for part in read_parts(root).values() for entry in part]
        nbytes = sum(path.stat().st_size for path in (root / "spans").glob("*.parquet"))
    except OSError as error:
        raise _cannot(root, error) from error
    return PackResult(len(entries), len(left), sum(entry.spans for entry in entries), nbytes)


def _begin(root: Path, head: DatasetHead) -> None:
    """Make the folder, or check that it is of an earlier run in the same time; else begin anew."""
    try:
        if root.exists() and any(root.iterdir()) and _head_there(root) != head:
            for name in ("parts", *TABLES):  # the description last, so that a run that is cut off goes on here
                for path in sorted((root / name).glob("*")):
                    path.unlink()
        for name in ("parts", *TABLES):
            (root / name).mkdir(parents=True, exist_ok=True)
        write_head(root, head)
    except OSError as error:
        raise _cannot(root, error) from error


def _head_there(root: Path) -> DatasetHead:
    try:
        return read_head(root)
    except ModtraceError as error:
        raise WriteError(
            f"{root}: it holds something else than a dataset of this version; name another folder"
        ) from error


def _cannot(root: Path, error: OSError) -> WriteError:
    return WriteError(f"{root}: cannot be written: {error.strerror or error}")


def _known_ranks(root: Path, sources: Mapping[int, list[object]]) -> set[int]:
    """Return the ranks of whole parts; parts in which a rank's file is another one now are taken out."""
    known: set[int] = set()
    for name, entries in read_parts(root).items():
        if all(sources.get(entry.rank, entry.source) == entry.source for entry in entries):
            known.update(entry.rank for entry in entries)
            continue
        (root / "parts" / f"{name}.json").unlink()
        for table in TABLES:
            (root / table / f"{name}.parquet").unlink(missing_ok=True)
    return known


def _fingerprint(file: RankRecording) -> list[object]:
    status = os.stat(file.path)
    return [os.path.abspath(file.path), status.st_size, status.st_mtime_ns]


def _group_by_size(files: Sequence[RankRecording]) -> list[list[RankRecording]]:
    groups: list[list[RankRecording]] = []
    size = 0
    for file in files:
        own = file.path.stat().st_size
        if not groups or size + own > _PART_BYTES or len(groups[-1]) >= _MAX_RANKS_PER_PART:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += own
    return groups


def _pack_part(part: _Part) -> int:
    """Write one part; runs in a process of its own. What was cut off in the middle is written again by the next run."""
    entries: list[RankEntry] = []
    parts: dict[str, list[Any]] = {name: [] for name in TABLES}
    for file, time in zip(part.files, part.times, strict=True):
        source = _fingerprint(file)
        one = load_rank(file, time)
        for name, (make, _) in _MAKERS.items():
            parts[name].append(make(one.timeline, one.rank))
        spans = len(parts["spans"][-1].rank)
        entries.append(RankEntry(one.rank, one.bound_ns, one.method, time.clock, spans, source))
    file_name = f"{part.files[0].rank:06}-{part.files[-1].rank:06}"
    whole: dict[str, Any] = {name: join_tables(parts.pop(name)) for name in TABLES}
    # If nothing is in the recordings, one bucket without rows, so that there is a schema.
    buckets = _buckets([table.step for table in whole.values()], part.steps_per_bucket) or [(0, 0)]
    for name, table in whole.items():
        row_groups = [
            _MAKERS[name][1](take(table, np.flatnonzero((table.step >= first) & (table.step < last))))
            for first, last in buckets
        ]
        _write_parquet(part.dataset / name / f"{file_name}.parquet", row_groups)
    write_part(part.dataset, file_name, entries)
    return len(entries)


def _buckets(steps: Sequence[Int32Array], length: int) -> list[tuple[int, int]]:
    numbers = np.unique(np.concatenate(steps) // length).tolist()
    return [(number * length, (number + 1) * length) for number in numbers]


def _write_parquet(path: Path, row_groups: Sequence[pa.Table]) -> None:
    partial = path.with_suffix(".new")
    schema = row_groups[0].schema
    with pq.ParquetWriter(partial, schema, **parquet_options(schema)) as writer:
        for row_group in row_groups:
            if row_group.num_rows:
                writer.write_table(row_group, row_group_size=row_group.num_rows)
    os.replace(partial, path)
