"""Categories, names and args of slices in written traces, equal in both formats.

A slice's category is the kind of its track. Its name is the kind's label; for a collective the operator, for a wait
`wait: ` and the operator. Its args contain all other known values, without defaults. Texts that several slices share
are made once; each slice only adds numbers:

    key      [0, 0, 1]                                         per slice, an index into `shared`
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
"""The fixed args of a span, with their field numbers in the protobuf message of a Perfetto trace.

`link` is left out if the span has none, or a flow or `bind_id` shows it; `complete` if it is true.
"""

FLOW_CATEGORY, FLOW_NAME = "call", "backward"
"""Category and name of the flow events in JSON, from a call's forward span to its first backward span."""

LAUNCH_CATEGORY, LAUNCH_NAME = "launch", "collective"
"""Category and name of the flow events in JSON, from the launching span to the collective."""

CALLS_NAME = "calls"
"""Name of the flow events in JSON between the ranks' calls of one collective; their category is the slices'."""

PARTS_CATEGORY = "step parts"
"""Category of the counters in JSON for the parts of steps."""

_STEP, _DONE_DELAY = "step", "done_ns"
_NUMBER_ARGS = (Arg.COUNTER, Arg.NBYTES, Arg.DONE)
_WAIT_PREFIX = "wait"


def arg_texts(args: Mapping[str, Value]) -> dict[str, str]:
    """Return args as texts."""
    return {
        name: "unknown" if name == Arg.FLOPS and value == UNKNOWN_FLOPS else str(value) for name, value in args.items()
    }


def extra_arg_texts(args: Mapping[str, Value]) -> dict[str, str]:
    """Return a span's additional args as escaped texts; raises WriteError if one has the name of a fixed arg."""
    reserved = CALL_FIELDS.keys() & args.keys()
    if reserved:
        raise WriteError(f"a span's arguments cannot be called {', '.join(sorted(reserved))}: these names are reserved")
    return {escaped(name): escaped(text) for name, text in arg_texts(args).items()}


class SharedTexts(NamedTuple):
    """Escaped texts that several slices of a written trace have in common."""

    kind: int  # index into `KINDS`
    category: str  # kind of the track
    label: str  # name of the slices
    args: Mapping[str, str | bool | int]  # args with a common value


class SliceTexts(NamedTuple):
    """The texts and numbers of slices other than modules in a written trace."""

    key: Int64Array  # int64[n], index into `shared`
    shared: list[SharedTexts]  # distinct texts
    numbers: Args  # numbers of single slices, by arg; `done_ns` counts from the start of the slice


def slice_texts(timeline: Timeline, rows: Int64Array | slice) -> SliceTexts:
    """Return the texts and numbers of slices other than modules."""
    slices = timeline.slices.take(rows)
    args_number = np.zeros(len(slices), np.int64)
    with_args, numbers_from_0, args = distinct_args({k: v for k, v in slices.args.items() if k not in _NUMBER_ARGS})
    args_number[with_args] = numbers_from_0 + 1
    args = [{}, *args]
    code = (slices.kind.astype(np.int64) * (len(timeline.names) + 1) + slices.name + 1) * 2 + slices.complete
    codes, key = number_values(code * len(args) + args_number)
    shared = []
    for code_and_args in codes.tolist():
        slice_code, number = divmod(code_and_args, len(args))
        name_code, complete = divmod(slice_code, 2)
        kind, name = divmod(name_code, len(timeline.names) + 1)
        shared.append(_shared(timeline, kind, name - 1, args[number], complete=bool(complete)))
    on_network = np.flatnonzero(np.array([kind.track == COMMUNICATION for kind in KINDS])[slices.kind])
    numbers = {name: slices.args[name] for name in (Arg.COUNTER, Arg.NBYTES) if name in slices.args}
    if len(on_network):
        numbers[Arg.NBYTES] = ArgColumn(on_network, slices.arg(Arg.NBYTES).dense(len(slices), 0)[on_network])
        numbers[_STEP] = ArgColumn(on_network, slices.step[on_network])
    if Arg.DONE in slices.args:
        done = slices.args[Arg.DONE]
        numbers[_DONE_DELAY] = ArgColumn(done.rows, done.values - slices.start[done.rows])
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
    label = escaped(label or timeline.names[name].label)
    return SharedTexts(kind, track, label, texts if complete else {**texts, "complete": False})
