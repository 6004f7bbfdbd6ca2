"""Collectives of torch.distributed, for both engines: their names and groups, and the hooks that record them.

The native engine taps the operators of c10d. The Python engine patches the methods of a process group. Both patch
`Work.wait`. Collectives that a recording cannot see are logged once.
"""

import itertools
from collections.abc import Callable
from functools import cache, partial, wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .._interrupts import WeakMap
from ..ring import Kind, NameTable
from ..ring.event_text import OPERATORS, PEER_OPERATORS, SAME_NAME, UNSEEN_BY_PYTHON, collective_text, rank_list
from ..ring.slot_format import NO_NAME, NOT_AWAITED_BIT
from .call_patch import Patch, PatchTarget, Wrapper
from .event_sink import EventSink, OnError, warn_once


class CollectiveNames:
    """Gives collectives names in a ring, and writes a record of each group once."""

    def __init__(self, names: NameTable) -> None:
        self._names = names
        self._group_names: set[str] = set()

    def __call__(self, operator: tuple[str, str, int, str]) -> int:
        """Return the id of the text of a c10d operator, given as (name, group, peer or -1, device type or "")."""
        name, group_name, peer, device = operator
        if group_name not in self._group_names:
            self._group_names.add(group_name)
            ranks, description = _describe_group(group_name)
            self._names.group(group_name, rank_list(ranks), description)
        name = name.removesuffix("_")
        return self._names.text(collective_text(OPERATORS.get(name, name), group_name, peer, device))


def _describe_group(group_name: str) -> tuple[list[int], str]:
    """Return the global ranks of a group (empty if torch does not know them), and torch's description of it."""
    world: Any = torch.distributed.distributed_c10d._world
    for group, ranks in list(world.pg_group_ranks.items()):
        # If this process is not a member, torch has a number in place of the group.
        if getattr(group, "group_name", None) == group_name:
            return sorted(ranks), str(getattr(group, "group_desc", ""))
    return [], ""


class NativeCollectives:
    """Records the collectives of the session that the native engine runs."""

    def __init__(self, native: ModuleType, names: NameTable) -> None:
        self._native, self._names = native, names

    def start(self) -> None:
        """Start to record; the session must run."""
        try:
            self._native.start_collectives(CollectiveNames(self._names))
            _wait_patch(self._native).install(self)
        except RuntimeError as error:
            warn_once(f"collectives are not recorded: torch {torch.__version__} does not take the tap ({error})")

    def stop(self) -> None:
        """Stop recording, and restore `Work.wait`; the tap stays and only passes calls on."""
        self._native.stop_collectives()
        _wait_patch(self._native).uninstall()


@cache
def _wait_patch(native: ModuleType) -> Patch:
    work: Any = torch._C._distributed_c10d.Work
    return Patch(lambda wrapper: native.wrap_wait(wrapper.wrapped), (PatchTarget(work, "wait"),), native.set_active)


