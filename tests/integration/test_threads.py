"""Forward, backward, start and stop on several threads, pools and asyncio: each call is in its place."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import modtrace
from modtrace import Timeline
from modtrace.record_options import EngineName
from modtrace.recording.capture import choose_engine, make_engine
from modtrace.ring import Ring
from modtrace.track.event_sink import EngineOptions
from tests.support.profiler_truth import share_nested
from tests.support.python_process import HANGS_AFTER_S
from tests.support.small_modules import Scale
from tests.support.test_scale import scaled


def model() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(Scale(), Scale()) for _ in range(3)])


@pytest.fixture(autouse=True)
def quick_switches() -> Iterator[None]:
    """Let the interpreter change threads as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def together(*runs: Callable[[], object]) -> None:
    """Run each function on its own thread, named by its position, all from the same moment on."""
    errors: list[BaseException] = []
    gate = threading.Barrier(len(runs))

    def guarded(run: Callable[[], object]) -> None:
        gate.wait()
        try:
            run()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(run,), name=f"worker {n}") for n, run in enumerate(runs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def on_track(timeline: Timeline, track: str) -> list[tuple[str, int]]:
    return [(span.fqn, span.depth) for span in timeline.spans if span.track == track]


FORWARD = [("Sequential", 0)] + [
    row for n in range(3) for row in ((f"Sequential.{n}", 1), (f"Sequential.{n}.0", 2), (f"Sequential.{n}.1", 2))
]
BACKWARD = [("Sequential", 0)] + [
    row for n in (2, 1, 0) for row in ((f"Sequential.{n}", 1), (f"Sequential.{n}.1", 2), (f"Sequential.{n}.0", 2))
]


@pytest.mark.parametrize("shared", [False, True], ids=["a model each", "one model"])
def test_forward_and_backward_on_many_threads_at_once(engine: EngineName, shared: bool) -> None:
    threads, steps = 6, 30
    models = [model()] * threads if shared else [model() for _ in range(threads)]

    def train(net: nn.Module) -> Callable[[], None]:
        def run() -> None:
            for _ in range(steps):
                net(torch.ones(8)).sum().backward()

        return run

    with modtrace.record(engine=engine) as recording:
        together(*[train(net) for net in models])
    timeline = recording.timeline()

    assert timeline.stats.torn == 0
    assert timeline.stats.unfinished == timeline.stats.unstarted == 0
    assert share_nested(timeline) == 1
    assert sorted(timeline.track_names) == sorted(
        f"{kind} · worker {n}" for kind in ("forward", "backward", "backward pass") for n in range(threads)
    )
    roots = set()
    for worker in range(threads):
        forward, backward = (on_track(timeline, f"{phase} · worker {worker}") for phase in ("forward", "backward"))
        root = forward[0][0]
        roots.add(root)
        assert forward == [(fqn.replace("Sequential", root), depth) for fqn, depth in FORWARD * steps]
        assert backward == [(fqn.replace("Sequential", root), depth) for fqn, depth in BACKWARD * steps]
    assert roots == {"Sequential", *(f"Sequential#{n}" for n in range(2, threads + 1) if not shared)}
    # Each call has its own number, on any thread.
    for phase in ("forward", "backward"):
        numbers = Counter((span.fqn, span.call) for span in timeline.spans if span.phase == phase)
        assert set(numbers.values()) == {1}
        for root in roots:
            assert {call for fqn, call in numbers if fqn == root} == set(range(threads * steps // len(roots)))


def test_a_backward_on_another_thread(engine: EngineName) -> None:
    """A worker of the autograd engine runs the nodes, as on a GPU."""
    net = model()
    with modtrace.record(engine=engine) as recording:
        losses = [net(torch.ones(8)).sum() for _ in range(3)]
        together(*[partial(torch.autograd.backward, loss) for loss in losses])
    timeline = recording.timeline()

    assert on_track(timeline, "forward · MainThread") == FORWARD * 3
    calls = []
    for worker in range(3):
        assert on_track(timeline, f"backward · worker {worker}") == BACKWARD
        calls += [
            {s.call for s in timeline.spans if s.track == f"backward · worker {worker}" and s.fqn == "Sequential"}
        ]
    assert sorted(map(sorted, calls)) == [[0], [1], [2]]
    link = timeline.columns.link
    for at, span in enumerate(timeline.spans):
        if span.phase == "backward":
            partners = [row for row, other in enumerate(link.tolist()) if other == link[at] and row != at]
            assert [(timeline.spans[row].fqn, timeline.spans[row].call) for row in partners] == [(span.fqn, span.call)]


def test_a_graph_made_on_two_threads(engine: EngineName) -> None:
    """Sequence numbers are counted per thread: equal ones must not be mixed up."""
    parts = [nn.Sequential(Scale()), nn.Sequential(Scale(), Scale())]
    outs: dict[int, Tensor] = {}

    def forward(n: int) -> Callable[[], None]:
        def run() -> None:
            outs[n] = parts[n](torch.ones(8))

        return run

    with modtrace.record(engine=engine) as recording:
        for n in range(2):
            together(forward(n))
        (outs[0] + outs[1]).sum().backward()
    timeline = recording.timeline()

    spans = Counter((span.fqn, span.phase) for span in timeline.spans)
    assert spans == {
        (name, phase): 1
        for name in ("Sequential", "Sequential.0", "Sequential#2", "Sequential#2.0", "Sequential#2.1")
        for phase in ("forward", "backward")
    }
    assert {span.track for span in timeline.spans if span.phase == "backward"} == {"backward · MainThread"}


def test_a_recording_can_stop_while_threads_train(engine: EngineName) -> None:
    over = threading.Event()
    trained = [0] * 3

    def train(worker: int) -> Callable[[], None]:
        def run() -> None:
            net = model()
            while not over.is_set():
                net(torch.ones(8)).sum().backward()
                trained[worker] += 1

        return run

    def record() -> None:
        try:
            look()
        finally:
            over.set()

    def look() -> None:
        for _ in range(scaled(8, 20, 20)):
            with modtrace.record(engine=engine, capacity=1 << 10) as recording:
                before = sum(trained)
                while sum(trained) < before + 6:
                    recording.snapshot()
            timeline = recording.timeline()
            assert share_nested(timeline) == 1
            assert timeline.stats.recorded > 0
            # An event that a thread was about to write is lost, and counted.
            assert timeline.stats.torn <= 3

    together(record, *[train(worker) for worker in range(3)])

    assert min(trained) > 0


def test_passes_observed_node_by_node_during_starts_and_stops(engine: EngineName) -> None:
    """The native engine writes observed nodes without the interpreter's lock, while recordings start and stop."""
    over, passed = threading.Event(), threading.Semaphore(0)

    def train() -> None:
        x = torch.ones(8, requires_grad=True)
        while not over.is_set():
            power = x
            for _ in range(30):
                power = power * x
            # A pass for given inputs is one that hooks cannot follow.
            (gradient,) = torch.autograd.grad(power.sum(), [x])
            passed.release()
            assert gradient.tolist() == [31.0] * 8

    def record() -> None:
        try:
            for _ in range(40):
                with modtrace.record(engine=engine, capacity=1 << 10) as recording:
                    while passed.acquire(blocking=False):
                        pass
                    for _ in range(4):
                        assert passed.acquire(timeout=HANGS_AFTER_S)
                timeline = recording.timeline()
                assert len(timeline.spans) == 0
                # An event that a thread was about to write is lost, and counted.
                assert timeline.stats.torn <= 2
        finally:
            over.set()

    together(record, train, train)


def test_a_pass_that_goes_on_from_one_recording_into_the_next(engine: EngineName) -> None:
    """Its nodes are noted without the interpreter's lock: they read the state that the next start writes."""
    over, passed, errors = threading.Event(), threading.Semaphore(0), list[BaseException]()

    def train() -> None:
        x = torch.ones(1, requires_grad=True)
        power = x
        for _ in range(400):
            power = power * x
        while not over.is_set():
            (gradient,) = torch.autograd.grad(power, [x], retain_graph=True)
            passed.release()
            assert gradient.item() == 401.0

    def start_and_stop() -> None:
        # Only the engine, which starts again at once.
        recorder = make_engine(choose_engine(engine), Ring(1 << 10), errors.append, EngineOptions())
        try:
            for _ in range(scaled(40, 100, 2000)):
                recorder.start()
                while passed.acquire(blocking=False):
                    pass
                assert passed.acquire(timeout=HANGS_AFTER_S)
                recorder.stop()
        finally:
            recorder.stop()
            over.set()

    together(start_and_stop, train, train)

    assert errors == []


def test_another_thread_can_stop_it_inside_a_call(engine: EngineName) -> None:
    class Stops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            together(recording.stop)
            return x * 2

    x = torch.ones(1, requires_grad=True)
    recording = modtrace.record(engine=engine)
    recording.start()
    nn.Sequential(Scale(), Stops(), Scale())(x).sum().backward()

    assert [(span.fqn, span.depth, span.complete) for span in recording.timeline().spans] == [
        ("Sequential", 0, False),
        ("Sequential.0", 1, True),
        ("Sequential.1", 1, False),
    ]


def test_threads_that_ended_keep_their_names(engine: EngineName) -> None:
    with modtrace.record(engine=engine) as recording:
        for _ in range(20):
            together(lambda: nn.ReLU()(torch.ones(1)))
    timeline = recording.timeline()

    assert len(timeline.spans) == 20
    assert {track.thread for track in timeline.tracks} == {"worker 0"}


class Pooled(nn.Module):
    """Runs its parts on threads."""

    def __init__(self, run_on_threads: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Sequential(Scale()) for _ in range(2)])
        self.run_on_threads = run_on_threads

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.run_on_threads(part, x) for part in self.parts]).sum()


