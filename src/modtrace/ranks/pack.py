"""A folder of recordings → a dataset: Parquet files of spans, collectives, steps and ranges, see `dataset_files`.

A part has ranks that together fit into memory, or one large rank that is read in pieces. Each file of a part has one
bucket of steps of all its ranks. A reader of a bucket reads one file per part, so a map over buckets needs no shuffle.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq

from .._arrays import Numbering
from .._errors import ModtraceError, WriteError
from .._pools import map_in_processes, processor_count
from .._tables import counted
from ..ring.clocks import measurement_record
from ..timeline import Track
from ..timeline.contents import damage_sentence, process_label
from .all_ranks import place_rank
from .dataset_files import (
    DatasetFiles,
    Part,
    broken_parts,
    file_name,
    read_head,
    read_parts,
    remove_part,
    write_head,
    write_part,
)
from .dataset_tables import FOLDERS, TABLE_NAMES, parquet_options, to_arrow
from .rank_folder import (
    JobTime,
    Location,
    RankRecording,
    RankTime,
    Reference,
    check_one_world,
    group_by_size,
    load_pieces,
)
from .rank_tables import TABLE_MAKERS, RankEntry, join_tables, take

_MIN_PART_BYTES = 8 << 20
"""Minimum bytes of rings in a part, because each part has a fixed cost."""
_MAX_PART_BYTES = 128 << 20
"""Maximum bytes of rings in a part; reading them needs several times this memory."""
_MIN_PARTS = 16
"""Minimum number of parts, if they are large enough, so that several processes have equal work."""
_MAX_RANKS_PER_PART = 512


class PackResult(NamedTuple):
    """The result of `pack`."""

    rank_count: int  # number of ranks in the dataset
    packed_count: int  # number of ranks that this run packed; the others were there already
    span_count: int  # number of spans in the dataset
    span_bytes: int  # bytes of its files of spans
    damage: Mapping[str, str]  # process (`rank 3`) -> description of the damage of its ring; only damaged rings


def pack(
    files: Sequence[RankRecording],
    dataset: Location,
    *,
    steps_per_bucket: int = 10,
    processes: int | None = None,
    executor: Executor | None = None,
    progress: Callable[[int], object] | None = None,
    this_host: bool = False,
    source: str | None = None,
) -> PackResult:
    """Write the recordings of ranks as a dataset; keep existing parts whose source files have not changed.

    Args:
        files: the recordings.
        dataset: a folder, or a URL that pyarrow can open; new, or from an earlier run.
        steps_per_bucket: number of steps that are stored together.
        processes: number of processes that pack in parallel; None: one per CPU.
        executor: packs instead of these processes; its workers must see the same files under the same names.
        progress: called with the number of ranks that were packed since the last call.
        this_host: keep the parts that other hosts packed, even if their times have another reference.
        source: the URL that the files were copied from; None if they were not copied.

    Raises:
        WriteError: the dataset's folder contains something else, or cannot be written.
        ModtraceError: a recording cannot be read, roles have ranks of their own, or other hosts use another
            `steps_per_bucket`.
    """
    check_one_world(files)
    job = JobTime(files)
    target = DatasetFiles(dataset)
    try:
        _prepare(target, steps_per_bucket, this_host)
        sources = {file.rank: _fingerprint(file, source) for file in files}
        packed_ranks = _known_ranks(target, sources, job.reference, steps_per_bucket, this_host)
        unpacked = [file for file in files if file.rank not in packed_ranks]
        part_bytes = sum(os.stat(file.path).st_size for file in unpacked) // _MIN_PARTS
        groups = group_by_size(unpacked, min(max(part_bytes, _MIN_PART_BYTES), _MAX_PART_BYTES), _MAX_RANKS_PER_PART)
        parts = [_PartSources.of(group, job, sources) for group in groups]
        pack_part = partial(_pack_part, target.location, steps_per_bucket)
        for _, packed in map_in_processes(pack_part, parts, processes or processor_count(), executor):
            if progress is not None:
                progress(packed)
        complete_parts = read_parts(target)
        for name in broken_parts(target, complete_parts, steps_per_bucket):
            del complete_parts[name]
        entries = [entry for part in complete_parts.values() for entry in part.ranks]
        absent = sources.keys() - {entry.rank for entry in entries}
        if absent:
            raise WriteError(f"{target.location}: files of {counted(len(absent), 'rank')} are missing; pack again")
        nbytes = sum(file.size or 0 for file in target.files("spans") if file.extension == "parquet")
    except OSError as error:
        raise WriteError(f"{target.location}: cannot be written: {error.strerror or error}") from error
    damage = {process_label(entry.role, entry.rank): entry.damage for entry in entries if entry.damage}
    return PackResult(len(entries), len(unpacked), sum(entry.spans for entry in entries), nbytes, damage)


_ALL_FOLDERS = ("parts", *TABLE_NAMES)


def _prepare(files: DatasetFiles, steps_per_bucket: int, this_host: bool) -> None:
    """Create the folders or keep the existing dataset; empty it if it has another number of steps per bucket."""
    try:
        old_length = None if files.is_empty() else read_head(files)
    except ModtraceError as error:
        raise WriteError(
            f"{files.location}: contains something other than a dataset of this version; choose another folder"
        ) from error
    if this_host and old_length not in (None, steps_per_bucket):
        raise ModtraceError(f"{files.location}: other hosts use --steps-per-bucket {old_length}; use the same number")
    files.make(_ALL_FOLDERS)
    if old_length != steps_per_bucket:
        for folder in _ALL_FOLDERS:  # the description is written last, so that an interrupted run can continue
            for file in files.files(folder):
                files.remove(f"{folder}/{file.base_name}")
        write_head(files, steps_per_bucket)


def _known_ranks(
    files: DatasetFiles, sources: Mapping[int, list[object]], reference: Reference, length: int, this_host: bool
) -> set[int]:
    """Return the ranks of complete parts; remove parts with changed files, or in a time of another reference."""
    ranks: set[int] = set()
    parts = read_parts(files)
    broken = broken_parts(files, parts, length)
    for name, part in parts.items():
        has_same_files = all(sources.get(entry.rank, entry.source) == entry.source for entry in part.ranks)
        is_other_host = this_host and not any(entry.rank in sources for entry in part.ranks)
        if name not in broken and has_same_files and (part.reference == reference or is_other_host):
            ranks.update(entry.rank for entry in part.ranks)
        else:
            remove_part(files, name, TABLE_NAMES)
    return ranks


def _fingerprint(file: RankRecording, source: str | None) -> list[object]:
    status = os.stat(file.path)
    path = os.path.abspath(file.path) if source is None else f"{source.rstrip('/')}/{file.path.name}"
    return [path, status.st_size, status.st_mtime_ns]


class _PartSources(NamedTuple):
    """The sources of a part."""

    empty: Part  # the part, without its ranks and steps
    ranks: list[tuple[RankRecording, RankTime, list[Any]]]  # recording, mapping to the job's time, `RankEntry.source`

    @classmethod
    def of(cls, files: Sequence[RankRecording], job: JobTime, sources: Mapping[int, list[Any]]) -> "_PartSources":
        measured = [measurement_record(readings) for file in files for readings in job.measurements.get(file.rank, ())]
        ranks = [(file._replace(path=file.path.absolute()), job[file.rank], sources[file.rank]) for file in files]
        return cls(Part(job.reference, measured, [], {}), ranks)


def _pack_part(dataset: str, steps_per_bucket: int, sources: _PartSources) -> int:
    """Write one part, in a process of its own. If this is interrupted, the next run writes the part again."""
    entries: list[RankEntry] = []
    parts = _parts(sources, entries)
    if len(sources.ranks) > 1:
        by_name: dict[str, list[Any]] = {name: [] for name in TABLE_NAMES}
        for tables in parts:
            for name, table in tables.items():
                by_name[name].append(table)
        parts = iter([{name: join_tables(by_name.pop(name)) for name in TABLE_NAMES}])
    part_name = f"{sources.ranks[0][0].rank:06}-{sources.ranks[-1][0].rank:06}"
    files = DatasetFiles(dataset)
    files.make(_ALL_FOLDERS)
    remove_part(files, part_name, TABLE_NAMES)  # files of an interrupted run
    steps: dict[str, list[list[int]]] = {name: [] for name in TABLE_NAMES}
    for index, (bucket, tables) in enumerate(_buckets(parts, steps_per_bucket)):
        first_step = bucket * steps_per_bucket
        for name, table in tables.items():
            rows = to_arrow(table)
            if rows.num_rows or not index:  # the first bucket has all tables, for their schemas
                with files.create(file_name(name, part_name, first_step)) as file:
                    pq.write_table(rows, file, rows.num_rows or 1, **parquet_options(rows.schema))
            if rows.num_rows:
                if not steps[name] or (steps[name][-1][1] - 1) // steps_per_bucket < bucket - 1:
                    steps[name].append([first_step, first_step])
                steps[name][-1][1] = int(table.step.max()) + 1
    write_part(files, part_name, sources.empty._replace(ranks=entries, steps=steps))
    return len(entries)


def _parts(sources: _PartSources, entries: list[RankEntry]) -> Iterator[dict[str, Any]]:
    """Yield the tables of each rank, or of each piece of a large ring; append each rank's entry to `entries`."""
    for file, time, source in sources.ranks:
        spans, bound_ns, peak_bytes, torn, engine, lines = 0, 0, -1, 0, "", ""
        moments: list[int] = []
        tracks = Numbering[Track]()  # joins the tracks of the pieces
        for piece in load_pieces(file):
            rank = place_rank(piece, time, file)
            tables = {name: TABLE_MAKERS[kind](rank.timeline, rank.rank) for kind, name in FOLDERS.items()}
            numbers = np.array([tracks[track] for track in rank.timeline.tracks] or [0], np.int32)
            tables["spans"] = tables["spans"]._replace(track=numbers[tables["spans"].track])
            spans, bound_ns = spans + len(tables["spans"].rank), max(bound_ns, rank.bound_ns)
            peak_bytes = max(peak_bytes, -1 if rank.peak_bytes is None else rank.peak_bytes)
            slices, engine, lines = rank.timeline.slices, rank.engine, rank.lines
            torn = rank.timeline.stats.torn  # total of all pieces so far
            moments += [int(slices.start.min()), int(slices.end.max())] if len(slices) else []
            yield tables
        bounds = min(moments, default=0), max(moments, default=0)
        identity = file.rank, file.role, bound_ns, time.method, time.clock
        entries.append(
            RankEntry(*identity, *bounds, spans, peak_bytes, engine, source, lines, damage_sentence(torn, tracks))
        )


def _buckets(parts: Iterator[dict[str, Any]], length: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of each bucket of `length` steps and its tables, in order.

    Each part has whole steps, later than the steps of the previous part. If all are empty, there is one empty bucket.
    """
    number, pending = 0, dict[str, Any]()
    for part in parts:
        joined = {name: join_tables([pending[name], table]) if pending else table for name, table in part.items()}
        bucket = {name: table.step // length for name, table in joined.items()}
        numbers = np.unique(np.concatenate([*bucket.values()])).tolist() or [0]
        order = {name: np.argsort(numbers_of, kind="stable") for name, numbers_of in bucket.items()}
        bounds = {
            name: np.searchsorted(numbers_of[order[name]], [*numbers, 1 << 31]) for name, numbers_of in bucket.items()
        }
        for index in range(len(numbers)):
            if index:
                yield number, pending  # the last bucket may continue in the next part
            rows = {name: order[name][slice(*row_bounds[index : index + 2])] for name, row_bounds in bounds.items()}
            number, pending = numbers[index], {name: take(table, rows[name]) for name, table in joined.items()}
    yield number, pending
