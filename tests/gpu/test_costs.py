"""Memory and FLOPs of modules on a device: closed forms, torch's own counts, and a stopwatch of the device."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.flop_counter import FlopCounterMode

import modtrace
from modtrace.timeline.memory import measure_calls
from tests.support.flop_cases import CASES, STEPS, Case, attention, costs
from tests.support.memory_culprits import (
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
from tests.support.models import ARCHITECTURES

pytestmark = [
    pytest.mark.usefixtures("native_engine"),
    pytest.mark.filterwarnings("ignore:.*enable_nested_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own, when its compiler is imported
]
STEPS_OF_A_LEAK = 200
"""So that it is more than a hundredth of what cuBLAS takes for itself."""


def requested(what: str) -> int:
    """Return what CUDA's allocator says that programs asked it for, bytes: `current` or `peak`."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{what}"])


def training_of(name: str, device: torch.device) -> Callable[[], Tensor]:
    """Return a step of an architecture, on the device."""
    torch.manual_seed(0)
    with device:
        model, loss = ARCHITECTURES[name]()

    def step() -> Tensor:
        with device:
            result: Tensor = loss()
        result.backward()
        model.zero_grad()
        return result.detach()

    return step


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_calls_retain_what_the_allocator_of_cuda_says(cuda: torch.device, name: str) -> None:
    step = training_of(name, cuda)
    step()
    open_calls: list[tuple[int, str, int]] = []
    told: list[tuple[str, int]] = []

    def enter(module: nn.Module, _inputs: object) -> None:
        open_calls.append((len(told), type(module).__name__, requested("current")))
        told.append(("", 0))

    def leave(_module: nn.Module, _inputs: object, _output: object) -> None:
        place, module_class, before = open_calls.pop()
        told[place] = (module_class, requested("current") - before)

    handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    with modtrace.record(memory=True) as recording:
        for _ in range(2):
            step()
    most = requested("peak")
    for handle in handles:
        handle.remove()
    timeline = recording.timeline()
    memory = measure_calls(timeline)

    assert memory is not None
    recorded = [
        (span.module_class, retained)
        for span, retained in zip(timeline.spans, memory.retained_bytes.tolist(), strict=True)
        if span.phase != "backward"
    ]
    assert recorded == told
    (series,) = [one for one in timeline.counters if one.name == "cuda allocated"]
    assert max(series.value) == most
    summary = timeline.summary().memory
    assert summary is not None
    assert summary.peak_bytes == most == sum(holder.bytes for holder in summary.holders)


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        (keep_nothing, None),
        (keep_outputs, "125.00 KiB a step: Net.head 125.00 KiB"),
        (keep_history, "19.53 KiB a step: no module 19.53 KiB"),
        (evaluate_with_gradients, "48.00 KiB a step: Net.blocks.* 48.00 KiB"),
        (keep_activations_by_a_hook, "8.00 KiB a step: Net.blocks.1.1 8.00 KiB"),
        (keep_gradients, "302.66 KiB a step: backward 302.66 KiB"),
        (make_an_optimizer_in_each_step, "605.34 KiB a step: optimizer 605.34 KiB"),
    ],
)
def test_a_leak_on_the_device_is_told_with_who_holds_it(
    cuda: torch.device, steps: Callable[[Training], None], sentence: str | None
) -> None:
    with cuda:
        training = Training()
        with modtrace.record(memory=True) as recording:
            for _ in range(STEPS_OF_A_LEAK):
                steps(training)
    summary = recording.timeline().summary().memory

    assert summary is not None
    assert summary.sentences == ((f"tensor memory grows by {sentence}",) if sentence else ())


@pytest.mark.parametrize(
    ("asking", "asked", "place"),
    [
        (widen_the_batch, "256.00 TiB", "forward Net.blocks.0.0"),
        (widen_the_head, "128.00 TiB", "forward Net.head"),
        (mask_each_pair_of_many_tokens, "64.00 TiB", "forward Net.blocks.0#2"),
        (ask_in_backward, "256.00 TiB", "backward Net.blocks.3"),
        (ask_outside, "256.00 TiB", "no module"),
    ],
)
def test_an_allocation_without_memory_is_reported_with_its_module(
    cuda: torch.device, asking: Callable[[Training], None], asked: str, place: str
) -> None:
    with cuda:
        training = Training()
        with modtrace.record(memory=True) as recording:
            for _ in range(3):
                training.step()
            with pytest.raises(torch.OutOfMemoryError):
                asking(training)
    summary = recording.timeline().summary().memory

    assert summary is not None
    (told,) = summary.sentences
    assert told.startswith(f"could not allocate {asked} in {place}, after step {2 + (asking is ask_outside)}; held: ")


@pytest.mark.parametrize("case", [case for case in CASES if case is not attention])
def test_modules_cost_what_their_closed_forms_say(device: torch.device, case: Callable[[], Case]) -> None:
    with device:
        step, expected = case()
        with modtrace.record(flops=True) as recording:
            for _ in range(STEPS):
                step()
                recording.step()
    cost_of = costs(recording.timeline())

    assert {name: cost_of[name] for name in expected} == {
        name: tuple(STEPS * flops for flops in of_phase) for name, of_phase in expected.items()
    }


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_over_modules_is_what_torchs_counter_counts(cuda: torch.device, name: str, dtype: torch.dtype) -> None:
    step = training_of(name, cuda)
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        with FlopCounterMode(display=False) as counter:
            step()
        with modtrace.record(flops=True) as recording:
            step()
    timeline = recording.timeline()
    flops = timeline.summary().flops

    assert flops is not None
    outermost = [row for row in costs(timeline).items() if "." not in row[0]]
    assert sum(sum(of_phase) for _, of_phase in outermost) + flops.outside == counter.get_total_flops()


class Stack(nn.Module):
    """Eight layers of one class, whose products take nearly all of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8192, 8192, bias=False, dtype=torch.bfloat16) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_rates_are_those_of_the_devices_stopwatch(cuda: torch.device) -> None:
    with cuda, torch.no_grad():
        model, x = Stack(), torch.randn(8192, 8192, dtype=torch.bfloat16)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(3):
            model(x)
        with modtrace.record(flops=True, device_times=8) as recording:
            for _ in range(4):
                model(x)
                recording.step()
            begin.record()
            for _ in range(8):
                model(x)
                recording.step()
            end.record()
            torch.cuda.synchronize()
    timed = 8 * 8 * 2 * 8192**3 / (begin.elapsed_time(end) / 1e3)
    summary = recording.timeline().summary()
    by_class = recording.timeline().summary(by="class")

    assert summary.flops is not None
    assert by_class.flops is not None
    rows = {row.fqn: row for row in summary.flops.rows}
    of_class = next(row for row in by_class.flops.rows if row.module_class == "Linear")
    assert rows["Stack"].flops == of_class.flops == 12 * 8 * 2 * 8192**3
    # Clocks of the device change by a few per cent.
    assert rows["Stack"].flops_per_second == pytest.approx(timed, rel=0.1)
    assert of_class.flops_per_second == pytest.approx(timed, rel=0.1)
    rate = next(rate for rate in summary.flops.rates if rate.fqn == "Stack")
    assert rate.peak_share is None or 0.3 < rate.peak_share < 1
    assert rate.bound_by in (None, "compute")
