"""Planted causes of memory that runs out, or grows: the sentence names the module or the category."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import modtrace
from modtrace.timeline import RingAnalysis
from modtrace.timeline.decode.held_memory import HeldMemory, held_memory
from tests.support.forked_python import run_forked
from tests.support.memory_culprits import (
    TOO_MANY,
    Training,
    ask_in_backward,
    ask_outside,
    evaluate_with_gradients,
    keep_activations_by_a_hook,
    keep_gradients,
    keep_history,
    keep_nothing,
    keep_outputs,
    make_an_optimizer_in_each_step,
    mask_each_pair_of_many_tokens,
    widen_the_batch,
    widen_the_head,
)

pytestmark = pytest.mark.usefixtures("native_engine", "one_thread")

STEPS = 14


def held_by(steps: Callable[[Training], None]) -> HeldMemory:
    training = Training()
    with modtrace.record(memory=True) as recording:
        for _ in range(STEPS):
            steps(training)
    memory = held_memory(RingAnalysis(recording._require_capture().ring.read()))
    assert memory is not None
    return memory


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        (keep_outputs, "tensor memory grows by 125.00 KiB a step: Net.head 125.00 KiB"),
        (keep_history, "tensor memory grows by 19.53 KiB a step: no module 19.53 KiB"),
        # The scalar and its graph: the tensors saved by the two layers of each block, and the head's output.
        (evaluate_with_gradients, "tensor memory grows by 48.00 KiB a step: Net.blocks.* 48.00 KiB"),
        (keep_activations_by_a_hook, "tensor memory grows by 8.00 KiB a step: Net.blocks.1.1 8.00 KiB"),
        # 3 × (64 × 64 + 64) + 64 × 1000 + 1000 floats
        (keep_gradients, "tensor memory grows by 302.66 KiB a step: backward 302.66 KiB"),
        # Two moments of this size, and a count of 4 bytes for each of 8 parameters.
        (make_an_optimizer_in_each_step, "tensor memory grows by 605.34 KiB a step: optimizer 605.34 KiB"),
    ],
)
def test_a_leak_is_reported_with_its_holder(steps: Callable[[Training], None], sentence: str) -> None:
    assert held_by(steps).sentences == [sentence]


def keep_in_a_range(training: Training) -> None:
    recording = modtrace.current()
    assert recording is not None
    with recording.range("remember"):
        training.kept.append(torch.ones(5000))
    training.step()


def keep_between(training: Training) -> None:
    out = training.model(training.x)
    training.kept.append(torch.ones(5000))
    out.square().mean().backward()
    training.optimizer.step()
    training.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("steps", "where", "place"),
    [
        (keep_in_a_range, "remember", ", in remember,"),
        (keep_between, None, ", between Net forward and backward,"),
        # The same gap frees the step's output, which is larger: the origin of the kept memory is unclear.
        (keep_history, None, ""),
    ],
)
def test_growth_outside_modules_is_reported_with_its_place(
    steps: Callable[[Training], None], where: str | None, place: str
) -> None:
    training = Training()
    with modtrace.record(memory=True) as recording:
        for _ in range(STEPS):
            steps(training)
    summary = recording.timeline().summary()

    (found,) = (one for one in summary.findings if one.what == "memory grows from step to step")
    assert (found.where, found.evidence) == (
        where,
        f"19.53 KiB more at the end of each step: outside of modules{place} 19.53 KiB",
    )
    assert summary.memory is not None
    holders = {holder.fqn: holder.bytes for holder in summary.memory.holders}
    # The peak is in one of the last two steps, with everything that was kept before it.
    assert holders["no module"] >= (STEPS - 2) * 20_000


def test_a_training_that_keeps_nothing_has_no_sentence() -> None:
    assert held_by(keep_nothing).sentences == []


SAVED = {f"Net.blocks.{block}.{layer}": 32 * 64 * 4 for block in range(3) for layer in range(2)}
"""Bytes of each layer's output: GELU saves that of Linear, and the next Linear that of GELU."""


