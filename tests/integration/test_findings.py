"""Faults planted in small trainings: the first screen of a summary names place and cause; sound trainings have none."""

from __future__ import annotations

import copy
import gc
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import modtrace
from modtrace.record_options import EngineName
from modtrace.timeline.summary import Finding, Summary
from tests.support.pretended_clock import with_pretended_clock
from tests.support.python_process import start_python

pytestmark = pytest.mark.usefixtures("native_engine")

_ENGINES = ["native", pytest.param("python", marks=pytest.mark.full)]
_STEPS, _BATCH, _CONTEXT, _WORDS, _WIDTH = 20, 4, 16, 64, 32
_CALLS = 50
_LONG = 0.02
"""Seconds: longer than a step of the model, even on a busy machine."""
_STALL = 1.0
"""Seconds, once in a single step."""


def wait(seconds: float) -> None:
    if seconds:  # sleep(0) would give the processor to other threads
        time.sleep(seconds)


class Slow(nn.GELU):
    """An activation that waits."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(_LONG)
        return super().forward(x)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH)
        self.pause = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.up(x))
        wait(self.pause)
        result: Tensor = self.down(x)
        return result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.mlp, self.calls = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH), MLP(), 1

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x))
        for _ in range(self.calls):
            x = x + self.mlp(x)
        return x


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(_WORDS, _WIDTH), nn.Linear(_WIDTH, _WORDS)
        self.blocks = nn.ModuleList([Block() for _ in range(6)])
        self.checkpoints, self.pause = False, 0.0

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        wait(self.pause)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        result: Tensor = self.head(x)
        return result


class Words(Dataset[Tensor]):
    """Rows of words; `pause`: seconds that a row takes; `stall`: seconds of the first row of step 11."""

    pause = stall = 0.0

    def __len__(self) -> int:
        return _STEPS * _BATCH

    def __getitem__(self, index: int) -> Tensor:
        wait(self.pause + (self.stall if index == 11 * _BATCH else 0.0))
        return torch.randint(_WORDS, (_CONTEXT,))


class Training:
    """A training whose parts a fault changes: the actions in `before` and `after` run in each step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.words, self.options = GPT(), Words(), dict[str, Any]()
        self.blocks: list[Any] = list(self.model.blocks)
        self.before, self.after_forward, self.after = (list[Callable[[Tensor], object]]() for _ in range(3))
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters())
        self.loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy
        self.step = 0

    def run(self) -> None:
        loader = DataLoader(self.words, _BATCH, **self.options)
        for self.step, batch in enumerate(loader):
            self.do(self.before, batch)
            output = self.model(batch)
            self.do(self.after_forward, batch)
            loss = self.loss(output.flatten(0, 1), batch.flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.do(self.after, batch)

    def infer(self) -> None:
        with torch.no_grad():
            for self.step, batch in enumerate(self.words[index].expand(_BATCH, -1) for index in range(_CALLS)):
                self.do(self.before, batch)
                self.model(batch).argmax(-1)

    def do(self, actions: Sequence[Callable[[Tensor], object]], batch: Tensor) -> None:
        for action in actions:
            action(batch)

    def each(self, period: int, action: Callable[[Tensor], object]) -> None:
        """Run an action before every `period`th step."""
        self.before.append(lambda batch: action(batch) if self.step % period == period - 1 else None)


def slow_forward(training: Training) -> None:
    training.blocks[2].mix.register_forward_pre_hook(lambda *_: time.sleep(_LONG))


def slow_backward(training: Training) -> None:
    training.blocks[1].mlp.down.register_full_backward_hook(lambda *_: time.sleep(_LONG))


def other_class(training: Training) -> None:
    training.blocks[4].mlp.act = Slow()


def called_often(training: Training) -> None:
    training.blocks[3].calls = 12


def two_slow_blocks(training: Training) -> None:
    for block in (1, 4):
        training.blocks[block].norm.register_forward_hook(lambda *_: time.sleep(_LONG))


def pauses_between(training: Training) -> None:
    for block in training.blocks:
        block.mlp.pause = _LONG / 4


def pause_in_model(training: Training) -> None:
    training.model.pause = _LONG


def slow_head(training: Training) -> None:
    training.model.head.register_forward_hook(lambda *_: time.sleep(_LONG))


def forward_twice(training: Training) -> None:
    training.before.append(training.model)


def forward_without_gradients(training: Training) -> None:
    training.before.append(torch.no_grad()(lambda batch: training.model(batch)))


def teacher_with_gradients(training: Training) -> None:
    training.before.append(GPT())


def gradients(training: Training) -> None:
    training.before.append(lambda _: torch.set_grad_enabled(True))


def checkpoints(training: Training) -> None:
    training.model.checkpoints = True


def collects(training: Training) -> None:
    heap = [[index] for index in range(300_000)]
    training.each(5, lambda _: gc.collect() + len(heap))


def saves(training: Training) -> None:
    def save(_: Tensor) -> None:
        for _times in range(20):
            torch.save(training.model.state_dict(), io.BytesIO())

    training.each(4, save)


def evaluates(training: Training) -> None:
    def evaluate(batch: Tensor) -> None:
        training.model.eval()
        with torch.no_grad():
            for _ in range(20):
                training.model(batch)
        training.model.train()

    training.each(5, evaluate)


def evaluates_with_gradients(training: Training) -> None:
    def evaluate(batch: Tensor) -> None:
        training.model.eval()
        training.model(batch)
        training.model.train()

    training.after.append(evaluate)


def generates(training: Training) -> None:
    def generate(batch: Tensor) -> None:
        with torch.no_grad():
            for _ in range(20):
                training.model(batch)

    training.each(5, generate)


def samples(training: Training) -> None:
    def sample(_: Tensor) -> None:
        with modtrace.range("sample images"):
            time.sleep(10 * _LONG)

    training.each(6, sample)


def augments(training: Training) -> None:
    def augment(_: Tensor) -> None:
        with torch.profiler.record_function("augment"):
            time.sleep(_LONG)

    training.before.append(augment)


def stalls_in_a_module(training: Training) -> None:
    training.blocks[3].mix.register_forward_hook(lambda *_: wait(_STALL if training.step == 13 else 0))


def stalls_now_and_then(training: Training) -> None:
    training.blocks[0].norm.register_forward_hook(lambda *_: wait(_STALL / 4 if training.step % 5 == 4 else 0))


def stalls_in_the_loader(training: Training) -> None:
    training.words.stall = _STALL


def slow_loader(training: Training) -> None:
    training.words.pause = _LONG / _BATCH


def slow_workers(training: Training) -> None:
    # Longer than a step of a busy machine.
    training.words.pause, training.options = 10 * _LONG / _BATCH, {"num_workers": 1}


def optimizer_hook(training: Training) -> None:
    training.optimizer.register_step_pre_hook(lambda *_: time.sleep(_LONG))


def many_tensors(training: Training) -> None:
    more = [nn.Parameter(torch.zeros(1)) for _ in range(1000)]
    for tensor in more:
        tensor.grad = torch.zeros(1)
    training.optimizer = torch.optim.AdamW([*training.model.parameters(), *more], foreach=False)
    training.optimizer.zero_grad = lambda set_to_none=True: training.model.zero_grad()  # type: ignore[method-assign]


def compiles_again(training: Training) -> None:
    compiled = torch.compile(training.blocks[0].mix, backend="eager", dynamic=False)
    training.each(6, lambda batch: compiled(torch.zeros(training.step + 1, _WIDTH)).sum().backward())


def slow_loss(training: Training) -> None:
    training.after_forward.append(lambda _: time.sleep(_LONG))


def loop_outside(training: Training) -> None:
    training.after.append(lambda _: time.sleep(_LONG))


def long_loss(training: Training) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        rows = [*zip(output, target, strict=True)] * 4
        each = [nn.functional.cross_entropy(row[None], word[None]) for row, word in rows]
        return torch.stack(each).mean()

    training.loss = loss


def prepares(training: Training) -> None:
    training.before.append(lambda _: time.sleep(_LONG))


def two_slow_calls(training: Training) -> None:
    training.blocks[4].mix.register_forward_hook(lambda *_: wait(_STALL / 2 if training.step in (19, 37) else 0))


def averages_by_hand(training: Training) -> None:
    parameters = [*training.model.parameters()]
    averages = [parameter.detach().clone() for parameter in parameters]

    @torch.no_grad()
    def update(_: Tensor) -> None:
        for own, parameter in zip(averages, parameters, strict=True):
            for _times in range(5):
                own.mul_(0.99).add_(parameter, alpha=0.01)

    training.after.append(update)


def copies_the_model(training: Training) -> None:
    training.after.append(lambda _: copy.deepcopy(training.model))


def norms_of_gradients(training: Training) -> None:
    def note(_: Tensor) -> None:
        for parameter in training.model.parameters():
            for power in range(1, 6):
                if parameter.grad is not None:
                    parameter.grad.norm(power).item()

    training.after.append(note)


def gradient_hooks(training: Training) -> None:
    for parameter in training.model.parameters():
        parameter.register_hook(lambda _: wait(_LONG / 8))


def activation_hooks(training: Training) -> None:
    for block in training.blocks:
        block.mlp.register_forward_hook(lambda *_: wait(_LONG / 16))


def detects_anomalies(training: Training) -> None:
    training.before.append(lambda _: torch.autograd.set_detect_anomaly(True))
    training.after.append(lambda _: torch.autograd.set_detect_anomaly(training.step < _STEPS - 1))


class Told(NamedTuple):
    """Content of a summary.

    Attributes:
        findings: all findings.
        text: the findings for people.
        screen: its first screen.
    """

    findings: Sequence[Finding]
    text: str
    screen: str


def told_by(summary: Summary) -> Told:
    return Told(summary.findings, summary.findings_text(), summary.sort_by().first_screen())


def answer() -> None:
    """Record each training that a line on stdin names, and print the content of its summary."""
    torch.set_num_threads(1)
    gc.disable()  # as in tests: only planted collections run
    for line in sys.stdin:
        plant, engine, run, options = json.loads(line)
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # otherwise it knows functions that a test before had compiled
        summary = recorded(globals()[plant], engine, getattr(Training, run), **options)
        print(json.dumps(told_by(summary)), flush=True)


Ask = Callable[..., Told]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Record a training in a process whose clock ignores the machine's load, and return its summary's content."""
    environment = with_pretended_clock(tmp_path_factory.mktemp("clock"))
    code = "from tests.integration import test_findings; test_findings.answer()"
    with start_python("-c", code, env=environment, stdin=subprocess.PIPE) as process:
        requests, answers = process.stdin, process.stdout
        assert requests is not None
        assert answers is not None

        def ask(plant: Callable[[Training], None], engine: EngineName, run: str = "run", **options: bool) -> Told:
            print(json.dumps([plant.__name__, engine, run, options]), file=requests, flush=True)
            findings, text, screen = json.loads(answers.readline())
            return Told([Finding(*finding) for finding in findings], text, screen)

        yield ask
        requests.close()


def not_of_the_machine(summary: Summary | Told) -> list[Finding]:
    """Return the findings without slow steps: the machine may really have stopped a step, and be named."""
    return [found for found in summary.findings if "makes s" not in found.what]


class Fault(NamedTuple):
    """A planted fault.

    Attributes:
        plant: the change to a training.
        names: the names on the first screen: a module, a range or a part, and why.
    """

    plant: Callable[[Training], None]
    names: tuple[str, ...]


FAULTS = [
    Fault(slow_forward, ("GPT.blocks.2.mix", "slower than its siblings", "mostly forward")),
    Fault(slow_backward, ("GPT.blocks.1.mlp", "slower than its siblings", "mostly backward")),
    Fault(other_class, ("GPT.blocks.4.mlp.act", "is Slow, its siblings GELU")),
    Fault(
        called_often, ("GPT.blocks.3.mlp", "called more often than its siblings", "called 12 times a step, they once")
    ),
    Fault(two_slow_blocks, ("GPT.blocks.1.norm", "GPT.blocks.4.norm", "slower than its siblings")),
    Fault(pauses_between, ("GPT.blocks.*.mlp (MLP)", "host time", "own backward")),
    Fault(pause_in_model, (" GPT · spends host time",)),
    Fault(slow_head, ("GPT.head", "host time")),
    Fault(forward_twice, ("GPT · runs forward more often than backward", "twice a step")),
    Fault(forward_without_gradients, ("GPT · runs forward more often than backward", "twice a step")),
    Fault(
        teacher_with_gradients, ("GPT · builds a graph that no backward pass uses", "once a step", "torch.no_grad()")
    ),
    Fault(checkpoints, ("recompute", "GPT.blocks.* again")),
    Fault(collects, ("garbage collection", "every 5th step", "generation 2", "gc.collect()")),
    Fault(saves, ("torch.save", "every 4th step")),
    Fault(evaluates, ("evaluation", "every 5th step")),
    Fault(evaluates_with_gradients, ("evaluation takes a large share", "it builds a graph, without torch.no_grad()")),
    Fault(generates, ("calls without gradients", "every 5th step")),
    Fault(samples, ("sample images", "every 6th step")),
    Fault(augments, ("augment", "takes a large share")),
    Fault(stalls_in_a_module, ("GPT.blocks.3.mix", "step 13", "slow (forward)")),
    Fault(stalls_now_and_then, ("GPT.blocks.0.norm", "every 5th step", "forward")),
    Fault(stalls_in_the_loader, ("step 11", "data loading makes step 11 slow")),
    Fault(slow_loader, ("data loading takes a large share", "no workers")),
    Fault(slow_workers, ("data loading takes a large share", "waiting for the loader's workers")),
    Fault(optimizer_hook, ("optimizer takes a large share", "1 hook")),
    Fault(many_tensors, ("optimizer takes a large share", "tensors one by one (foreach=False)")),
    Fault(compiles_again, ("torch.compile", "size mismatch at index 0", "is compiled again")),
    Fault(slow_loss, ("loss takes a large share",)),
    Fault(long_loss, ("loss takes a large share", "of it in backward, outside of modules")),
    Fault(loop_outside, ("outside of modules and ranges (other)", "(optimizer) and", "Python, or waiting")),
    Fault(averages_by_hand, ("(other)", "255 × mul_", "255 × add_", "a loop over the 51 parameters")),
    Fault(copies_the_model, ("(other)", "51 × clone", "copies of the 51 parameters")),
    Fault(norms_of_gradients, ("(other)", "255 × linalg_vector_norm", "255 × item", "a loop over the 51 parameters")),
    Fault(gradient_hooks, ("hooks of gradients take a large share", "51 hooks")),
    Fault(activation_hooks, ("GPT.blocks.", "has a forward hook that takes long", "6 modules with forward hooks")),
    Fault(detects_anomalies, ("anomaly detection is on", "set_detect_anomaly")),
]


OF_CALLS = [
    Fault(pause_in_model, (" GPT · spends host time in its own forward", "Python or waiting")),
    Fault(gradients, ("GPT · builds a graph that no backward pass uses", "once a step", "torch.no_grad()")),
    Fault(prepares, ("time between calls", "the program prepares its input, or waits")),
    Fault(two_slow_calls, ("GPT.blocks.4.mix · makes some steps slow (forward)", "in 2 of 50 steps")),
    Fault(slow_forward, ("GPT.blocks.2.mix", "slower than its siblings", "mostly forward")),
    Fault(collects, ("garbage collection", "every 5th step", "generation 2", "gc.collect()")),
    Fault(augments, ("augment", "takes a large share")),
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """torch threads that wait for each other spin, and make anything slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def recorded(
    plant: Callable[[Training], None],
    engine: EngineName,
    run: Callable[[Training], None] = Training.run,
    **options: Any,
) -> Summary:
    training = Training()
    plant(training)
    with modtrace.record(engine=engine, **options) as recording:
        run(training)
    return recording.timeline().summary()


@pytest.mark.parametrize("engine", _ENGINES)
@pytest.mark.parametrize("fault", FAULTS, ids=[fault.plant.__name__ for fault in FAULTS])
def test_the_first_screen_names_a_planted_fault(fault: Fault, engine: EngineName, ask: Ask) -> None:
    # The loader's workers are processes, and the training really waits for them.
    told = told_by(recorded(fault.plant, engine)) if fault.plant is slow_workers else ask(fault.plant, engine)

    first = told.screen.partition("\n\n")[0]
    assert [name for name in fault.names if name not in first] == [], first
    assert len(told.screen.encode()) <= 3_000


@pytest.mark.parametrize("engine", _ENGINES)
@pytest.mark.parametrize("fault", OF_CALLS, ids=[fault.plant.__name__ for fault in OF_CALLS])
def test_the_first_screen_names_a_fault_of_a_program_that_trains_nothing(
    fault: Fault, engine: EngineName, ask: Ask
) -> None:
    screen = ask(fault.plant, engine, "infer").screen

    first = screen.partition("\n\n")[0]
    assert [name for name in fault.names if name not in first] == [], first
    assert len(screen.encode()) <= 3_000


def _irregular(training: Training) -> None:
    # Requests, and prompts of 1 to 32 times the length.
    training.before.append(lambda _: time.sleep(_LONG * (training.step % 4)))
    training.model.register_forward_pre_hook(lambda _, batch: (batch[0].repeat(1, 1 + 31 * (training.step == 29)),))


@pytest.mark.parametrize("engine", _ENGINES)
def test_calls_that_come_irregularly_or_with_longer_inputs_are_no_finding(engine: EngineName, ask: Ask) -> None:
    told = ask(_irregular, engine, "infer")

    assert not_of_the_machine(told) == [], told.text
    # The machine may pause a thread; a long prompt lengthens all layers.
    assert [found for found in told.findings if "29" in found.what] == []


def _nothing(_: Training) -> None:
    pass


def _teacher(training: Training) -> None:
    training.before.append(torch.no_grad()(GPT()))


def _frozen_teacher(training: Training) -> None:
    training.before.append(GPT().requires_grad_(False))


def _accumulate(training: Training) -> None:
    training.before.append(lambda batch: training.model(batch).sum().backward())


def _schedule(training: Training) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 5)
    training.after.append(lambda _: scheduler.step())


