"""Flows between slices, and slices of other kinds than modules as rows of the page.

Flows lead from a call's forward span to its first backward span, and between the ranks of a collective.
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
from ..timeline.slices import COLLECTIVE, MODULE, Arg, ArgColumn, in_start_order

_SPANS_AT_A_TIME = 1 << 16
"""The number of spans, or pairs, in memory at a time."""


class FlowRole(enum.IntEnum):
    """The sign in a written span that it belongs to a call: the begin or the end of a flow, or an arg."""

    NO_LINK = 0
    LINK_ARG = 1
    BEGIN = 2
    END = 3
    # Only in JSON: the span itself carries the flow, as its `bind_id`, where a flow event would bind to another span.
    BIND_OUT = 4
    BIND_IN = 5


def flow_roles(columns: Slices) -> UInt8Array:
    """Return uint8[n], the `FlowRole` of each span, without those that only JSON has."""
    roles: UInt8Array = np.where(columns.link >= 0, np.uint8(FlowRole.LINK_ARG), np.uint8(FlowRole.NO_LINK))
    for begins, ends in flow_pairs(columns):
        roles[begins] = FlowRole.BEGIN
        roles[ends] = FlowRole.END
    return roles


def flow_pairs(columns: Slices) -> Iterator[tuple[IndexArray, IndexArray]]:
    """Yield the positions of the spans where flows begin and of those where they end, some thousand pairs at a time.

    A link has a flow if its first span that is not backward starts before its first backward span.
    """
    # Links are indices themselves, unless they are too far apart for a table.
    count = int(columns.link.max(initial=-1)) + 1
    links = distinct(columns.link) if count > 2 * len(columns) else None
    count = count if links is None else len(links)
    begins = np.full(count, -1, np.int32 if len(columns) < 1 << 31 else np.int64)
    ends = begins.copy()
    for last in range(len(columns), 0, -_SPANS_AT_A_TIME):
        rows = np.arange(max(last - _SPANS_AT_A_TIME, 0), last)[::-1]
        link = columns.link[rows]
        linked = (link >= 0) & (link < MAX_LINK)
        rows, index = rows[linked], link[linked] if links is None else np.searchsorted(links, link[linked])
        backward = columns.phase[rows] == BACKWARD
        # Of several spans with one link the one written last stays, which is the first in the timeline.
        begins[index[~backward]] = rows[~backward]
        ends[index[backward]] = rows[backward]
    for first in range(0, count, _SPANS_AT_A_TIME):
        begin, end = begins[first : first + _SPANS_AT_A_TIME], ends[first : first + _SPANS_AT_A_TIME]
        both = (begin >= 0) & (end >= 0)
        begin, end = begin[both], end[both]
        before = columns.start[begin] < columns.start[end]
        yield begin[before].astype(np.intp), end[before].astype(np.intp)


def _call_flows(timeline: Timeline) -> tuple[Int64Array, BoolArray, BoolArray]:
    """Return `flow`, `is_first` and `is_last` of `CollectiveFlows`; a timeline of one rank has no flows."""
    table = timeline.collectives
    flow = np.full(len(table), -1, np.int64)
    first, last = np.zeros((2, len(table)), np.bool_)
    if len({track.process.rank for track in timeline.tracks}) < 2:
        return flow, first, last
    rows = np.flatnonzero(~table.is_wait & (table.name >= 0) & (table.counter >= 0))
    groups = {group.name: group for group in table.groups}
    kind, of_row = np.unique(table.name[rows] * np.int64(len(timeline.tracks)) + table.track[rows], return_inverse=True)
    numbers = Numbering[object]()
    number = []
    for name, track in (divmod(pair, len(timeline.tracks)) for pair in kind.tolist()):
        meeting = _meeting(table.names[name], timeline.tracks[track].process.rank, groups)
        number.append(-1 if meeting is None else numbers[meeting])
    of_row = np.array(number, np.int64)[of_row] if len(rows) else of_row
    rows, of_row = rows[of_row >= 0], of_row[of_row >= 0]
    order = np.lexsort((table.track[rows], table.start[rows], table.counter[rows], of_row))
    rows, of_row = rows[order], of_row[order]
    begins = np.append(begins_run(of_row, table.counter[rows]), True)
    alone = begins[:-1] & begins[1:]
    flow[rows] = np.where(alone, -1, np.cumsum(begins[:-1]) - 1)
    first[rows], last[rows] = begins[:-1] & ~alone, begins[1:] & ~alone
    return flow, first, last


def _meeting(name: CollectiveName, rank: int | None, groups: Mapping[str, Group]) -> object:
    """Return a key that the calls which meet have in common, beside their counter; None if it is not known."""
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
        first_row: the row of the timeline's slices that the first collective or wait has.
        launched_by: int64, per collective or wait the span that launched it; -1 for none, and for waits.
        flow: int64, per collective or wait the number of its flow between ranks, from 0, which joins the calls of one
            collective or the two ends of one message; -1 for a wait, and for what no other rank in the timeline called.
        is_first: bool, whether its call was the earliest of its flow.
        is_last: bool, whether it was the latest.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.first_row = timeline.slices.block_of(COLLECTIVE).start
        self.launched_by = np.where(timeline.collectives.is_wait, -1, launching_spans(timeline))
        self.flow, self.is_first, self.is_last = _call_flows(timeline)
        self._first_call = MAX_LINK + len(timeline.collectives)

    def has_flow(self, rows: Int64Array) -> BoolArray:
        """Return which rows of the timeline's slices have flows; only collectives have."""
        index = rows - self.first_row
        is_collective = (index >= 0) & (index < len(self.flow))
        has_flow: BoolArray = np.append((self.flow >= 0) | (self.launched_by >= 0), False)
        return has_flow[np.where(is_collective, index, -1)]

    def of_row(self, row: int) -> tuple[list[int], list[int]]:
        """Return the ids in a Perfetto trace of the flows that go on from a collective, and of those that end there."""
        going_on: list[int] = []
        index = row - self.first_row
        ending = [MAX_LINK + index] if self.launched_by[index] >= 0 else []
        if self.flow[index] >= 0:
            flow = self._first_call + int(self.flow[index])
            (ending if self.is_last[index] else going_on).append(flow)
        return going_on, ending

    def launches(self) -> dict[int, list[int]]:
        """Return the ids of the flows that each launching span begins in a Perfetto trace."""
        flows: dict[int, list[int]] = {}
        for index in np.flatnonzero(self.launched_by >= 0).tolist():
            flows.setdefault(int(self.launched_by[index]), []).append(MAX_LINK + index)
        return flows


