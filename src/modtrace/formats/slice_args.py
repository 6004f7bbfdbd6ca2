"""Categories, names and args of slices in written traces; the same in both formats.

A slice's category is the kind of its track. Its name is the kind's label; for a collective the operator, for a wait
`wait: ` and the operator. Its args hold the rest, without what is not known or is as usual. What many slices share is
made once, and what differs in each is numbers:

    key      [0, 0, 1]                                         an index into `shared`, of each slice
    shared   [("communication", "all_reduce", {"group": "0"}), ("communication", "wait: all_reduce", …)]
    numbers  {"counter": [3, 4, 4], "bytes": …}
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from .._arrays import Int64Array, number_values
from .._errors import WriteError
from ..timeline import Timeline
from ..timeline.contents import COMMUNICATION, RANGES
from ..timeline.slices import KINDS, UNKNOWN_FLOPS, WAIT, Arg, ArgColumn, Args, Value, distinct_args
from .limits import escaped

CALL_FIELDS = {"fqn": 1, "module_class": 2, "call": 3, "step": 4, "link": 5, "complete": 6}
"""The fixed args of a span by their field number in the protobuf message that holds them in a Perfetto trace.

`link` is left out if the span has none, or a flow or `bind_id` shows it; `complete` if it is true.
"""

FLOW_CATEGORY = "call"
FLOW_NAME = "backward"
"""Category and name of the flow events in JSON, from a call's forward span to its first backward span."""

LAUNCH_CATEGORY = "launch"
LAUNCH_NAME = "collective"
"""Category and name of the flow events in JSON, from the span that launched a collective to it."""

CALLS_NAME = "calls"
"""The name of the flow events in JSON between the ranks' calls of one collective; their category is the slices'."""

PARTS_CATEGORY = "step parts"
"""The category of the counters in JSON of what steps were spent on."""

_STEP, _DONE_AFTER = "step", "done_ns"
_NUMBERS = (Arg.COUNTER, Arg.NBYTES, Arg.DONE)
_WAIT_PREFIX = "wait"


def arg_texts(args: Mapping[str, Value]) -> dict[str, str]:
    """Return args as texts."""
    return {
        name: "unknown" if name == Arg.FLOPS and value == UNKNOWN_FLOPS else str(value) for name, value in args.items()
    }


def extra_arg_texts(args: Mapping[str, Value]) -> dict[str, str]:
    """Return the args of a span beyond the fixed ones, as escaped texts; raises WriteError if one is named so."""
    taken = CALL_FIELDS.keys() & args.keys()
    if taken:
        raise WriteError(f"a span's arguments cannot be called {', '.join(sorted(taken))}: these names are reserved")
    return {escaped(name): escaped(text) for name, text in arg_texts(args).items()}


class SharedTexts(NamedTuple):
    """The texts that some slices have in common in a written trace; they are escaped."""

    kind: int  # index into `KINDS`
    category: str  # the kind of their tracks
    label: str  # their name
    args: Mapping[str, str | bool | int]  # what they hold


class SliceTexts(NamedTuple):
    """The texts and numbers of slices of all kinds but modules in a written trace."""

    key: Int64Array  # int64[n], index into `shared`
    shared: list[SharedTexts]  # what they say, without repetitions
    numbers: Args  # what differs in each slice, by arg; `done_ns` counts from its begin


def slice_texts(timeline: Timeline, rows: Int64Array | slice) -> SliceTexts:
    """Return what some slices say; none is a module's."""
    part = timeline.slices.take(rows)
    number = np.zeros(len(part), np.int64)
    with_args, of_args, kinds = distinct_args({k: v for k, v in part.args.items() if k not in _NUMBERS})
    number[with_args] = of_args + 1
    kinds = [{}, *kinds]
    code = (part.kind.astype(np.int64) * (len(timeline.names) + 1) + part.name + 1) * 2 + part.complete
    codes, key = number_values(code * len(kinds) + number)
    shared = []
    for code_and_args in codes.tolist():
        code_of_slice, args = divmod(code_and_args, len(kinds))
        code_of_name, complete = divmod(code_of_slice, 2)
        kind, name = divmod(code_of_name, len(timeline.names) + 1)
        shared.append(_shared(timeline, kind, name - 1, kinds[args], complete=bool(complete)))
    on_network = np.flatnonzero(np.array([kind.track == COMMUNICATION for kind in KINDS])[part.kind])
    numbers = {name: part.args[name] for name in (Arg.COUNTER, Arg.NBYTES) if name in part.args}
    if len(on_network):
        numbers[Arg.NBYTES] = ArgColumn(on_network, part.arg(Arg.NBYTES).dense(len(part), 0)[on_network])
        numbers[_STEP] = ArgColumn(on_network, part.step[on_network])
    if Arg.DONE in part.args:
        done = part.args[Arg.DONE]
        numbers[_DONE_AFTER] = ArgColumn(done.rows, done.values - part.start[done.rows])
    return SliceTexts(key, shared, numbers)


def _shared(timeline: Timeline, kind: int, name: int, args: Mapping[str, Value], *, complete: bool) -> SharedTexts:
    texts: dict[str, str | bool | int] = {
        escaped(key): value if key == Arg.PEER else escaped(str(value)) for key, value in args.items()
    }
    track, label = KINDS[kind].track, KINDS[kind].label
    if track == COMMUNICATION:
        operator = str(args.get(Arg.OPERATOR, ""))
        label = operator if kind != WAIT else f"{_WAIT_PREFIX}: {operator}" if operator else _WAIT_PREFIX
        texts = {**dict.fromkeys((Arg.OPERATOR, Arg.GROUP), ""), **texts}
    elif track == RANGES:
        texts["category"] = escaped(timeline.names[name].category or "")
    shown = escaped(label or timeline.names[name].label)
    return SharedTexts(kind, track, shown, texts if complete else {**texts, "complete": False})
