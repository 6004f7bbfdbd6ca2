"""Greenlets that take turns inside calls: judged by their own stopwatch and log, never by another recording."""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import modtrace
from modtrace.record_options import EngineName
from modtrace.timeline.decode.analysis import wall_clock
from tests.support.forked_python import run_forked
from tests.support.test_scale import PROMISED, scaled

greenlet: Any = pytest.importorskip("greenlet")


class Entry(NamedTuple):
    """An action of the program, with its time and its greenlet."""

    what: str
    fqn: str
    greenlet: int
    began_ns: int
    ended_ns: int


class Log:
    """Actions of one thread, in order."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.in_backward: int | None = None

    def note(self, what: str, fqn: str, number: int, began_ns: int = 0) -> None:
        now = time.monotonic_ns()
        self.entries.append(Entry(what, fqn, number, began_ns or now, now))


class Note(torch.autograd.Function):
    """A node that notes when its backward runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Part, log: Log, number: int) -> Tensor:
        ctx.part = part, log
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        part, log = ctx.part
        began_ns, current = time.monotonic_ns(), part.running()
        try:
            if part.switches_in_backward:
                part.switch()
                began_ns = time.monotonic_ns()
            while time.monotonic_ns() - began_ns < 20_000:
                pass
        except BaseException:  # killed
            began_ns = time.monotonic_ns()
            raise
        finally:
            log.note("backward", part.fqn, current, began_ns)
        return gradients[0], None, None, None


class Part(nn.Module):
    """A module that calls its parts, makes nodes and lets other greenlets run, in an order of its own."""

    def __init__(self, fqn: str, running: Callable[[], int], script: list[str], log: Log) -> None:
        super().__init__()
        self.fqn, self.running, self.script, self.log = fqn, running, script, log
        self.switches_in_backward = False

    def switch(self) -> None:
        greenlet.getcurrent().parent.switch()

    def forward(self, x: Tensor) -> Tensor:
        number = self.running()
        self.log.note("enter", self.fqn, number)
        try:
            for what in self.script:
                if what == "switch":
                    self.switch()
                    self.log.note("switch", self.fqn, number)
                elif what == "node":
                    x = Note.apply(x, self, self.log, number)
                else:
                    x = self.get_submodule(what)(x)
        finally:
            self.log.note("exit", self.fqn, number)
        return x


def make_part(rng: random.Random, fqn: str, running: Callable[[], int], log: Log, depth: int = 0) -> Part:
    kind = Part if depth else type(fqn, (Part,), {})
    children = [f"c{index}" for index in range(rng.randrange(3) if depth < 3 else 0)]
    script = ["node"] * rng.randrange(1, 3) + ["switch"] * rng.randrange(3) + children
    rng.shuffle(script)
    part: Part = kind(fqn, running, script, log)
    part.switches_in_backward = rng.random() < 0.2
    for child in children:
        part.add_module(child, make_part(rng, f"{fqn}.{child}", running, log, depth + 1))
    return part


def interleave(rng: random.Random, name: str, log: Log, kept: list[Any]) -> None:
    """Run some greenlets, each with forward and backward of its own module, in any order; kill or leave some."""
    numbers: dict[Any, int] = {}

    def running() -> int:
        return numbers[greenlet.getcurrent()]

    def train(model: Part, number: int) -> None:
        x = torch.ones(1, requires_grad=True)
        for _ in range(rng.randrange(1, 3)):
            y = model(x * 2) * 3
            if rng.random() < 0.3:
                model.switch()
            # torch cannot run a pass while another one waits on the same thread; and it makes no graph in a hook.
            while log.in_backward is not None:
                model.switch()
            if y.requires_grad:
                log.in_backward = number
                try:
                    if rng.random() < 0.5:
                        y.sum().backward()
                    else:
                        torch.autograd.grad(y.sum(), x, create_graph=True)
                finally:
                    log.in_backward = None

    alive = []
    for number in range(rng.randrange(2, 6)):
        model = make_part(rng, f"{name}x{number}", running, log)
        alive.append(greenlet.greenlet(lambda model=model, number=number: train(model, number)))
        numbers[alive[-1]] = number
    while alive:
        one = rng.choice(alive)
        if one and rng.random() < 0.02:
            one.throw()
        elif one and rng.random() < 0.01 and log.in_backward != numbers[one]:
            kept.append(one)
        else:
            one.switch()
        alive = [one for one in alive if not one.dead and not any(one is left for left in kept)]


class Call(NamedTuple):
    """A call as the program saw it; its start and end each lie between two moments, in Unix nanoseconds."""

    began: tuple[int, int]
    ended: tuple[int, int]
    fqn: str
    depth: int
    complete: bool