def all_as_modules(timeline: Timeline) -> Timeline:
    """Return the timeline with every slice as one of a module, for the page, which draws all slices of a track alike.

    Values for which modules have no field are in their args. Their phase says nothing.
    """
    first = len(timeline.columns)
    if first == len(timeline.slices):
        return timeline
    texts = slice_texts(timeline, slice(first, None))
    names = Numbering[Name](len(timeline.names))
    on_network = np.array([shared.category == COMMUNICATION for shared in texts.shared], np.bool_)[texts.key]
    name, call = timeline.slices.name.copy(), timeline.slices.call.copy()
    name[first:] = np.array([names[_shown_name(shared)] for shared in texts.shared])[texts.key]
    call[first:] = _count_alike([shared.category for shared in texts.shared], texts.key)
    counter = texts.numbers.get(Arg.COUNTER)
    call[first:][on_network] = 0
    if counter is not None:
        call[first + counter.rows] = counter.values
    args = dict(timeline.columns.args)
    shown = [
        {key: str(value) for key, value in shared.args.items() if key != "complete" or shared.category == COMMUNICATION}
        for shared in texts.shared
    ]
    for key in dict.fromkeys(itertools.chain.from_iterable(shown)):
        has = np.array([key in values for values in shown], np.bool_)[texts.key]
        args[key] = ArgColumn(first + np.flatnonzero(has), texts.key[has], [values.get(key, "") for values in shown])
    args |= {key: ArgColumn(first + column.rows, column.values) for key, column in texts.numbers.items()}
    kind = np.full_like(timeline.slices.kind, MODULE)
    slices = replace(timeline.slices, kind=kind, name=name, call=call, args=args)
    return replace(timeline, slices=in_start_order(slices), names=[*timeline.names, *names])


def _shown_name(texts: SharedTexts) -> Name:
    """Return the name of slices other than modules on the page."""
    if texts.category == COMMUNICATION:
        return Name(texts.label, f"{texts.args[Arg.OPERATOR] or 'wait'} · group {texts.args[Arg.GROUP]}", texts.label)
    if texts.category == RANGES:
        return range_name(texts.label, str(texts.args["category"]))
    return Name(texts.label, texts.category, texts.label)


def _count_alike(categories: Sequence[str], key: Int64Array) -> Int64Array:
    """Return for each slice, with its category at `key`, how many before it are of the same category."""
    numbers = Numbering[str]()
    number = np.array([numbers[category] for category in categories], np.int64)[key]
    count = np.empty(len(key), np.int64)
    for rows in split_by(number):
        count[rows] = np.arange(len(rows))
    return count
