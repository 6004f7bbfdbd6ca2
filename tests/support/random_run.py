"""A random program's events: calls, passes and steps of some threads, whatever way round they can come."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

from modtrace.ring import Kind
from modtrace.ring.event_text import range_text
from modtrace.ring.slot_format import ALLOCATED, NO_NAME, WITH_GRADIENTS_BIT
from tests.support.event_script import EventScript

_NAMES = ("Net", "Net.body", "Net.head", "Teacher")
_Graph = list[tuple[int, int, int | None]]
"""The nodes of a graph: the thread that made each, its sequence number (Python engine: the index of the call that it
belongs to), and the name of that call; None if it belongs to none."""


class RandomRun:
    """Writes a ring.

    Args:
        path: the ring.
        seed: of all that is random, also of which kinds of things happen at all.
    """

    def __init__(self, path: Path, seed: int) -> None:
        self.random = random.Random(seed)
        begin = time.monotonic_ns() + 10**9
        capacity = self.random.choice((400, 800, 8192))
        self.script = EventScript(capacity, path, clock=lambda at: begin + at)
        self.now = self.passes = self.tasks = self.steps = self.ranges = 0
        self.names = [self.script.name(name) for name in _NAMES]
        self.calls = dict.fromkeys([(name, again) for name in self.names for again in (False, True)], 0)
        self.is_python = self.happens(0.3)
        self.ended_by = self.random.choice((Kind.STEP, Kind.OPTIMIZER_STEP, Kind.GRADIENTS, None))
        self.keeps, self.fails, self.recomputes, self.loses, self.nests = (
            self.random.choice((0, 0, chance)) for chance in (0.1, 0.1, 0.3, 0.003, 0.05)
        )
        engine, *others = (self.script.add_thread(f"t{n}", tid=n, torch_thread_id=n) for n in (2, 3, 4))
        self.counts, self.samples, self.counting = self.happens(0.5), self.happens(0.5), False
        for number, flops in enumerate((100, 30, -1)):
            self.script.note_operator(number, "aten::mm", "float32", flops, 2 * number + 5)
        threads = [0, *(thread for thread in others if self.happens(0.4))]
        self.sequence = dict.fromkeys([*threads, engine], 0)
        self.engine = engine if self.happens(0.3) else None
        self.abandoned: dict[int, list[int]] = {thread: [] for thread in threads}
        self.kept: dict[int, _Graph] = {thread: [] for thread in threads}
        programs = {thread: self.trains(thread, self.random.randint(20, 40)) for thread in threads}
        while programs:
            thread = self.random.choice([*programs])
            self.script.on_thread(thread)
            if next(programs[thread], "ended") == "ended":
                del programs[thread]
        self.script.close()

    def happens(self, chance: float) -> bool:
        return self.random.random() < chance

    def after(self) -> int:
        self.now += self.random.randint(1, 1000)
        return self.now

    def costs(self) -> None:
        """Run an operator, if these are counted, and sample memory, if that is counted."""
        if self.counting and self.happens(0.5):
            gradients = WITH_GRADIENTS_BIT if self.happens(0.5) else 0
            self.script.operator(self.after(), self.random.randint(0, 2) | gradients)
        if not self.samples:
            return
        name = self.random.choice([*self.names, NO_NAME])
        if self.happens(0.4):
            self.script.collective(self.after(), Kind.COUNTER, ALLOCATED, self.random.randint(0, 9000))
        if self.happens(0.1):
            self.script.event(
                self.after(), Kind.HELD, name, self.random.randint(0, 9000) << 2 | self.random.randint(0, 2)
            )
        if self.happens(0.1):
            self.script.event(self.after(), Kind.SAVED, name, self.passes)

    def trains(self, thread: int, steps: int) -> Iterator[None]:
        ranges = list[int]()
        for _ in range(steps):
            if self.happens(0.2):
                self.ranges += 1
                self.script.collective(self.after(), Kind.RANGE_BEGIN, range_text("epoch", "user"), self.ranges)
                ranges.append(self.ranges)
            elif ranges and self.happens(0.2):
                self.script.collective(self.after(), Kind.RANGE_END, range_text("epoch", "user"), ranges.pop())
            if self.happens(self.nests):  # a call in which the program trains
                name = self.random.choice(self.names)
                index = self.enter(thread, name)
                yield from self.trains(thread, self.random.randint(2, 15))
                self.exit(thread, name, index)
            if self.counts and thread == 0 and self.counting != (self.steps < 2):
                self.counting = self.steps < 2
                self.script.event(self.after(), Kind.COUNTING, NO_NAME, int(self.counting))
            graph = _Graph()
            yield from self.forward(thread, graph, 0)
            if not self.is_python and self.happens(0.5):
                graph.append((thread, self.sequence[thread], None))
                self.sequence[thread] += 1
            if self.happens(self.keeps):
                self.kept[thread] += graph
            else:
                old, self.kept[thread] = self.kept[thread], []
                yield from self.backward(thread, old + graph)
            if self.happens(self.keeps):
                self.kept[thread] += graph
            self.end_step(thread)
            yield
        for number in reversed(ranges):
            self.script.collective(self.after(), Kind.RANGE_END, range_text("epoch", "user"), number)

    def end_step(self, thread: int) -> None:
        if self.ended_by is not None and (thread == 0 or self.happens(0.05)):
            name = 0 if self.ended_by == Kind.GRADIENTS else NO_NAME
            self.script.event(self.after(), self.ended_by, name, self.steps)
            self.steps += 1

    def enter(self, thread: int, name: int, *, again: bool = False) -> int:
        index = self.calls[name, again]
        self.calls[name, again] += 1
        self.script.enter(self.after(), name, index, self.sequence[thread], recompute=again)
        return index

    def exit(self, thread: int, name: int, index: int, *, again: bool = False) -> None:
        self.script.exit(self.after(), name, index, self.sequence[thread], recompute=again)

    def forward(self, thread: int, graph: _Graph, depth: int, again: int | None = None) -> Iterator[None]:
        name = self.random.choice(self.names) if again is None else again
        is_again = again is not None
        index = self.enter(thread, name, again=is_again)
        if self.counts and depth == 0:
            self.script.event(self.after(), Kind.INPUTS, NO_NAME, self.random.randint(0, 1))
        self.costs()
        yield
        for _ in range(self.random.randint(0, 2) if depth < 2 else 0):
            yield from self.forward(thread, graph, depth + 1, self.random.choice(self.names) if is_again else None)
        made = self.random.randint(1, 3)
        if self.is_python:
            graph.append((thread, index, name))
        else:
            graph += [(thread, self.sequence[thread] + n, name) for n in range(made)]
        self.sequence[thread] += made
        self.costs()
        if not self.happens(self.loses):
            self.exit(thread, name, index, again=is_again)
            yield

    def backward(self, thread: int, graph: _Graph) -> Iterator[None]:
        number, task = self.passes, self.tasks
        self.passes, self.tasks = number + 1, task + 1
        self.script.pass_begin(self.after(), number)
        yield
        while self.abandoned[thread]:
            self.script.backward_over(self.after(), graph_task=self.abandoned[thread].pop(), abandoned=True)
        fails = self.happens(self.fails)
        runs_on = thread if self.engine is None or self.is_python else self.engine
        for maker, at, name in reversed(graph[len(graph) // 2 :] if fails else graph):
            if self.is_python and name is not None:
                self.script.call_backward(self.after(), name, at, graph_task=task)
                yield
                continue
            node = {"graph_task": task % 256, "forward_thread": maker + 1}
            self.script.on_thread(runs_on)
            self.script.node_begin(self.after(), at, **node)
            self.costs()
            if name is not None and runs_on == thread and self.happens(self.recomputes):
                yield from self.forward(thread, _Graph(), 1, again=name)
            self.script.node_end(self.after(), at, **node)
            self.script.on_thread(thread)
            yield
        if self.is_python and graph and fails:
            self.abandoned[thread].append(task)
        elif self.is_python:
            self.script.backward_over(self.after(), graph_task=task)
        self.script.pass_end(self.after(), number)
        yield
