"""The training of the GPU benchmarks: its model, device and number of steps."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from modtrace.demo import GPT


class Subject(NamedTuple):
    """The command's options.

    Attributes:
        device: "cuda" or "cpu".
        layers, width, vocabulary: sizes of the GPT, whose heads have 64 channels.
        batch, length: number of sequences, and of tokens in each.
        rounds, steps: number of rounds, and of steps in a group.
        models: parts of the names of architectures to measure; empty: all.
    """

    device: str
    layers: int
    width: int
    vocabulary: int
    batch: int
    length: int
    rounds: int
    steps: int
    models: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: argparse.Namespace) -> Subject:
        """Return the subject of the options; on the CPU, sizes are limited to those of a small model."""
        values = {name: getattr(options, name) for name in cls._fields}
        if options.device == "cpu":
            limits = {"layers": 2, "width": 128, "vocabulary": 512, "batch": 2, "length": 64, "rounds": 2, "steps": 2}
            values |= {name: min(values[name], limit) for name, limit in limits.items()}
        return cls(**{**values, "models": tuple(options.models or ())})

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def gpt(self) -> nn.Module:
        torch.manual_seed(0)
        heads = max(1, self.width // 64)
        return GPT(self.layers, self.width, heads, self.length, self.vocabulary).to(self.device)

    def training_step(self, model: nn.Module) -> Callable[[], torch.Tensor]:
        """Return a training step in bf16 autocast, with AdamW, which returns the loss and does not synchronize."""
        torch.manual_seed(1)
        tokens = torch.randint(self.vocabulary, (self.batch, self.length + 1), device=self.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=self.is_gpu)

        def step() -> torch.Tensor:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(self.device, torch.bfloat16):
                logits = model(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    def describe(self) -> str:
        parameters = 12 * self.layers * self.width**2 + self.width * (self.vocabulary + self.length)
        size = (
            f"GPT of {self.layers} layers, {self.width} channels, {parameters / 1e6:.1f} million parameters, "
            f"{self.batch} x {self.length} tokens, bf16 autocast"
        )
        if self.is_gpu:
            device = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
        else:
            device = "THE CPU: this tests the program, and shows nothing about a GPU"
        return f"torch {torch.__version__}, Python {platform.python_version()}, {device}\n{size}"
