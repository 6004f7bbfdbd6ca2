"""How a file holds the slices of all kinds but modules: collectives, waits, backward passes and others.

Both formats hold the same. A slice's category is the kind of its track. Its name is the kind's label; for a collective
the operator, for a wait `wait: ` and the operator. Its args hold the rest, without what is not known or is as usual.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from .._numbering import Numbering
from .._typing import Int64Array
from ..ring.collective_text import CollectiveName, parse_ranks, rank_list
from ..timeline import Group, Name, Timeline
from ..timeline.collectives import CollectiveDetails
from ..timeline.contents import COMMUNICATION, RANGE_CLASS, RANGES, range_name
from ..timeline.join import with_slices
from ..timeline.select import steps_at
from ..timeline.slices import COLLECTIVE, GARBAGE_COLLECTION, KINDS, MODULE, RANGE, WAIT, Slices
from .escape import escaped, restore
from .limits import MAX_TIME_NS

LAUNCH_CATEGORY = "launch"
LAUNCH_NAME = "collective"
"""Category and name of the flow events in JSON, from the span that launched a collective to it."""

CALLS_NAME = "calls"
"""The name of the flow events in JSON between the ranks' calls of one collective; their category is the slices'."""

PARTS_CATEGORY = "step parts"
"""The category of the counters in JSON of what steps were spent on; readers leave them out, as the slices say it."""

CATEGORIES = {kind.track: code for code, kind in reversed([*enumerate(KINDS)]) if code != MODULE}
"""Each category, and the first kind of slice that has it."""

_WAIT_PREFIX = "wait"
_TEXTS = ("operator", "group")
_INTEGERS = ("counter", "bytes", "done_ns", "peer", "step")


class FileSlice(NamedTuple):
    """A slice of any kind but modules, as a file holds it.

    Attributes:
        category: one of `CATEGORIES`.
        track: index of its track.
        start: Unix nanoseconds.
        end: Unix nanoseconds.
        name: escaped.
        args: texts escaped.
    """

    category: str
    track: int
    start: int
    end: int
    name: str
    args: Mapping[str, Any]


def file_slices(timeline: Timeline, rows: Int64Array | None = None) -> Iterator[FileSlice]:
    """Yield the slices of all kinds but modules.

    Args:
        timeline: what is written.
        rows: indices of the slices that are wanted; None: all.
    """
    slices = timeline.slices
    part = slices.take(slice(len(timeline.columns), None) if rows is None else rows)
    first = len(timeline.columns)
    indices = range(first, len(slices)) if rows is None else rows.tolist()
    columns = (part.kind, part.detail, part.name, part.track, part.start, part.end, part.step, part.complete)
    values = zip(indices, *(column.tolist() for column in columns), strict=True)
    for row, code, detail, name, track, start, end, step, complete in values:
        kind = KINDS[code]
        args: dict[str, Any] = {escaped(key): escaped(text) for key, text in timeline.span_args.get(row, {}).items()}
        if kind.track == COMMUNICATION:
            label, args = _collective(timeline.collective_details, detail, start, step, is_wait=code == WAIT)
        else:
            label = kind.label or escaped(timeline.names[name].label)
            if kind.track == RANGES:
                args["category"] = escaped(timeline.names[name].module_class.removeprefix(RANGE_CLASS))
        if not complete:
            args["complete"] = False
        yield FileSlice(kind.track, track, start, end, label, args)


def _collective(
    details: CollectiveDetails, index: int, start: int, step: int, *, is_wait: bool
) -> tuple[str, dict[str, Any]]:
    """Return the name and the args of a collective or a wait; `done_ns` counts from its begin."""
    name = int(details.name[index])
    operator, group, peer, device = details.names[name] if name >= 0 else CollectiveName("", "")
    counter, done = int(details.counter[index]), int(details.done[index])
    label = operator if not is_wait else f"{_WAIT_PREFIX}: {operator}" if operator else _WAIT_PREFIX
    args: dict[str, Any] = {"operator": escaped(operator), "group": escaped(group)}
    args |= {"peer": peer} if peer >= 0 else {}
    args |= {"counter": counter} if counter >= 0 else {}
    args |= {"bytes": int(details.nbytes[index]), "step": step}
    args |= {"done_ns": done - start} if done >= 0 else {}
    args |= {"device": escaped(device)} if device else {}
    return escaped(label), args


def is_usable(file_slice: FileSlice) -> bool:
    """Return whether the name and the args of a slice are as they are written."""
    if file_slice.category != COMMUNICATION:
        texts = [file_slice.name, *(value for key, value in file_slice.args.items() if key != "complete")]
        return all(isinstance(text, str) for text in texts)
    texts = [file_slice.name, *(file_slice.args.get(name) for name in _TEXTS), file_slice.args.get("device", "")]
    numbers = [file_slice.args.get(name, -1) for name in _INTEGERS]
    return all(isinstance(text, str) for text in texts) and all(
        type(number) is int and abs(number) < MAX_TIME_NS for number in numbers
    )


def add_file_slices(timeline: Timeline, file_slices: Sequence[FileSlice], groups: Sequence[Group]) -> Timeline:
    """Return the timeline with the slices of a file; see `others_of_file`."""
    others = others_of_file(timeline, file_slices, groups)
    timeline = replace(timeline, names=others.names)
    return with_slices(timeline, others.slices, others.span_args, others.collective_details)


def others_of_file(timeline: Timeline, file_slices: Sequence[FileSlice], groups: Sequence[Group]) -> Timeline:
    """Return the timeline with the slices of a file in place of its own.

    Only collectives and waits say their step; other slices are of the step in which they began.

    Args:
        timeline: what the file says of modules, with all tracks.
        file_slices: the slices.
        groups: the process groups.

    Raises:
        ValueError: a slice is on another kind of track, ends before it begins, or has args that are not as written.
    """
    for one in file_slices:
        track = timeline.tracks[one.track]
        if track.kind != one.category or one.end < one.start:
            raise ValueError(f"a {one.category} from {one.start} to {one.end} is on {track.name}")
        if not is_usable(one):
            raise ValueError(f"the args of {one.name!r} are {one.args!r}")
    others = replace(timeline, slices=Slices.empty(), span_args={}, collective_details=CollectiveDetails())
    others = _add_collectives(others, [one for one in file_slices if one.category == COMMUNICATION], groups)
    file_slices = sorted(
        (one for one in file_slices if one.category != COMMUNICATION), key=lambda one: (one.start, -one.end)
    )
    for category, code in CATEGORIES.items():
        rows = [one for one in file_slices if one.category == category]
        if not rows:
            continue
        start = np.array([one.start for one in rows], np.int64)
        numbers = Numbering[Name](len(others.names))
        left_out = {"complete", "category"} if code == RANGE else {"complete"}
        own_args = {
            index: restore({key: text for key, text in one.args.items() if key not in left_out})
            for index, one in enumerate(rows)
            if one.args.keys() - left_out
        }
        is_collection = [code == RANGE and one.args.get("category") == "gc" for one in rows]
        slices = Slices.of_kind(
            np.where(is_collection, GARBAGE_COLLECTION, code),
            start,
            name=-1 if KINDS[code].label else [numbers[_own_name(one, code)] for one in rows],
            end=[one.end for one in rows],
            track=[one.track for one in rows],
            step=steps_at(timeline, start),
            complete=[bool(one.args.get("complete", True)) for one in rows],
        )
        others = with_slices(replace(others, names=[*others.names, *numbers]), slices, own_args)
    return others


def _own_name(file_slice: FileSlice, code: int) -> Name:
    """Return the name of a slice of a kind whose slices have names of their own."""
    text = restore(file_slice.name)
    if code != RANGE:
        return Name(text, text, file_slice.category)
    return range_name(text, restore(file_slice.args.get("category", "user")))


def _add_collectives(timeline: Timeline, file_slices: Sequence[FileSlice], groups: Sequence[Group]) -> Timeline:
    names = Numbering[CollectiveName]()
    rows = []
    for one in file_slices:
        numbers = {name: one.args.get(name, -1) for name in _INTEGERS}
        operator, group = (restore(one.args[name]) for name in _TEXTS)
        device = restore(one.args.get("device", ""))
        name = -1
        if operator or group:
            name = names[CollectiveName(operator, group, numbers["peer"], device)]
        is_wait = one.name == _WAIT_PREFIX or one.name.startswith(f"{_WAIT_PREFIX}: ")
        done = one.start + numbers["done_ns"] if "done_ns" in one.args else -1
        complete = bool(one.args.get("complete", True))
        rows.append((name, numbers["counter"], numbers["bytes"], done, is_wait, numbers["step"], complete))
    name, counter, nbytes, done, is_wait, step, complete = np.array(rows, np.int64).reshape(-1, 7).T
    details = CollectiveDetails([*names], groups, name.astype(np.int32), counter, nbytes, done)
    slices = Slices.of_kind(
        np.where(is_wait, WAIT, COLLECTIVE),
        [one.start for one in file_slices],
        end=[one.end for one in file_slices],
        track=[one.track for one in file_slices],
        step=step,
        complete=complete,
        detail=np.arange(len(file_slices)),
    )
    return with_slices(timeline, slices, collective_details=details)


def group_header(groups: Sequence[Group]) -> list[dict[str, str]]:
    """Return the process groups as a trace's header has them."""
    return [
        {"name": escaped(one.name), "ranks": rank_list(one.ranks), "description": escaped(one.description)}
        for one in groups
    ]


def groups_from_header(entries: Any) -> list[Group]:
    """Return the process groups of a header.

    Raises:
        ValueError: they are not as they are written.
    """
    groups = []
    for entry in entries:
        values = [entry[name] for name in ("name", "ranks", "description")]
        if not all(isinstance(value, str) for value in values):
            raise ValueError(f"a group is {entry!r}")
        name, ranks, description = values
        groups.append(Group(name, tuple(parse_ranks(ranks)), description))
    return groups