def true_calls(entries: list[Entry]) -> Iterator[Call]:
    open_: dict[int, list[int]] = defaultdict(list)
    before = [0, *(entry.ended_ns for entry in entries)]
    after = [*(entry.began_ns for entry in entries[1:]), sys.maxsize]
    for index, entry in enumerate(entries):
        stack = open_[entry.greenlet]
        if entry.what == "enter":
            stack.append(index)
        elif entry.what == "exit":
            begin = stack.pop()
            began = before[begin] - 1, entries[begin].ended_ns + 1
            yield Call(began, (entry.began_ns - 1, after[index] + 1), entry.fqn, len(stack), True)
    for stack in open_.values():
        for depth, begin in enumerate(stack):
            began = before[begin] - 1, entries[begin].ended_ns + 1
            yield Call(began, (0, sys.maxsize), entries[begin].fqn, depth, False)


def root_of(fqn: str) -> str:
    return fqn.partition(".")[0]


def faults(recording: modtrace.Recording, logs: list[Log]) -> Iterator[str]:
    """Yield each fault of the recording, compared with the logs."""
    clock = wall_clock(recording._require_capture().ring.read().records)
    timeline, spans = recording.timeline(), defaultdict(list)
    for span in timeline.spans:
        spans[root_of(span.fqn), span.phase].append(span)
    for root in {root for root, _ in spans}:
        tracks = {span.track.partition(" · ")[2] for phase in ("forward", "backward") for span in spans[root, phase]}
        if len(tracks) != 1:
            yield f"{root} is on {tracks}"
    notes: list[Entry] = []
    calls: dict[str, list[Call]] = defaultdict(list)
    for log in logs:
        times = [clock.to_other([entry.began_ns, entry.ended_ns]).tolist() for entry in log.entries]
        entries = [
            entry._replace(began_ns=time[0], ended_ns=time[1]) for entry, time in zip(log.entries, times, strict=True)
        ]
        notes += [entry for entry in entries if entry.what == "backward"]
        for call in true_calls(entries):
            calls[root_of(call.fqn)].append(call)
    for root, true in calls.items():
        seen = spans[root, "forward"]
        true.sort()
        if [(span.fqn, span.depth, span.complete) for span in seen] != [call[2:] for call in true]:
            yield f"calls of {root}: {[(span.fqn, span.depth, span.complete) for span in seen]}, not {true}"
            continue
        for span, call in zip(seen, true, strict=True):
            is_between = (
                call.began[0] <= span.start_ns <= call.began[1] and call.ended[0] <= span.end_ns <= call.ended[1]
            )
            if not is_between:
                yield f"{span} is not {call}"
    for note in notes:
        middle = (note.began_ns + note.ended_ns) // 2
        around = [span for span in spans[root_of(note.fqn), "backward"] if span.start_ns <= middle <= span.end_ns]
        innermost = max(around, key=lambda span: span.depth, default=None)
        if innermost is None or innermost.fqn != note.fqn:
            yield f"backward of {note.fqn} is in {None if innermost is None else innermost.fqn}"
    for root in calls:
        for span in spans[root, "backward"]:
            if not any(f"{note.fqn}.".startswith(f"{span.fqn}.") for note in notes):
                yield f"backward of {span.fqn}, which ran none"


@pytest.mark.timeout(3600 if PROMISED else 900)
def test_any_interleaving_is_recorded_as_the_program_logged_it(engine: EngineName) -> None:
    for seed in range(scaled(20, 300, 2000)):
        rng, log = random.Random(seed), Log()
        kept: list[Any] = []
        with modtrace.record(engine=engine, ranges=False) as recording:
            interleave(rng, "Net", log, kept)

        assert list(faults(recording, [log])) == [], seed
        for one in kept:
            one.throw()
        if seed % 100 == 99:  # tests run without collections, and each recording has 32 MiB
            gc.collect()


def test_greenlets_of_several_threads(engine: EngineName) -> None:
    for seed in range(scaled(3, 50, 300)):
        logs = [Log() for _ in range(3)]
        kept: list[Any] = []
        threads = [
            threading.Thread(target=interleave, args=(random.Random(seed * 3 + index), f"Net{index}", log, kept))
            for index, log in enumerate(logs)
        ]
        with modtrace.record(engine=engine, ranges=False) as recording:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        assert list(faults(recording, logs)) == [], seed