def checkpoint_blocks(training: Training) -> None:
    for block in training.model.blocks:
        block.forward = partial(checkpoint, type(block).forward, block, use_reentrant=False, preserve_rng_state=False)
    training.step()
    for block in training.model.blocks:
        del block.forward


@pytest.mark.parametrize(
    ("steps", "saved"),
    [
        (keep_nothing, SAVED | {"Net.head": 32 * 1000 * 4}),
        (keep_outputs, SAVED),  # an output that stays alive is not freed after the pass
        # The output of each block goes into the next one.
        (checkpoint_blocks, {f"Net.blocks.{block}.1": 32 * 64 * 4 for block in range(3)} | {"Net.head": 32 * 1000 * 4}),
    ],
)
def test_modules_keep_tensors_for_backward_that_are_freed_in_or_after_it(
    steps: Callable[[Training], None], saved: dict[str, int]
) -> None:
    assert held_by(steps).saved_by_module == saved


def test_a_failed_allocation_names_saved_memory_and_what_checkpointing_would_free() -> None:
    training = Training()
    with modtrace.record(memory=True) as recording:
        for _ in range(3):
            training.step()
        out = training.model(training.x)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.empty(TOO_MANY, 64)
    summary = recording.timeline().summary().memory

    # 3 blocks of 16 KiB and the head's 125 KiB; two of the blocks would be freed.
    told = "; about 173.00 KiB of it saved for backward; "
    told += "checkpointing Net.blocks.* would free about 32.00 KiB (an estimate)"
    assert summary is not None
    assert summary.sentences[0].endswith(told)
    rows = {row.fqn: row.saved_bytes for row in summary.rows}
    assert (rows["Net"], rows["Net.blocks.0"], rows["Net.head"]) == (48 * 1024 + out.nbytes, 16 * 1024, out.nbytes)


@pytest.mark.parametrize(
    ("asking", "asked", "place"),
    [
        (widen_the_batch, "256.00 TiB", "forward Net.blocks.0.0"),
        (widen_the_head, "128.00 TiB", "forward Net.head"),
        (mask_each_pair_of_many_tokens, "64.00 TiB", "forward Net.blocks.0#2"),  # another module had that name
        (ask_in_backward, "256.00 TiB", "backward Net.blocks.3"),
        (ask_outside, "256.00 TiB", "no module"),
    ],
)
def test_a_failed_allocation_is_reported_with_its_module(
    asking: Callable[[Training], None], asked: str, place: str, tmp_path: Path
) -> None:
    ring = tmp_path / "run.modtrace"
    training = Training()
    with modtrace.record(tmp_path / "run.json", memory=True, ring=ring):
        for _ in range(3):
            training.step()
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            asking(training)

    sentence = f"could not allocate {asked} in {place}, after step {2 + (asking is ask_outside)}; held: "
    (told,) = modtrace.where(ring).ranks[0].memory
    summary = modtrace.load(tmp_path / "run.json").summary().memory
    assert told.startswith(sentence)
    assert summary is not None
    assert summary.sentences == (told,)


def test_owners_at_a_failed_allocation_account_for_all_memory() -> None:
    training = Training()
    with modtrace.record(memory=True) as recording:
        kept = [training.step() for _ in range(3)]
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.empty(TOO_MANY, 64)

    memory = held_memory(RingAnalysis(recording._require_capture().ring.read()))
    assert memory is not None
    assert len(kept) == 3
    assert sum(memory.bytes_by_holder.values()) == memory.held_bytes
    assert memory.bytes_by_holder["Net.head"] == 3 * 32 * 1000 * 4
    state = [value for values in training.optimizer.state.values() for value in values.values()]
    assert memory.bytes_by_holder["optimizer"] == sum(value.nbytes for value in state)
    assert memory.refused_bytes == TOO_MANY * 64 * 4


