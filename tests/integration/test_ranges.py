"""Ranges: named code that is not a module, against counts of their own hooks and calls, with both engines."""

from __future__ import annotations

import asyncio
import inspect
import io
import json
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.export import export
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import StepLR
from torch.profiler import record_function
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader, TensorDataset

import modtrace
from modtrace.record_options import EngineName
from modtrace.ring import Kind
from modtrace.ring.event_text import RangeName, parse_range
from modtrace.track.torch_ranges import _wrap_actors


def noted(recording: modtrace.Recording) -> list[RangeName]:
    """Return the names of the ranges in the order in which they ended; each has one start and one end."""
    snapshot = recording._require_capture().ring.read()
    texts = {record["id"]: record["text"] for record in snapshot.records if record["kind"] == "text"}
    events = snapshot.slots.events
    begun, ended = events.kind == Kind.RANGE_BEGIN, events.kind == Kind.RANGE_END
    assert sorted(events.value[begun].tolist()) == sorted(events.value[ended].tolist())
    assert len(set(events.value[begun].tolist())) == begun.sum()
    return [parse_range(texts[name]) for name in events.name[ended].tolist()]


class Training:
    """A step with everything that has a range, and how often each part was done."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scheduler = StepLR(self.optimizer, 1)
        self.scaler = torch.amp.GradScaler("cpu")
        self.loader = DataLoader(TensorDataset(torch.ones(6, 4)), batch_size=2)

    def run(self) -> None:
        for (batch,) in self.loader:
            with record_function("forward of mine"):
                loss = self.model(batch).sum()
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.model.parameters(), 1.0)
            torch.nn.utils.clip_grad_value_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.model.zero_grad()
        buffer = io.BytesIO()
        torch.save(self.model.state_dict(), buffer)
        buffer.seek(0)
        torch.load(buffer)


EXPECTED = {
    ("data loading", "enumerate(DataLoader)#DataLoader.__iter__"): 1,
    ("optimizer", "_get_total_norm"): 3,
    ("optimizer", "_clip_grads_with_norm_"): 3,
    # The fourth call ends the epoch.
    ("data loading", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"): 4,
    ("user", "forward of mine"): 3,
    ("optimizer", "GradScaler.unscale_"): 3,
    ("optimizer", "clip_grad_norm_"): 3,
    ("optimizer", "clip_grad_value_"): 3,
    ("optimizer", "GradScaler.step"): 3,
    ("optimizer", "GradScaler.update"): 3,
    ("optimizer", "Optimizer.step#AdamW.step"): 3,
    ("optimizer", "Optimizer.zero_grad#AdamW.zero_grad"): 3,
    ("optimizer", "Module.zero_grad#Linear.zero_grad"): 3,
    ("optimizer", "LRScheduler.step#StepLR.step"): 3,
    ("saving", "torch.save"): 1,
    ("saving", "torch.load"): 1,
}


def test_each_part_of_a_training_has_its_ranges(engine: EngineName) -> None:
    training = Training()

    with modtrace.record(engine=engine) as recording:
        training.run()

    assert Counter((name.category, name.name) for name in noted(recording)) == EXPECTED


def test_ranges_are_left_out_on_request(engine: EngineName) -> None:
    training = Training()

    with modtrace.record(engine=engine, ranges=False) as recording:
        training.run()
        with recording.range("own"), modtrace.range("own"):
            pass

    assert noted(recording) == []


def test_nothing_is_noted_outside_of_recordings(engine: EngineName) -> None:
    training = Training()

    with modtrace.record(engine=engine) as first:
        pass
    training.run()
    with record_function("before"):
        with modtrace.record(engine=engine) as second:
            range_ = record_function("begun inside")
            range_.__enter__()
        range_.__exit__(None, None, None)

    assert noted(first) == []
    begun = second._require_capture().ring.read().slots.events
    assert Counter(begun.kind.tolist()) == {Kind.RANGE_BEGIN: 1}


def test_a_range_of_ones_own_is_a_block_and_a_decorator(engine: EngineName) -> None:
    @modtrace.range("named")
    def named(depth: int) -> int:
        return depth if depth == 0 else named(depth - 1)

    @modtrace.range
    def unnamed() -> str:
        return "returned"

    assert named(1) == 0  # nothing records
    with modtrace.record(engine=engine) as recording:
        with recording.range("outer"), modtrace.range("inner"):
            assert named(2) == 0
        assert unnamed() == "returned"
        with pytest.raises(ZeroDivisionError), modtrace.range("raises"):
            raise ZeroDivisionError
    with recording.range("too late"):
        pass

    own = f"{test_a_range_of_ones_own_is_a_block_and_a_decorator.__qualname__}.<locals>.unnamed"
    names = ["named", "named", "named", "inner", "outer", own, "raises"]
    assert noted(recording) == [RangeName(name, "user") for name in names]
    assert (named.__name__, unnamed.__name__) == ("named", "unnamed")


def test_the_name_of_a_range_is_text() -> None:
    with pytest.raises(TypeError, match="the name of a range is a str, not int"):
        modtrace.record().range(3)  # type: ignore[arg-type]


def test_ranges_of_threads_belong_to_their_threads(engine: EngineName) -> None:
    def work() -> None:
        for _ in range(50):
            with record_function("of a thread"), modtrace.range("own"):
                pass

    with modtrace.record(engine=engine) as recording:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert Counter(name.name for name in noted(recording)) == {"of a thread": 200, "own": 200}
    events = recording._require_capture().ring.read().slots.events
    assert sorted(Counter(events.thread.tolist()).values()) == [200] * 4


def test_names_without_end_share_one(engine: EngineName) -> None:
    with modtrace.record(engine=engine) as recording:
        for number in range(4200):
            with record_function(f"batch {number}"):
                pass

    names = Counter(name.name for name in noted(recording))
    assert len(names) == 4097
    assert names["other ranges"] == 104


def test_a_compilation_is_a_range_with_its_reason(engine: EngineName) -> None:
    torch._dynamo.reset()

    @torch.compile(backend="eager")
    def double(x: Tensor) -> Tensor:
        return x * 2

    with modtrace.record(engine=engine) as recording:
        torch._dynamo.reset()  # which forgets the callbacks that others registered
        for length in (2, 2, 3, 4):
            double(torch.ones(length))

    compilations = [name.name for name in noted(recording) if name.category == "compile"]
    assert len(compilations) == 2
    assert compilations[0].startswith("torch.compile ")
    assert ": " not in compilations[0]
    assert compilations[1].endswith(": tensor 'x' size mismatch at index 0. expected 2, actual 3")


def test_graphs_of_torch_compile_are_the_same(engine: EngineName) -> None:
    model = nn.Linear(4, 4)
    scheduler = StepLR(torch.optim.SGD(model.parameters(), 0.1), 1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)

    def clipped(x: Tensor) -> Tensor:
        with modtrace.range("own"), record_function("torch's"):
            y: Tensor = model(x)
        clip_grad_norm_(model.parameters(), 1.0)
        return y.sum()

    def scheduled(x: Tensor) -> Tensor:
        y: Tensor = model(x)
        scheduler.step()
        return y.sum()

    def compile_all() -> tuple[Any, ...]:
        torch._dynamo.reset()
        counters = torch._dynamo.utils.counters
        counters.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            # torch 2.15 warns so on CPython 3.13.0 for each guard.
            warnings.filterwarnings("ignore", "Guards may run slower")
            compiled = [torch.compile(function, backend="eager") for function in (clipped, scheduled)]
            values = [function(torch.ones(2, 4)).item() for function in compiled for _ in range(2)]
        breaks = sum(counters["graph_break"].values())
        return values, dict(counters["stats"]), breaks, [str(warning.message) for warning in caught]

    compile_all()  # some warnings come once
    before = compile_all()
    with modtrace.record(engine=engine):
        during = compile_all()

    assert during == before
    at_clipping = TorchVersion(torch.__version__) < "2.9"
    assert before[2] == 1 + at_clipping  # one is at the scheduler


def test_functions_compiled_before_the_first_recording_are_recompiled_as_before(engine: EngineName) -> None:
    code = """
