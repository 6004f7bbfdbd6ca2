"""Python's garbage collections, recorded as ranges of the category `gc`."""

from __future__ import annotations

import ast
import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from torch import nn, ones

import modtrace
from modtrace import Timeline
from modtrace.record_options import EngineName
from modtrace.ring.slot_format import MIN_COLLECTION_NS
from modtrace.timeline.slices import GARBAGE_COLLECTION
from tests.support.forked_python import run_forked

CYCLES = 30_000
"""Number of cycles that take ten times `MIN_COLLECTION_NS` to collect, on a quick machine."""


def leave_cycles(count: int = CYCLES) -> None:
    """Make objects that only the collector frees."""
    for _ in range(count):
        cycle: list[object] = []
        cycle.append(cycle)


def collections_of(timeline: Timeline) -> list[tuple[object, ...]]:
    """Return track, depth, step, generation, number of objects collected and trigger of each collection."""
    slices = timeline.slices
    return [
        (timeline.track_names[slices.track[row]], int(slices.depth[row]), int(slices.step[row]), *args.values())
        for row in np.flatnonzero(slices.kind == GARBAGE_COLLECTION).tolist()
        if (args := timeline.span_args[row])
    ]


def record(engine: EngineName, act: Callable[[modtrace.Recording], object], ranges: bool = True) -> Timeline:
    """Return the recording of `act`, on a thread that has called a module."""
    with modtrace.record(engine=engine) as first, first.range("imports"):  # imports leave objects to collect
        nn.Identity()(ones(1))
    gc.collect()
    with modtrace.record(engine=engine, ranges=ranges) as recording:
        nn.Identity()(ones(1))
        act(recording)
    return recording.timeline()


# In its own process: objects of other tests can become garbage when a recording starts.
RECORDED = """
import gc, sys
from tests.integration.test_garbage_collections import leave_cycles, record

def act(recording):
    recording.step()
    leave_cycles()
    with recording.range("mine"):
        gc.collect(0)
    gc.collect(2)

gc.disable()
record(sys.argv[2], act).save(sys.argv[1])
"""


@pytest.fixture(scope="module")
def recorded(engine: EngineName, tmp_path_factory: pytest.TempPathFactory) -> Timeline:
    path = tmp_path_factory.mktemp("recorded") / "recorded.pftrace"
    run_forked("-c", RECORDED, path, engine)
    return modtrace.load(path)


TRACK = "ranges · MainThread"
EXPECTED = [(TRACK, 1, 1, 0, CYCLES, "gc.collect()"), (TRACK, 0, 1, 2, 0, "gc.collect()")]


def test_a_collection_has_its_generation_and_what_it_collected(recorded: Timeline) -> None:
    assert collections_of(recorded) == EXPECTED
    assert [(row.name, row.category, row.step, row.complete) for row in recorded.ranges] == [
        ("mine", "user", 1, True),
        ("garbage collection", "gc", 1, True),
        ("garbage collection", "gc", 1, True),
    ]
    around, first, second = recorded.ranges
    assert around.start_ns <= first.start_ns < first.end_ns <= around.end_ns <= second.start_ns
    assert min(first.duration_ns, second.duration_ns) >= MIN_COLLECTION_NS
    assert [span.fqn for span in recorded.spans] == ["Identity"]


# The program asks for the last three: the collector is on, off, and on but never starts a collection.
TRIGGERED = """
import gc, sys
from tests.integration.test_garbage_collections import CYCLES, collections_of, leave_cycles, record

def act(recording):
    gc.set_threshold(CYCLES, 1_000, 1_000)
    gc.enable()
    leave_cycles(2 * CYCLES - 600)  # with what else is there, too few for a second one
    gc.collect(0)
    gc.disable()
    leave_cycles(2 * CYCLES)
    gc.collect(0)
    gc.set_threshold(0)
    gc.enable()
    leave_cycles(2 * CYCLES)
    gc.collect(0)

gc.disable()
print([row[3:] for row in collections_of(record(sys.argv[1], act))])
"""


def test_a_collection_says_who_began_it(engine: EngineName) -> None:
    collections = ast.literal_eval(run_forked("-c", TRIGGERED, engine).stdout)

    assert [row[2] for row in collections] == ["automatic", *["gc.collect()"] * 3]
    assert [round(row[1], -3) for row in collections] == [CYCLES, CYCLES, 2 * CYCLES, 2 * CYCLES]


# As in the `__new__` of a named tuple: the first collection that a recording notes. It is in a loop, as CPython 3.12
# and newer check there whether to collect.
WITHOUT_BUILTINS = """
import gc, sys
from tests.integration.test_garbage_collections import CYCLES, collections_of, leave_cycles, record

make_lists = eval("lambda: [[] for _ in ((),) * 100]", {"__builtins__": {}})

def act(recording):
    gc.set_threshold(CYCLES, 1_000, 1_000)
    leave_cycles()
    leave_cycles(10)
    gc.enable()
    make_lists()
    gc.disable()

gc.disable()
print([row[3:] for row in collections_of(record(sys.argv[1], act))])
"""


