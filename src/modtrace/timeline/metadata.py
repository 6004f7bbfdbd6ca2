"""Shapes of the values in a timeline's metadata: anybody may have written a file, so they are checked when it is read.

A shape says what a JSON value is:

    int | None     of that type; True and False are no numbers
    range(3)       an integer in it
    re.Pattern     a text that it matches whole
    (str, int)     a list of just these
    [int]          a list in which all are so; of objects, what is none is left out
    {str: int}     an object; what is not so is left out of it
    {"a": int}     an object; what is not so is left out of it, and entries of other names stay
"""

import re
from collections.abc import Mapping
from typing import Any

from . import contents
from .slices import PHASES

_COUNT, _KNOWN = range(1 << 63), range(-1, 1 << 63)
_PHASE = range(len(PHASES))
_OPERATORS = [(str, int, int)]
_SECONDS = int | float
GRAPH = {
    "graph": int | str,
    "unknown": str,
    # The name, which has to be short as all that it is below is made of it; nodes and FLOPs in each phase
    "work": [(re.compile(".{0,1000}", re.DOTALL), *[_KNOWN] * 2 * len(PHASES))],
    "kernels": [{"key": str, "unknown": str, "kernels": [(str, [(_COUNT, _PHASE, _COUNT)])]}],
    "kernel_times": [(str, *[_COUNT] * (len(PHASES) + 1))],
    contents.FUSED_TIMES: [(str, _PHASE, [(str, _SECONDS)])],
}
"""The shape of a graph that torch.compile made, see `summary.compiled`."""
_GAPS = [(*[str] * 5, [_COUNT])]
SHAPE_OF_STEP_NOTES = {
    # How many steps were looked at.
    "steps": int,
    # What Python took for a thousand rounds of an empty loop, ns.
    "loops_ns": int,
    # Operators that ran outside of modules, in backward passes outside of nodes, and in optimizers: name, calls, ns.
    "operators": {"outside": _OPERATORS, "in_passes": _OPERATORS, "in_optimizers": _OPERATORS},
    # By module, the operators that it calls itself: all together, without a name; all of float64; then the longest.
    "inside": {str: _OPERATORS},
    # By name, lists and the like of modules and of `__main__` that grow: after how many steps how many values.
    "lengthen": {str: [(int, int)]},
    # By name, in how many of these steps a setting that makes a program slow was on.
    "settings": {str: int},
    # By module, after how many steps it got tensors of which shapes, if its first call in the step was in no other's.
    "inputs": {str: [(int, str)]},
    # By module, how many forward hooks it has.
    "hooks": {str: int},
    # By module, what percent of all parameters' values it has, if that is most.
    "largest": {str: int},
    # How many hooks gradients have, how many values all parameters, and those of float64.
    "gradient_hooks": int,
    "parameters": int,
    "float64_parameters": int,
    # Modules with parameters of float64, with other tensors of it, and in which casts without gradients made nodes.
    "doubles": [str],
    "tables": [str],
    "casts": [str],
    # Modules that drop values or normalize by the batch, as in training.
    "drop": [str],
    # Modules with parameters that no optimizer has.
    "untrained": [str],
    # By module in a list, in percent how many parameters it has of those that most there have, if it has others.
    "size_percent": {str: int},
    # Places in lists whose modules differ in size, see `contents.place_in_lists`.
    "unlike": [str],
    # After how many steps the process held how many bytes.
    "resident": [(int, int)],
    # In which steps the thread waited for a processor, and how long, ns; where calls are steps, in all of them.
    "delays": [(int, _COUNT)],
    "waited_ns": _COUNT,
    # The longest times between modules, passes and ranges: the line where something ended, what, the line where the
    # next began, what, the part of the step, and ns in each step that has it. The second is of slow steps alone.
    "gaps": _GAPS,
    "slow_gaps": _GAPS,
}
"""The shapes of a recording's notes of few steps, by key, see `contents.STEP_NOTES`."""
OPTIMIZER_NOTES = [
    {"class": str, "how": str, **dict.fromkeys(("tensors", "groups", "hooks", "stepped", "first_tensors"), int)}
]
_SHAPES = {
    **dict.fromkeys((contents.MISSING_BYTES, contents.LEFT_OUT), int),
    **dict.fromkeys(("device_clock_bound_ns", "device_events_dropped", "device_events_unread"), int),
    "notes": [str],
    contents.FIRST_CALLED: {str: int},
    contents.WHOLE_RUN: dict.fromkeys(("steps", "spans", "seconds", "kept_steps"), _SECONDS | None),
    contents.OPEN_AT_END: {"thread": str, "place": str, "seconds": _SECONDS, "usual_seconds": _SECONDS | None},
    contents.COUNTED: {"steps": [int], "outside": int, "unknown": int, "without_formula": [str], "dtypes": {str: int}},
    contents.MEMORY: {
        **{key: {str: int} for key in ("by", "grows_by", "saved", "at_peak")},
        "grows": int,
        "sentences": [str],
    },
    contents.COMPILED: {str: [GRAPH]},
    contents.OPTIMIZERS: OPTIMIZER_NOTES,
    contents.STEP_NOTES: SHAPE_OF_STEP_NOTES,
}
_MISFIT = object()
_MAX_TEXT = 10_000
"""Length of the longest text: names and sentences are shorter, and others would fill the answers."""


def fit_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a timeline without what is not as it should be."""
    fitting: dict[str, Any] = fit(metadata, _SHAPES, {})
    return fitting


def fit(value: Any, shape: Any, default: Any = _MISFIT) -> Any:
    """Return a JSON value without what is not of its shape; `default` if it is not itself."""
    if isinstance(shape, dict):
        if not isinstance(value, Mapping):
            return default
        entries = {
            key: fit(entry, shape.get(key, shape.get(str, object)))
            for key, entry in value.items()
            if key in shape or str not in shape or len(key) <= _MAX_TEXT
        }
        return {key: entry for key, entry in entries.items() if entry is not _MISFIT}
    if isinstance(shape, list | tuple):
        if not isinstance(value, list | tuple) or (isinstance(shape, tuple) and len(value) != len(shape)):
            return default
        fitting = [*map(fit, value, shape if isinstance(shape, tuple) else shape * len(value))]
        if isinstance(shape[0], dict):
            fitting = [entry for entry in fitting if entry is not _MISFIT]
        return default if any(entry is _MISFIT for entry in fitting) else fitting
    if isinstance(shape, range):
        fits = type(value) is int and value in shape
    elif isinstance(shape, re.Pattern):
        fits = isinstance(value, str) and shape.fullmatch(value) is not None
    else:
        fits = isinstance(value, shape) and (shape is object or not isinstance(value, bool))
        fits = fits and (shape is not str or len(value) <= _MAX_TEXT)
    return value if fits else default
