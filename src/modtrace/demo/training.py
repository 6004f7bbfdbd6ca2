"""Train the demo's GPT on the bytes of its own source text."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (torch's own name for it)
from torch.optim import AdamW, Optimizer

from .gpt import GPT

__all__ = ["batches", "make_optimizer", "train_step"]


def batches(
    size: int = 8, length: int = 64, *, seed: int = 0, device: str | torch.device = "cpu"
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tokens, targets) forever, int64[size, length] each, drawn from the demo's own source text."""
    text = "".join(files(__package__).joinpath(name).read_text("utf-8") for name in ("gpt.py", "training.py"))
    tokens = torch.tensor(list(text.encode()), device=device)
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - length, (size,), generator=generator).tolist()
        windows = torch.stack([tokens[start : start + length + 1] for start in starts])
        yield windows[:, :-1], windows[:, 1:]


def make_optimizer(model: GPT) -> Optimizer:
    """Return the optimizer of the demo's training."""
    return AdamW(model.parameters(), lr=3e-3)


def train_step(model: GPT, optimizer: Optimizer, tokens: Tensor, targets: Tensor) -> float:
    """Run forward, backward and one optimizer step; return the loss in nats per byte."""
    optimizer.zero_grad()
    logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.autograd.backward(loss)
    optimizer.step()
    return loss.item()
