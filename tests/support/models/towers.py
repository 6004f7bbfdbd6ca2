"""Two towers, called by keywords only, whose outputs are a dictionary and a dataclass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .decoders import VOCABULARY, GPTBlock
from .workload import Workload

__all__ = ["two_towers"]


@dataclass
class Output:
    embedding: Tensor
    hidden: Tensor


class Text(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(GPTBlock(width, 4) for _ in range(2))
        self.projection = nn.Linear(width, width, bias=False)

    def forward(self, *, tokens: Tensor) -> dict[str, Tensor]:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(x=hidden)
        return {"hidden": hidden, "embedding": self.projection(hidden.mean(1))}


class Image(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.blocks = nn.ModuleList(GPTBlock(width, 4) for _ in range(2))
        self.projection = nn.Linear(width, width, bias=False)

    def forward(self, *, images: Tensor) -> Output:
        hidden = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            hidden = block(x=hidden)
        return Output(self.projection(hidden[:, 0]), hidden)


class Towers(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.text, self.image = Text(width), Image(width)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, *, tokens: Tensor, images: Tensor) -> dict[str, object]:
        text, image = self.text(tokens=tokens), self.image(images=images)
        a, b = F.normalize(text["embedding"], dim=-1), F.normalize(image.embedding, dim=-1)
        return {"logits": self.logit_scale.exp() * a @ b.T, "image": image}


def two_towers(width: int = 64) -> Workload:
    model = Towers(width)
    tokens, images = torch.randint(VOCABULARY, (6, 16)), torch.randn(6, 3, 16, 16)

    def loss() -> Tensor:
        logits = model(tokens=tokens, images=images)["logits"]
        return F.cross_entropy(logits, torch.arange(6)) + F.cross_entropy(logits.T, torch.arange(6))

    return Workload(model, loss)
