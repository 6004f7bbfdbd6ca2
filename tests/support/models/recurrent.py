"""Models that loop over time, or call the same block again and again."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .decoders import VOCABULARY, GPTBlock, RMSNorm, next_token_loss
from .workload import Workload

__all__ = ["lstm", "mamba", "shared_block"]


class Reader(nn.Module):
    """An LSTM, then a cell called once per token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True, dropout=0.1)
        self.cell = nn.LSTMCell(width, width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x, (hidden, state) = self.lstm(self.embedding(tokens))
        memory = (hidden[-1], state[-1])
        outs = []
        for at in range(tokens.shape[1]):
            memory = self.cell(x[:, at], memory)
            outs.append(memory[0])
        out: Tensor = self.head(torch.stack(outs, 1))
        return out


def lstm(width: int = 32) -> Workload:
    model = Reader(width)
    tokens = torch.randint(VOCABULARY, (4, 12))
    return Workload(model, lambda: next_token_loss(model, tokens))


class Mixer(nn.Module):
    """A selective scan, written as a loop over time among the module's own operations."""

    def __init__(self, width: int, states: int = 8) -> None:
        super().__init__()
        self.width, self.states = width, states
        self.in_proj = nn.Linear(width, 2 * width, bias=False)
        self.conv1d = nn.Conv1d(width, width, 4, groups=width, padding=3)
        self.x_proj = nn.Linear(width, 4 + 2 * states, bias=False)
        self.dt_proj = nn.Linear(4, width)
        self.A_log = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(width, 1))
        self.D = nn.Parameter(torch.ones(width))
        self.out_proj = nn.Linear(width, width, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        time = x.shape[1]
        x, gate = self.in_proj(x).chunk(2, -1)
        x = self.act(self.conv1d(x.transpose(1, 2))[..., :time]).transpose(1, 2)
        step, b, c = self.x_proj(x).split([4, self.states, self.states], -1)
        step = F.softplus(self.dt_proj(step))
        decay = (step[..., None] * -self.A_log.exp()).exp()
        drive = step[..., None] * b[:, :, None] * x[..., None]
        state = torch.zeros(len(x), self.width, self.states)
        outs = []
        for at in range(time):
            state = decay[:, at] * state + drive[:, at]
            outs.append((state * c[:, at, None]).sum(-1))
        y = torch.stack(outs, 1) + self.D * x
        out: Tensor = self.out_proj(y * self.act(gate))
        return out


class MambaBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mixer = RMSNorm(width), Mixer(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mixer(self.norm(x))
        return out


class Mamba(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(MambaBlock(width) for _ in range(2))
        self.norm_f = RMSNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.lm_head(self.norm_f(x))
        return out


def mamba(width: int = 32) -> Workload:
    model = Mamba(width)
    tokens = torch.randint(VOCABULARY, (2, 16))
    return Workload(model, lambda: next_token_loss(model, tokens))


class Albert(nn.Module):
    """One block, called four times."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.block = GPTBlock(width, 4)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for _ in range(4):
            x = self.block(x)
        out: Tensor = self.head(x)
        return out


def shared_block(width: int = 64) -> Workload:
    model = Albert(width)
    tokens = torch.randint(VOCABULARY, (4, 24))
    return Workload(model, lambda: next_token_loss(model, tokens))
