"""A run of tests: each makes a model of its own, prepares, takes a few steps, and looks at the result."""

import functools

import stopwatch
import torch
from torch import nn


def train(model: nn.Module, steps: int, optimizer_class: type[torch.optim.Optimizer]) -> None:
    with torch.no_grad():
        model(torch.randn(2, stopwatch.WIDTH))
    optimizer = optimizer_class(model.parameters(), lr=0.01)  # type: ignore[call-arg]
    stopwatch.prepare()
    stopwatch.begin()
    for _ in range(steps):
        with stopwatch.part("batch"), torch.profiler.record_function("batch"):
            inputs = torch.randn(128, stopwatch.WIDTH)
        stopwatch.learn(optimizer, functools.partial(model, inputs), stopwatch.spread)
    model(torch.randn(2, stopwatch.WIDTH))


class Small(stopwatch.Net):  # type: ignore[misc]
    """Another class."""


models = [stopwatch.Net(), Small(), stopwatch.Net(20), nn.Sequential(stopwatch.Net(), nn.GELU())]
for number, optimizer_class in enumerate((torch.optim.SGD, torch.optim.Adam, torch.optim.SGD, torch.optim.AdamW)):
    train(models[number], 3 + number % 2, optimizer_class)
stopwatch.report()
