"""Asking trackers for the open names: at the start and end of each forward, and at each autograd node."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node as GraphNode

from .notation import Node, Trees

__all__ = ["LiveTracker", "tracker_trees"]

_sequence: Callable[[], int] = torch._C._autograd._get_sequence_nr


class LiveTracker(Protocol):
    """The interface that torch's two trackers and ours share."""

    @property
    def parents(self) -> set[str]: ...


@dataclass
class ReportedNames:
    """The open names that a tracker reported, in order, per track."""

    tracker: LiveTracker
    main: str
    names: dict[str, list[frozenset[str]]] = field(default_factory=dict)
    after: frozenset[str] = frozenset()
    outermost: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    entered: dict[str, int] = field(default_factory=dict)

    def enter(self) -> None:
        """A forward starts on this thread."""
        thread = threading.current_thread().name
        if self.entered.setdefault(thread, 0) == 0:
            self.outermost.setdefault(thread, []).append((_sequence(), -1))
        self.entered[thread] += 1
        self.ask()

    def leave(self) -> None:
        """A forward ends on this thread."""
        self.ask()
        thread = threading.current_thread().name
        self.entered[thread] -= 1
        if self.entered[thread] == 0:
            first, _ = self.outermost[thread][-1]
            self.outermost[thread][-1] = (first, _sequence())

    def node(self, number: int) -> None:
        """A node runs. If a forward made the node, a tracker without open names is wrong."""
        self.ask()
        if len(self.outermost) == 1:
            (ranges,) = self.outermost.values()
            names = self.names[self._title()]
            if names[-1] <= {"Global"} and any(first <= number < last for first, last in ranges):
                names[-1] |= {"nothing"}

    def ask(self) -> None:
        self.names.setdefault(self._title(), []).append(frozenset(self.tracker.parents))

    def _title(self) -> str:
        thread = threading.current_thread().name
        kind = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
        return kind if thread == self.main else f"{kind} @{thread}"

    def trees(self) -> Trees:
        """Return the trees of the sets of names; sets that do not nest make trees that cannot be right."""
        names = self.names | {"after the step": [self.after]}
        trees = {title: _tree([open_names - {"Global"} for open_names in sets]) for title, sets in names.items()}
        missing = [title for title, sets in names.items() if any("Global" not in open_names for open_names in sets)]
        return {title: nodes for title, nodes in trees.items() if nodes} | {f"no Global in {t}": () for t in missing}


def tracker_trees(tracker: LiveTracker, step: Callable[[], object]) -> Trees:
    """Run `step` and return the trees that `tracker`, which is entered, reports."""
    notes = ReportedNames(tracker, threading.current_thread().name)
    with _probed_modules(notes), _probed_graphs(notes):
        step()
    notes.after = frozenset(tracker.parents)
    return notes.trees()


@contextmanager
def _probed_modules(notes: ReportedNames) -> Iterator[None]:
    """Ask at the start and end of each forward; classes are patched, not modules, so that modules can die."""

    def probe(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def probed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            notes.enter()
            try:
                return forward(self, *args, **kwargs)
            finally:
                notes.leave()

        return probed

    with ExitStack() as stack:
        for kind in _kinds(nn.Module):
            if "forward" in vars(kind) and not issubclass(kind, torch.jit.ScriptModule):
                stack.enter_context(mock.patch.object(kind, "forward", probe(vars(kind)["forward"])))
        yield


def _kinds(kind: type[nn.Module]) -> set[type[nn.Module]]:
    return {kind}.union(*(_kinds(inner) for inner in kind.__subclasses__())) - {nn.Module}


@contextmanager
def _probed_graphs(notes: ReportedNames) -> Iterator[None]:
    """Ask at each node of each backward pass, nested passes included."""
    backward, grad = torch.autograd.backward, torch.autograd.grad

    def probed_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        with _probed_nodes(tensors, notes):
            backward(tensors, *args, **kwargs)

    def probed_grad(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        with _probed_nodes(outputs, notes):
            return grad(outputs, *args, **kwargs)

    with mock.patch("torch.autograd.backward", probed_backward), mock.patch("torch.autograd.grad", probed_grad):
        yield


@contextmanager
def _probed_nodes(outputs: Any, notes: ReportedNames) -> Iterator[None]:
    tensors = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    todo = [tensor.grad_fn for tensor in tensors]
    seen: set[GraphNode] = set()
    handles = []
    while todo:
        node = todo.pop()
        # The accumulation of a gradient belongs to the node before it.
        if node is None or node in seen or node.name().endswith("AccumulateGrad"):
            continue
        seen.add(node)
        handles.append(node.register_prehook(partial(lambda number, _: notes.node(number), node._sequence_nr())))
        todo.extend(inner for inner, _ in node.next_functions)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tree(sets: Sequence[frozenset[str]]) -> tuple[Node, ...]:
    root = Node("")
    stack = [root]

    def close(down_to: int) -> None:
        while len(stack) > down_to:
            done = stack.pop()
            stack[-1] = replace(stack[-1], children=(*stack[-1].children, done))

    for names in sets:
        height = 1
        while height < len(stack) and stack[height].fqn in names:
            height += 1
        close(height)
        is_open = {node.fqn for node in stack}
        stack.extend(Node(name) for name in sorted(names - is_open, key=lambda name: (name.count("."), name)))
    close(1)
    return stack[0].children
