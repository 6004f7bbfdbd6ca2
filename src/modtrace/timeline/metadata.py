"""Shapes of the values in a timeline's metadata, which are checked on reading, since anyone may have written a file.

A shape describes a JSON value:

    int | None     a value of one of the types; True and False are not numbers
    range(3)       an integer in the range
    re.Pattern     a text that matches the whole pattern
    (str, int)     a list with exactly these entries
    [int]          a list with entries of this shape; entries that should be objects and are not are left out
    {str: int}     an object; entries of other shapes are left out
    {"a": int}     an object; entries of other shapes are left out, and entries with other names stay
"""

import re
from collections.abc import Mapping
from typing import Any

from . import contents
from .slices import PHASES

_COUNT = range(1 << 63)
_COUNT_OR_UNKNOWN = range(-1, 1 << 63)  # -1: unknown
_PHASE = range(len(PHASES))
_OPERATORS = [(str, int, int)]
_SECONDS = int | float
GRAPH = {
    "graph": int | str,
    "unknown": str,
    # The name, which must be short, because the names of all inner modules start with it; nodes and FLOPs per phase
    "work": [(re.compile(".{0,1000}", re.DOTALL), *[_COUNT_OR_UNKNOWN] * 2 * len(PHASES))],
    "kernels": [{"key": str, "unknown": str, "kernels": [(str, [(_COUNT, _PHASE, _COUNT)])]}],
    "kernel_times": [(str, *[_COUNT] * (len(PHASES) + 1))],
    contents.FUSED_TIMES: [(str, _PHASE, [(str, _SECONDS)])],
}
"""The shape of a graph that torch.compile made, see `summary.compiled`."""
_GAPS = [(*[str] * 5, [_COUNT])]
SHAPE_OF_STEP_NOTES = {
    # Number of sampled steps.
    "steps": int,
    # Duration of a thousand rounds of an empty Python loop, ns.
    "loops_ns": int,
    # Operators outside modules, in backward passes outside nodes, and in optimizers: name, calls, ns.
    "operators": {"outside": _OPERATORS, "in_passes": _OPERATORS, "in_optimizers": _OPERATORS},
    # Operators called directly by each module: all together, without a name; all with float64; then the longest.
    "inside": {str: _OPERATORS},
    # Containers of modules and of `__main__` that grow, by name: steps ended, and length; then such tensors.
    "lengthen": {str: [(int, int)]},
    "tensors_lengthen": {str: [(int, int)]},
    # Number of sampled steps in which a setting that slows programs was on, by name.
    "settings": {str: int},
    # Steps ended and input shapes of a module, if its first call in the step was outermost.
    "inputs": {str: [(int, str)]},
    # Number of a module's calls in a step, 8 or more, and input shapes of the first and of the last, if these differ.
    "changing_inputs": {str: [(int, str, str)]},
    # Number of calls in all sampled steps with the inputs of an earlier one in the same step, by module.
    "same_inputs": {str: int},
    # Number of forward hooks of each module.
    "hooks": {str: int},
    # Percentage of all parameter values that a module has, if it has most of them.
    "largest": {str: int},
    # Number of hooks on gradients, of parameter values, and of float64 parameter values.
    "gradient_hooks": int,
    "parameters": int,
    "float64_parameters": int,
    # Modules with float64 parameters, with other float64 tensors, and with casts without gradients that made nodes.
    "doubles": [str],
    "tables": [str],
    "casts": [str],
    # Modules that drop values or normalize by the batch, in training mode.
    "drop": [str],
    # Modules with parameters that belong to no optimizer.
    "untrained": [str],
    # Number of parameters of a module in a list, in percent of the usual number in that list, if it differs.
    "size_percent": {str: int},
    # Names with `*` (see `contents.place_in_lists`) whose modules differ in size.
    "unlike": [str],
    # Steps ended, and bytes held by the process.
    "resident": [(int, int)],
    # Steps in which the thread waited for a CPU, with ns; if calls are steps, the total over all steps.
    "delays": [(int, _COUNT)],
    "waited_ns": _COUNT,
    # Sampled steps, with the ns at the end of each in which these notes were made.
    "sampling_ns": [(int, _COUNT)],
    # The longest gaps between modules, passes and ranges: line and kind of the slice that ended, line and kind of the
    # slice that started, the part of the step, and ns in each step that has the gap; then the gaps in slow steps.
    "gaps": _GAPS,
    "slow_gaps": _GAPS,
}
"""The shapes of a recording's facts about sampled steps, by key, see `contents.STEP_NOTES`."""
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
"""Maximum number of characters of a text; names and sentences are shorter, and longer texts would flood the answers."""


def fit_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a timeline without values of unexpected shapes."""
    fitting: dict[str, Any] = fit(metadata, _SHAPES, {})
    return fitting


def fit(value: Any, shape: Any, default: Any = _MISFIT) -> Any:
    """Return a JSON value without the entries that do not fit its shape; `default` if the value itself does not fit."""
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
