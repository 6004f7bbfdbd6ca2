"""The portable engine: Python only, and few hooks.

Nodes of one thread's graph run in descending order of their sequence numbers. So it is enough to hook the newest
node of each stretch of nodes that one call made itself: when it is reached, "the backward of this call goes on", and
that ends whatever went on before. A stretch ends where an inner call is entered (its newest node is then most often
among the inner call's inputs) and where the call itself is left (then among its outputs). Where it is among neither,
the call's graph is walked for it once, at its exit. One engine callback says "backward is over".
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.compiler import is_dynamo_compiling

from ...ring import Kind, Ring
from ...ring.slot_format import (
    ABANDONED_BIT,
    CALL_INDEX_MASK,
    CALL_KEY_BITS,
    CALL_KEY_MASK,
    KIND_SHIFT,
    LAP_SHIFT,
    NO_NAME,
    RECOMPUTE_BIT,
    SEQUENCE_BITS,
    SEQUENCE_MASK,
    THREAD_SHIFT,
    WORDS_PER_SLOT,
)
from ..call_patch import Layer
from ..module_names import ModuleNames, OpenCall
from ..sync_marks import SyncMarks
from ..threads import describe_thread
from .backward_hooks import StretchFrame, StretchHooks
from .pass_depth import passes_around

__all__ = ["PortableEngine"]

_current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
_profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled
_sequence: Callable[[], int] = torch._C._autograd._get_sequence_nr

_OUTSIDE = NO_NAME << CALL_KEY_BITS
_NO_TASK = -1

_ENTER, _EXIT = Kind.FORWARD_ENTER << KIND_SHIFT, Kind.FORWARD_EXIT << KIND_SHIFT
_AGAIN_ENTER, _AGAIN_EXIT = Kind.RECOMPUTE_ENTER << KIND_SHIFT, Kind.RECOMPUTE_EXIT << KIND_SHIFT
_BACKWARD, _OVER = Kind.CALL_BACKWARD << KIND_SHIFT, Kind.BACKWARD_OVER << KIND_SHIFT


class Frame(StretchFrame):
    """An open call; the frames of a thread are used again, since making one costs as much as noting an event.

    Attributes:
        thread: the thread it runs on.
        module: None for the frame around all calls, and for one that is not in use.
        name: the number of its name.
        code: name and key together: which call it is.
        exit_meta: kind, thread and name of its exit.
        value: its number, where the slot has it.
    """

    __slots__ = ("exit_meta", "module", "name", "thread", "value")

    code: int

    def __init__(self, thread: _Thread, height: int) -> None:
        super().__init__(height)
        self.thread = thread
        self.module: nn.Module | None = None
        self.name = NO_NAME
        self.code = _OUTSIDE
        self.exit_meta = self.value = 0


class _Thread:
    """What one thread is doing.

    Attributes:
        bits: its number, where the slot has it.
        frames: its frames, outermost first; the bottom one is around all calls.
        height: the place of the innermost open call's frame.
        tasks: its running graph tasks, outermost first: number, the call whose nodes run, and `passes_around`.
        carrier: an empty tensor that carries a hook to the node it is registered on.
    """

    __slots__ = ("bits", "carrier", "frames", "height", "tasks")

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.frames = [Frame(self, 0)]
        self.frames[0].segment = _sequence()
        self.height = 0
        self.tasks: list[list[int]] = []
        self.carrier = torch.empty(0)

    def open_frames(self) -> list[Frame]:
        """Return the frames of the open calls, outermost first."""
        return self.frames[1 : self.height + 1]


Place = tuple[int, Callable[[], int], Callable[[], int]]
"""A name's number, and what counts its calls and its recomputations."""