def _clip(training: Training) -> None:
    training.model.embed.register_forward_hook(lambda *_: None)
    training.after_forward.append(lambda _: nn.utils.clip_grad_norm_(training.model.parameters(), 1.0))


def _short_range(training: Training) -> None:
    def note(_: Tensor) -> None:
        with modtrace.range("note"):
            pass

    training.before.append(note)


def _wide_layer(training: Training) -> None:
    training.model.head = nn.Linear(_WIDTH, 4_000)
    training.optimizer.add_param_group({"params": training.model.head.parameters()})


def _other_activation(training: Training) -> None:
    training.blocks[2].mlp.act = nn.ReLU()


def _sgd(training: Training) -> None:
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=1e-3)


def _frozen(training: Training) -> None:
    training.model.embed.requires_grad_(False)


def _compile_once(training: Training) -> None:
    compiled = torch.compile(training.blocks[0].mix, backend="eager")
    training.before.append(lambda _: compiled(torch.zeros(4, _WIDTH)).sum().backward())


def _play(training: Training) -> None:
    def play(batch: Tensor) -> None:
        if training.step % 4 == 0:
            with torch.no_grad():
                for _ in range(8):
                    training.model(batch[:1])

    training.before.append(play)


def _play_in_each_step(training: Training) -> None:
    training.before.append(torch.no_grad()(lambda batch: [training.model(batch[:1]) for _ in range(4)]))