def in_a_pool(part: nn.Module, x: Tensor) -> Tensor:
    with ThreadPoolExecutor(1, "pool") as pool:
        output: Tensor = pool.submit(part, x).result()
    return output


def as_a_replica(part: nn.Module, x: Tensor) -> Tensor:
    """Run a replica of a module in a pool, as `nn.DataParallel` does."""
    replica, child = (module._replicate_for_data_parallel() for module in (part, part[0]))  # type: ignore[index]
    child.weight = part[0].weight  # type: ignore[index]
    replica._modules["0"] = child
    return in_a_pool(replica, x)


@pytest.mark.parametrize("run_on_threads", [in_a_pool, as_a_replica])
def test_parts_that_run_on_threads_of_a_pool_are_named_below_their_caller(
    engine: EngineName, run_on_threads: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    module = nn.Sequential(Pooled(run_on_threads))

    with modtrace.record(engine=engine) as recording:
        for _ in range(2):
            module(torch.ones(2)).sum().backward()
    timeline = recording.timeline()

    parts = [
        ("Sequential.0.parts.0", 0),
        ("Sequential.0.parts.0.0", 1),
        ("Sequential.0.parts.1", 0),
        ("Sequential.0.parts.1.0", 1),
    ]
    on_threads = [(span.fqn, span.depth) for span in timeline.spans if span.track.startswith("forward · pool")]
    assert on_threads == parts * 2
    assert on_track(timeline, "forward · MainThread") == [("Sequential", 0), ("Sequential.0", 1)] * 2
    labels = {name.fqn: name.label for name in timeline.names}
    assert labels["Sequential.0.parts.1"] == "0.parts.1: Sequential"


def test_a_part_that_its_own_thread_calls_by_itself_is_named_by_itself(engine: EngineName) -> None:
    module = nn.Sequential(nn.Sequential(Scale()))

    with modtrace.record(engine=engine) as recording:
        nn.Sequential(Scale())(torch.ones(2))
        module[0](torch.ones(2))

    assert [span.fqn for span in recording.timeline().spans] == ["Sequential", "Sequential.0"] * 2


def test_asyncio_to_thread_names_below_the_caller(engine: EngineName) -> None:
    async def run(part: nn.Module, x: Tensor) -> Tensor:
        return await asyncio.to_thread(part, x)

    module = Pooled(lambda part, x: asyncio.run(run(part, x)))

    with modtrace.record(engine=engine) as recording:
        module(torch.ones(2))

    assert {span.fqn for span in recording.timeline().spans} == {
        "Pooled",
        *(f"Pooled.parts.{n}{child}" for n in range(2) for child in ("", ".0")),
    }