class PortableEngine(StretchHooks):
    """Notes forward by a layer around `nn.Module.__call__` and backward by hooks on few nodes.

    Args:
        ring: where events and names go.
        model: where names start, see `ModuleNames`.
        fail: called with what went wrong inside; the recording stops, the user's call goes on.
    """

    kind = "python"

    def __init__(self, ring: Ring, model: nn.Module | str | None, fail: Callable[[BaseException], None]) -> None:
        self._write = ring.make_writer()
        self._ring = ring
        self._table = ring.names
        self._fail = fail
        self._places: dict[int, dict[int, Place]] = {}
        self._counters: dict[int, tuple[Callable[[], int], Callable[[], int]]] = {}
        self.module_names = ModuleNames(ring.names, model, lambda identity: self._places.pop(identity, None))
        self._local = threading.local()
        self._running: set[int] = set()
        self._when_reached = self._make_reached()
        self._sync = SyncMarks(self, ring.names)
        self.active = False

    def start(self) -> None:
        """Begin to note; one portable engine notes at a time."""
        self.active = True
        _LAYER.observer = self
        _LAYER.put_on()

    def stop(self) -> None:
        """End it and restore `nn.Module.__call__`; hooks that live graphs still hold do nothing from now on."""
        self.active = False
        _LAYER.observer = None
        _LAYER.take_off()

    def after_fork(self) -> None:
        """End it in a forked child."""
        self.stop()

    def event(self, kind: Kind, name: int, value: int) -> None:
        """Write one event of this thread."""
        self._write(kind << KIND_SHIFT | self._thread().bits | name, value)

    def enter(self, module: nn.Module, inputs: object) -> Frame | None:
        """Note that `module` is called with `inputs`."""
        if not self.active:
            return None
        try:
            try:
                thread: _Thread = self._local.thread
            except AttributeError:
                thread = self._thread()
            height = thread.height
            outer = thread.frames[height]
            if height == 0 and _profiler_enabled():
                self._sync()
            sequence = _sequence()
            if sequence != outer.segment:
                self._end_segment(thread, outer, inputs, sequence)
            try:
                name, count, count_again = self._places[id(module)][outer.name]
            except KeyError:
                name, count, count_again = self._find(module, outer.name, thread)
            if name == NO_NAME:
                return None
            if _current_graph_task() == _NO_TASK:
                if thread.tasks:
                    self._end_tasks(thread)
                number = count() & CALL_INDEX_MASK
                key, enter_kind, exit_kind = number, _ENTER, _EXIT
            else:
                number = count_again() & CALL_INDEX_MASK
                key, enter_kind, exit_kind = number | RECOMPUTE_BIT, _AGAIN_ENTER, _AGAIN_EXIT
            height += 1
            try:
                frame = thread.frames[height]
            except IndexError:
                frame = Frame(thread, height)
                thread.frames.append(frame)
            bits = thread.bits | name
            frame.module = module
            frame.name = name
            frame.code = name << CALL_KEY_BITS | key
            frame.exit_meta = exit_kind | bits
            frame.value = value = number << SEQUENCE_BITS
            frame.first = frame.segment = sequence
            try:
                thread.height = height
                self._write(enter_kind | bits, value | sequence & SEQUENCE_MASK)
            except BaseException:
                self._take_back(frame, enter_kind | bits, value | sequence & SEQUENCE_MASK)
                raise
        except Exception as error:
            self._fail(error)
            return None
        return frame

    def leave(self, frame: Frame, output: object) -> None:
        """Note that the call returned `output`, or None where it raised."""
        if not self.active:
            return
        try:
            sequence = _sequence()
            self._write(frame.exit_meta, frame.value | sequence & SEQUENCE_MASK)
            thread = frame.thread
            # An interrupt between an inner call's enter and its try can have left inner frames behind.
            thread.height = height = frame.height - 1
            if sequence != frame.first and output is not None:
                if sequence != frame.segment:
                    self._end_segment(thread, frame, output, sequence)
                if frame.pending:
                    self._walk(thread, frame, output)
            if frame.pending:
                frame.pending.clear()
            frame.module = None
            thread.frames[height].segment = sequence
        except Exception as error:
            self._fail(error)

    def _take_back(self, frame: Frame, meta: int, value: int) -> None:
        """Leave a call that an interrupt kept from being made, as far as it was entered."""
        frame.thread.height = frame.height - 1
        slots = np.frombuffer(self._ring.buffer, np.int64, self._ring.capacity * WORDS_PER_SLOT, self._ring.offset)
        slots = slots.reshape(-1, WORDS_PER_SLOT)
        if np.any((slots[:, 0] & (1 << LAP_SHIFT) - 1 == meta) & (slots[:, 2] == value)):
            self.leave(frame, None)

    def open_calls(self) -> list[Frame]:
        """Return this thread's open calls, outermost first."""
        return self._thread().open_frames()

    def _thread(self) -> _Thread:
        try:
            thread: _Thread = self._local.thread
        except AttributeError:
            number = self._table.thread(*describe_thread())
            thread = self._local.thread = _Thread(number << THREAD_SHIFT)
        return thread

    def _find(self, module: nn.Module, parent: int, thread: _Thread) -> Place:
        open_calls: Iterable[OpenCall] = (
            (frame.module, frame.name) for frame in reversed(thread.open_frames()) if frame.module is not None
        )
        name = self.module_names.resolve(module, open_calls)
        counters = self._counters.get(name)
        if counters is None:
            counters = self._counters.setdefault(name, (itertools.count().__next__, itertools.count().__next__))
        place = (name, *counters)
        self._places.setdefault(id(module), {})[parent] = place
        return place

    def _make_reached(self) -> Callable[[int, Tensor], None]:
        # Run for every hook, and so a closure: what it looks up on itself is a tenth of its cost.
        local, write, begin_task = self._local, self._write, self._begin_task

        def reached(code: int, _gradient: Tensor) -> None:
            if not self.active:
                return
            try:
                task = _current_graph_task()
                try:
                    thread: _Thread = local.thread
                except AttributeError:
                    thread = self._thread()
                tasks = thread.tasks
                if not tasks or tasks[-1][0] != task:
                    if task == _NO_TASK:
                        return
                    begin_task(thread, task)
                current = tasks[-1]
                if current[1] != code:
                    current[1] = code
                    write(_BACKWARD | thread.bits | code >> CALL_KEY_BITS, task << CALL_KEY_BITS | code & CALL_KEY_MASK)
            except Exception as error:
                self._fail(error)

        return reached

    def _begin_task(self, thread: _Thread, task: int) -> None:
        tasks, passes = thread.tasks, passes_around()
        while tasks and tasks[-1][0] != task and (tasks[-1][0] not in self._running or tasks[-1][2] >= passes > 0):
            self._end_task(thread, tasks.pop()[0])
        if tasks and tasks[-1][0] == task:
            return
        if task not in self._running:
            self._running.add(task)
            Variable._execution_engine.queue_callback(partial(self._over, task))
        tasks.append([task, -1, passes])

    def _end_tasks(self, thread: _Thread) -> None:
        while thread.tasks:
            self._end_task(thread, thread.tasks.pop()[0])

    def _end_task(self, thread: _Thread, task: int) -> None:
        """Note the end of a graph task that ended by an exception: for these the engine calls nobody."""
        if task in self._running:
            self._running.discard(task)
            self._write(_OVER | thread.bits | NO_NAME, task | ABANDONED_BIT)

    def _over(self, task: int) -> None:
        self._running.discard(task)
        if self.active:
            try:
                self._write(_OVER | self._thread().bits | NO_NAME, task)
            except Exception as error:
                self._fail(error)


def _make_call(layer: Layer) -> Callable[..., Any]:
    assert isinstance(layer, _PortableLayer)

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807  # what it stands for
        observer = layer.observer
        if is_dynamo_compiling() or observer is None:
            return layer.inner(self, *args, **kwargs)
        frame = observer.enter(self, (args, kwargs) if kwargs else args)
        output = None
        try:
            try:
                # torch.profiler (with_stack) knows a module's call by the frame that this leaves out.
                if layer.wraps_torch and self._compiled_call_impl is None and not _profiler_enabled():
                    output = self._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
                else:
                    output = layer.inner(self, *args, **kwargs)
                return output
            finally:
                if frame is not None:
                    observer.leave(frame, output)
        except BaseException:
            if frame is not None and frame.module is not None:
                # An interrupt came while it was left.
                observer.leave(frame, None)
            raise

    return __call__


class _PortableLayer(Layer):
    observer: PortableEngine | None = None


_LAYER = _PortableLayer(_make_call)
