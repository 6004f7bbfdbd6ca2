"""A folder of recordings → a dataset: Parquet files of spans, collectives, steps and ranges, see `dataset_tables`.

A part holds as many ranks as fit the memory, or one that is read in pieces. In each file a row group holds some steps,
a bucket, of all its ranks, so that whoever asks for a bucket reads one row group of each file: a map over buckets needs
no shuffle.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq

from .._errors import ModtraceError, WriteError
from .._files import Folder
from .._numbering import Numbering
from .._processes import map_in_processes, processor_count
from ..timeline import Track
from .all_ranks import place_rank
from .dataset_tables import (
    FOLDERS,
    TABLE_NAMES,
    RankEntry,
    create_anew,
    parquet_options,
    read_head,
    read_parts,
    to_arrow,
    write_head,
    write_part,
)
from .rank_folder import JobTime, RankRecording, RankTime, check_one_world, load_pieces
from .rank_tables import TABLE_MAKERS, join_tables, take

_PART_BYTES = 128 << 20
"""Bytes of rings in a part; reading one takes several times as much memory."""
_MAX_RANKS_PER_PART = 512


class PackResult(NamedTuple):
    """What `pack` did."""

    ranks: int  # how many ranks the dataset holds
    packed: int  # how many of them this run has packed; the others were there
    spans: int  # how many spans the dataset holds
    nbytes: int  # how large its files of spans are


def pack(
    files: Sequence[RankRecording],
    dataset: str | os.PathLike[str],
    *,
    steps_per_bucket: int = 10,
    processes: int | None = None,
    executor: Executor | None = None,
    progress: Callable[[int], object] | None = None,
) -> PackResult:
    """Write the recordings of ranks as a dataset; keep the parts of it whose files have not changed.

    Args:
        files: the recordings.
        dataset: a folder, new or of an earlier run.
        steps_per_bucket: how many steps are stored together.
        processes: how many pack at a time; None: one per processor.
        executor: runs them in place of these; its workers see the same files by the same names.
        progress: called with the number of ranks that were packed since the last call.

    Raises:
        WriteError: the folder holds something else, or cannot be written.
        ModtraceError: a recording cannot be read, or roles have ranks of their own.
    """
    root = Path(dataset).absolute()
    check_one_world(files)
    job = JobTime(files)
    _begin(root, steps_per_bucket, job.reference)
    try:
        known = _known_ranks(root, {file.rank: _fingerprint(file) for file in files})
        left = [file for file in files if file.rank not in known]
        parts = [
            [(file._replace(path=file.path.absolute()), job[file.rank]) for file in group]
            for group in _group_by_size(left)
        ]
        pack_part = partial(_pack_part, root, steps_per_bucket)
        for _, packed in map_in_processes(pack_part, parts, processes or processor_count(), executor):
            if progress is not None:
                progress(packed)
        entries = [entry for part in read_parts(root).values() for entry in part]
        nbytes = sum(path.stat().st_size for path in (root / "spans").glob("*.parquet"))
    except OSError as error:
        raise _cannot(root, error) from error
    return PackResult(len(entries), len(left), sum(entry.spans for entry in entries), nbytes)


def _begin(root: Path, steps_per_bucket: int, reference: str) -> None:
    """Make the folder, or keep the dataset in it if that is in the same time; else begin anew."""
    try:
        if root.exists() and any(root.iterdir()) and read_head(root) != (steps_per_bucket, reference):
            for folder in _folders(root).values():  # the description last, so that a run that is cut off goes on here
                for path in sorted(Path(folder.path).glob("*")):
                    path.unlink()
        root.mkdir(parents=True, exist_ok=True)
        _folders(root)
        write_head(root, steps_per_bucket, reference)
    except ModtraceError as error:
        raise WriteError(
            f"{root}: it holds something else than a dataset of this version; name another folder"
        ) from error
    except OSError as error:
        raise _cannot(root, error) from error


def _folders(root: Path) -> dict[str, Folder]:
    """Return the folders in that of a dataset by their names, held and made if they are missing; none is a link.

    Raises:
        OSError: one cannot be made, or something else has its name.
    """
    held = Folder(root)
    return {name: held.make(name, 0o777) for name in ("parts", *TABLE_NAMES)}


def _cannot(root: Path, error: OSError) -> WriteError:
    return WriteError(f"{root}: cannot be written: {error.strerror or error}")


def _known_ranks(root: Path, sources: Mapping[int, list[object]]) -> set[int]:
    """Return the ranks of whole parts; remove parts in which a rank's file has changed."""
    known: set[int] = set()
    folders = _folders(root)
    for name, entries in read_parts(root).items():
        if all(sources.get(entry.rank, entry.source) == entry.source for entry in entries):
            known.update(entry.rank for entry in entries)
            continue
        for folder, held in folders.items():
            Path(held.path, f"{name}.json" if folder == "parts" else f"{name}.parquet").unlink(missing_ok=True)
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


