"""Chooses the autograd nodes to hook: the newest node of each segment, which runs first.

A segment is a run of nodes that one call made itself, between two calls of inner modules. Nodes of one thread's graph
run in descending order of their sequence numbers, so the newest node of a segment is the first of it that runs.
"""

import math
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Container, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import has_torch_function_unary

from ..._interrupts import WeakMap
from ...ring.slot_format import NO_NAME
from ..event_sink import NO_GRAPH_TASK, current_graph_task, sequence_number
from ..greenlets import PerGreenlet, current_greenlet
from ..unseen import is_backward_compiled, tensors_in, unseen_by_modes

_MAX_NODES_SEARCHED = 20_000
_MAX_OUTSIDE_SEGMENTS = 1024
_MAX_LEFT_SEGMENTS = 4096
_MAX_PASSES_IN_VAIN = 32

Segment = tuple[int, int]
"""Its first and its last sequence number."""
Segments = deque[Segment]
"""Segments in the order in which they were made."""
_LeftBy = tuple[int, bool]
"""The name of the call that left a segment, and whether a backward pass made the call."""


class FrameBase:
    """An open call, or (at the bottom of a thread's stack) what is around all calls."""

    __slots__ = (
        *("call_id", "depth", "entry_seq", "keywords_id", "module", "name"),
        *("segment_start_seq", "unhooked_segments"),
    )

    call_id: Any  # passed to the hooks on its nodes

    def __init__(self, depth: int) -> None:
        self.depth = depth  # how many frames are below it; 0 for the frame around all calls
        self.module: nn.Module | None = None  # None also for a frame that is not in use
        self.name = NO_NAME
        self.entry_seq = 0  # the thread's sequence number at enter
        self.segment_start_seq = 0  # of the current segment: it began with the call, or when the last inner one ended
        self.keywords_id = 0  # `id()` of the dictionary of keyword arguments; no two open calls have the same one
        self.unhooked_segments: list[Segment] = []  # those whose newest node is not found yet


_Frame = TypeVar("_Frame", bound=FrameBase)
_Stack = TypeVar("_Stack", bound="FrameStack[Any]")


class FrameStack(Generic[_Frame]):
    """The open calls of one thread."""

    __slots__ = ("frames", "hook_tensor", "left_segments", "outside_segments", "stack_depth")

    frames: list[_Frame]  # its frames, outermost first; the bottom one is around all calls

    def __init__(self) -> None:
        self.stack_depth = 0  # index of the innermost open call's frame
        # Segments of nodes that were made outside of all calls and that no pass ran yet; the last ones.
        self.outside_segments: Segments = deque(maxlen=_MAX_OUTSIDE_SEGMENTS)
        # Those of calls that have no hook, as no output leads to their nodes; with the call's id.
        self.left_segments: dict[Segment, tuple[Any, _LeftBy]] = {}
        # Hidden from the user's dispatch modes, as FakeTensorMode or a FLOP counter.
        with unseen_by_modes(), torch._C._DisableTorchDispatch():
            self.hook_tensor = torch.empty(0)  # an empty CPU tensor that carries a hook to the node it is registered on

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
    """The open calls of each thread, or greenlet, which `make` returns. Nodes have sequence numbers of one thread."""

    def __init__(self, make: Callable[[], _Stack]) -> None:
        self.thread_ids: set[int] = set()  # of threads that may have made graphs; with two it is full

        def make_stack() -> _Stack:
            stack = make()
            # The first that torch's own threads do is to run a pass.
            if len(self.thread_ids) < 2 and current_graph_task() == NO_GRAPH_TASK:
                self.thread_ids.add(threading.get_ident())
            greenlet, began = current_greenlet(), self.since()
            if greenlet is not None:
                stack.outside_segments.extend(self._outside.get(greenlet) or ())
                stack.frames[0].segment_start_seq = began
            return stack

        super().__init__(make_stack)
        self._outside: WeakMap[Any, Segments] = WeakMap()  # of greenlets that have no stack yet

    def switch(self, stopped: Any, goes_on: Any, made: range) -> None:
        """End the segment that was made, and begin one of the frame that goes on."""
        stack = self._values.get(stopped)
        if stack is not None:
            stack.end_segment(made.stop)
        elif made:
            self._outside[stopped] = outside = self._outside.get(stopped) or deque(maxlen=_MAX_OUTSIDE_SEGMENTS)
            outside.append((made.start, made.stop - 1))
        stack = self._values.get(goes_on)
        if stack is not None:
            stack.frames[stack.stack_depth].segment_start_seq = made.stop


