"""A comparison of the bits of losses and parameters, with and without a recording, with deterministic algorithms."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from scripts.benches.gpu.subject import Subject
from torch import nn

import modtrace

Trained = tuple[list[str], str]
"""The bits of each loss, and a hash of all parameters."""

CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none again": nullcontext,
    "native": lambda: modtrace.record(engine="native"),
    "native, device times": lambda: modtrace.record(engine="native", device_times=True),
    "native, device times of all calls": lambda: modtrace.record(engine="native", device_times=64),
    "python": lambda: modtrace.record(engine="python"),
}


class WithDropout(nn.Module):
    """Draws random numbers, so that a recording that draws a random number is found."""

    def __init__(self, gpt: nn.Module) -> None:
        super().__init__()
        self.gpt, self.dropout = gpt, nn.Dropout(0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.dropout(self.gpt(tokens))
        return out


def train(subject: Subject, context: AbstractContextManager[Any], seed: int = 2) -> Trained:
    """Train from the same start, and return the losses and parameters."""
    model = WithDropout(subject.gpt())
    step = subject.training_step(model)
    torch.manual_seed(seed)
    with context:
        losses = [step() for _ in range(subject.steps)]
    subject.synchronize()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return [float(loss).hex() for loss in losses], digest.hexdigest()


def run(subject: Subject) -> list[str]:
    """Print the last losses; return the contexts with other bits."""
    torch.use_deterministic_algorithms(True)
    try:
        plain = train(subject, nullcontext())
        recorded = {name: train(subject, context()) for name, context in CONTEXTS.items()}
        other_seed = train(subject, nullcontext(), seed=3)
    finally:
        torch.use_deterministic_algorithms(False)
    print(f"{subject.steps} steps; the last loss without a recording: {float.fromhex(plain[0][-1]):.9f}\n")
    print("| | losses | parameters |\n| --- | --- | --- |")
    for name, trained in recorded.items():
        same = [("the same bits" if a == b else "DIFFERENT") for a, b in zip(trained, plain, strict=True)]
        print(f"| {name} | {same[0]} | {same[1]} |")
    faults = [f"{name}: other bits" for name, trained in recorded.items() if trained != plain]
    # If another seed gives the same bits, the comparison proves nothing.
    return faults + (["another seed trains to the same bits"] if other_seed == plain else [])
