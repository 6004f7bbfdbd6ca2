"""Prints what torch's caches of graphs gave to a compiled model, its losses, and the modules that spans tell inside."""

import json
import sys

import torch
from torch import nn
from torch._dynamo.utils import counters

import modtrace


class Block(nn.Module):
    """A norm, a linear layer and a GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.act(self.up(self.norm(x)))
        return out


def main(is_recorded: bool) -> None:
    """Train the compiled block for two steps."""
    torch.manual_seed(0)
    compiled, x = torch.compile(Block()), torch.randn(2, 8)
    losses = []

    def train() -> None:
        for _ in range(2):
            loss = compiled(x).sum()
            loss.backward()
            losses.append(loss.item().hex())

    inside: list[tuple[str, object]] = []
    if is_recorded:
        with modtrace.record() as recording:
            train()
        timeline = recording.timeline()
        args = [timeline.span_args.get(index, {}) for index in range(len(timeline.spans))]
        inside = [(span.phase, own.get("compiled_modules")) for span, own in zip(timeline.spans, args, strict=True)]
    else:
        train()
    told = {"losses": losses, "counters": {key: dict(value) for key, value in counters.items() if value}}
    print(json.dumps(told | {"inside": inside}))


if __name__ == "__main__":
    main(sys.argv[1] == "recorded")