def _pack_part(dataset: Path, steps_per_bucket: int, part: Sequence[tuple[RankRecording, RankTime]]) -> int:
    """Write one part; runs in a process of its own. What was cut off in the middle is written again by the next run."""
    entries: list[RankEntry] = []
    parts = _parts(part, entries)
    if len(part) > 1:
        by_name: dict[str, list[Any]] = {name: [] for name in TABLE_NAMES}
        for tables in parts:
            for name, table in tables.items():
                by_name[name].append(table)
        parts = iter([{name: join_tables(by_name.pop(name)) for name in TABLE_NAMES}])
    file_name = f"{part[0][0].rank:06}-{part[-1][0].rank:06}"
    folders = _folders(dataset)
    paths = {name: Path(folders[name].path, f"{file_name}.parquet") for name in TABLE_NAMES}
    with ExitStack() as stack:
        writers: dict[str, pq.ParquetWriter] = {}
        for tables in _buckets(parts, steps_per_bucket):
            for name, table in tables.items():
                row_group = to_arrow(table)
                if name not in writers:
                    new, schema = stack.enter_context(create_anew(paths[name].with_suffix(".new"))), row_group.schema
                    writers[name] = stack.enter_context(pq.ParquetWriter(new, schema, **parquet_options(schema)))
                if row_group.num_rows:
                    writers[name].write_table(row_group, row_group_size=row_group.num_rows)
    for path in paths.values():
        os.replace(path.with_suffix(".new"), path)
    write_part(Path(folders["parts"].path), file_name, entries)
    return len(entries)


def _parts(part: Sequence[tuple[RankRecording, RankTime]], entries: list[RankEntry]) -> Iterator[dict[str, Any]]:
    """Yield the tables of each rank, of a large ring piece by piece; append what a dataset says of it to `entries`."""
    for file, time in part:
        source, spans, bound_ns, peak_bytes = _fingerprint(file), 0, 0, -1
        tracks = Numbering[Track]()  # each piece has its own
        for own in load_pieces(file):
            one = place_rank(own, time, file)
            tables = {name: TABLE_MAKERS[kind](one.timeline, one.rank) for kind, name in FOLDERS.items()}
            numbers = np.array([tracks[track] for track in one.timeline.tracks] or [0], np.int32)
            tables["spans"] = tables["spans"]._replace(track=numbers[tables["spans"].track])
            spans, bound_ns = spans + len(tables["spans"].rank), max(bound_ns, one.bound_ns)
            peak_bytes = max(peak_bytes, -1 if one.peak_bytes is None else one.peak_bytes)
            yield tables
        entries.append(RankEntry(file.rank, bound_ns, time.method, time.clock, spans, peak_bytes, source))


def _buckets(parts: Iterator[dict[str, Any]], length: int) -> Iterator[dict[str, Any]]:
    """Yield the tables of each bucket of `length` steps, in order.

    Each part has whole steps, after those of the part before. If nothing is in them, one bucket without rows is there,
    so that there is a schema.
    """
    waiting: dict[str, Any] = {}
    for part in parts:
        joined = {name: join_tables([waiting[name], table]) if waiting else table for name, table in part.items()}
        bucket = {name: table.step // length for name, table in joined.items()}
        numbers = np.unique(np.concatenate([*bucket.values()])).tolist() or [0]
        order = {name: np.argsort(of, kind="stable") for name, of in bucket.items()}
        bounds = {name: np.searchsorted(of[order[name]], [*numbers, 1 << 31]) for name, of in bucket.items()}
        for place in range(len(numbers)):
            if place:
                yield waiting  # the last one goes on in the next part
            rows = {name: order[name][slice(*of[place : place + 2])] for name, of in bounds.items()}
            waiting = {name: take(table, rows[name]) for name, table in joined.items()}
    yield waiting
