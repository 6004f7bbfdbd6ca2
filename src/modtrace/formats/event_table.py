"""The parsed events of a trace as columns, with one row for each event of the file, from any program."""

import contextlib
import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._arrays import AnyIntArray, BoolArray, Float64Array, Int32Array, Int64Array, Numbering, UInt8Array, split_by
from .._interrupts import cached_property
from .chrome_values import MAX_TIME_US, TrackKey, find_open_begin, is_int64, microseconds_to_ns

MALFORMED = (KeyError, TypeError, ValueError, AttributeError, OverflowError)
"""Errors that reading a malformed event raises."""
NONE = -1
"""Value in a column of args if the event lacks the arg."""
NO_NUMBER = -(1 << 62)
"""Value in a column of args if the arg is not an integer of 64 bits."""
SLICE, BEGIN, END, METADATA = b"XBEM"
FLOW_PHASES = b"stf"
FLOW_PHASE_NAMES = frozenset(FLOW_PHASES.decode())
AT_LAST, AROUND, NEXT = range(3)
"""The slice to which an end of a flow belongs: the slice of its row, the slice around it, or the next slice."""
ENDS, BEGINS, _BOUND = 1, 2, 4
_NO_EVENT = {"ph": "\0"}
_NO_ARGS: dict[str, Any] = {}
_NO_DURATION = -math.inf
_Row = tuple[int, int, int, float, float]
_IGNORED_ROW: _Row = (ord("0"), 0, 0, 0.0, 0.0)
_RowEvent = tuple[int, dict[str, Any]]
"""A row, and its event or the event's args."""


class EventFlows(NamedTuple):
    """The ends of arrows in file order; int64 columns of equal length."""

    row: Int64Array  # row of the event in the table
    flow: Int64Array  # number of the flow
    ways: Int64Array  # `ENDS`, `BEGINS`, or both for a flow that passes through
    binds: Int64Array  # slice to which the end belongs: `AT_LAST`, `AROUND` or `NEXT`