import sys
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
import modtrace

model = nn.Linear(4, 4)
for parameter in model.parameters():
    parameter.grad = torch.ones_like(parameter)

def step(x):
    y = model(x)
    clip_grad_norm_(model.parameters(), 1.0)
    model.zero_grad(set_to_none=False)
    return y.sum()

def captured():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # torch 2.8 cannot compile what clipping does.
    torch.compile(step, backend="eager", fullgraph=not torch.__version__.startswith("2.8."))(torch.ones(2, 4))
    return dict(torch._dynamo.utils.counters["stats"])

before = captured()
with modtrace.record(engine=sys.argv[1]):
    during = captured()
print(before == during == captured())
"""
    run = subprocess.run([sys.executable, "-c", code, engine], capture_output=True, text=True, check=False)
    assert run.stdout.splitlines()[-1:] == ["True"], run.stderr


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")
def test_wrapped_functions_are_pickled_and_scripted_as_before(engine: EngineName) -> None:
    with modtrace.record(engine=engine):
        for function in (clip_grad_norm_, torch.save, torch.load, torch.serialization.save):
            assert pickle.loads(pickle.dumps(function)) is function
        pickle.dumps([torch.amp.GradScaler("cpu"), StepLR, record_function("x")])

        class Scripted(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                with torch.autograd.profiler.record_function("scripted"):
                    return x + 1

        scripted: Any = torch.jit.script(Scripted())
        assert scripted(torch.ones(1)).item() == 2


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")  # torch 2.8
def test_functions_that_were_imported_before_have_ranges_too(engine: EngineName, tmp_path: Path) -> None:
    functions = (torch.save, torch.load, save_file, load_file, save_checkpoint, load_checkpoint, export)
    signatures = [inspect.signature(function) for function in functions]
    model, file, folder = nn.Linear(2, 2), tmp_path / "model.safetensors", tmp_path / "checkpoint"
    with modtrace.record(engine=engine) as recording:
        save_file(model.state_dict(), file)
        assert load_file(file).keys() == {"weight", "bias"}
        save_checkpoint(model.state_dict(), checkpoint_id=folder)
        load_checkpoint(model.state_dict(), checkpoint_id=folder)
        export(model, (torch.ones(1, 2),))

    assert [
        (row.name, row.category) for row in recording.timeline().ranges if row.depth == 0 and row.category != "gc"
    ] == [
        ("safetensors.torch.save_file", "saving"),
        ("safetensors.torch.load_file", "saving"),
        ("torch.distributed.checkpoint.save", "saving"),
        ("torch.distributed.checkpoint.load", "saving"),
        ("torch.export.export", "compile"),
    ]
    assert [inspect.signature(function) for function in functions] == signatures


def test_waits_for_objects_of_ray_are_ranges(engine: EngineName, monkeypatch: pytest.MonkeyPatch) -> None:
    ray: Any = ModuleType("ray")
    exec("def get(refs): return refs\n\ndef wait(refs): return get(refs), []", vars(ray))
    monkeypatch.setitem(sys.modules, "ray", ray)

    with modtrace.record(engine=engine) as recording:
        assert (ray.get(1), ray.wait(2)) == (1, (2, []))

    assert [(row.name, row.category, row.depth) for row in recording.timeline().ranges if row.category != "gc"] == [
        ("ray.get", "user", 0),
        ("ray.wait", "user", 0),
        ("ray.get", "user", 1),
    ]


def test_methods_of_rays_actors_are_ranges(engine: EngineName, monkeypatch: pytest.MonkeyPatch) -> None:
    prepares = """
