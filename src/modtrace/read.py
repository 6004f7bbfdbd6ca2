"""Reads a `Timeline` from every kind of file that modtrace writes or merges.

`read_timeline` reads any file; `file_kind` finds the kind of a file, `trace_path` opens a report. For a ring file,
`read_timeline` adds the counts of the whole run, if a watcher has saved them.
"""

import itertools
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from ._errors import ModtraceError, TraceError
from ._files import open_regular, work_folder
from .formats.limits import LimitError, check_unpacked
from .formats.trace_file import BLOCK_BYTES, ZIP_MAGIC, FileKind, TraceFile, file_kind, file_kind_by_head
from .live.read_whole_run import read_whole_run
from .record_options import StepRange
from .ring import RingLog, read_ring, ring_serials
from .timeline import OnePiece, Pieces, ReadRing, RingPieces, Timeline
from .timeline.contents import WHOLE_RUN
from .timeline.decode.window import build_around, build_last, find_last_steps
from .timeline.summary import find_step_bounds, take_steps
from .timeline.summary.step_bounds import CALL, OPTIMIZER

__all__ = [
    "NO_PROFILE",
    "FileKind",
    "errors_about",
    "extract_trace",
    "file_kind",
    "file_kind_by_head",
    "read_timeline",
    "trace_path",
]

NO_PROFILE = (FileKind.RING, FileKind.SAVED_JSON, FileKind.PERFETTO, FileKind.MERGED_PERFETTO, FileKind.ZIP)
"""Kinds of files that are not a profiler's trace, and so cannot be merged with a recording."""
_MAX_DIRECTORY_BYTES = 1 << 20
_MAX_END_BYTES = 20 + 22 + (1 << 16)
"""Maximum size of the records at the end of a ZIP archive: ZIP64 locator, end record, comment."""
_UNPACK = "unpack it and open the trace inside"


@contextmanager
def trace_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield `path`, or if it is a report's `.zip` the path of its trace, extracted for the duration of the block.

    Raises TraceError if the file cannot be read, or is an archive without a trace; errors about a trace in an archive
    name the archive. Raises ModtraceError if there is no writable folder for the extracted trace.
    """
    if not _is_archive(path):
        yield Path(path)  # needs no writable folder
        return
    with work_folder() as folder:
        inner = extract_trace(path, folder)
        with errors_about(path, inner):
            yield inner


@contextmanager
def errors_about(path: str | os.PathLike[str], inner: Path) -> Iterator[None]:
    """Name the archive in errors about the extracted trace, whose path the user does not know."""
    try:
        yield
    except TraceError as error:
        if inner == Path(path):
            raise
        raise TraceError(path, f"{inner.name}: {error.message}", error.offset) from error


def extract_trace(path: str | os.PathLike[str], folder: Path) -> Path:
    """Return `path`, or the trace of a report's `.zip`, extracted into `folder`; raises TraceError without a trace."""
    if not _is_archive(path):
        return Path(path)
    try:
        with open(path, "rb") as file:
            if _directory_bytes(file) > _MAX_DIRECTORY_BYTES:
                raise TraceError(path, f"its table of files is too large for a report of modtrace; {_UNPACK}")
            with zipfile.ZipFile(file) as archive:
                # Only fixed names are extracted, so an archive cannot choose the path of the extracted file.
                name = next((name for name in archive.namelist() if name in _REPORT_TRACES), None)
                if name is not None:
                    return _extract(archive, name, path, folder)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise TraceError(path, f"it is an incomplete or damaged ZIP archive: {error}") from error
    except OSError as error:
        raise TraceError(path, f"cannot be read: {error.strerror or error}") from error
    raise TraceError(path, f"it is a ZIP archive, but not a report of modtrace; {_UNPACK}")


_REPORT_TRACES = {"trace.pftrace.gz", "trace.json.gz"}


def _extract(archive: zipfile.ZipFile, name: str, path: str | os.PathLike[str], folder: Path) -> Path:
    packed_bytes = archive.getinfo(name).compress_size
    try:
        with archive.open(name) as member, open(folder / name, "wb") as extracted:
            while block := member.read(BLOCK_BYTES):
                check_unpacked(extracted.tell() + len(block), packed_bytes)
                extracted.write(block)
    except LimitError as error:
        raise TraceError(path, f"{name} in it: {error}") from None
    return folder / name