class EventTable:
    """Collects parsed events chunk by chunk through `add`; its columns describe all events added so far.

    A slice is an X, or a B and its E, paired by time. A time is a number or its text; a missing pid or tid is 0.

    Attributes:
        tracks: number of each track, by pid and tid as an event has them.
        kinds: number of each pair of category and name; either may be a value other than text.
        texts: number of each text of an arg.
        thread_names: names by pid and tid.
        process_names: names by pid.
        sort_indexes: sort index of the rows of threads and streams in a viewer, by pid and tid.
        tids: numeric thread ids in metadata events.
        flow_ids: id of each flow in the form of its first event; set by `flows`.
    """

    arrow_categories: Container[object] | None = None
    """Categories of the arrows that are read; None: all arrows."""
    TEXT_ARGS: frozenset[str] = frozenset()
    """Names of the args that are texts."""

    def __init__(self) -> None:
        self.tracks = TrackNumbers()
        self.kinds, self.texts = EventKinds(self.arg_names), Numbering[str]()
        self.thread_names: dict[TrackKey, str] = {}
        self.process_names: dict[int | str, str] = {}
        self.sort_indexes: dict[TrackKey, int] = {}
        self.tids: set[int] = set()
        self.flow_ids: list[Any] = []
        self._phase = bytearray()
        self._kind, self._track = array("i"), array("i")
        self._start, self._duration = array("d"), array("d")
        self._args: dict[Sequence[str], list[array[int]]] = {}
        self._flow_keys = Numbering[tuple[Any, ...]]()
        self._flows = array("q"), array("q"), bytearray()

    def __len__(self) -> int:
        return len(self._phase)

    def arg_names(self, _category: object, _name: str) -> Sequence[str]:
        """Return the names of the args that get a column, for events of a category and name; subclasses override it."""
        return ()

    def add(self, events: Sequence[Any]) -> Sequence[Any]:
        """Add a chunk's events; return them, if necessary changed to the form of torch.profiler's events.

        For a malformed event, an event without a phase is returned.
        """
        try:
            self._add(events)
        except MALFORMED:
            events = [*map(_ordinary, events)]
            self._add(events)
        return events

    def _add(self, events: Sequence[Any]) -> None:
        """Add events whose fields have torch.profiler's types; if it raises, no event was added."""
        kinds, tracks, categories = self.kinds, self.tracks, self.arrow_categories
        rows, metadata, arrows, bound = list[_Row](), list[_RowEvent](), list[_RowEvent](), list[_RowEvent]()
        with_args = defaultdict[Sequence[str], list[_RowEvent]](list)
        add_row, arg_names = rows.append, kinds.arg_names
        # One pass: a second loop over the events would cost as much as their processing.
        for row, event in enumerate(events, len(self)):
            if (phase := event["ph"]) == "X":
                kind, track = kinds[event.get("cat"), event["name"]], tracks[event["pid"], event["tid"]]
                add_row((SLICE, kind, track, event["ts"], event["dur"]))
                if "bind_id" in event:
                    bound.append((row, event))
            else:
                if phase in FLOW_PHASE_NAMES:
                    if categories is not None and event.get("cat") not in categories:
                        add_row(_IGNORED_ROW)
                        continue
                    arrows.append((row, event))
                elif phase == "M":
                    metadata.append((row, event))
                elif "bind_id" in event:
                    bound.append((row, event))
                kind = kinds[event.get("cat"), event.get("name", "")]
                track = tracks[event.get("pid"), event.get("tid")] if phase != "M" else 0
                add_row((ord(phase), kind, track, event.get("ts", math.nan), 0.0))
            if names := arg_names[kind]:
                with_args[names].append((row, event.get("args") or _NO_ARGS))
        phases, in_kind, on_track, starts, durations = zip(*rows, strict=True) if rows else ((),) * 5
        phase, start, duration = bytearray(phases), array("d", starts), array("d", durations)
        args = {names: self._arg_columns(names, args_by_row) for names, args_by_row in with_args.items()}
        flows = self._flow_ends(arrows, bound)
        # From here on nothing raises an error.
        for row, event in metadata:
            phase[row - len(self)] = self._metadata(event)
        for column, values in zip(self._flows, flows, strict=True):
            column.extend(values)
        for names, numbers in args.items():
            columns = self._args.setdefault(names, [array("q") for _ in numbers])
            for column, values in zip(columns, numbers, strict=True):
                column += values
        self._phase += phase
        self._kind += array("i", in_kind)
        self._track += array("i", on_track)
        self._start += start
        self._duration += duration

    def _arg_columns(self, names: Sequence[str], rows: list[_RowEvent]) -> "list[array[int]]":
        """Return a column with the rows, and a column per name with the numbers of their args."""
        columns = [array("q", [row for row, _ in rows])]
        for name in names:
            values = [args.get(name, NONE) for _, args in rows]
            if name in self.TEXT_ARGS:
                values = [value if value == NONE else self.texts[str(value)] for value in values]
            columns.append(_numbers(values))
        return columns

    def _flow_ends(self, arrows: list[_RowEvent], bound: list[_RowEvent]) -> tuple[Iterable[int], ...]:
        """Return row, flow and hint of each arrow and of each slice with a `bind_id`; raises TypeError without an id.

        The hint of an arrow is whether it belongs to the slice around it; the hint of a slice is how it uses the flow.
        """
        if not {type(e["id"]) for _, e in arrows} | {type(e["bind_id"]) for _, e in bound} <= _FLOW_ID_TYPES:
            raise TypeError
        flow = [self._flow_keys[e["id"], e.get("cat", ""), e.get("name", "")] for _, e in arrows]
        flow += [self._flow_keys[(e["bind_id"],)] for _, e in bound]
        hints = [e.get("bp") == "e" for _, e in arrows]
        hints += [_BOUND + (e.get("flow_in") is True) + 2 * (e.get("flow_out") is True) for _, e in bound]
        return [row for row, _ in arrows + bound], flow, hints

    def _metadata(self, event: dict[str, Any]) -> int:
        """Store an event's metadata of a process or thread; return its phase, or 0 if it is malformed."""
        try:
            pid, tid, args = parse_id(event.get("pid")), parse_id(event.get("tid")), event["args"]
            if event["name"] == "thread_name":
                # If a thread has several names, the last is the name that it gave itself.
                self.thread_names[pid, tid] = str(args["name"])
            elif event["name"] == "process_name":
                self.process_names[pid] = str(args["name"])
            elif event["name"] == "thread_sort_index" and is_int64(index := args["sort_index"]):
                self.sort_indexes[pid, tid] = index
            if isinstance(tid, int):
                self.tids.add(tid)
        except MALFORMED:
            return 0
        return METADATA

    @cached_property
    def track(self) -> Int32Array:
        """The number of each event's track."""
        return np.frombuffer(self._track, np.int32)

    @cached_property
    def kind(self) -> Int32Array:
        """The number of each event's category and name."""
        return np.frombuffer(self._kind, np.int32)

    @cached_property
    def start_us(self) -> Float64Array:
        """Start of each event in µs; NaN for an event without a time."""
        return np.frombuffer(self._start, np.float64)

    @cached_property
    def written_phase(self) -> UInt8Array:
        """The `ph` of each event; 0 for malformed events."""
        return np.frombuffer(self._phase, np.uint8)

    @cached_property
    def pairs(self) -> tuple[Int64Array, Int64Array]:
        """The rows of each B and of the E that ends it, as `find_open_begin` pairs them."""
        halves = np.flatnonzero(np.isin(self.written_phase, (BEGIN, END)) & self._is_timed)
        begins, ends = list[int](), list[int]()
        is_begin, kinds, numbers = self.written_phase == BEGIN, [*self.kinds], Numbering[str]()
        _ = numbers[""]  # 0: no name
        for rows in split_by(self.track[halves], halves):
            rows = rows[np.argsort(self.start_us[rows], kind="stable")]
            names = [numbers[str(kinds[kind][1] or "")] for kind in self.kind[rows].tolist()]
            open_begins: list[int] = []
            for index, begins_slice in enumerate(is_begin[rows].tolist()):
                if begins_slice:
                    open_begins.append(index)
                elif (position := find_open_begin(open_begins, names, names[index])) >= 0:
                    begins.append(rows[open_begins[position]])
                    ends.append(rows[index])
                    del open_begins[position:]
        return np.array(begins, np.int64), np.array(ends, np.int64)

    @cached_property
    def _is_timed(self) -> BoolArray:
        """A mask of the events with a usable time."""
        return np.abs(self.start_us) < MAX_TIME_US

    @cached_property
    def without_duration(self) -> Int64Array:
        """The rows of slices without a `dur`; their duration is 0."""
        has_none = np.frombuffer(self._duration, np.float64) == _NO_DURATION
        return np.flatnonzero((self.written_phase == SLICE) & has_none)

    @cached_property
    def duration_us(self) -> Float64Array:
        """The duration of each slice in µs; meaningless for other events."""
        duration: Float64Array = np.frombuffer(self._duration, np.float64)
        begins, ends = self.pairs
        if not len(self.without_duration) and not len(begins):
            return duration
        duration = duration.copy()
        duration[self.without_duration] = 0
        duration[begins] = self.start_us[ends] - self.start_us[begins]
        return duration

    @cached_property
    def phase(self) -> UInt8Array:
        """The phase of each event: a B with its E is a slice; the phase of this E, and of malformed rows, is 0."""
        phase: UInt8Array = self.written_phase.copy()
        begins, ends = self.pairs
        phase[begins], phase[ends] = SLICE, 0
        is_slice = phase == SLICE
        has_duration = (self.duration_us >= 0) & (self.start_us + self.duration_us < MAX_TIME_US)
        is_valid = self._is_timed & (has_duration | ~is_slice)
        phase[~is_valid & (phase != METADATA) | (phase == END)] = 0
        return phase

    def start_ns(self, rows: AnyIntArray) -> Int64Array:
        """Return the start of the events in `rows`, in ns from the trace's base."""
        return microseconds_to_ns(self.start_us[rows])

    def duration_ns(self, rows: AnyIntArray) -> Int64Array:
        """Return the duration of the slices in `rows`, in ns."""
        return microseconds_to_ns(self.duration_us[rows])

    @property
    def malformed(self) -> int:
        """The number of malformed events: not an object, or without a field that every event needs."""
        return int(np.count_nonzero(self.phase == 0)) - len(self.pairs[1])

    @cached_property
    def flows(self) -> EventFlows:
        """The ends of arrows."""
        keys, numbers = [*self._flow_keys], Numbering[tuple[Any, ...]]()
        flow_of_key, self.flow_ids = np.arange(len(keys)), [key[0] for key in keys]
        if not {*map(type, self.flow_ids)} <= {int}:
            ids = [(_flow_id(key[0]), *map(str, key[1:])) for key in keys]
            is_invalid = [len(key) == 1 and not isinstance(key[0], int) for key in ids]  # a `bind_id` without a number
            flows = [NONE if invalid else numbers[key] for key, invalid in zip(ids, is_invalid, strict=True)]
            flow_of_key = np.array(flows, np.int64)
            first_ids = {number: key[0] for number, key in zip(flows[::-1], keys[::-1], strict=True)}
            self.flow_ids = [first_ids[number] for number in range(len(numbers))]
        row, key, hint = (np.array(column, np.int64) for column in self._flows)
        phase, is_bound = self.phase[row], hint >= _BOUND
        ways = np.where(phase == ord("s"), BEGINS, np.where(phase == ord("f"), ENDS, BEGINS | ENDS))
        binds = np.where((phase == ord("f")) & (hint == 0), NEXT, AROUND)
        ways, binds = np.where(is_bound, hint - _BOUND, ways), np.where(is_bound, AT_LAST, binds)
        flow, has_slice = flow_of_key[key], is_bound & ((phase == SLICE) | (phase == BEGIN))
        valid = np.flatnonzero((flow != NONE) & (ways > 0) & (has_slice | np.isin(phase, list(FLOW_PHASES))))
        valid = valid[np.argsort(row[valid], kind="stable")]
        return EventFlows(*(column[valid] for column in (row, flow, ways, binds)))

    def arg(self, name: str) -> Int64Array:
        """Return an arg of each row, as a number or the number of its text; a slice also has the args of its E."""
        if not any(name in names for names in self._args):
            return np.broadcast_to(np.int64(NONE), len(self))
        column = np.full(len(self), NONE, np.int64)
        for names, (rows, *values) in self._args.items():
            if name in names:
                column[np.array(rows)] = np.array(values[names.index(name)])
        begins, ends = self.pairs
        column[begins] = np.where(column[ends] == NONE, column[begins], column[ends])
        return column

    def notes(self) -> list[str]:
        """Return notes for the user: how many events are broken or are not shown."""
        kinds = {
            "are malformed: not an object, or without a ph or a time; no track shows them": self.malformed,
            "have no dur: modtrace shows them as 0 ns long, and viewers drop them": len(self.without_duration),
            "begin and never end (B without E): no track shows them": int(np.count_nonzero(self.phase == BEGIN)),
        }
        return [f"{count:,} of the profiler's events {problem}" for problem, count in kinds.items() if count]


