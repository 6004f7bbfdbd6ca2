"""Collectives for the portable engine: patches of what Python calls of a process group, and of `Work.wait`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..._weak_map import WeakMap
from ...ring import Kind, NameTable
from ...ring.slot_format import NO_NAME, NOT_AWAITED_BIT
from ..call_patch import Layer, Patch, PatchTarget
from ..event_sink import EventSink, OnError
from .names import OPERATORS, CollectiveNames
from .notice import say_portable_limits

__all__ = ["PortableCollectives"]

_METHODS = {
    **{operator: operator for operator in OPERATORS if operator != "recv_any_source"},
    "recv_anysource": "recv_any_source",
    # What later versions of torch call some of them.
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
"""The methods of a process group, by the operator of c10d that each calls."""
_PEER_OPERATORS = ("send", "recv")


class PortableCollectives:
    """Notes the collectives that Python calls, and the waits for them.

    Args:
        events: takes the events.
        names: the ring's name table.
        on_error: called with what went wrong inside.
    """

    def __init__(self, events: EventSink, names: NameTable, on_error: OnError) -> None:
        self._events = events
        self._name = CollectiveNames(names)
        self._on_error = on_error
        self._name_ids: dict[tuple[str, str, int, str], int] = {}
        self._counters: dict[tuple[str, int], Callable[[], int]] = {}
        self._works: WeakMap[Any, tuple[int, int]] = WeakMap()

    def start(self) -> None:
        """Begin; a torch without torch.distributed has nothing to note."""
        if torch.distributed.is_available():
            for patch in _patches():
                patch.install(self)

    def stop(self) -> None:
        """End, and restore what was wrapped."""
        if torch.distributed.is_available():
            for patch in _patches():
                patch.uninstall()

    def enter(self, operator: str, group: Any, args: tuple[Any, ...]) -> tuple[int, int] | None:
        """Write that `operator` of c10d is called; return the id of its name and its counter.

        None where an error came in between.
        """
        try:
            say_portable_limits()
            peer = args[1] if operator in _PEER_OPERATORS and len(args) > 1 and type(args[1]) is int else -1
            key = (operator, str(group.group_name), peer, _device_type(args))
            name_id = self._name_ids.get(key)
            if name_id is None:
                name_id = self._name_ids[key] = self._name(key)
            # What goes to or comes from one rank is in order with that rank only.
            count_key = (key[1], name_id if operator in (*_PEER_OPERATORS, "recv_any_source") else -1)
            counter = self._counters.setdefault(count_key, itertools.count().__next__)()
            self._events.write_event(Kind.COLLECTIVE_ENTER, name_id, counter)
        except Exception as error:
            self._on_error(error)
            return None
        return name_id, counter

    def exit(self, entered: tuple[int, int], operator: str, args: tuple[Any, ...], work: Any) -> None:
        """Write that it returned `work`, or None where it raised."""
        try:
            message = 0 if "barrier" in operator else max(map(_tensor_bytes, args[:2]), default=0)
            not_awaited = NOT_AWAITED_BIT if work is None and _device_type(args) else 0
            self._events.write_event(Kind.COLLECTIVE_EXIT, entered[0], message | not_awaited)
            if work is not None:
                self._works[work] = entered
        except Exception as error:
            self._on_error(error)

    def wait(self, kind: Kind, work: Any) -> None:
        """Write that a thread begins or ends to wait for `work`."""
        try:
            name_id, counter = self._works.get(work) or (NO_NAME, -1)
            self._events.write_event(kind, name_id, counter)
        except Exception as error:
            self._on_error(error)


def _device_type(value: object) -> str:
    """Return the type of the first tensor's device; an empty text for the CPU, and where there is none."""
    if isinstance(value, Tensor):
        return "" if value.is_cpu else value.device.type
    return next(filter(None, map(_device_type, value)), "") if isinstance(value, (list, tuple)) else ""


def _tensor_bytes(value: object) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_tensor_bytes, value)) if isinstance(value, (list, tuple)) else 0


def _make_collective(operator: str) -> Callable[[Layer], Callable[..., Any]]:
    def make(layer: Layer) -> Callable[..., Any]:
        @wraps(layer.wrapped)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            collectives = layer.observer
            if is_dynamo_compiling() or collectives is None:
                return layer.wrapped(self, *args, **kwargs)
            entered = collectives.enter(operator, self, args)
            work = None
            try:
                work = layer.wrapped(self, *args, **kwargs)
                return work
            finally:
                if entered is not None:
                    collectives.exit(entered, operator, args, work)

        return call

    return make


def _make_wait(layer: Layer) -> Callable[..., Any]:
    @wraps(layer.wrapped)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        collectives = layer.observer
        if is_dynamo_compiling() or collectives is None:
            return layer.wrapped(self, *args, **kwargs)
        collectives.wait(Kind.WAIT_ENTER, self)
        try:
            return layer.wrapped(self, *args, **kwargs)
        finally:
            collectives.wait(Kind.WAIT_EXIT, self)

    return wait


@cache
def _patches() -> tuple[Patch, ...]:
    c10d: Any = torch._C._distributed_c10d
    patches = [Patch(_make_wait, (PatchTarget(c10d.Work, "wait"),))]
    for method, operator in _METHODS.items():
        if hasattr(c10d.ProcessGroup, method):
            patches.append(Patch(_make_collective(operator), (PatchTarget(c10d.ProcessGroup, method),)))
    return tuple(patches)
