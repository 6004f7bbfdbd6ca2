"""Usual trainings on a GPU: mixed precision with models of transformers and timm, torch.compile, a collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.module import register_module_forward_pre_hook

import modtrace
from modtrace.record_options import EngineName
from tests.frameworks.trainers import import_torchvision

pytestmark = [
    # Torch's own, when its compiler is imported, and of what compiles for a GPU.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
STEPS = 3
Loss = Callable[[], Tensor]


def gpt2(device: torch.device) -> tuple[nn.Module, Loss]:
    import_torchvision()  # transformers does, and fails beside one that was built for another torch
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=2, vocab_size=97, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).to(device)
    tokens = torch.randint(97, (2, 32), device=device)
    return model, lambda: model(input_ids=tokens, labels=tokens).loss


def vit(device: torch.device) -> tuple[nn.Module, Loss]:
    import_torchvision()  # as for transformers
    timm = pytest.importorskip("timm")
    size = 224 if device.type == "cuda" else 32  # fewer patches go through the same calls
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=size).to(device)
    images = torch.randn(2, 3, size, size, device=device)
    return model, lambda: model(images).float().square().mean()


def mlp(device: torch.device) -> tuple[nn.Module, Loss]:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(device)
    x = torch.randn(8, 64, device=device)
    return model, lambda: model(x).float().square().mean()


def train(model: nn.Module, loss_of: Loss, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Return the bits of each loss of a training with autocast and GradScaler."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype):
            loss = loss_of()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()).hex())
    return losses


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [mlp, gpt2, vit])
def test_mixed_precision_has_a_span_for_each_call_and_its_backward(
    device: torch.device, engine: EngineName, make: Any, dtype: torch.dtype
) -> None:
    model, loss_of = make(device)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    counted: Counter[str] = Counter()
    handle = register_module_forward_pre_hook(lambda module, _: counted.update([type(module).__name__]))
    train(model, loss_of, device, dtype)
    handle.remove()
    model.load_state_dict(state)

    with modtrace.record(engine=engine, device_times=engine == "native" and device.type == "cuda") as recording:
        train(model, loss_of, device, dtype)

    timeline = recording.timeline()
    on_threads = [span for span in timeline.spans if not span.track.startswith("gpu ")]
    assert Counter(span.module_class for span in on_threads if span.phase == "forward") == counted
    backward = {(span.fqn, span.call) for span in on_threads if span.phase == "backward"}
    assert {(type(model).__name__, call) for call in range(STEPS)} <= backward
    assert {name for name, _ in backward} >= {
        span.fqn for span in on_threads if span.module_class in ("Linear", "Conv1D", "LayerNorm")
    }
    assert (timeline.stats.overwritten, timeline.stats.torn, timeline.stats.unfinished) == (0, 0, 0)
    if device.type == "cuda" and engine == "native":
        assert {span.phase for span in timeline.spans if span.track.startswith("gpu ")} == {"forward", "backward"}


@pytest.mark.usefixtures("native_engine")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_model_computes_the_same_and_is_one_span(cuda: torch.device, mode: str) -> None:
    def train_compiled(context: Any) -> tuple[list[str], Any]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, _ = mlp(cuda)
        compiled: Any = torch.compile(model, mode=mode)
        x = torch.randn(8, 64, device=cuda)
        losses = []
        with context as recording:
            for _ in range(6):  # two warm up, one captures
                model.zero_grad()
                loss = compiled(x).square().mean()
                loss.backward()
                losses.append(float(loss.detach()).hex())
        return losses, recording

    plain, _ = train_compiled(nullcontext())
    losses, recording = train_compiled(modtrace.record(engine="native", device_times=True))

    assert losses == plain
    spans = recording.timeline().spans
    on_threads = [span for span in spans if not span.track.startswith("gpu ")]
    assert [s.call for s in on_threads if s.fqn == "Sequential" and s.phase == "forward"] == list(range(6))
    assert [s.call for s in on_threads if s.fqn == "Sequential" and s.phase == "backward"] == list(range(6))
    assert all(s.end_ns >= s.start_ns for s in spans)
    replays = [s for s in spans if s.module_class == "CUDAGraph" and s.track.startswith("gpu ")]
    assert bool(replays) is (mode == "reduce-overhead")


@pytest.fixture
def one_rank(device: torch.device, tmp_path: Path) -> Iterator[str]:
    """A group of one rank: NCCL's on the GPU, gloo's on the CPU."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl" and not distributed.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    distributed.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield backend
    distributed.destroy_process_group()


@pytest.mark.usefixtures("native_engine")
def test_a_collective_is_known_to_be_complete_where_threads_wait_for_it(device: torch.device, one_rank: str) -> None:
    values = torch.ones(1 << 20, device=device)
    distributed.all_reduce(values)  # the first one makes a communicator
    with modtrace.record(engine="native") as recording:
        distributed.all_reduce(values)
        work = distributed.all_reduce(values, async_op=True)
        assert work is not None
        work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize()

    timeline = recording.timeline()
    calls = [one for one in timeline.collectives if not one.is_wait]
    assert [(one.operator, one.counter) for one in calls] == [("all_reduce", 0), ("all_reduce", 1)]
    for one in calls:
        assert one.start_ns <= one.end_ns
        assert (one.done_ns is None) is (device.type == "cuda")
        assert one.device == ("cuda" if device.type == "cuda" else "")
    assert torch.equal(values, torch.ones_like(values))