def _validate(training: Training) -> None:
    def validate(batch: Tensor) -> None:
        with torch.no_grad():
            training.model.eval()(batch)
        training.model.train()

    training.each(10, validate)


QUIET: list[Callable[[Training], None]] = [
    *(_nothing, _accumulate, _schedule, _clip, _short_range, _wide_layer, _other_activation, _sgd, _frozen),
    *(_compile_once, _teacher, _frozen_teacher, _play, _play_in_each_step, _validate),
]


@pytest.mark.parametrize("engine", _ENGINES)
@pytest.mark.parametrize("program", QUIET, ids=[program.__name__ for program in QUIET])
def test_a_sound_training_has_no_findings(program: Callable[[Training], None], engine: EngineName, ask: Ask) -> None:
    told = ask(program, engine)

    assert not_of_the_machine(told) == [], told.text


@pytest.mark.parametrize("plant", [_other_activation, slow_forward])
def test_memory_and_flops_name_no_module_more(plant: Callable[[Training], None], ask: Ask) -> None:
    told = ask(plant, "native", memory=True, flops=True)

    expected = [] if plant is _other_activation else ["GPT.blocks.2.mix"]
    assert [found.where for found in not_of_the_machine(told)] == expected, told.text
    assert len(told.screen.encode()) <= 3_000