class FunctionActorManager:
    def _make_actor_method_executor(self, method_name, method):
        def actor_method_executor(__ray_actor, *args):
            return method(__ray_actor, *args)
        actor_method_executor.name, actor_method_executor.method = method_name, method
        return actor_method_executor
"""
    module: Any = ModuleType("ray._private.function_manager")
    exec(prepares, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    _wrap_actors.cache_clear()

    class Actor:
        def add(self, number: int) -> int:
            return number + 1

        async def later(self) -> int:
            return 3

    with modtrace.record(engine=engine) as recording:
        prepare = module.FunctionActorManager()._make_actor_method_executor
        assert prepare("add", Actor.add)(Actor(), 1) == 2
        assert asyncio.run(prepare("later", Actor.later)(Actor())) == 3

    assert [(row.name, row.category) for row in recording.timeline().ranges if row.category != "gc"] == [
        ("Actor.add", "user")
    ]


class Kept(nn.Linear):
    def save_pretrained(self, path: Path) -> None:
        save_file(self.state_dict(), path)


class Keeper:
    def save_checkpoint(self, model: nn.Module, path: Path) -> None:
        torch.save(model.state_dict(), path)

    def load_checkpoint(self, path: Path) -> Any:
        return torch.load(path)


def test_methods_that_save_have_ranges_around_their_calls(engine: EngineName, tmp_path: Path) -> None:
    model, keeper = Kept(2, 2), Keeper()
    with modtrace.record(engine=engine) as recording:
        model(torch.ones(1, 2))
        model.save_pretrained(tmp_path / "model.safetensors")
        keeper.save_checkpoint(model, tmp_path / "model.pt")
        assert keeper.load_checkpoint(tmp_path / "model.pt").keys() == {"weight", "bias"}

    assert [
        (row.name, row.depth, row.category) for row in recording.timeline().ranges if row.category in ("saving", "user")
    ] == [
        ("Kept.save_pretrained", 0, "saving"),
        ("safetensors.torch.save_file", 1, "saving"),
        ("Keeper.save_checkpoint", 0, "saving"),
        ("torch.save", 1, "saving"),
        ("Keeper.load_checkpoint", 0, "saving"),
        ("torch.load", 1, "saving"),
    ]


class Optimizing:
    """An optimizer whose class is not derived from torch's."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())

    def step(self) -> None:
        assert all(parameter.grad is not None for parameter in self.parameters)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