class Hoard(nn.Module):
    """Its n-th module keeps n floats of each call, and saves n floats for backward."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.rows = nn.ModuleList(Row(n) for n in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row(x) for row in self.rows]).sum()


class Row(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        self.kept.append(torch.ones(self.size))
        return x.expand(self.size).exp().sum()


def test_held_and_saved_memory_is_known_for_any_number_of_modules() -> None:
    count, steps = 4200, 2
    model, x = Hoard(count), torch.ones(1, requires_grad=True)
    with modtrace.record(memory=True) as recording:
        for _ in range(steps):
            model(x).backward()
            recording.step()
    memory = held_memory(RingAnalysis(recording._require_capture().ring.read()))

    assert memory is not None
    rows = {name: held for name, held in memory.bytes_by_holder.items() if name.startswith("Hoard.rows.") and held}
    assert rows == {f"Hoard.rows.{n}": steps * 4 * n for n in range(1, count)}
    assert sum(memory.bytes_by_holder.values()) == memory.held_bytes
    assert {f"Hoard.rows.{n}": memory.saved_by_module[f"Hoard.rows.{n}"] for n in range(1, count)} == {
        f"Hoard.rows.{n}": 4 * n for n in range(1, count)
    }


def test_at_the_peak_parameters_gradients_and_the_optimizers_state_are_named(tmp_path: Path) -> None:
    with modtrace.record(tmp_path / "run.pftrace", memory=True):
        training = Training()
        for step in range(4):
            if step == 2:
                training.model(torch.randn(4096, 64))
            training.model(training.x).square().mean().backward()
            training.optimizer.step()
    memory = modtrace.load(tmp_path / "run.pftrace").summary().memory

    assert memory is not None
    held = {holder.fqn: holder.bytes for holder in memory.holders}
    state = [value for values in training.optimizer.state.values() for value in values.values()]
    parameters = sum(parameter.nbytes for parameter in training.model.parameters())
    assert (held["parameters"], held["optimizer state"]) == (parameters, sum(value.nbytes for value in state))
    assert held["gradients"] == sum(p.grad.nbytes for p in training.model.parameters() if p.grad is not None)
    assert sum(held.values()) == memory.peak_bytes


KILLED = """
import os, signal, sys, torch, modtrace
from tests.integration.test_memory_culprits import Training

training = Training()
recording = modtrace.record(memory=True, ring=sys.argv[1])
recording.start()
for _ in range(5):
    training.kept.append(training.step())
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_memory_of_a_killed_process_is_known(tmp_path: Path) -> None:
    ring = tmp_path / "run.modtrace"
    run_forked("-c", KILLED, ring, status=-signal.SIGKILL)

    (told,) = modtrace.where(ring).ranks[0].memory
    # At the end of the last step: the outputs of the four steps before, and its own.
    assert told.startswith("its tensors held ")
    assert " at its last event; before, held: " in told
    assert ", by Net.head 625.00 KiB (" in told


def test_children_forked_while_threads_allocate_free_inherited_memory() -> None:
    stop = threading.Event()

    def allocate() -> None:
        while not stop.is_set():
            torch.empty(1000)

    model, x = nn.Linear(64, 64), torch.randn(32, 64)
    threads = [threading.Thread(target=allocate) for _ in range(2)]
    with modtrace.record(memory=True):
        held = [model(x) for _ in range(10)]
        for thread in threads:
            thread.start()
        statuses = []
        for _ in range(20):
            child = os.fork()
            if child == 0:
                held.clear()
                kept = [torch.empty(1000) for _ in range(100)]
                os._exit(len(kept) != 100)
            statuses.append(os.waitpid(child, 0)[1])
        stop.set()
        for thread in threads:
            thread.join()

    assert statuses == [0] * 20


def test_a_second_recording_starts_with_the_memory_left_by_the_first() -> None:
    model, x = nn.Linear(64, 64, bias=False), torch.randn(32, 64)
    gc.collect()
    with torch.no_grad():
        with modtrace.record(memory=True) as first:
            kept = [model(x) for _ in range(3)]
        uncounted = model(x)
        del kept[1:], uncounted
        with modtrace.record(memory=True) as second:
            out = model(x)

    base = first.timeline().counters[0].value[0]
    (series,) = second.timeline().counters
    assert out.nbytes == kept[0].nbytes == 8192
    assert (series.value[0] - base, series.value[-1] - base) == (8192, 16384)
