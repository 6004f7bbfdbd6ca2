"""Finds the faults of a trace: events that viewers silently drop, hide or draw wrongly."""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .._errors import RingError, TraceError
from .._files import work_folder
from ..formats.event_stream import EventStream, garbage_collection_paused
from ..formats.trace_file import BYTE_ORDER_MARK, MERGED, TraceFile, format_of
from .track_layout import Fault, TrackLayout

__all__ = ["CheckResult", "Fault", "check"]

_MAX_LINES_PER_RULE = 20
_BY_PROFILER = ", in events of torch.profiler"


class CheckResult(NamedTuple):
    """The faults of a file; `str` lists the first 20 of each rule, and the counts.

    Attributes:
        path: the file.
        faults: one for each broken rule and event: first faults of the file and of single events in file order, then
            faults between events, by rule. Empty for a good trace.
    """

    path: str
    faults: list[Fault]

    @property
    def own_faults(self) -> list[Fault]:
        """The faults of events that torch.profiler did not write."""
        return [fault for fault in self.faults if not fault.of_profiler]

    def lines(self, *, named: bool = False) -> Iterator[str]:
        """Yield the lines of the text; if `named`, each fault starts with the path."""
        if not self.faults:
            yield f"{self.path}: no faults"
            return
        prefix = f"{self.path}: " if named else ""
        counts: Counter[tuple[str, str]] = Counter()
        for fault in self.faults:
            rule, writer = key = fault.rule, _BY_PROFILER if fault.of_profiler else ""
            counts[key] += 1
            if counts[key] <= _MAX_LINES_PER_RULE:
                yield f"{f'{self.path}: ' if rule == 'not-a-trace' else prefix}{fault}{writer}"
        for (rule, writer), count in counts.items():
            if count > _MAX_LINES_PER_RULE:
                yield f"{prefix}{rule}: and {count - _MAX_LINES_PER_RULE:,} more{writer}"
        for (rule, writer), count in counts.items():
            yield f"{count:8,} {rule}{writer}"

    def __str__(self) -> str:
        return "\n".join(self.lines())


def check(path: str | os.PathLike[str], *, progress: Callable[[int], None] | None = None) -> CheckResult:
    """Find the events that viewers would drop, hide or draw wrongly in a trace, written by modtrace or another program.

    The trace is in Chrome's JSON or in Perfetto's format, plain or gzipped.
    For a report's `.zip` the trace inside is checked, for a ring file the result of `modtrace convert`.

    Args:
        path: the file.
        progress: called with the number of bytes of the file that have been read since the last call.

    Raises:
        TraceError: the file itself cannot be opened, or unpacks to more than the limit.
        ModtraceError: no temporary file can be made.

    Example:
        >>> for fault in modtrace.check("step.json").faults:
        ...     print(fault.rule, fault.message)
    """
    from .track_layout import STRUCTURE_RULES

    name = os.fspath(path)
    with work_folder() as folder:
        try:
            trace, losses = _trace_of(path, folder)
        except RingError as error:
            return CheckResult(name, [Fault("not-a-trace", str(error))])
        except RecursionError:
            return CheckResult(name, [Fault("unreadable", "nested too deeply")])
        with garbage_collection_paused():
            faults, layout, keys = _read_trace(trace, progress)
            faults += losses
            if layout is not None:
                faults += [
                    *layout.ends_without_begin,
                    *layout.begins_without_end,
                    *(fault for rule in STRUCTURE_RULES for fault in rule(layout)),
                ]
        first_own = _first_own_event(keys)
    faults = [fault._replace(of_profiler=fault.event is not None and fault.event < first_own) for fault in faults]
    return CheckResult(name, faults)


class _ReadTrace(NamedTuple):
    """The faults of a file and of its single events, all events by track, and the top-level keys of JSON."""

    faults: list[Fault]
    layout: TrackLayout | None = None
    keys: Mapping[str, Any] = {}


def _read_trace(path: str | os.PathLike[str], progress: Callable[[int], None] | None = None) -> _ReadTrace:
    """Read a trace; `progress` is called as for `check`. Raises TraceError if the trace cannot be opened."""
    with TraceFile(path) as source:
        head = next(source.blocks(), b"")
    if not head.strip():
        return _ReadTrace([Fault("not-a-trace", "it is empty")])
    kind = format_of(head)
    if kind is None:
        message = f"neither Chrome JSON nor a Perfetto trace: it starts with {head[:8]!r}"
        return _ReadTrace([Fault("not-a-trace", message)])
    with TraceFile(path, progress) as source:
        if kind == "perfetto":
            return _read_packets(source)
        trace = _read_events(source)
        if head.startswith(BYTE_ORDER_MARK):
            trace.faults.insert(0, Fault("unreadable", "byte 0: a byte order mark, which JSON forbids"))
        return trace


def _read_packets(source: TraceFile) -> _ReadTrace:
    from .perfetto_rules import PerfettoPackets, parse_packets

    faults, packets = list[Fault](), PerfettoPackets()
    for batch in parse_packets(source.blocks(), faults):
        packets.add(batch)
    if source.damage is not None:
        faults.append(Fault("unreadable", source.damage))
    return _ReadTrace([*faults, *packets.faults()], packets.layout())


def _read_events(source: TraceFile) -> _ReadTrace:
    from .chrome_rules import ChromeEvents

    events = ChromeEvents()
    try:
        stream = EventStream(source, strict=True)
        for chunk in stream.chunks():
            events.add(chunk.events)
    except TraceError as error:
        position = "" if error.offset is None else f"byte {error.offset}: "
        return _ReadTrace([Fault("unreadable", source.damage or f"{position}{error.message}")])
    return _ReadTrace(events.faults(), events.layout(), stream.keys)


def _first_own_event(keys: Mapping[str, Any]) -> float:
    """Return the number of torch.profiler's events before the first event of another program, from a trace's keys."""
    if "schemaVersion" not in keys and MERGED not in keys:
        return 0
    metadata = keys.get(MERGED, {"profiler_events": math.inf})
    count = metadata.get("profiler_events") if isinstance(metadata, dict) else None
    return count if isinstance(count, int | float) else 0


def _trace_of(path: str | os.PathLike[str], folder: Path) -> tuple[Path, list[Fault]]:
    """Return the file to check, and faults for the losses of a ring; archives and rings are converted in `folder`."""
    from ..read import FileKind, extract_trace, file_kind_by_head, read_timeline
    from ..timeline.contents import MISSING_BYTES, damage_sentence
    from ..write import write

    try:
        trace = extract_trace(path, folder)
    except TraceError:
        if not os.fspath(path):
            raise  # Path("") would be the working directory
        return Path(path), []  # the archive itself is checked
    if file_kind_by_head(trace) is FileKind.RING:
        converted, timeline = folder / "ring.pftrace", read_timeline(trace)
        write(timeline, converted)
        missing, damage = timeline.metadata.get(MISSING_BYTES), damage_sentence(timeline.stats.torn, timeline.tracks)
        losses = [None if missing is None else f"{missing:,} bytes were cut off its end", damage]
        return converted, [Fault("damaged-ring", text) for text in losses if text]
    return trace, []
