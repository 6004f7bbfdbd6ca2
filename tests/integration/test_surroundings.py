"""Recording with unusual uses of Python and torch, beyond a plain loop: a next recording is complete."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import modtrace
from modtrace import Timeline
from modtrace.record_options import EngineName
from tests.support.forked_python import run_forked, start_forked
from tests.support.python_process import run_python, users_environment
from tests.support.test_scale import PYTHON_IN_FULL

Row = tuple[str, str, int, bool]
X = torch.ones(1, 2)
COMPLETE: list[Row] = [
    ("Sequential", "forward", 0, True),
    ("Sequential.0", "forward", 1, True),
    ("Sequential.0.0", "forward", 2, True),
    ("Sequential.1", "forward", 1, True),
    ("Sequential", "backward", 0, True),
    ("Sequential.1", "backward", 1, True),
    ("Sequential.0", "backward", 1, True),
    ("Sequential.0.0", "backward", 2, True),
]


def model() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))


def step() -> None:
    model()(X).sum().backward()


def rows(timeline: Timeline, since_ns: int = 0) -> list[Row]:
    return [(span.fqn, span.phase, span.depth, span.complete) for span in timeline.spans if span.start_ns >= since_ns]


def rows_after(timeline: Timeline) -> list[Row]:
    """The spans after the test's last mark, after which a backward pass may have ended a step."""
    return rows(timeline, max(mark.time_ns for mark in timeline.marks if mark.kind == "mark"))


@pytest.fixture(autouse=True)
def recording_is_unharmed_afterwards(engine: EngineName) -> Iterator[None]:
    yield
    with modtrace.record(engine=engine) as recording:
        step()
    assert rows(recording.timeline()) == COMPLETE