_METHODS = {
    **{operator: operator for operator in (*OPERATORS, *SAME_NAME, *PEER_OPERATORS)},
    "recv_anysource": "recv_any_source",
    # Names of operators in later versions of torch.
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
"""The c10d operators of the methods of a process group, by the methods' names."""


class PythonCollectives:
    """Records the collectives that Python calls, and the waits for them."""

    def __init__(self, events: EventSink, names: NameTable, on_error: OnError) -> None:
        self._events = events
        self._name = CollectiveNames(names)
        self._on_error = on_error
        self._name_ids: dict[tuple[str, str, int, str], int] = {}
        self._counters: dict[tuple[str, int], Callable[[], int]] = {}
        self._works: WeakMap[Any, tuple[int, int]] = WeakMap()

    def start(self) -> None:
        """Start to record; a torch without torch.distributed has no collectives."""
        if torch.distributed.is_available():
            for patch in _patches():
                patch.install(self)

    def stop(self) -> None:
        """Stop recording, and restore the wrapped methods."""
        if torch.distributed.is_available():
            for patch in _patches():
                patch.uninstall()

    def enter(self, operator: str, group: Any, args: tuple[Any, ...]) -> tuple[int, int] | None:
        """Write the start of a call of a c10d operator; return its name id and counter, or None after an error."""
        try:
            warn_once(f"{UNSEEN_BY_PYTHON}, which also sees when one completes")
            peer = args[1] if operator in PEER_OPERATORS and len(args) > 1 and type(args[1]) is int else -1
            key = (operator, str(group.group_name), peer, _device_type(args))
            name_id = self._name_ids.get(key)
            if name_id is None:
                name_id = self._name_ids[key] = self._name(key)
            # Messages to and from one rank are ordered among themselves only.
            count_key = (key[1], name_id if operator in (*PEER_OPERATORS, "recv_any_source") else -1)
            counter = self._counters.setdefault(count_key, itertools.count().__next__)()
            self._events.write_event(Kind.COLLECTIVE_ENTER, name_id, counter)
        except Exception as error:
            self._on_error(error)
            return None
        return name_id, counter

    def exit(self, entered: tuple[int, int], operator: str, args: tuple[Any, ...], work: Any) -> None:
        """Write the end of the call, which returned `work`, or None if it raised."""
        try:
            message_bytes = 0 if "barrier" in operator else max(map(_tensor_bytes, args[:2]), default=0)
            not_awaited = NOT_AWAITED_BIT if work is None and _device_type(args) else 0
            self._events.write_event(Kind.COLLECTIVE_EXIT, entered[0], message_bytes | not_awaited)
            if work is not None:
                self._works[work] = entered
        except Exception as error:
            self._on_error(error)

    def wait(self, kind: Kind, work: Any) -> None:
        """Write an event of `kind`: the start or the end of a thread's wait for `work`."""
        try:
            name_id, counter = self._works.get(work) or (NO_NAME, -1)
            self._events.write_event(kind, name_id, counter)
        except Exception as error:
            self._on_error(error)


def _device_type(value: object) -> str:
    """Return the device type of the first tensor; an empty text for the CPU, or if there is no tensor."""
    if isinstance(value, Tensor):
        return "" if value.is_cpu else value.device.type
    return next(filter(None, map(_device_type, value)), "") if isinstance(value, (list, tuple)) else ""


def _tensor_bytes(value: object) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_tensor_bytes, value)) if isinstance(value, (list, tuple)) else 0


def _make_collective(operator: str, wrapper: Wrapper) -> Callable[..., Any]:
    @wraps(wrapper.wrapped)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        collectives = wrapper.observer
        if is_dynamo_compiling() or collectives is None:
            return wrapper.wrapped(self, *args, **kwargs)
        entered = collectives.enter(operator, self, args)
        work = None
        try:
            work = wrapper.wrapped(self, *args, **kwargs)
            return work
        finally:
            if entered is not None:
                collectives.exit(entered, operator, args, work)

    return call


def _make_wait(wrapper: Wrapper) -> Callable[..., Any]:
    @wraps(wrapper.wrapped)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        collectives = wrapper.observer
        if is_dynamo_compiling() or collectives is None:
            return wrapper.wrapped(self, *args, **kwargs)
        collectives.wait(Kind.WAIT_ENTER, self)
        try:
            return wrapper.wrapped(self, *args, **kwargs)
        finally:
            collectives.wait(Kind.WAIT_EXIT, self)

    return wait


@cache
def _patches() -> tuple[Patch, ...]:
    c10d: Any = torch._C._distributed_c10d
    patches = [Patch(_make_wait, (PatchTarget(c10d.Work, "wait"),))]
    for method, operator in _METHODS.items():
        if hasattr(c10d.ProcessGroup, method):
            make = partial(_make_collective, operator)
            patches.append(Patch(make, (PatchTarget(c10d.ProcessGroup, method),)))
    return tuple(patches)
