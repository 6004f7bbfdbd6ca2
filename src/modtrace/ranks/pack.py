"""A folder of recordings → a dataset: Parquet files of spans, collectives, steps and ranges, see `dataset_files`.

A part holds as many ranks as fit the memory, or one that is read in pieces. Each of its files holds some steps, a
bucket, of all its ranks, so that whoever asks for a bucket reads one file of each part: a map over buckets needs no
shuffle.
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
    cut_parts,
    file_name,
    read_head,
    read_parts,
    remove_part,
    write_head,
    write_part,
)
from .dataset_tables import FOLDERS, TABLE_NAMES, parquet_options, to_arrow
from .rank_folder import JobTime, Place, RankRecording, RankTime, Reference, check_one_world, group_by_size, load_pieces
from .rank_tables import TABLE_MAKERS, RankEntry, join_tables, take

_MIN_PART_BYTES = 8 << 20
"""The least bytes of rings in a part: each part takes some time of its own."""
_MAX_PART_BYTES = 128 << 20
"""The most bytes of rings in a part: to read them takes several times as much memory."""
_MIN_PARTS = 16
"""The least number of parts, so that several processes have equally much to do."""
_MAX_RANKS_PER_PART = 512


class PackResult(NamedTuple):
    """The result of `pack`."""

    ranks: int  # how many ranks the dataset holds
    packed: int  # how many of them this run has packed; the others were there
    spans: int  # how many spans the dataset holds
    nbytes: int  # how large its files of spans are
    damage: Mapping[str, str]  # by process (`rank 3`), what is damaged of its ring; without those that are whole


def pack(
    files: Sequence[RankRecording],
    dataset: Place,
    *,
    steps_per_bucket: int = 10,
    processes: int | None = None,
    executor: Executor | None = None,
    progress: Callable[[int], object] | None = None,
    this_host: bool = False,
    source: str | None = None,
) -> PackResult:
    """Write the recordings of ranks as a dataset; keep the parts of it whose files have not changed.

    Args:
        files: the recordings.
        dataset: a folder, or a URL that pyarrow opens; new or of an earlier run.
        steps_per_bucket: how many steps are stored together.
        processes: how many pack at a time; None: one per processor.
        executor: runs them instead of these; its workers see the same files by the same names.
        progress: called with the number of ranks that were packed since the last call.
        this_host: keep what other hosts have packed, whichever time their parts are in.
        source: where the files were copied from; None: they were not.

    Raises:
        WriteError: the place holds something else, or cannot be written.
        ModtraceError: a recording cannot be read, roles have ranks of their own, or other hosts store other steps
            together.
    """
    check_one_world(files)
    job = JobTime(files)
    target = DatasetFiles(dataset)
    try:
        _begin(target, steps_per_bucket, this_host)
        sources = {file.rank: _fingerprint(file, source) for file in files}
        packed_ranks = _known_ranks(target, sources, job.reference, steps_per_bucket, this_host)
        left = [file for file in files if file.rank not in packed_ranks]
        share = sum(os.stat(file.path).st_size for file in left) // _MIN_PARTS
        groups = group_by_size(left, min(max(share, _MIN_PART_BYTES), _MAX_PART_BYTES), _MAX_RANKS_PER_PART)
        parts = [_PartSources.of(group, job, sources) for group in groups]
        pack_part = partial(_pack_part, target.place, steps_per_bucket)
        for _, packed in map_in_processes(pack_part, parts, processes or processor_count(), executor):
            if progress is not None:
                progress(packed)
        whole = read_parts(target)
        for name in cut_parts(target, whole, steps_per_bucket):
            del whole[name]
        entries = [entry for part in whole.values() for entry in part.ranks]
        gone = sources.keys() - {entry.rank for entry in entries}
        if gone:
            raise WriteError(f"{target.place}: files of it are gone, of {counted(len(gone), 'rank')}; pack again")
        nbytes = sum(file.size or 0 for file in target.files("spans") if file.extension == "parquet")
    except OSError as error:
        raise WriteError(f"{target.place}: cannot be written: {error.strerror or error}") from error
    damage = {process_label(entry.role, entry.rank): entry.damage for entry in entries if entry.damage}
    return PackResult(len(entries), len(left), sum(entry.spans for entry in entries), nbytes, damage)


_ALL_FOLDERS = ("parts", *TABLE_NAMES)


def _begin(files: DatasetFiles, steps_per_bucket: int, this_host: bool) -> None:
    """Make the folders, or keep the dataset in them; begin anew if it stores other steps together."""
    try:
        before = None if files.is_empty() else read_head(files)
    except ModtraceError as error:
        raise WriteError(
            f"{files.place}: it holds something else than a dataset of this version; name another folder"
        ) from error
    if this_host and before not in (None, steps_per_bucket):
        raise ModtraceError(f"{files.place}: other hosts store {before} steps together: --steps-per-bucket {before}")
    files.make(_ALL_FOLDERS)
    if before != steps_per_bucket:
        for folder in _ALL_FOLDERS:  # the description last, so that a run that is cut off goes on here
            for file in files.files(folder):
                files.remove(f"{folder}/{file.base_name}")
        write_head(files, steps_per_bucket)


def _known_ranks(
    files: DatasetFiles, sources: Mapping[int, list[object]], reference: Reference, length: int, this_host: bool
) -> set[int]:
    """Return the ranks of whole parts; remove parts in which a rank's file has changed, or that are in another time."""
    ranks: set[int] = set()
    parts = read_parts(files)
    cut = cut_parts(files, parts, length)
    for name, part in parts.items():
        is_same = name not in cut and all(sources.get(entry.rank, entry.source) == entry.source for entry in part.ranks)
        is_of_others = this_host and not any(entry.rank in sources for entry in part.ranks)
        if is_same and (part.reference == reference or is_of_others):
            ranks.update(entry.rank for entry in part.ranks)
        else:
            remove_part(files, name, TABLE_NAMES)
    return ranks