class Derived(Optimizing):
    def step(self) -> None:
        super().step()


class Around(torch.optim.Optimizer):
    """An optimizer around another one, which torch's `Optimizer` does not set up."""

    def __init__(self, model: nn.Module) -> None:
        self.original = torch.optim.SGD(model.parameters(), 0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return self.original.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.original.zero_grad(set_to_none)


class SetUp(torch.optim.Optimizer):
    """An optimizer that torch's `Optimizer` sets up, with a step of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None


class Agent(nn.Module):
    """A model that steps in its world."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(self) -> None:
        self.optimizer.step()


class Scheduler:
    """An object that steps, but is not an optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self.zero_grad = model.zero_grad

    def step(self) -> None:
        pass


STEP, ZERO = "Optimizer.step#{}.step", "Optimizer.zero_grad#{}.zero_grad"


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Optimizing, ["Optimizing.step", "Optimizing.zero_grad"]),
        (Derived, ["Derived.step", "Derived.step", "Derived.zero_grad"]),
        (Around, ["Around.step", STEP.format("SGD"), "Around.zero_grad", ZERO.format("SGD")]),
        (SetUp, [STEP.format("SetUp"), ZERO.format("SetUp")]),
        (Agent, [STEP.format("SGD"), "Module.zero_grad#Agent.zero_grad"]),
        (Scheduler, ["Module.zero_grad#Linear.zero_grad"]),
    ],
)
def test_an_object_that_steps_and_zeroes_gradients_is_an_optimizer(
    engine: EngineName, kind: Callable[[nn.Module], Any], names: list[str]
) -> None:
    model = nn.Linear(2, 2)
    optimizer = kind(model)
    with modtrace.record(engine=engine) as recording:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert [row.name for row in recording.timeline().ranges if row.category == "optimizer"] == names


def test_an_optimizer_whose_class_is_made_later_is_found_with_its_model(engine: EngineName) -> None:
    with modtrace.record(engine=engine) as recording:
        nn.Linear(1, 1)(torch.ones(1, 1))
        later: Any = type("Later", (), {name: lambda self: None for name in ("step", "zero_grad")})
        nn.Linear(2, 2)(torch.ones(1, 2))
        later().step()

    assert [row.name for row in recording.timeline().ranges if row.category == "optimizer"] == ["Later.step"]


def test_a_second_recording_is_told_of_the_first(engine: EngineName) -> None:
    assert modtrace.current() is None
    with modtrace.record("first.pftrace", engine=engine) as recording:
        assert modtrace.current() is recording
        with pytest.raises(modtrace.RecordingError, match=r"in this process, to first\.pftrace; .*current\(\)\.stop"):
            modtrace.record(engine=engine).start()
        recording._outputs._trace = None
        modtrace.current().stop()  # type: ignore[union-attr]
        assert modtrace.current() is None


def test_a_merge_shows_each_range_once(engine: EngineName, tmp_path: Path) -> None:
    training = Training()
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler,
        modtrace.record(engine=engine) as recording,
    ):
        training.run()
        with modtrace.range("of modtrace"):
            training.model(torch.ones(1, 4))
    profiler.export_chrome_trace(str(tmp_path / "profile.json"))

    merged = modtrace.merge(tmp_path / "profile.json", recording.timeline(), tmp_path / "merged.json")

    alone = {part.part: part.total_ns for part in recording.timeline().summary().parts}
    assert {part.part: part.total_ns for part in merged.summary.parts} == pytest.approx(alone, rel=1e-3, abs=100)
    recording.save(tmp_path / "alone.json")
    counted = [_total_of_counters(tmp_path / name) for name in ("alone.json", "merged.json")]
    assert counted[1] == pytest.approx(counted[0], rel=1e-3, abs=1e-4)
    assert {"step: data loading", "step: optimizer"} < counted[1].keys()
    events = json.loads((tmp_path / "merged.json").read_bytes())["traceEvents"]
    shown = Counter(event["name"] for event in events if event.get("ph") == "X")
    names = {name: count for (_, name), count in EXPECTED.items()}
    assert {name: shown[name] for name in names} == names
    assert shown["of modtrace"] == 1
    ours = Counter(event["name"] for event in events if event.get("cat") == "ranges")
    assert ours.keys() == {name for name in names if name.startswith(WITHOUT_ANNOTATION)} | {"of modtrace"}
    modtrace.merge(tmp_path / "profile.json", recording.timeline(), tmp_path / "merged.pftrace")
    for suffix in ("json", "pftrace"):
        read = modtrace.load(tmp_path / f"merged.{suffix}").ranges
        assert Counter((row.category, row.name) for row in read) == EXPECTED | {("user", "of modtrace"): 1}


def _total_of_counters(path: Path) -> Counter[str]:
    """Return the sum of a trace's counters that are called `step: …`, in ms."""
    total: Counter[str] = Counter()
    for event in json.loads(path.read_bytes())["traceEvents"]:
        if event["ph"] == "C" and event["name"].startswith("step: "):
            total[event["name"]] += event["args"]["ms"]
    return total


WITHOUT_ANNOTATION = (
    *(
        "clip_grad_",
        "_get_total_norm",
        "_clip_grads_with_norm_",
        "GradScaler.",
        "LRScheduler.",
        "torch.",
        "Module.zero_grad",
    ),
    "enumerate(DataLoader)#DataLoader.__iter__",
)


@pytest.mark.parametrize("suffix", ["json", "pftrace", "html"])
def test_every_file_is_written_with_the_ranges_of_a_training(engine: EngineName, suffix: str, tmp_path: Path) -> None:
    training = Training()

    with modtrace.record(tmp_path / f"trace.{suffix}", engine=engine) as recording:
        training.run()

    timeline = recording.timeline()
    assert Counter((row.category, row.name) for row in timeline.ranges) == EXPECTED
    assert {row.track for row in timeline.ranges} == {"ranges · MainThread"}
    assert all(row.complete for row in timeline.ranges)
    inner = [row for row in timeline.ranges if row.name.startswith("Optimizer.step")]
    assert [row.depth for row in inner] == [1, 1, 1]  # in GradScaler.step
    if suffix != "html":
        assert modtrace.load(tmp_path / f"trace.{suffix}").ranges == timeline.ranges


def test_an_interrupt_during_a_request_for_a_name_reaches_the_user() -> None:
    code = """
import signal, torch, modtrace
from torch.profiler import record_function
from modtrace.track.ranges import RangeRecorder
ask = RangeRecorder.name_id
def interrupted(self, name, category=None):
    if name == "here":
        signal.raise_signal(signal.SIGINT)
    return ask(self, name, category)
RangeRecorder.name_id = interrupted
try:
    with modtrace.record(engine="native"):
        with record_function("here"):
            pass
        for _ in range(10):
            pass
        print("lost")
except KeyboardInterrupt:
    print("raised")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.stdout.strip(), run.stderr) == ("raised", "")


def test_a_range_that_is_entered_long_after_it_was_made_begins_when_it_is_entered(engine: EngineName) -> None:
    model = nn.Linear(4, 4)
    with modtrace.record(engine=engine) as recording:
        late = record_function("enumerate(mine)")
        made = time.monotonic_ns()
        model(torch.ones(1, 4))
        while time.monotonic_ns() - made < 2_000_000:
            pass
        with late:
            pass
    timeline = recording.timeline()
    (entered,) = (one for one in timeline.ranges if one.name == "enumerate(mine)")
    assert entered.start_ns >= timeline.spans[0].end_ns


def test_a_range_whose_name_is_no_text_is_refused_by_torch(engine: EngineName) -> None:
    with modtrace.record(engine=engine) as recording:
        with pytest.raises(RuntimeError):
            record_function(3).__enter__()  # type: ignore[arg-type]
        nn.Linear(4, 4)(torch.ones(1, 4))
    assert [span.module_class for span in recording.timeline().spans] == ["Linear"]


class _Timeout(Exception):
    """An exception of a user's handler."""


def test_an_exception_of_a_handler_during_the_schedule_reaches_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_signal(_number: int, _frame: object) -> None:
        raise _Timeout

    before = signal.signal(signal.SIGUSR2, on_signal)
    try:
        with modtrace.record() as recording:
            monkeypatch.setattr(recording, "_follow_schedule", lambda: signal.raise_signal(signal.SIGUSR2))
            with pytest.raises(_Timeout):
                recording.step()
            monkeypatch.undo()
            assert recording.running
    finally:
        signal.signal(signal.SIGUSR2, before)