class SegmentHooks(Generic[_Stack]):
    """Hooks few nodes of each segment, the newest among them: they call `on_segment_start(call_id, gradient)`."""

    on_segment_start: Callable[[Any, Tensor], None]

    def __init__(self, make: Callable[[], _Stack]) -> None:
        self._threads = FrameStacks(make)
        self._local = self._threads.local
        self.passes: set[int] = set()  # numbers of those that run now
        # By the number of such a pass, the tensors to whose gradients it goes, and no further.
        self.ends_early: dict[int, Sequence[Any]] = {}
        self._passes_in_vain: dict[_LeftBy, int] = {}

    def close_segment(self, thread: FrameStack[Any], frame: FrameBase, values: object, sequence: int) -> None:
        """End the segment of `frame`'s own nodes, and hook its newest one.

        The tensors in `values` are tried first, inputs of an inner call or outputs: usually the newest node is the
        `grad_fn` of one.
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
        if not frame.depth:
            thread.outside_segments.append((first, newest))
        elif not is_hooked:
            frame.unhooked_segments.append((first, newest))

    def hook_unfound(self, thread: FrameStack[Any], frame: FrameBase, output: object) -> None:
        """Look for the newest node of each unhooked segment in the graph that leads to `output`, and hook it."""
        # Nodes older than the call are not its own, and lead to none of its own: they are not followed.
        newest = _newest_of(frame.unhooked_segments, output, lambda number, _: number >= frame.entry_seq)
        for node in newest.values():
            self._hook(thread, node, frame.call_id)
        if len(newest) < len(frame.unhooked_segments):
            self._leave(thread, frame, newest)
        frame.unhooked_segments.clear()

    def _leave(self, thread: FrameStack[Any], frame: FrameBase, hooked: Container[Segment] = ()) -> None:
        """Keep the unhooked segments of a call for the passes to come, unless those of its name were never run."""
        left_by = frame.name, current_graph_task() != NO_GRAPH_TASK
        if self._passes_in_vain.get(left_by, 0) < _MAX_PASSES_IN_VAIN:
            left_segments = thread.left_segments
            for segment in frame.unhooked_segments:
                if segment not in hooked and segment[0] >= frame.entry_seq:
                    left_segments[segment] = frame.call_id, left_by
            while len(left_segments) > _MAX_LEFT_SEGMENTS:
                del left_segments[next(iter(left_segments))]
            frame.unhooked_segments.clear()

    def begin_pass(self, number: int, outputs: object, inputs: Sequence[Any]) -> None:
        """Hook the node that a pass from `outputs` runs first in each segment that has no hook yet.

        These are what was made since the last call, as the loss, what was made before and outside of all calls, and
        what calls left: a call raised, was called by `vmap`, put its result aside. The graph is followed through
        segments outside of all calls. If one thread made all of it, it is followed everywhere to the segments of calls:
        sequence numbers are a thread's.
        """
        self.passes.add(number)
        if inputs:
            self.ends_early[number] = inputs
        if is_backward_compiled():
            return
        thread = self._threads.get()
        frame, sequence = thread.frames[thread.stack_depth], sequence_number()
        if sequence != frame.segment_start_seq:
            if frame.depth:
                self.close_segment(thread, frame, outputs, sequence)
            else:
                thread.end_segment(sequence)
        outside, left_segments, oldest = thread.outside_segments, thread.left_segments, math.inf
        segments: Sequence[Segment] = outside
        if len(self._threads.thread_ids) < 2:
            for open_frame in thread.open_frames():
                if open_frame.unhooked_segments:
                    self._leave(thread, open_frame)
            if left_segments:
                segments, oldest = sorted((*outside, *left_segments)), min(left_segments)[0]
        if not segments:
            return
        newest = _newest_of(segments, outputs, lambda number, is_inside: is_inside or number >= oldest)
        names_found = set()
        for segment, node in newest.items():
            if segment in left_segments:
                call_id, left_by = left_segments.pop(segment)
                names_found.add(left_by)
            else:
                outside.remove(segment)
                call_id = thread.frames[0].call_id
            self._hook(thread, node, call_id)
        if oldest < math.inf:
            self._note_found(left_segments, names_found)

    def _note_found(self, left_segments: dict[Segment, tuple[Any, _LeftBy]], names_found: set[_LeftBy]) -> None:
        """Count the passes in vain of each name, and give up those that never run: a model leaves some in each step."""
        for left_by in names_found | {left_by for _, left_by in left_segments.values()}:
            self._passes_in_vain[left_by] = 0 if left_by in names_found else self._passes_in_vain.get(left_by, 0) + 1
        for segment, (_, left_by) in list(left_segments.items()):
            if self._passes_in_vain[left_by] == _MAX_PASSES_IN_VAIN:
                del left_segments[segment]

    def end_pass(self, number: int) -> None:
        """Note that the pass of this number returned or raised."""
        self.passes.discard(number)
        self.ends_early.pop(number, None)

    def _hook(self, thread: FrameStack[Any], node: Node, call_id: Any) -> None:
        # `node.register_prehook` makes a removable handle, which is most of its cost; a tensor's own dictionary of
        # hooks registers on the node at a third of it.
        hook_tensor = thread.hook_tensor
        hook_tensor._backward_hooks = {0: partial(self.on_segment_start, call_id)}
        node._register_hook_dict(hook_tensor)


def _newest_of(
    segments: Sequence[Segment], outputs: object, follow: Callable[[int, bool], bool]
) -> dict[Segment, Node]:
    """Return the newest node of each segment, ascending, in the graph of `outputs`; `follow` has it go on to inputs."""
    newest: dict[Segment, tuple[int, Node]] = {}
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
