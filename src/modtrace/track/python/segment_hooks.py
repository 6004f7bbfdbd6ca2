"""Chooses the autograd nodes to hook: the newest node of each segment, which runs first.

A segment is a run of nodes that one call made itself, between two calls of inner modules. Nodes of one thread's graph
run in descending order of their sequence numbers, so the newest node of a segment runs before the others.
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
_MAX_CALL_SEGMENTS = 4096
_MAX_FAILED_SEARCHES = 32

Segment = tuple[int, int]
"""The first and the last sequence number of a segment."""
Segments = deque[Segment]
"""Segments in the order in which they were made."""
_CallSource = tuple[int, bool]
"""The name id of the call that made a segment, and whether the call was inside a backward pass."""


class FrameBase:
    """An open call, or (at the bottom of a thread's stack) the code around all calls."""

    __slots__ = (
        *("call_id", "depth", "entry_seq", "keywords_id", "module", "name"),
        *("segment_start_seq", "unhooked_segments"),
    )

    call_id: Any  # passed to the hooks on its nodes

    def __init__(self, depth: int) -> None:
        self.depth = depth  # number of frames below it; 0 for the frame around all calls
        self.module: nn.Module | None = None  # None also for a frame that is not in use
        self.name = NO_NAME
        self.entry_seq = 0  # the thread's sequence number at enter
        self.segment_start_seq = 0  # first number of the segment since the call's start, or since its last inner call
        self.keywords_id = 0  # `id()` of the dictionary of keyword arguments, which is different for each open call
        self.unhooked_segments: list[Segment] = []  # segments whose newest node is not found yet


_Frame = TypeVar("_Frame", bound=FrameBase)
_Stack = TypeVar("_Stack", bound="FrameStack[Any]")


class FrameStack(Generic[_Frame]):
    """The open calls of one thread."""

    __slots__ = ("call_segments", "frames", "hook_tensor", "outside_segments", "stack_depth")

    frames: list[_Frame]  # outermost first; the first frame is around all calls

    def __init__(self) -> None:
        self.stack_depth = 0  # index of the innermost open call's frame
        # The last segments of nodes that were made outside all calls and that no pass has run yet.
        self.outside_segments: Segments = deque(maxlen=_MAX_OUTSIDE_SEGMENTS)
        # Segments of ended calls without a hook, because no output leads to their nodes; with the call's id.
        self.call_segments: dict[Segment, tuple[Any, _CallSource]] = {}
        # Hidden from the user's dispatch modes, such as FakeTensorMode or a FLOP counter.
        with unseen_by_modes(), torch._C._DisableTorchDispatch():
            self.hook_tensor = torch.empty(0)  # an empty CPU tensor that carries a hook to the node it is registered on

    def end_segment(self, sequence: int) -> None:
        """End the segment of the innermost call's nodes, or of nodes outside all calls, before this sequence number."""
        frame = self.frames[self.stack_depth]
        if sequence != frame.segment_start_seq:
            segments = frame.unhooked_segments if frame.depth else self.outside_segments
            segments.append((frame.segment_start_seq, sequence - 1))
            frame.segment_start_seq = sequence

    def open_frames(self) -> list[_Frame]:
        """Return the frames of the open calls, outermost first."""
        return self.frames[1 : self.stack_depth + 1]

    def open_calls(self) -> list[tuple[nn.Module, int]]:
        """Return the module and the name id of each open call, innermost first."""
        return [(frame.module, frame.name) for frame in reversed(self.open_frames()) if frame.module is not None]

    def innermost_called_with(self, keywords: dict[str, Any]) -> _Frame | None:
        """Return the innermost open call's frame if the call has this very dictionary of keyword arguments.

        A signal may arrive after a call was entered but before its caller has the frame: under torch.compile, CPython
        checks for signals after every call.
        """
        frame = self.frames[self.stack_depth]
        return frame if frame.depth and frame.keywords_id == id(keywords) else None


class FrameStacks(PerGreenlet[_Stack]):
    """The stack of open calls, made by `make`, of each thread or greenlet. Sequence numbers belong to one thread."""

    def __init__(self, make: Callable[[], _Stack]) -> None:
        self.thread_ids: set[int] = set()  # ids of up to two threads that may have made graphs

        def make_stack() -> _Stack:
            stack = make()
            # torch's own threads run a pass first, so they are not counted.
            if len(self.thread_ids) < 2 and current_graph_task() == NO_GRAPH_TASK:
                self.thread_ids.add(threading.get_ident())
            greenlet, start_seq = current_greenlet(), self.resume_sequence()
            if greenlet is not None:
                stack.outside_segments.extend(self._outside.get(greenlet) or ())
                stack.frames[0].segment_start_seq = start_seq
            return stack

        super().__init__(make_stack)
        self._outside: WeakMap[Any, Segments] = WeakMap()  # segments of greenlets that have no stack yet

    def switch(self, suspended: Any, resumed: Any, sequences: range) -> None:
        """End the segment of the suspended greenlet, and start a segment of the resumed greenlet."""
        stack = self._values.get(suspended)
        if stack is not None:
            stack.end_segment(sequences.stop)
        elif sequences:
            self._outside[suspended] = outside = self._outside.get(suspended) or deque(maxlen=_MAX_OUTSIDE_SEGMENTS)
            outside.append((sequences.start, sequences.stop - 1))
        stack = self._values.get(resumed)
        if stack is not None:
            stack.frames[stack.stack_depth].segment_start_seq = sequences.stop


class SegmentHooks(Generic[_Stack]):
    """Hooks few nodes of each segment, and always the newest: they call `on_segment_start(call_id, gradient)`."""

    on_segment_start: Callable[[Any, Tensor], None]

    def __init__(self, make: Callable[[], _Stack]) -> None:
        self._threads = FrameStacks(make)
        self._local = self._threads.local
        self.passes: set[int] = set()  # numbers of the passes that run now
        # By the number of a running pass, the tensors at whose gradients it ends.
        self.ends_early: dict[int, Sequence[Any]] = {}
        self._failed_searches: dict[_CallSource, int] = {}

    def close_segment(self, thread: FrameStack[Any], frame: FrameBase, values: Any, sequence: int) -> None:
        """End the segment of `frame`'s own nodes, and hook its newest node.

        That node is searched for among the `grad_fn`s of the tensors in `values`: inputs of an inner call, or outputs.
        """
        first, newest, is_hooked = frame.segment_start_seq, sequence - 1, False
        frame.segment_start_seq = sequence
        if type(values) is tuple and len(values) == 1:
            values = values[0]
        # Usually there is one tensor; the general walk costs more than the rest of this method.
        for tensor in (values,) if issubclass(type(values), Tensor) else tensors_in(values):
            is_seen_by_mode = has_torch_function_unary(tensor)
            try:
                node = node_of(tensor) if is_seen_by_mode else tensor.grad_fn
            except RuntimeError:
                # A view whose base was changed in place may raise when it is asked for its grad_fn.
                continue
            if node is not None and first <= (number := node._sequence_nr()) <= newest:
                if is_seen_by_mode:
                    self._hook(thread, node, frame.call_id)
                else:  # `_hook`, inlined: the call would add 10 %.
                    hook_tensor = thread.hook_tensor
                    hook_tensor._backward_hooks = {0: partial(self.on_segment_start, frame.call_id)}
                    node._register_hook_dict(hook_tensor)
                is_hooked = is_hooked or number == newest
        if not frame.depth:
            thread.outside_segments.append((first, newest))
        elif not is_hooked:
            frame.unhooked_segments.append((first, newest))

    def hook_unfound(self, thread: FrameStack[Any], frame: FrameBase, output: object) -> None:
        """Search the graph of `output` for the newest node of each unhooked segment, and hook it."""
        # Nodes older than the call do not lead to the call's own nodes, so their inputs are not followed.
        newest = _newest_of(frame.unhooked_segments, output, lambda number, _: number >= frame.entry_seq)
        for node in newest.values():
            self._hook(thread, node, frame.call_id)
        if len(newest) < len(frame.unhooked_segments):
            self._keep_for_passes(thread, frame, newest)
        frame.unhooked_segments.clear()

    def _keep_for_passes(self, thread: FrameStack[Any], frame: FrameBase, hooked: Container[Segment] = ()) -> None:
        """Keep the unhooked segments of a call for later passes, unless passes never ran earlier ones of its name."""
        source = frame.name, current_graph_task() != NO_GRAPH_TASK
        if self._failed_searches.get(source, 0) < _MAX_FAILED_SEARCHES:
            call_segments = thread.call_segments
            for segment in frame.unhooked_segments:
                if segment not in hooked and segment[0] >= frame.entry_seq:
                    call_segments[segment] = frame.call_id, source
            while len(call_segments) > _MAX_CALL_SEGMENTS:
                del call_segments[next(iter(call_segments))]
            frame.unhooked_segments.clear()

    def begin_pass(self, number: int, outputs: object, inputs: Sequence[Any]) -> None:
        """Hook the first node that a pass from `outputs` runs in each segment that has no hook yet.

        These segments are: the nodes since the last call, such as the loss's nodes; earlier nodes outside all calls;
        nodes of calls that raised, ran under `vmap` or stored their result elsewhere. The graph is followed through
        segments outside all calls. If only one thread made graphs, all nodes are followed down to the oldest segment of
        calls: sequence numbers belong to one thread.
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
        outside, call_segments, oldest = thread.outside_segments, thread.call_segments, math.inf
        segments: Sequence[Segment] = outside
        if len(self._threads.thread_ids) < 2:
            for open_frame in thread.open_frames():
                if open_frame.unhooked_segments:
                    self._keep_for_passes(thread, open_frame)
            if call_segments:
                segments, oldest = sorted((*outside, *call_segments)), min(call_segments)[0]
        if not segments:
            return
        newest = _newest_of(segments, outputs, lambda number, is_inside: is_inside or number >= oldest)
        found_sources = set()
        for segment, node in newest.items():
            if segment in call_segments:
                call_id, source = call_segments.pop(segment)
                found_sources.add(source)
            else:
                outside.remove(segment)
                call_id = thread.frames[0].call_id
            self._hook(thread, node, call_id)
        if oldest < math.inf:
            self._count_failures(call_segments, found_sources)

    def _count_failures(
        self, call_segments: dict[Segment, tuple[Any, _CallSource]], found_sources: set[_CallSource]
    ) -> None:
        """Count the failed searches per source, and drop segments that never run: each step may make some."""
        for source in found_sources | {source for _, source in call_segments.values()}:
            self._failed_searches[source] = 0 if source in found_sources else self._failed_searches.get(source, 0) + 1
        for segment, (_, source) in list(call_segments.items()):
            if self._failed_searches[source] == _MAX_FAILED_SEARCHES:
                del call_segments[segment]

    def end_pass(self, number: int) -> None:
        """Forget the pass of this number, which returned or raised."""
        self.passes.discard(number)
        self.ends_early.pop(number, None)

    def _hook(self, thread: FrameStack[Any], node: Node, call_id: Any) -> None:
        # `node.register_prehook` costs three times as much, because it makes a removable handle. So the dictionary of
        # hooks of a tensor is registered on the node.
        hook_tensor = thread.hook_tensor
        with unseen_by_modes():
            hook_tensor._backward_hooks = {0: partial(self.on_segment_start, call_id)}
            node._register_hook_dict(hook_tensor)


def _newest_of(
    segments: Sequence[Segment], outputs: object, follow: Callable[[int, bool], bool]
) -> dict[Segment, Node]:
    """Return the newest node of each segment in the graph of `outputs`; `follow`: whether to search a node's inputs."""
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
    """Return the node that made `tensor`; None if there is none, or torch raises."""
    try:
        if has_torch_function_unary(tensor):
            with unseen_by_modes():
                return tensor.grad_fn
        return tensor.grad_fn
    except RuntimeError:
        # A view whose base was changed in place may raise when it is asked for its grad_fn.
        return None
