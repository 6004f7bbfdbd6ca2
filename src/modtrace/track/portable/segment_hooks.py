"""Chooses the autograd nodes to hook: the newest node of each segment, which runs first.

A segment is a run of nodes that one call made itself, between two calls of inner modules. Nodes of one thread's graph
run in descending order of their sequence numbers, so the newest node of a segment is the first of it that runs.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import has_torch_function_unary

from ..._interrupts import WeakMap
from ...ring.slot_format import NO_NAME
from ..greenlets import PerGreenlet, current_greenlet
from ..unseen import tensors_in, unseen_by_modes

_MAX_NODES_SEARCHED = 20_000
_MAX_OUTSIDE_SEGMENTS = 1024

Segments = deque[tuple[int, int]]
"""Segments in the order in which they were made: the first and the last sequence number of each."""


class FrameBase:
    """An open call, or (at the bottom of a thread's stack) what is around all calls.

    Attributes:
        call_id: passed to the hooks on its nodes.
        module: None for the frame around all calls, and for one that is not in use.
        name: id of its name.
        depth: how many frames are below it; 0 for the frame around all calls.
        entry_seq: the thread's sequence number at enter.
        segment_start_seq: first sequence number of the current segment, which began with the call, or when the last
            inner call ended.
        unhooked_segments: its segments whose newest node is not found yet: first and last sequence number.
        keywords_id: `id()` of the dictionary of keyword arguments; no two open calls have the same one.
    """

    __slots__ = (
        *("call_id", "depth", "entry_seq", "keywords_id", "module", "name"),
        *("segment_start_seq", "unhooked_segments"),
    )

    call_id: Any

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.module: nn.Module | None = None
        self.name = NO_NAME
        self.entry_seq = self.segment_start_seq = self.keywords_id = 0
        self.unhooked_segments: list[tuple[int, int]] = []


_Frame = TypeVar("_Frame", bound=FrameBase)
_Stack = TypeVar("_Stack", bound="FrameStack[Any]")


class FrameStack(Generic[_Frame]):
    """The open calls of one thread.

    Attributes:
        frames: its frames, outermost first; the bottom one is around all calls.
        stack_depth: index of the innermost open call's frame.
        outside_segments: segments of nodes that were made outside of all calls and that no pass ran yet; the last ones.
        hook_tensor: an empty CPU tensor that carries a hook to the node it is registered on.
    """

    __slots__ = ("frames", "hook_tensor", "outside_segments", "stack_depth")

    frames: list[_Frame]

    def __init__(self) -> None:
        self.stack_depth = 0
        self.outside_segments: Segments = deque(maxlen=_MAX_OUTSIDE_SEGMENTS)
        # Hidden from the user's dispatch modes, as FakeTensorMode or a FLOP counter.
        with unseen_by_modes(), torch._C._DisableTorchDispatch():
            self.hook_tensor = torch.empty(0)

    def end_segment(self, sequence: int) -> None:
        """End the segment of the innermost call's nodes, or of those outside, before this sequence number."""
        frame = self.frames[self.stack_depth]
        if sequence != frame.segment_start_seq:
            segments = frame.unhooked_segments if frame.depth else self.outside_segments
            segments.append((frame.segment_start_seq, sequence - 1))
            frame.segment_start_seq = sequence

    def open_frames(self) -> list[_Frame]:
        """Return the frames of the open calls, outermost first."""
        return self.frames[1 : self.stack_depth + 1]

    def open_calls(self) -> list[tuple[nn.Module, int]]:
        """Return module and id of the name of each open call, innermost first."""
        return [(frame.module, frame.name) for frame in reversed(self.open_frames()) if frame.module is not None]

    def innermost_called_with(self, keywords: dict[str, Any]) -> _Frame | None:
        """Return the innermost open call's frame if the call has this very dictionary of keyword arguments.

        A signal may arrive after a call was entered but before its caller has the frame: under torch.compile, CPython
        checks for signals after every call.
        """
        frame = self.frames[self.stack_depth]
        return frame if frame.depth and frame.keywords_id == id(keywords) else None


class FrameStacks(PerGreenlet[_Stack]):
    """The open calls of each thread, or of each greenlet. Their nodes have sequence numbers of one thread.

    Args:
        make: returns those of a greenlet.
    """

    def __init__(self, make: Callable[[], _Stack]) -> None:
        def make_stack() -> _Stack:
            stack = make()
            greenlet, began = current_greenlet(), self.since()
            if greenlet is not None:
                stack.outside_segments.extend(self._outside.get(greenlet) or ())
                stack.frames[0].segment_start_seq = began
            return stack

        super().__init__(make_stack)
        self._outside: WeakMap[Any, Segments] = WeakMap()  # of greenlets that have no stack yet

    def switch(self, left: Any, goes_on: Any, made: range) -> None:
        """End the segment that was made, and begin one of the frame that goes on."""
        stack = self._values.get(left)
        if stack is not None:
            stack.end_segment(made.stop)
        elif made:
            self._outside[left] = outside = self._outside.get(left) or deque(maxlen=_MAX_OUTSIDE_SEGMENTS)
            outside.append((made.start, made.stop - 1))
        stack = self._values.get(goes_on)
        if stack is not None:
            stack.frames[stack.stack_depth].segment_start_seq = made.stop


class SegmentHooks:
    """Hooks few nodes of each segment, the newest among them: they call `on_segment_start(call_id, gradient)`."""

    on_segment_start: Callable[[Any, Tensor], None]

    def close_segment(self, thread: FrameStack[Any], frame: FrameBase, values: object, sequence: int) -> None:
        """End the segment of `frame`'s own nodes, and hook its newest one.

        Args:
            thread: where it runs.
            frame: whose segment it is.
            values: holds the tensors to try first, inputs of an inner call or outputs: usually the newest node is the
                `grad_fn` of one.
            sequence: the thread's sequence number now.
        """
        first, newest, is_hooked = frame.segment_start_seq, sequence - 1, False
        frame.segment_start_seq = sequence
        if type(values) is tuple and len(values) == 1:
            values = values[0]
        # Most often it is one tensor; the general walk costs more than all else here.
        for tensor in (values,) if isinstance(values, Tensor) else tensors_in(values):
            try:
                node = node_of(tensor) if has_torch_function_unary(tensor) else tensor.grad_fn
            except RuntimeError:
                # A view whose base was changed in place may raise when it is asked for its grad_fn.
                continue
            if node is not None and first <= (number := node._sequence_nr()) <= newest:
                # `_hook`, inlined: the call would add 10 %.
                hook_tensor = thread.hook_tensor
                hook_tensor._backward_hooks = {0: partial(self.on_segment_start, frame.call_id)}
                node._register_hook_dict(hook_tensor)
                is_hooked = is_hooked or number == newest
        if not is_hooked and frame.depth:
            frame.unhooked_segments.append((first, newest))

    def hook_unfound(self, thread: FrameStack[Any], frame: FrameBase, output: object) -> None:
        """Look for the newest node of each unhooked segment in the graph that leads to `output`, and hook it."""
        # Nodes older than the call are not its own, and lead to none of its own: they are not followed.
        newest = _newest_of(frame.unhooked_segments, output, lambda number, _: number >= frame.entry_seq)
        for node in newest.values():
            self._hook(thread, node, frame.call_id)

    def hook_outside(self, thread: FrameStack[Any], frame: FrameBase, segments: Segments, outputs: object) -> None:
        """Hook the node that a pass from `outputs` runs first in each segment outside of all calls.

        The graph is followed through such segments, not through calls: a call's inputs were looked at when it began.

        Args:
            thread: where it runs.
            frame: what is around all calls.
            segments: those outside of all calls; those that get a hook are removed.
            outputs: where the pass begins.
        """
        newest = _newest_of(segments, outputs, lambda _, is_inside: is_inside)
        for segment, node in newest.items():
            segments.remove(segment)
            self._hook(thread, node, frame.call_id)

    def _hook(self, thread: FrameStack[Any], node: Node, call_id: Any) -> None:
        # `node.register_prehook` makes a removable handle, which is most of its cost; a tensor's own dictionary of
        # hooks registers on the node at a third of it.
        hook_tensor = thread.hook_tensor
        hook_tensor._backward_hooks = {0: partial(self.on_segment_start, call_id)}
        node._register_hook_dict(hook_tensor)


def _newest_of(
    segments: Sequence[tuple[int, int]], outputs: object, follow: Callable[[int, bool], bool]
) -> dict[tuple[int, int], Node]:
    """Return the newest node of each segment in the graph that leads to `outputs`.

    Args:
        segments: the first and the last sequence number of each, ascending.
        outputs: where the search begins.
        follow: whether to go on to a node's inputs, by its sequence number and whether that is in a segment.
    """
    newest: dict[tuple[int, int], tuple[int, Node]] = {}
    seen: set[Node] = set()
    todo = [node for tensor in tensors_in(outputs) if (node := node_of(tensor)) is not None]
    while todo and len(seen) < _MAX_NODES_SEARCHED:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        number = node._sequence_nr()
        index = bisect_right(segments, number, key=itemgetter(0)) - 1
        is_inside = index >= 0 and number <= segments[index][1]
        if is_inside and newest.get(segments[index], (-1, node))[0] < number:
            newest[segments[index]] = (number, node)
        if follow(number, is_inside):
            todo.extend(inner for inner, _ in node.next_functions if inner is not None)
    return {segment: node for segment, (_, node) in newest.items()}


def node_of(tensor: Tensor) -> Node | None:
    """Return the node that made `tensor`, None if there is none or torch does not say."""
    try:
        if has_torch_function_unary(tensor):
            with unseen_by_modes():
                return tensor.grad_fn
        return tensor.grad_fn
    except RuntimeError:
        # A view whose base was changed in place may raise when it is asked for its grad_fn.
        return None
