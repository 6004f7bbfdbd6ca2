"""Flows between slices, and the page's module slices for slices of other kinds.

A flow leads from a call's forward span to its first backward span, or between the ranks of a collective.
"""

import enum
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from .._arrays import BoolArray, IndexArray, Int64Array, Numbering, UInt8Array, begins_run, distinct, split_by
from ..formats.limits import MAX_LINK
from ..formats.slice_args import SharedTexts, slice_texts
from ..ring.event_text import MESSAGES
from ..timeline import BACKWARD, CollectiveName, Group, Name, Slices, Timeline, launching_spans
from ..timeline.contents import COMMUNICATION, RANGES, range_name
from ..timeline.slices import COLLECTIVE, MODULE, Arg, ArgColumn, sort_by_start

_SPANS_AT_A_TIME = 1 << 16
"""Number of spans, or pairs, in memory at a time."""


class FlowRole(enum.IntEnum):
    """The form of a link in a written span: the start or the end of a flow, or an arg."""

    NO_LINK = 0
    LINK_ARG = 1
    BEGIN = 2
    END = 3
    # Only in JSON: the span itself carries the flow (`bind_id`), because a flow event would bind to another span.
    BIND_OUT = 4
    BIND_IN = 5


def flow_roles(columns: Slices) -> UInt8Array:
    """Return uint8[n], the `FlowRole` of each span, without the roles that only JSON has."""
    roles: UInt8Array = np.where(columns.link >= 0, np.uint8(FlowRole.LINK_ARG), np.uint8(FlowRole.NO_LINK))
    for starts, ends in flow_pairs(columns):
        roles[starts] = FlowRole.BEGIN
        roles[ends] = FlowRole.END
    return roles


def flow_pairs(columns: Slices) -> Iterator[tuple[IndexArray, IndexArray]]:
    """Yield the rows of the spans at which flows start, and of the spans at which they end, in blocks of pairs.

    A link has a flow if its first span that is not backward starts before its first backward span.
    """
    # Links are used as indices, unless they are too far apart for a table.
    count = int(columns.link.max(initial=-1)) + 1
    links = distinct(columns.link) if count > 2 * len(columns) else None
    count = count if links is None else len(links)
    starts = np.full(count, -1, np.int32 if len(columns) < 1 << 31 else np.int64)
    ends = starts.copy()
    for last in range(len(columns), 0, -_SPANS_AT_A_TIME):
        rows = np.arange(max(last - _SPANS_AT_A_TIME, 0), last)[::-1]
        link = columns.link[rows]
        has_link = (link >= 0) & (link < MAX_LINK)
        rows, index = rows[has_link], link[has_link] if links is None else np.searchsorted(links, link[has_link])
        is_backward = columns.phase[rows] == BACKWARD
        # Rows are written from last to first, so the first span of a link in the timeline stays.
        starts[index[~is_backward]] = rows[~is_backward]
        ends[index[is_backward]] = rows[is_backward]
    for first in range(0, count, _SPANS_AT_A_TIME):
        start, end = starts[first : first + _SPANS_AT_A_TIME], ends[first : first + _SPANS_AT_A_TIME]
        has_both = (start >= 0) & (end >= 0)
        start, end = start[has_both], end[has_both]
        is_flow = columns.start[start] < columns.start[end]
        yield start[is_flow].astype(np.intp), end[is_flow].astype(np.intp)


def _call_flows(timeline: Timeline) -> tuple[Int64Array, BoolArray, BoolArray]:
    """Return `flow`, `is_first` and `is_last` of `CollectiveFlows`; a timeline of one rank has no flows."""
    table = timeline.collectives
    flow = np.full(len(table), -1, np.int64)
    first, last = np.zeros((2, len(table)), np.bool_)
    if len({track.process.rank for track in timeline.tracks}) < 2:
        return flow, first, last
    rows = np.flatnonzero(~table.is_wait & (table.name >= 0) & (table.counter >= 0))
    groups = {group.name: group for group in table.groups}
    keys, index = np.unique(table.name[rows] * np.int64(len(timeline.tracks)) + table.track[rows], return_inverse=True)
    numbers = Numbering[object]()
    number = []
    for name, track in (divmod(key, len(timeline.tracks)) for key in keys.tolist()):
        match_key = _match_key(table.names[name], timeline.tracks[track].process.rank, groups)
        number.append(-1 if match_key is None else numbers[match_key])
    match = np.array(number, np.int64)[index] if len(rows) else index
    rows, match = rows[match >= 0], match[match >= 0]
    order = np.lexsort((table.track[rows], table.start[rows], table.counter[rows], match))
    rows, match = rows[order], match[order]
    starts_flow = np.append(begins_run(match, table.counter[rows]), True)
    is_single = starts_flow[:-1] & starts_flow[1:]
    flow[rows] = np.where(is_single, -1, np.cumsum(starts_flow[:-1]) - 1)
    first[rows], last[rows] = starts_flow[:-1] & ~is_single, starts_flow[1:] & ~is_single
    return flow, first, last