def _ordinary(event: Any) -> dict[str, Any]:
    """Return an event in the form of torch.profiler's events."""
    try:
        phase, args = event["ph"], event.get("args")
        if phase == "\0" or len(phase.encode("latin-1")) != 1:
            return _NO_EVENT
        fields = {**event, "args": args if isinstance(args, dict) else {}, "name": str(event.get("name", ""))}
        if not isinstance(event.get("cat"), str | None):
            fields["cat"] = str(event["cat"])
        fields["pid"], fields["tid"] = parse_id(event.get("pid")), parse_id(event.get("tid"))
        if phase == "M":
            fields.pop("ts", None)
        else:
            fields["ts"] = parse_microseconds(event["ts"])
        if phase == "X":
            fields["dur"] = parse_microseconds(event["dur"]) if "dur" in event else _NO_DURATION
        if phase in "stf" and type(fields["id"]) not in _FLOW_ID_TYPES:
            return _NO_EVENT
        if type(fields.get("bind_id")) not in _FLOW_ID_TYPES:
            fields.pop("bind_id", None)
    except MALFORMED:
        return _NO_EVENT
    return fields


_FLOW_ID_TYPES = {int, float, str}


def _flow_id(value: int | float | str) -> int | float | str:
    """Return the number by which viewers identify a flow; they read text as hexadecimal. Other ids stay as they are."""
    with contextlib.suppress(ValueError, OverflowError):
        return int(value, 16) if isinstance(value, str) else int(value)
    return value