class Deep(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self(x)
        return result


def test_a_model_that_recurses_without_end(engine: EngineName) -> None:
    with modtrace.record(engine=engine) as recording:
        for _ in range(3):
            with pytest.raises(RecursionError):
                Deep()(X)
        recording.mark("last")
        step()
    timeline = recording.timeline()

    assert timeline.stats.unfinished == 0
    assert rows_after(timeline) == COMPLETE


def test_the_limit_of_recursion_reached_at_each_frame_of_a_step(engine: EngineName) -> None:
    def down(levels: int) -> None:
        if levels:
            down(levels - 1)
        else:
            step()

    def reaches_limit(levels: int) -> bool:
        try:
            down(levels)
        except RecursionError:
            return True
        return False

    limit, failed = sys.getrecursionlimit(), 0
    with modtrace.record(engine=engine) as recording:
        for levels in range(limit - 200, limit):
            failed += reaches_limit(levels)
        recording.mark("last")
        step()
    timeline = recording.timeline()

    assert 10 < failed < 190
    assert (timeline.stats.unfinished, timeline.stats.unstarted) == (0, 0)
    assert rows_after(timeline) == COMPLETE


def test_a_generator_that_is_closed_inside_a_call(engine: EngineName) -> None:
    class Closed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise GeneratorExit

    def outputs() -> Generator[Tensor, None, None]:
        try:
            while True:
                yield model()(X)
        finally:
            nn.Sequential(Closed())(X)

    with modtrace.record(engine=engine) as recording:
        generator = outputs()
        next(generator)
        generator.close()
    timeline = recording.timeline()

    assert rows(timeline) == [*COMPLETE[:4], ("Sequential", "forward", 0, True), ("Sequential.0#2", "forward", 1, True)]


def test_tasks_of_asyncio_that_take_turns(engine: EngineName) -> None:
    async def train() -> None:
        for _ in range(3):
            loss = model()(X).sum()
            await asyncio.sleep(0)
            loss.backward()

    async def main() -> None:
        await asyncio.gather(*[train() for _ in range(4)])

    with modtrace.record(engine=engine) as recording:
        asyncio.run(main())
    spans = rows(recording.timeline())

    assert sorted(spans) == sorted(COMPLETE * 12)


def test_greenlets_that_change_inside_calls(engine: EngineName) -> None:
    greenlet = pytest.importorskip("greenlet")

    class Switch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            greenlet.getcurrent().parent.switch()
            return x * 2

    with modtrace.record(engine=engine) as recording:
        first, second = nn.Sequential(nn.Linear(2, 2), Switch()), nn.Sequential(Switch(), nn.Linear(2, 2))
        one, other = greenlet.greenlet(lambda: first(X)), greenlet.greenlet(lambda: second(X))
        for run in (one, other, one, other):
            run.switch()
        recording.mark("last")
        step()

    assert one.dead
    assert other.dead
    # The first two models are still alive.
    third = [(fqn.replace("Sequential", "Sequential#3"), *rest) for fqn, *rest in COMPLETE]
    assert rows_after(recording.timeline()) == third


@pytest.mark.parametrize("hook", [sys.settrace, sys.setprofile])
def test_a_debugger_or_profiler_of_python(engine: EngineName, hook: Callable[[object], None]) -> None:
    before = sys.gettrace() if hook is sys.settrace else sys.getprofile()

    def note(frame: object, event: str, argument: object) -> object:
        return note

    with modtrace.record(engine=engine) as recording:
        hook(note)
        try:
            step()
        finally:
            hook(before)

    assert rows(recording.timeline()) == COMPLETE


def graph_of(graph: object) -> str:
    """The graph's text, without the numbers that torch.jit gives classes anew each time."""
    return re.sub(r"__torch_mangle_\d+\.", "", str(graph))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
def test_torch_traces_the_same_graph(engine: EngineName) -> None:
    traced = model()

    def graphs() -> list[str]:
        return [
            graph_of(torch.jit.trace(traced, X).inlined_graph),
            graph_of(torch.fx.symbolic_trace(traced).graph),
            graph_of(torch.export.export(traced, (X,)).graph),
        ]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graphs()
        plain = graphs()
        with modtrace.record(engine=engine):
            recorded = graphs()

    assert recorded == plain


@PYTHON_IN_FULL
@pytest.mark.parametrize("dynamo", [False, True])
def test_onnx_exports_are_the_same(engine: EngineName, dynamo: bool, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    if dynamo:
        pytest.importorskip("onnxscript")
    exported = model().eval()

    def export() -> bytes:
        torch.onnx.export(exported, (X,), tmp_path / "model.onnx", dynamo=dynamo, external_data=False)
        return (tmp_path / "model.onnx").read_bytes()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = export()
        with modtrace.record(engine=engine):
            recorded = export()

    assert recorded == plain


LOADS = """
import sys, warnings, torch, modtrace
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __init__(self):
        self.module = nn.Linear(2, 2).requires_grad_(False)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        # A module that a worker calls, in a recording that it inherited or that is not there.
        return self.module(torch.full((2,), float(index)))

def main():
    warnings.simplefilter("ignore")
    engine, method, ring = sys.argv[1:]
    model = nn.Sequential(nn.Linear(2, 2))
    with modtrace.record(engine=engine, ring=ring) as recording:
        for batch in DataLoader(Data(), batch_size=2, num_workers=2, multiprocessing_context=method):
            model(batch).sum().backward()
    print([(span.fqn, span.phase, span.complete) for span in recording.timeline().spans])

if __name__ == "__main__":
    main()
"""


@PYTHON_IN_FULL
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_a_data_loader(engine: EngineName, method: str, tmp_path: Path) -> None:
    script = tmp_path / "loads.py"
    script.write_text(LOADS)

    done = run_forked(script, engine, method, tmp_path / "ring.modtrace")

    passes = [(name, phase, True) for phase in ("forward", "backward") for name in ("Sequential", "Sequential.0")]
    assert (done.stdout, done.stderr) == (f"{passes * 2}\n", "")


STEPS = """
import sys, torch, modtrace
from torch import nn
engine, ring = sys.argv[1:]
model = nn.Sequential(nn.Linear(2, 2))
print("ready", flush=True)
sys.stdin.readline()
with modtrace.record(engine=engine, ring=ring, capacity=64) as recording:
    for _ in range(50):
        model(torch.ones(1, 2)).sum().backward()
        recording.step()
timeline = recording.timeline()
print(timeline.stats.torn, all(span.complete for span in list(timeline.spans)[-4:]), timeline.marks[-1].text)
"""


@PYTHON_IN_FULL
@pytest.mark.parametrize(
    ("options", "variables"),
    [(["-X", "dev"], {}), ([], {"PYTHONMALLOC": "debug"}), (["-m", "coverage", "run", "--data-file={folder}/c"], {})],
    ids=["development mode", "debugged memory", "coverage"],
)
def test_interpreters_that_look_more_closely(
    engine: EngineName, options: list[str], variables: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "steps.py"
    script.write_text(STEPS)
    options = [option.format(folder=tmp_path) for option in options]

    done = run_python(*options, script, engine, tmp_path / "ring.modtrace", env=users_environment(**variables))

    assert (done.stdout, done.stderr) == ("ready\n0 True step 49\n", "")


@PYTHON_IN_FULL
def test_two_processes_that_record_to_one_ring(engine: EngineName, tmp_path: Path) -> None:
    ring = tmp_path / "ring.modtrace"
    processes = [start_forked("-c", STEPS, engine, ring, stdin=subprocess.PIPE) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"

    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    printed = [process.communicate()[0] for process in processes]

    # Each process has its own ring; its name depends on which came first, and whether it had ended.
    assert printed == ["0 True step 49\n"] * 2
    assert {path.name for path in tmp_path.iterdir()} == {"ring.modtrace", "ring.1.modtrace"}
    timelines = [modtrace.load(path) for path in tmp_path.iterdir()]
    assert [(one.stats.torn, one.marks[-1].text) for one in timelines] == [(0, "step 49")] * 2
    assert {one.tracks[0].process.pid for one in timelines} == {process.pid for process in processes}


NO_FILES = """
import os, torch, modtrace
from torch import nn
torch.optim.SGD([torch.ones(1, requires_grad=True)]).step()  # torch imports more when it is first used
modtrace.record
open_files = []
try:
    while True:
        open_files.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
with modtrace.record(engine="auto") as recording:
    nn.Identity()(torch.ones(1))
for file in open_files:
    os.close(file)
print(recording.timeline().metadata["engine"], len(recording.timeline().spans))
"""


def test_a_first_recording_runs_on_loaded_modules_if_no_file_can_be_opened() -> None:
    done = run_forked("-c", NO_FILES)

    assert (done.stdout, done.stderr) == ("native 1\n", "")
