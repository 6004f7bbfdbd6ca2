"""Decoder-only language models: GPT-2-like and Llama-like, the latter also with checkpointing and with experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .workload import Workload

__all__ = ["gpt", "llama", "llama_checkpointed", "llama_checkpointed_reentrant", "mixture_of_experts"]

VOCABULARY = 97


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class FusedAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.attn_dropout = nn.Dropout(0.1)
        self.resid_dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (part.view(batch, time, self.heads, -1).transpose(1, 2) for part in self.c_attn(x).split(width, -1))
        weights = (q @ k.transpose(-2, -1)) / k.shape[-1] ** 0.5
        mask = torch.ones(time, time, dtype=torch.bool).tril()
        weights = self.attn_dropout(weights.masked_fill(~mask, float("-inf")).softmax(-1))
        mixed = (weights @ v).transpose(1, 2).reshape(batch, time, width)
        out: Tensor = self.resid_dropout(self.c_proj(mixed))
        return out


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = FusedAttention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, width)
        self.wpe = nn.Embedding(64, width)
        self.drop = nn.Dropout(0.1)
        self.h = nn.ModuleList(GPTBlock(width, 4) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1])))
        for block in self.h:
            x = block(x)
        out: Tensor = self.lm_head(self.ln_f(x))
        return out


def gpt(layers: int = 4, width: int = 64, batch: int = 4, time: int = 32) -> Workload:
    model = GPT(layers, width)
    tokens = torch.randint(VOCABULARY, (batch, time))
    return Workload(model, lambda: next_token_loss(model, tokens))


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Rotary(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", 1 / 10_000 ** (torch.arange(0, width, 2) / width))

    def forward(self, time: int) -> tuple[Tensor, Tensor]:
        assert isinstance(self.frequencies, Tensor)
        angles = torch.outer(torch.arange(time), self.frequencies).repeat(1, 2)
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class GroupedAttention(nn.Module):
    """Four query heads share two heads of keys and values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = width // 4
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width // 2, bias=False)
        self.v_proj = nn.Linear(width, width // 2, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, position: tuple[Tensor, Tensor]) -> tuple[Tensor, None]:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, *position), rotate(k, *position)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2)), None


class GatedMLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


class LlamaLayer(nn.Module):
    def __init__(self, width: int, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(width)
        self.self_attn = GroupedAttention(width)
        self.post_attention_layernorm = RMSNorm(width)
        self.mlp = mlp

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        mixed, _ = self.self_attn(self.input_layernorm(hidden_states), position=position_embeddings)
        hidden_states = hidden_states + mixed
        out: Tensor = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return out


class Llama(nn.Module):
    """Args: checkpointing: None runs the layers as they are, else the value of `use_reentrant`."""

    def __init__(self, width: int, layers: list[nn.Module], checkpointing: bool | None = None) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.embed_tokens = nn.Embedding(VOCABULARY, width)
        self.rotary_emb = Rotary(width // 4)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        position = self.rotary_emb(tokens.shape[1])
        for layer in self.layers:
            if self.checkpointing is None:
                x = layer(x, position_embeddings=position)
            else:
                x = checkpoint(layer, x, position, use_reentrant=self.checkpointing)
        out: Tensor = self.lm_head(self.norm(x))
        return out


def llama(layers: int = 4, width: int = 64, checkpointing: bool | None = None) -> Workload:
    model = Llama(width, [LlamaLayer(width, GatedMLP(width, 3 * width)) for _ in range(layers)], checkpointing)
    tokens = torch.randint(VOCABULARY, (4, 32))
    return Workload(model, lambda: next_token_loss(model, tokens))


def llama_checkpointed() -> Workload:
    return llama(checkpointing=False)


def llama_checkpointed_reentrant() -> Workload:
    return llama(checkpointing=True)


class Experts(nn.Module):
    """Each token goes to the two of four experts that its router prefers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList(GatedMLP(width, 2 * width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.gate(tokens).softmax(-1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, rank = torch.where(chosen == number)
            out.index_add_(0, token, expert(tokens[token]) * weights[token, rank, None])
        return out.view_as(x)


def mixture_of_experts(layers: int = 3, width: int = 64) -> Workload:
    model = Llama(width, [LlamaLayer(width, Experts(width)) for _ in range(layers)])
    tokens = torch.randint(VOCABULARY, (4, 32))
    return Workload(model, lambda: next_token_loss(model, tokens))