def _numbers(values: list[Any]) -> "array[int]":
    try:
        return array("q", values)
    except (TypeError, OverflowError):
        return array("q", [value if is_int64(value) else NONE if value is None else NO_NUMBER for value in values])


class EventKinds(Numbering[tuple[Any, Any]]):
    """The number of each category and name of events; `arg_names` lists the args to read per kind."""

    def __init__(self, arg_names: Callable[[Any, str], Sequence[str]]) -> None:
        super().__init__()
        self.arg_names: list[Sequence[str]] = []
        self._ask = arg_names

    def __missing__(self, kind: tuple[Any, Any]) -> int:
        self.arg_names.append(self._ask(kind[0], str(kind[1])))
        return super().__missing__(kind)


class TrackNumbers(dict[tuple[Any, Any], int]):
    """The number of each track, by pid and tid as an event has them; `known` contains each track once."""

    def __init__(self) -> None:
        super().__init__()
        self.known = Numbering[TrackKey]()

    def __missing__(self, ids: tuple[Any, Any]) -> int:
        pid, tid = ids
        track = self[ids] = self.known[parse_id(pid), parse_id(tid)]
        return track


def parse_id(value: Any) -> int | str:
    """Return an id as an integer of 64 bits or a text; 0 for None."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if is_int64(value) else 0 if value is None else str(value)


def parse_microseconds(value: Any) -> float:
    """Return a time, which may be text; raises ValueError or TypeError if it is not a valid time."""
    number = float(value) if not isinstance(value, bool) else math.nan
    if not abs(number) < MAX_TIME_US:
        raise ValueError(value)
    return number