def test_a_collection_can_begin_where_there_are_no_builtins(engine: EngineName) -> None:
    ran = run_forked("-c", WITHOUT_BUILTINS, engine)

    assert [(row[0], row[2]) for row in ast.literal_eval(ran.stdout)] == [(0, "automatic")]
    assert ran.stderr == ""


@pytest.mark.parametrize("suffix", [".json", ".pftrace"])
def test_a_file_gives_them_back(recorded: Timeline, tmp_path: Path, suffix: str) -> None:
    recorded.save(tmp_path / f"trace{suffix}")
    loaded = modtrace.load(tmp_path / f"trace{suffix}")

    assert collections_of(loaded) == EXPECTED
    assert loaded.ranges == recorded.ranges


def test_selections_keep_them_like_other_slices(recorded: Timeline) -> None:
    assert collections_of(recorded.window(recorded.ranges[2].start_ns)) == EXPECTED[1:]
    assert collections_of(recorded.steps(1, 2)) == EXPECTED
    assert collections_of(recorded.steps(0, 1)) == []
    assert collections_of(recorded.only("nothing")) == EXPECTED


def test_short_collections_have_no_event(engine: EngineName) -> None:
    collections = record(engine, lambda _: [gc.collect(0) for _ in range(1_000)]).ranges

    assert len(collections) < 500  # only those during which the machine ran something else
    assert all(row.duration_ns >= MIN_COLLECTION_NS for row in collections)


def test_ranges_false_leaves_them_out(engine: EngineName) -> None:
    timeline = record(engine, lambda _: gc.collect(), ranges=False)

    assert (collections_of(timeline), timeline.stats.recorded) == ([], 2)


def test_a_collection_is_on_the_thread_that_collects(engine: EngineName) -> None:
    def collect() -> None:
        gc.collect()  # this thread has no number yet
        nn.Identity()(ones(1))
        leave_cycles()
        gc.collect(1)

    def act(_: modtrace.Recording) -> None:
        leave_cycles()
        gc.collect(0)
        thread = threading.Thread(target=collect, name="worker")
        thread.start()
        thread.join()

    assert [(row[0], row[3]) for row in collections_of(record(engine, act))] == [(TRACK, 0), ("ranges · worker", 1)]


class Acts:
    """A cycle that calls a function when it is collected."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act, self.itself = act, self

    def __del__(self) -> None:
        self.act()


@pytest.fixture
def recordings() -> Iterator[list[modtrace.Recording]]:
    started: list[modtrace.Recording] = []
    yield started
    for recording in started:
        recording.stop()


def test_a_recording_that_starts_or_stops_in_a_collection_does_not_have_it(
    engine: EngineName, recordings: list[modtrace.Recording]
) -> None:
    def restart() -> None:
        for recording in recordings:
            recording.stop()
        recordings.append(modtrace.record(engine=engine))
        recordings[-1].start()
        nn.Identity()(ones(1))

    gc.collect()
    for _ in range(2):
        Acts(restart)
        gc.collect()
    gc.collect()  # entirely in the second recording

    for recording in recordings:
        recording.stop()
    assert [[row[3:] for row in collections_of(recording.timeline())] for recording in recordings] == [
        [],
        [(2, 0, "gc.collect()")],
    ]


def test_a_child_that_is_forked_in_a_collection_writes_nothing_of_it(engine: EngineName) -> None:
    children: list[int] = []
    of_child = modtrace.record(engine=engine)

    def fork() -> None:
        children.append(os.fork())
        if children == [0]:
            of_child.start()
            nn.Identity()(ones(1))

    def act(_: modtrace.Recording) -> None:
        Acts(fork)
        gc.collect()
        if children == [0]:
            try:
                leave_cycles()
                gc.collect(1)
                of_child.stop()
                os._exit(0 if [row[3] for row in collections_of(of_child.timeline())] == [1] else 1)
            finally:
                os._exit(2)

    assert [row[3] for row in collections_of(record(engine, act))] == [2]
    assert os.waitpid(children[0], 0) == (children[0], 0)


def test_an_interrupt_in_a_collection_reaches_the_program(engine: EngineName) -> None:
    done = run_forked(
        "-c",
        "import _thread, gc, modtrace, torch\n"
        "class Interrupts:  # without bytecode, in which Python would look at signals\n"
        "    __del__ = staticmethod(_thread.interrupt_main)\n"
        f"with modtrace.record(engine={engine!r}):\n"
        "    torch.nn.Linear(2, 2)(torch.ones(1, 2))\n"
        "    try:\n"
        "        one = Interrupts(); one.self = one; del one; gc.collect()\n"
        "        for _ in range(10): pass\n"
        "    except KeyboardInterrupt: print('interrupted')\n",
    )
    assert (done.stdout, "Exception ignored in" in done.stderr) == ("interrupted\n", False)