class Wait(nn.Module):
    """Lets another greenlet run in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        greenlet.getcurrent().parent.switch()
        return x * 2


class First(Wait):
    pass


class Second(Wait):
    pass


def forward_spans(recording: modtrace.Recording) -> list[tuple[str, int, bool, str]]:
    return [
        (span.fqn, span.depth, span.complete, span.track)
        for span in recording.timeline().spans
        if span.phase == "forward"
    ]


def take_turns() -> None:
    x = torch.ones(1, requires_grad=True)
    one, other = greenlet.greenlet(lambda: First()(x)), greenlet.greenlet(lambda: Second()(x))
    for run in (one, other, one, other):
        run.switch()


IN_TURN = [
    ("First", 0, True, "forward · MainThread · greenlet 1"),
    ("Second", 0, True, "forward · MainThread · greenlet 2"),
]


def test_greenlets_beside_a_trace_of_the_users(engine: EngineName) -> None:
    seen: list[str] = []

    def trace(event: str, _: object) -> None:
        seen.append(event)

    with modtrace.record(engine=engine) as recording:
        before = greenlet.settrace(trace)
        take_turns()
        greenlet.settrace(before)
    in_recording = len(seen)
    before = greenlet.settrace(trace)
    take_turns()
    greenlet.settrace(before)

    assert forward_spans(recording) == IN_TURN
    assert in_recording == len(seen) - in_recording > 0


def test_a_trace_that_raises_is_the_users_error_and_loses_no_call(engine: EngineName) -> None:
    def trace(event: str, _: object) -> None:
        raise ValueError(event)

    def run() -> None:
        greenlet.settrace(trace)
        First()(torch.ones(1))
        Second()(torch.ones(1))

    with modtrace.record(engine=engine) as recording:
        one = greenlet.greenlet(run)
        with pytest.raises(ValueError, match="switch"):
            one.switch()
        one.switch()
        one.switch()

    names = [(fqn, depth, complete) for fqn, depth, complete, _ in forward_spans(recording)]
    assert one.dead
    assert names == [("First", 0, True), ("Second", 0, True)]


def test_a_thousand_greenlets_one_after_the_other_have_one_track(engine: EngineName) -> None:
    with modtrace.record(engine=engine) as recording:
        for _ in range(1000):
            one = greenlet.greenlet(lambda: First()(torch.ones(1)))
            one.switch()
            one.switch()
            del one

    assert {track for *_, track in forward_spans(recording)} == {"forward · MainThread · greenlet 1"}
    assert all(complete and depth == 0 for _, depth, complete, _ in forward_spans(recording))


def test_a_greenlet_that_waits_through_three_recordings(engine: EngineName) -> None:
    with modtrace.record(engine=engine) as first:
        one = greenlet.greenlet(lambda: First()(torch.ones(1)))
        one.switch()
    with modtrace.record(engine=engine) as second:
        take_turns()
    with modtrace.record(engine=engine) as third:
        one.switch()
        take_turns()

    assert forward_spans(first) == [("First", 0, False, "forward · MainThread · greenlet 1")]
    assert [row[:3] for row in forward_spans(second)] == [("First", 0, True), ("Second", 0, True)]
    assert [row[:3] for row in forward_spans(third)] == [("First", 0, True), ("Second", 0, True)]


def test_training_in_greenlets_has_the_same_gradients_and_steps_of_its_own(engine: EngineName) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            greenlet.getcurrent().parent.switch()
            out: Tensor = self.inner(x)
            return out.tanh()

    def train() -> list[float]:
        torch.manual_seed(0)
        losses: list[float] = []

        def run(model: nn.Module) -> None:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                loss = model(torch.ones(2)).sum()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())

        runs = [greenlet.greenlet(lambda model=model: run(model)) for model in (Net(), Net())]
        while any(not one.dead for one in runs):
            for one in runs:
                one.switch()
        return losses

    plain = train()
    with modtrace.record(engine=engine) as recording:
        recorded = train()

    assert recorded == plain
    calls = Counter((span.fqn, span.phase) for span in recording.timeline().spans)
    names = ["Net", "Net.inner", "Net#2", "Net#2.inner"]
    assert calls == {(name, phase): 3 for name in names for phase in ("forward", "backward")}
    assert recording.timeline().stats.unattributed == 6  # each sum


LATE = """
import sys, threading, torch, modtrace
from torch import nn

class Late(nn.Module):
    def forward(self, x):
        import greenlet
        class Inner(nn.Module):
            def forward(self, x):
                greenlet.getcurrent().parent.switch()
                return x
        one, other = greenlet.greenlet(Inner()), greenlet.greenlet(Inner())
        one.switch(x); other.switch(x); one.switch(x)
        self.run.set(); self.ready.wait()
        other.switch(x)
        return x

class Other(nn.Module):
    def forward(self, x):
        self.run.wait()
        import greenlet
        one = greenlet.greenlet(lambda: (self.inner(x), greenlet.getcurrent().parent.switch(), self.inner(x)))
        one.switch()
        y = self.inner(x)
        one.switch()
        self.ready.set()
        return y

assert "greenlet" not in sys.modules
late, other = Late(), Other()
other.inner = nn.Identity()
late.run = other.run = threading.Event()
late.ready = other.ready = threading.Event()
with modtrace.record(engine=sys.argv[1]) as recording:
    thread = threading.Thread(target=other, args=(torch.ones(1),), name="worker")
    thread.start()
    late(torch.ones(1))
    thread.join()
rows = sorted((s.track, s.fqn, s.depth, s.complete) for s in recording.timeline().spans)
for row in rows:
    print(row)
"""


def test_greenlet_is_imported_inside_of_a_call(engine: EngineName) -> None:
    done = run_forked("-c", LATE, engine)

    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "('forward · MainThread', 'Late', 0, True)",
        "('forward · MainThread · greenlet 1', 'Inner', 0, True)",
        "('forward · MainThread · greenlet 2', 'Inner#2', 0, True)",
        "('forward · worker', 'Other', 0, True)",
        "('forward · worker', 'Other.inner', 1, True)",
        "('forward · worker · greenlet 1', 'Other.inner', 0, True)",
        "('forward · worker · greenlet 1', 'Other.inner', 0, True)",
    ]
