"""Memory that calls keep and take, compared with a replay of all allocations that torch's own profiler reports."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import modtrace
from modtrace.timeline.memory import measure_calls
from tests.support.allocation_replay import Replay, ReplayedCall, mark, replayed
from tests.support.models import ARCHITECTURES, Workload

pytestmark = pytest.mark.usefixtures("native_engine", "one_thread")


def calls_of(timeline: modtrace.Timeline) -> list[ReplayedCall]:
    """The recorded memory of each call, in the order of their starts."""
    memory = measure_calls(timeline)
    assert memory is not None
    assert memory.is_known.all()
    return [
        ReplayedCall(span.module_class, retained, peak)
        for span, retained, peak in zip(
            timeline.spans, memory.retained_bytes.tolist(), memory.peak_bytes.tolist(), strict=True
        )
        if span.phase != "backward"
    ]


def samples_of(timeline: modtrace.Timeline) -> list[int]:
    return next(series.value.tolist() for series in timeline.counters if series.name == "allocated")


def is_subsequence(values: list[int], of: list[int]) -> bool:
    left = iter(of)
    return all(any(value == other for other in left) for value in values)


def recorded_and_replayed(model: nn.Module, steps: Callable[[], object]) -> tuple[modtrace.Timeline, Replay]:
    with modtrace.record(memory=True) as recording, replayed(model) as replay:
        steps()
    return recording.timeline(), replay


def assert_equal_to_the_byte(timeline: modtrace.Timeline, replay: Replay) -> None:
    base = samples_of(timeline)[0]
    assert calls_of(timeline) == replay.calls
    assert is_subsequence([value - base for value in samples_of(timeline)], replay.live)
    assert max(samples_of(timeline)) - base == max(replay.live)
    summary = timeline.summary().memory
    assert summary is not None
    assert summary.peak_bytes == max(samples_of(timeline)) == sum(holder.bytes for holder in summary.holders)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.filterwarnings("ignore:.*enable_nested_tensor:UserWarning")
def test_calls_of_an_architecture_are_those_of_the_replay(name: str) -> None:
    torch.manual_seed(0)
    model, loss = ARCHITECTURES[name]()

    def steps() -> None:
        for _ in range(2):
            loss().backward()
        model.zero_grad()
        loss().backward()

    timeline, replay = recorded_and_replayed(model, steps)

    assert len(replay.calls) > 3
    assert_equal_to_the_byte(timeline, replay)


class ViewsAndInPlace(nn.Module):
    """Changes views of what a layer made, in place, and drops large temporaries."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.act = nn.Linear(16, 32), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        y[:, ::2].mul_(2)
        z = self.act(y + 1) * 2
        torch.ones(1000, 8).sum()
        out: Tensor = z[:, :16].add_(z[:, 16:].t().reshape(16, 16)).unsqueeze(0)
        return out


class OddStorages(nn.Module):
    """Storages that grow, shrink, are copied on write, or are shared with NumPy and another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x).detach()
        grown = torch.empty(8).resize_(4000)
        grown.untyped_storage().resize_(100)
        lazy = torch._lazy_clone(y)
        lazy.add_(1)
        unchanged = torch._lazy_clone(y)
        array = torch.ones(500).numpy()
        back = torch.from_numpy(array * 2)
        target = torch.empty(0).set_(torch.ones(300).untyped_storage())
        deleted = torch.ones(700).untyped_storage()
        deleted.resize_(0)
        self.kept = (unchanged, array, back, target, deleted, lazy.clone())
        return lazy


class RaisesInside(nn.Module):
    """Raises in an inner call; its own code catches the error the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.wrong = nn.Linear(16, 64), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = self.wide(x)
        try:
            self.wrong(kept)
        except RuntimeError:
            if not x.requires_grad:
                raise
        return kept


def train(workload: Workload) -> Tensor:
    loss = workload.loss()
    loss.backward()
    return loss


def test_views_and_changes_in_place_are_counted_once() -> None:
    model, x = ViewsAndInPlace(), torch.randn(16, 16)

    assert_equal_to_the_byte(*recorded_and_replayed(model, lambda: model(x).sum().backward()))


def test_storages_that_change_are_counted_as_torch_counts_them() -> None:
    model, x = OddStorages(), torch.randn(16, 16)

    def steps() -> None:
        for _ in range(3):
            model(x)

    assert_equal_to_the_byte(*recorded_and_replayed(model, steps))


def test_calls_that_raise_are_counted_until_they_raise() -> None:
    model, x = RaisesInside(), torch.randn(8, 16)

    def steps() -> None:
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            model(x)
        model(x.clone().requires_grad_()).sum().backward()

    assert_equal_to_the_byte(*recorded_and_replayed(model, steps))


def test_backward_of_each_layer_of_a_chain_starts_with_the_memory_of_the_replay() -> None:
    model, x = nn.Sequential(*(nn.Linear(8 << i, 16 << i) for i in range(4))), torch.randn(32, 8)

    def steps() -> None:
        for _ in range(2):  # the second pass adds to the gradients of the first
            out = x
            for number, layer in enumerate(model):  # as the model does, with a mark at the last node of each
                out = layer(out)
                assert out.grad_fn is not None
                out.grad_fn.register_prehook(lambda _, number=number: mark(f"backward-of-{number}"))
            out.sum().backward()

    timeline, replay = recorded_and_replayed(model, steps)

    series = next(series for series in timeline.counters if series.name == "allocated")
    held: dict[str, list[int]] = {}
    for span in timeline.spans:
        if span.phase == "backward":
            at = int(series.time.searchsorted(span.start_ns, "right")) - 1
            held.setdefault(span.module_class, []).append(int(series.value[at] - series.value[0]))
    assert held["Linear"] == list(
        itertools.chain(*zip(*(replay.marks[f"backward-of-{n}"] for n in (3, 2, 1, 0)), strict=True))
    )


def test_a_profiler_with_memory_sees_the_same_as_without_a_recording() -> None:
    def profiled() -> list[tuple[str, int]]:
        model, x = nn.Linear(32, 32), torch.randn(64, 32)
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profiler:
            model(x).sum().backward()
        return [(event.name, event.cpu_memory_usage) for event in profiler.events() or [] if event.name[:5] == "aten:"]

    plain = profiled()
    with modtrace.record(memory=True):
        recorded = profiled()

    assert recorded == plain
    assert sum(count for _, count in plain) > 0


@pytest.mark.parametrize("name", ["GPT", "Llama, checkpointed", "ResNet"])
def test_losses_and_gradients_are_the_same_to_the_bit(name: str) -> None:
    def trained() -> list[Tensor]:
        torch.manual_seed(0)
        workload = ARCHITECTURES[name]()
        losses = [train(workload) for _ in range(2)]
        return [*losses, *(p.grad for p in workload.model.parameters() if p.grad is not None)]

    plain = trained()
    with modtrace.record(memory=True):
        recorded = trained()

    assert len(plain) > 10
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
