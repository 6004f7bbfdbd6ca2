"""A small GPT over bytes, trained on its own source code: recorded by `modtrace demo`, measured by benchmarks."""

from collections.abc import Iterator
from importlib.resources import files

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own name for it)
from torch.optim import AdamW, Optimizer


class Attention(nn.Module):
    """Causal self-attention with separate query, key and value projections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.projection = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map float[batch, time, width] to the same shape."""
        q, k, v = (self._split(projected) for projected in (self.query(x), self.key(x), self.value(x)))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.projection(mixed.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        return x.view(batch, time, self.heads, -1).transpose(1, 2)


class MLP(nn.Module):
    """Two linear layers with a GELU between them, four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.activation = nn.GELU()
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map float[batch, time, width] to the same shape."""
        out: Tensor = self.down(self.activation(self.up(x)))
        return out


class Block(nn.Module):
    """Attention and MLP, each after a LayerNorm and with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map float[batch, time, width] to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class GPT(nn.Module):
    """A GPT over bytes."""

    def __init__(
        self, layers: int = 6, width: int = 64, heads: int = 4, context: int = 64, vocabulary: int = 256
    ) -> None:
        super().__init__()
        self.context = context
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token_embedding.weight
        self.apply(_init_weights)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64[batch, time] tokens to float[batch, time, vocabulary] logits of each next token."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _init_weights(module: nn.Module) -> None:
    # Small, because the head is tied to the embedding: at its usual scale of 1 the first logits would be far too large.
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def batches(
    size: int = 8, length: int = 64, *, seed: int = 0, device: str | torch.device = "cpu"
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tokens, targets) forever, int64[size, length] each, drawn from the demo's own source text."""
    text = files(__package__).joinpath("demo.py").read_text("utf-8")
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
