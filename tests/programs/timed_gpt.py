"""A small GPT whose batches are cut by hand in a range of the user; it computes its loss itself."""

from __future__ import annotations

import stopwatch
import torch
from stopwatch import part, turn_to
from torch import Tensor, nn
from torch.profiler import record_function

_CONTEXT, _WIDTH, _WORDS = 64, 96, 65


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.attention = nn.MultiheadAttention(_WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        normal = self.ln_1(x)
        x = x + self.attention(normal, normal, normal, attn_mask=mask, is_causal=True, need_weights=False)[0]
        result: Tensor = x + self.mlp(self.ln_2(x))
        return result


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(_WORDS, _WIDTH), nn.Embedding(_CONTEXT, _WIDTH)
        self.h = nn.ModuleList([Block() for _ in range(3)])
        self.lm_head = nn.Linear(_WIDTH, _WORDS)
        self.mask = nn.Transformer.generate_square_subsequent_mask(_CONTEXT)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(words) + self.wpe(torch.arange(_CONTEXT))
        for block in self.h:
            x = block(x, self.mask)
        return nn.functional.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())


def get_batch() -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(text) - _CONTEXT, (16,)).tolist()
    words = torch.stack([text[start : start + _CONTEXT] for start in starts])
    targets = torch.stack([text[start + 1 : start + 1 + _CONTEXT] for start in starts])
    return words, targets


text = torch.randint(_WORDS, (100_000,))
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(12):
    with part("get_batch"), record_function("get_batch"):
        words, targets = get_batch()
    with part("forward"):
        loss = model(words, targets)
        turn_to("backward")  # the model computes the loss
        loss.backward()
    with part("optimizer"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with part("optimizer"):
        optimizer.step()
    del loss  # else the next forward ends with freeing this graph
    stopwatch.step()
    with part("optimizer"):
        optimizer.zero_grad(set_to_none=True)
stopwatch.report()