def _fingerprint(file: RankRecording, source: str | None) -> list[object]:
    status = os.stat(file.path)
    path = os.path.abspath(file.path) if source is None else f"{source.rstrip('/')}/{file.path.name}"
    return [path, status.st_size, status.st_mtime_ns]


class _PartSources(NamedTuple):
    """The recordings that a part is made of."""

    empty: Part  # the part, without its ranks and steps
    # The recording of each, its place in the job's time, and what a dataset says of its file.
    ranks: list[tuple[RankRecording, RankTime, list[Any]]]

    @classmethod
    def of(cls, files: Sequence[RankRecording], job: JobTime, sources: Mapping[int, list[Any]]) -> "_PartSources":
        measured = [measurement_record(noted) for file in files for noted in job.measurements.get(file.rank, ())]
        ranks = [(file._replace(path=file.path.absolute()), job[file.rank], sources[file.rank]) for file in files]
        return cls(Part(job.reference, measured, [], {}), ranks)


def _pack_part(dataset: str, steps_per_bucket: int, sources: _PartSources) -> int:
    """Write one part; runs in a process of its own. What was cut off in the middle is written again by the next run."""
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
    remove_part(files, part_name, TABLE_NAMES)  # what a run that was cut off has left
    steps: dict[str, list[list[int]]] = {name: [] for name in TABLE_NAMES}
    for place, (bucket, tables) in enumerate(_buckets(parts, steps_per_bucket)):
        begin = bucket * steps_per_bucket
        for name, table in tables.items():
            rows = to_arrow(table)
            if rows.num_rows or not place:  # the first bucket has all tables, so that there is a schema
                with files.create(file_name(name, part_name, begin)) as file:
                    pq.write_table(rows, file, rows.num_rows or 1, **parquet_options(rows.schema))
            if rows.num_rows:
                if not steps[name] or (steps[name][-1][1] - 1) // steps_per_bucket < bucket - 1:
                    steps[name].append([begin, begin])
                steps[name][-1][1] = int(table.step.max()) + 1
    write_part(files, part_name, sources.empty._replace(ranks=entries, steps=steps))
    return len(entries)


def _parts(sources: _PartSources, entries: list[RankEntry]) -> Iterator[dict[str, Any]]:
    """Yield the tables of each rank, of a large ring piece by piece; append what a dataset says of it to `entries`."""
    for file, time, source in sources.ranks:
        spans, bound_ns, peak_bytes, torn, engine, lines = 0, 0, -1, 0, "", ""
        moments: list[int] = []
        tracks = Numbering[Track]()  # each piece has its own
        for piece in load_pieces(file):
            rank = place_rank(piece, time, file)
            tables = {name: TABLE_MAKERS[kind](rank.timeline, rank.rank) for kind, name in FOLDERS.items()}
            numbers = np.array([tracks[track] for track in rank.timeline.tracks] or [0], np.int32)
            tables["spans"] = tables["spans"]._replace(track=numbers[tables["spans"].track])
            spans, bound_ns = spans + len(tables["spans"].rank), max(bound_ns, rank.bound_ns)
            peak_bytes = max(peak_bytes, -1 if rank.peak_bytes is None else rank.peak_bytes)
            slices, engine, lines = rank.timeline.slices, rank.engine, rank.lines
            torn = rank.timeline.stats.torn  # of all pieces so far
            moments += [int(slices.start.min()), int(slices.end.max())] if len(slices) else []
            yield tables
        ends = min(moments, default=0), max(moments, default=0)
        placed = file.rank, file.role, bound_ns, time.method, time.clock
        entries.append(
            RankEntry(*placed, *ends, spans, peak_bytes, engine, source, lines, damage_sentence(torn, tracks))
        )


def _buckets(parts: Iterator[dict[str, Any]], length: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of each bucket of `length` steps and its tables, in order.

    Each part has whole steps, after those of the part before. If nothing is in them, there is one bucket without rows.
    """
    number, waiting = 0, dict[str, Any]()
    for part in parts:
        joined = {name: join_tables([waiting[name], table]) if waiting else table for name, table in part.items()}
        bucket = {name: table.step // length for name, table in joined.items()}
        numbers = np.unique(np.concatenate([*bucket.values()])).tolist() or [0]
        order = {name: np.argsort(numbers_of, kind="stable") for name, numbers_of in bucket.items()}
        bounds = {
            name: np.searchsorted(numbers_of[order[name]], [*numbers, 1 << 31]) for name, numbers_of in bucket.items()
        }
        for place in range(len(numbers)):
            if place:
                yield number, waiting  # the last one goes on in the next part
            rows = {name: order[name][slice(*edges[place : place + 2])] for name, edges in bounds.items()}
            number, waiting = numbers[place], {name: take(table, rows[name]) for name, table in joined.items()}
    yield number, waiting
