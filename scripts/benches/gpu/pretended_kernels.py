"""Simulated kernels in a profile of the CPU: each operator that calls no other launches one of its own duration."""

from __future__ import annotations

from scripts.benches.gpu.profile_truth import Json, extent, leaf_operators

DEVICE, STREAM = 0, 7
_LATENCY_NS, _GAP_NS = 5_000, 1_000


def with_kernels(document: Json) -> Json:
    """Return the trace with a launch inside each such operator, and with its kernel after it, one after the other."""
    operators = [event for event in document["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    added: list[Json] = []
    free_ns = 0
    for number, operator in enumerate(sorted(leaf_operators(operators), key=lambda event: float(event["ts"])), 1):
        start, end = extent(operator)
        launched = max(free_ns, start + _LATENCY_NS)
        free_ns = launched + (end - start) + _GAP_NS
        thread = {"pid": operator["pid"], "tid": operator["tid"]}
        stream = {"pid": DEVICE, "tid": STREAM}
        added += [
            _event("cuda_runtime", "cudaLaunchKernel", start, start, number) | thread,
            _event("kernel", operator["name"], launched, free_ns - _GAP_NS, number, device=DEVICE, stream=STREAM)
            | stream,
        ]
    return document | {"traceEvents": [*document["traceEvents"], *added]}


def _event(category: str, name: str, start: int, end: int, correlation: int, **args: int) -> Json:
    times = {"ts": start / 1000, "dur": (end - start) / 1000}
    return {"ph": "X", "cat": category, "name": name, **times, "args": {"correlation": correlation, **args}}
