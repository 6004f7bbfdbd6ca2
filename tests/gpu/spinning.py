"""Modules whose time on a GPU is known: each keeps its stream busy for so many ms, in forward and in backward."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Net", "Spin", "device_spans", "spin"]

_PROBE_CYCLES = 100_000_000


@cache
def _cycles_per_ms() -> float:
    """Return the cycles per ms, measured by two events whose times torch reports."""
    torch.cuda._sleep(_PROBE_CYCLES)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    torch.cuda._sleep(_PROBE_CYCLES)
    end.record()
    end.synchronize()
    return _PROBE_CYCLES / float(begin.elapsed_time(end))


def spin(ms: float) -> None:
    """Keep the current stream busy for about so long."""
    torch.cuda._sleep(round(ms * _cycles_per_ms()))


class _Spin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_ms: float, backward_ms: float) -> Tensor:
        ctx.backward_ms = backward_ms
        spin(forward_ms)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        spin(ctx.backward_ms)
        return gradients[0].clone(), None, None


class Spin(nn.Module):
    """One kernel of so many ms in forward and one in backward."""

    def __init__(self, forward_ms: float, backward_ms: float) -> None:
        super().__init__()
        self.forward_ms, self.backward_ms = forward_ms, backward_ms

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Spin.apply(x, self.forward_ms, self.backward_ms)
        return out


class Net(nn.Module):
    """10 and 30 ms in forward, 20 and 40 ms in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Spin(10, 20), Spin(30, 40)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x))
        return out


def device_spans(timeline: Any) -> list[Any]:
    """Return the spans on rows of streams, in start order."""
    return [span for span in timeline.spans if span.track.startswith("gpu ")]