def _is_archive(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is a ZIP archive; raises TraceError if it cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(len(ZIP_MAGIC)) == ZIP_MAGIC
    except OSError as error:
        raise TraceError(path, f"cannot be read: {error.strerror or error}") from error


def _directory_bytes(file: BinaryIO) -> int:
    """Return the size in bytes of an archive's table of files, which `zipfile` reads as a whole before all else.

    For a ZIP64 archive, which has the size in other fields, return 2^32.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - _MAX_END_BYTES, 0))
    end = file.read()
    end_record = end.rfind(b"PK\5\6")
    if end_record < 0 or len(end) < end_record + 16:
        return 0  # not an archive: zipfile raises the error
    if end[end_record - 20 : end_record - 16] == b"PK\6\7":
        return 1 << 32
    return int.from_bytes(end[end_record + 12 : end_record + 16], "little")


_ADVICE = "load the file as modtrace saved it, or the ring file of the recording"
_READABLE = "modtrace reads ring files, reports, traces of torch.profiler, and .json, .pftrace and .html that it wrote"


def read_timeline(path: str | os.PathLike[str]) -> Timeline:
    """Read a timeline from any file that modtrace knows; see `modtrace.load`."""
    try:
        with trace_path(path) as trace:
            return _read(trace)
    except RecursionError as error:
        raise TraceError(path, "its data is nested too deeply to be read") from error
    except OSError as error:
        raise TraceError(path, f"it cannot be read: {error.strerror or error}") from error


_CARRIERS = {
    FileKind.SAVED_JSON: "chrome",
    FileKind.MERGED_JSON: "chrome",
    FileKind.PERFETTO: "perfetto",
    FileKind.MERGED_PERFETTO: "perfetto",
    FileKind.PAGE: "page",
}
"""The form in which each kind of file contains the table of a timeline that modtrace wrote."""


def _read(path: Path) -> Timeline:
    """Read a timeline from a file that is not an archive."""
    # Each reader is imported when it is needed: importing protobuf takes longer than reading a small file.
    kind = file_kind(path)
    if kind is FileKind.RING:
        return _pieces(path, (_reader(path), ring_serials(path))).join()
    if kind is FileKind.PROFILE:
        from .profiler.merge import load_profile

        return load_profile(path)
    with TraceFile(path) as source:
        if kind not in _CARRIERS:
            if not b"".join(itertools.islice(source.whole_blocks(), 2)):  # the second block reports damage of the first
                raise TraceError(path, "it is empty")
            raise TraceError(path, "it is neither a ring file nor a trace in JSON or Perfetto's format")
        from .formats.own_table import read_table

        carried = read_table(source.whole_blocks(), _CARRIERS[kind])
    if carried.timeline is not None:
        return carried.timeline
    if _CARRIERS[kind] != "chrome":
        if kind is FileKind.PAGE and not carried.is_changed:
            raise TraceError(path, f"it is a page that modtrace did not write; {_READABLE}")
        problem = "another program has changed or cut it" if carried.is_changed else "it has no table of modtrace"
        fault = f" ({carried.fault})" if carried.fault else ""
        raise TraceError(path, f"{problem}{fault}; {_ADVICE}")
    from .profiler.merge import load_profile

    timeline = load_profile(path)
    note = "another program has changed this trace since modtrace wrote it; it was read as a profiler's"
    notes = [note, *timeline.metadata["notes"]]
    return replace(timeline, metadata={**timeline.metadata, "notes": notes})


SHOWN_EVENTS = 4_000_000
"""Maximum number of ring events shown if no steps are chosen: a browser draws them in a moment."""

_FIRST_EVENT_COUNT = 1 << 14
"""Number of events at a ring's end that are read in the first search for its last calls."""
_BYTES_PER_EVENT = 250
"""Approximate memory per event while a ring is decoded as a whole."""


def read_pieces(path: str | os.PathLike[str]) -> Pieces:
    """Read a file as `load` does, but a ring file piece by piece."""
    return ring_pieces(path) or OnePiece(read_timeline(path))


def load_around(path: str | os.PathLike[str], steps: StepRange | None, step_by: str | None = None) -> Timeline:
    """Read a file as `load` does, or only the training steps `steps` and their neighbours from a large ring file.

    If steps are calls or ranges, everything is read. Raises ModtraceError if a ring has too many events for the memory.
    """
    ring, timeline = _ring(path), None
    steps = steps if step_by in (None, OPTIMIZER) else None
    if ring is not None and steps is not None:
        timeline = build_around(*ring, *steps) or _last_calls(ring, *steps)
    if ring is not None and timeline is None and len(ring[1]) > SHOWN_EVENTS and steps != (None, None):
        pieces = _pieces(path, ring)
        if not pieces.cuts:
            raise too_large(path, len(ring[1]), "choose steps at its end, as in --steps -100:, or all with --steps :")
        return pieces.join()
    return read_timeline(path) if timeline is None else _add_whole_run(timeline, read_whole_run(Path(path)))


def too_large(path: str | os.PathLike[str], events: int, advice: str) -> ModtraceError:
    """Return the error for a ring that is too large to be read at once and cannot be read in pieces."""
    return ModtraceError(
        f"{os.fspath(path)}: its {events:,} events can only be read together, which needs about "
        f"{events * _BYTES_PER_EVENT / 1e9:.0f} GB of memory; {advice}"
    )


def _last_calls(ring: tuple[ReadRing, range], first: int | None, last: int | None) -> Timeline | None:
    """Return the timeline of a ring's end; None if the requested steps are not its last ones or not calls."""
    if first is None or first >= 0 or (last is not None and last >= 0):
        return None
    events = _FIRST_EVENT_COUNT
    while (timeline := build_last(*ring, events)) is not None:
        bounds = find_step_bounds(timeline, None)
        if bounds.step_by != CALL:
            return None
        if len(bounds.number) > -first:
            return timeline
        events *= 8
    return None


def load_shown(
    path: str | os.PathLike[str], steps: StepRange | None, pieces: RingPieces | None = None
) -> tuple[Timeline, list[str]]:
    """Return the timeline of a file and notes for the user: of `steps`, or all, or the end of a ring that is too long.

    `pieces` are the pieces of the ring, if they are known. Raises the errors of `load`, and TraceError if nothing ran
    in the steps.
    """
    notes, ring = list[str](), None if steps is not None else _ring(path)
    if ring is not None and len(ring[1]) > SHOWN_EVENTS:
        last_steps = find_last_steps(*ring, SHOWN_EVENTS)
        if last_steps is not None:
            oldest, first = last_steps
            steps = first, None
            notes.append(
                f"This contains the steps from {first:,} on: the ring has {len(ring[1]):,} events, from step "
                f"{oldest:,} on. --steps A:B chooses other steps, and --steps : all."
            )
        elif (end := build_last(*ring, SHOWN_EVENTS)) is not None:
            note = f"This contains the last {SHOWN_EVENTS:,} of {len(ring[1]):,} events, in which no step ends. "
            return _add_whole_run(end, read_whole_run(path)), [f"{note}--steps : shows all."]
    loaded = pieces.join() if pieces is not None and steps is None else load_around(path, steps)
    timeline = loaded if steps is None else take_steps(loaded, *steps)
    if steps is not None and not len(timeline.slices):
        last = int(loaded.slices.step.max(initial=-1))
        raise TraceError(path, f"it has no events in these steps; its last is {last}" if last >= 0 else "it is empty")
    return timeline, notes


def ring_pieces(path: str | os.PathLike[str]) -> RingPieces | None:
    """Return the pieces of a ring file, None for other files; raises RingError if it is damaged beyond reading."""
    ring = _ring(path)
    return None if ring is None else _pieces(path, ring)


def _ring(path: str | os.PathLike[str]) -> tuple[ReadRing, range] | None:
    """Return a reader of a ring file and the serial numbers of its events; None for other files."""
    try:
        is_ring = file_kind_by_head(path) is FileKind.RING
    except (OSError, TraceError):
        return None  # `load` reports the error
    return (_reader(path), ring_serials(path)) if is_ring else None


def _pieces(path: str | os.PathLike[str], ring: tuple[ReadRing, range]) -> RingPieces:
    return RingPieces(*ring, change=partial(_add_whole_run, whole_run=read_whole_run(path)))


def _reader(path: str | os.PathLike[str]) -> ReadRing:
    log = RingLog()
    return lambda serials, without: read_ring(path, None, serials, without, log)


def _add_whole_run(timeline: Timeline, whole_run: Mapping[str, Any] | None) -> Timeline:
    counts = timeline.metadata[WHOLE_RUN]
    if whole_run is None:
        return timeline
    is_complete = not whole_run["missed_events"]
    watched = {field: whole_run[field] for field in ("steps", "spans") if is_complete and counts[field] is None}
    return replace(timeline, metadata={**timeline.metadata, WHOLE_RUN: counts | watched})
