"""What the profiler's events are by their categories and names, those of old versions among them."""

from __future__ import annotations

import functools
import re
from enum import IntEnum

__all__ = [
    "ANNOTATION",
    "C10D",
    "CPU_OP",
    "KERNEL",
    "MEMCPY",
    "MEMSET",
    "MODULE",
    "MTIA",
    "MTIA_COPY",
    "MTIA_EVENTS",
    "NODE",
    "OTHER",
    "PARAM_COMMS",
    "PYTHON",
    "RUNTIME",
    "SLICE_KINDS",
    "STEP",
    "SYNC",
    "WINDOW",
    "ApiCall",
    "api_call",
    "collective_of_annotation",
    "collective_of_kernel",
    "collective_of_operator",
    "slice_kind",
]

SYNC = "modtrace.sync#"
STEP = "ProfilerStep#"
NODE = "autograd::engine::evaluate_function: "
MODULE = "nn.Module: "
C10D, PARAM_COMMS = "c10d::", "record_param_comms"

KERNEL, MEMCPY, MEMSET, CPU_OP, ANNOTATION, PYTHON, RUNTIME, WINDOW, MTIA, OTHER = range(10)
"""What slices are; the first three are work of a GPU."""

SLICE_KINDS: dict[object, int] = {
    "kernel": KERNEL,
    "gpu_memcpy": MEMCPY,
    "gpu_memset": MEMSET,
    "cpu_op": CPU_OP,
    "user_annotation": ANNOTATION,
    "python_function": PYTHON,
    "cuda_runtime": RUNTIME,
    "cuda_driver": RUNTIME,
    "Trace": WINDOW,
    "mtia_ccp_events": MTIA,
    # Kineto before torch 1.13.
    "Kernel": KERNEL,
    "Memcpy": MEMCPY,
    "Memset": MEMSET,
    "Operator": CPU_OP,
    "Runtime": RUNTIME,
}
"""The kind of a slice by its category; of others `slice_kind` tells it."""


MTIA_COPY = "dma_request"
MTIA_EVENTS = frozenset({"event_record", "event_wait"})
"""What streams of an MTIA do beside kernels, by its name."""


class ApiCall(IntEnum):
    """What a call of the GPU's runtime or driver does."""

    OTHER = 0
    KERNEL = 1
    MEMCPY = 2
    MEMSET = 3
    GRAPH = 4
    CAPTURE_BEGIN = 5
    CAPTURE_END = 6


_API_CALLS = (
    (re.compile(r"(cuda|hip)StreamBeginCapture|cuStreamBeginCapture"), ApiCall.CAPTURE_BEGIN),
    (re.compile(r"(cuda|hip)StreamEndCapture|cuStreamEndCapture"), ApiCall.CAPTURE_END),
    (re.compile(r"(cuda|hip|cu)GraphLaunch"), ApiCall.GRAPH),
    (re.compile(r"(cuda|hip|cu)(Module|Ext|ExtModule)?Launch"), ApiCall.KERNEL),
    (re.compile(r"(cuda|hip|cu)Memcpy"), ApiCall.MEMCPY),
    (re.compile(r"(cuda|hip|cu)Memset"), ApiCall.MEMSET),
)

_COMMUNICATION_KERNEL = re.compile(
    r"nccl|rccl|msccl|nvshmem|multimem_|_shot_all_reduce|cross_device_reduce", re.IGNORECASE
)
_ANNOTATION = re.compile(r"(nccl|rccl|gloo|mpi|ucc|xccl):(\w+)")
_COLLECTIVES = (
    ("reducescatter", "reduce_scatter"),
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("sendrecv", "send_recv"),
    ("barrier", "barrier"),
    ("scatter", "scatter"),
    ("gather", "gather"),
    ("reduce", "reduce"),
    ("send", "send"),
    ("recv", "recv"),
)
UNNAMED_COLLECTIVE = "collective"
"""What a collective is called of which nothing tells more."""


def slice_kind(category: object) -> int:
    """Return the kind of slices of a category."""
    kind = SLICE_KINDS.get(category)
    if kind is None:
        is_api = isinstance(category, str) and category.endswith(("_runtime", "_driver"))
        return RUNTIME if is_api else OTHER
    return kind


def api_call(name: str) -> int:
    """Return what a call of the GPU's runtime or driver does, by its name (`cudaLaunchKernel`): an `ApiCall`."""
    return next((int(call) for pattern, call in _API_CALLS if pattern.match(name)), 0)


def collective_of_kernel(name: str) -> str | None:
    """Return which collective a kernel is part of (`all_reduce`), by its name; None for one that computes."""
    return _collective(name) if _COMMUNICATION_KERNEL.search(name) else None


def collective_of_annotation(name: str) -> tuple[str, bool] | None:
    """Return the collective that a range of a communication library is for, and whether a CPU thread runs it there.

    Example:
        >>> collective_of_annotation("nccl:all_reduce"), collective_of_annotation("gloo:broadcast")
        (('all_reduce', False), ('broadcast', True))
    """
    found = _ANNOTATION.fullmatch(name)
    return (_collective(found[2]), found[1] in ("gloo", "mpi")) if found else None


def collective_of_operator(name: str, collective_name: object) -> str | None:
    """Return the collective that an operator launches; None for one that launches none.

    Args:
        name: of the operator: `record_param_comms` or `c10d::allreduce_`.
        collective_name: its arg `Collective name`, if it has one.
    """
    if name == PARAM_COMMS:
        return _collective(collective_name if isinstance(collective_name, str) else "")
    return _collective(name[len(C10D) :]) if name.startswith(C10D) else None


@functools.lru_cache(maxsize=4096)
def _collective(text: str) -> str:
    letters = re.sub(r"[^a-z]", "", text.lower())
    return next((name for part, name in _COLLECTIVES if part in letters), UNNAMED_COLLECTIVE)
