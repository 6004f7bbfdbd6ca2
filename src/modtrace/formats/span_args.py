"""The args of a span in a written trace, and the flow that joins the spans of a call; the same in both formats."""

from collections.abc import Mapping

from .._errors import WriteError
from ..timeline import Timeline
from .escape import escaped

CALL_FIELDS = {"fqn": 1, "module_class": 2, "call": 3, "step": 4, "link": 5, "complete": 6}
"""The fixed args by their field number in the protobuf message that holds them in a Perfetto trace.

`link` is left out if the span has none, or a flow or `bind_id` shows it; `complete` if it is true.
"""

RESERVED_ARGS = frozenset(CALL_FIELDS)
"""Names that a span's extra args (`shapes` …) cannot have."""

FLOW_CATEGORY = "call"
FLOW_NAME = "backward"
"""Category and name of the flow events in JSON, from a call's forward span to its first backward span."""


def module_args(timeline: Timeline) -> dict[int, Mapping[str, str]]:
    """Return the extra args of module slices, by slice index."""
    return {row: args for row, args in timeline.span_args.items() if row < len(timeline.columns)}


def escaped_span_args(span_args: Mapping[str, str]) -> dict[str, str]:
    """Return a span's extra args, escaped for a trace.

    Raises:
        WriteError: one has the name of a fixed arg.
    """
    taken = RESERVED_ARGS & span_args.keys()
    if taken:
        raise WriteError(f"a span's arguments cannot be called {', '.join(sorted(taken))}: these names are reserved")
    return {escaped(key): escaped(value) for key, value in span_args.items()}