def _match_key(name: CollectiveName, rank: int | None, groups: Mapping[str, Group]) -> object:
    """Return the key that, with their counter, the calls of one collective share; None if it is unknown."""
    if name.peer < 0:
        return (name.operator, name.group) if name.operator not in MESSAGES else None
    ranks = groups[name.group].ranks if name.group in groups else ()
    if rank not in ranks:
        return None
    ends = (ranks.index(rank), name.peer) if name.operator == "send" else (name.peer, ranks.index(rank))
    return (name.group, ends)


class CollectiveFlows:
    """The flows of collectives: from the spans that launched them, and between ranks.

    Attributes:
        first_row: row of the first collective or wait in the timeline's slices.
        launched_by: int64, the span that launched each collective; -1 for waits, and without a span.
        flow: int64, the number of each collective's flow between ranks, from 0. It joins the calls of one collective or
            the two ends of one message; -1 for a wait, and if no other rank in the timeline called it.
        is_first: bool, whether the call was the earliest of its flow.
        is_last: bool, whether the call was the latest of its flow.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.first_row = timeline.slices.block_of(COLLECTIVE).start
        self.launched_by = np.where(timeline.collectives.is_wait, -1, launching_spans(timeline))
        self.flow, self.is_first, self.is_last = _call_flows(timeline)
        self._first_call = MAX_LINK + len(timeline.collectives)

    def has_flow(self, rows: Int64Array) -> BoolArray:
        """Return a mask of the rows of the timeline's slices that have flows; only collectives have."""
        index = rows - self.first_row
        is_collective = (index >= 0) & (index < len(self.flow))
        has_flow: BoolArray = np.append((self.flow >= 0) | (self.launched_by >= 0), False)
        return has_flow[np.where(is_collective, index, -1)]

    def ids_in_perfetto(self, row: int) -> tuple[list[int], list[int]]:
        """Return the ids in a Perfetto trace of the flows that leave a collective, and of the flows that end there."""
        leaving: list[int] = []
        index = row - self.first_row
        ending = [MAX_LINK + index] if self.launched_by[index] >= 0 else []
        if self.flow[index] >= 0:
            flow = self._first_call + int(self.flow[index])
            (ending if self.is_last[index] else leaving).append(flow)
        return leaving, ending

    def launches(self) -> dict[int, list[int]]:
        """Return the ids of the flows that start at each launching span in a Perfetto trace."""
        flows: dict[int, list[int]] = {}
        for index in np.flatnonzero(self.launched_by >= 0).tolist():
            flows.setdefault(int(self.launched_by[index]), []).append(MAX_LINK + index)
        return flows


def all_as_modules(timeline: Timeline) -> Timeline:
    """Return the timeline with all slices as module slices, because the page draws all slices of a track alike.

    Values without a field in module slices become args. The phase of these slices has no meaning.
    """
    first = len(timeline.columns)
    if first == len(timeline.slices):
        return timeline
    texts = slice_texts(timeline, slice(first, None))
    names = Numbering[Name](len(timeline.names))
    is_communication = np.array([shared.category == COMMUNICATION for shared in texts.shared], np.bool_)[texts.key]
    name, call = timeline.slices.name.copy(), timeline.slices.call.copy()
    name[first:] = np.array([names[_page_name(shared)] for shared in texts.shared])[texts.key]
    call[first:] = _count_earlier([shared.category for shared in texts.shared], texts.key)
    counter = texts.numbers.get(Arg.COUNTER)
    call[first:][is_communication] = 0
    if counter is not None:
        call[first + counter.rows] = counter.values
    args = dict(timeline.columns.args)
    arg_texts = [
        {key: str(value) for key, value in shared.args.items() if key != "complete" or shared.category == COMMUNICATION}
        for shared in texts.shared
    ]
    for key in dict.fromkeys(itertools.chain.from_iterable(arg_texts)):
        has_key = np.array([key in values for values in arg_texts], np.bool_)[texts.key]
        values_by_key = [values.get(key, "") for values in arg_texts]
        args[key] = ArgColumn(first + np.flatnonzero(has_key), texts.key[has_key], values_by_key)
    args |= {key: ArgColumn(first + column.rows, column.values) for key, column in texts.numbers.items()}
    kind = np.full_like(timeline.slices.kind, MODULE)
    slices = replace(timeline.slices, kind=kind, name=name, call=call, args=args)
    return replace(timeline, slices=sort_by_start(slices), names=[*timeline.names, *names])


def _page_name(texts: SharedTexts) -> Name:
    """Return the page's name for slices that are not modules."""
    if texts.category == COMMUNICATION:
        return Name(texts.label, f"{texts.args[Arg.OPERATOR] or 'wait'} · group {texts.args[Arg.GROUP]}", texts.label)
    if texts.category == RANGES:
        return range_name(texts.label, str(texts.args["category"]))
    return Name(texts.label, texts.category, texts.label)


def _count_earlier(categories: Sequence[str], key: Int64Array) -> Int64Array:
    """Return for each slice the number of earlier slices of its category, `categories[key]`."""
    numbers = Numbering[str]()
    number = np.array([numbers[category] for category in categories], np.int64)[key]
    count = np.empty(len(key), np.int64)
    for rows in split_by(number):
        count[rows] = np.arange(len(rows))
    return count
