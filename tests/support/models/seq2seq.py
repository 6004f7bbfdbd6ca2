"""Encoders with decoders: torch's own Transformer, and a T5 whose layers share one bias."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .decoders import VOCABULARY, RMSNorm
from .workload import Workload

__all__ = ["encoder_decoder", "t5"]


class Translator(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.transformer = nn.Transformer(width, 4, 2, 2, 2 * width, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        mixed = self.transformer(self.embedding(source), self.embedding(target), tgt_mask=mask)
        out: Tensor = self.head(mixed)
        return out


def encoder_decoder(width: int = 64) -> Workload:
    model = Translator(width)
    source, target = torch.randint(VOCABULARY, (4, 24)), torch.randint(VOCABULARY, (4, 16))

    def loss() -> Tensor:
        return F.cross_entropy(model(source, target=target).flatten(0, 1), target.flatten())

    return Workload(model, loss)


class BiasedAttention(nn.Module):
    """Makes the bias of relative positions where it has one, and hands it on."""

    def __init__(self, width: int, has_bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        if has_bias:
            self.relative_attention_bias = nn.Embedding(32, 4)

    def forward(self, x: Tensor, memory: Tensor | None = None, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        memory = x if memory is None else memory
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in (self.q(x), self.k(memory), self.v(memory)))
        scores = q @ k.transpose(-2, -1)
        if bias is None:
            distance = torch.arange(x.shape[1])[:, None] - torch.arange(memory.shape[1])[None]
            bias = (
                self.relative_attention_bias(distance.clamp(-16, 15) + 16).permute(2, 0, 1).unsqueeze(0)
                if hasattr(self, "relative_attention_bias")
                else torch.zeros_like(scores)
            )
        mixed = ((scores + bias).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.o(mixed), bias


class T5Block(nn.Module):
    def __init__(self, width: int, has_bias: bool, cross: bool) -> None:
        super().__init__()
        self.norm, self.attention = RMSNorm(width), BiasedAttention(width, has_bias)
        if cross:
            self.cross_norm, self.cross = RMSNorm(width), BiasedAttention(width, False)
        self.wi, self.wo = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)
        self.mlp_norm, self.act = RMSNorm(width), nn.ReLU()

    def forward(self, x: Tensor, memory: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        mixed, bias = self.attention(self.norm(x), bias=bias)
        x = x + mixed
        if memory is not None:
            x = x + self.cross(self.cross_norm(x), memory)[0]
        return x + self.wo(self.act(self.wi(self.mlp_norm(x)))), bias


class T5Stack(nn.Module):
    def __init__(self, width: int, cross: bool) -> None:
        super().__init__()
        self.block = nn.ModuleList(T5Block(width, number == 0, cross) for number in range(3))
        self.final_layer_norm = RMSNorm(width)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        bias = None
        for block in self.block:
            x, bias = block(x, memory, bias)
        out: Tensor = self.final_layer_norm(x)
        return out


class T5(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, width)
        self.encoder, self.decoder = T5Stack(width, False), T5Stack(width, True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mixed = self.decoder(self.shared(target), memory=self.encoder(self.shared(source)))
        out: Tensor = mixed @ self.shared.weight.T
        return out


def t5(width: int = 64) -> Workload:
    model = T5(width)
    source, target = torch.randint(VOCABULARY, (4, 24)), torch.randint(VOCABULARY, (4, 16))
    return Workload(model, lambda: F.cross_entropy(model(source, target).flatten(0, 1), target.flatten()))
