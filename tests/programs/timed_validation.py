"""Validates before the first step and after each third, in batches, with a loss of its own."""

import functools

import stopwatch
import torch
from stopwatch import part
from torch import nn
from torch.utils.data import DataLoader


def validate() -> None:
    with part("evaluation"), torch.no_grad():
        model.eval()
        batches = iter(DataLoader(stopwatch.Rows(192), batch_size=64))
        for _ in range(3):
            inputs, classes = next(batches)
            criterion(model(inputs), classes)
        model.train()


model, criterion = stopwatch.Net(), nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
validate()
stopwatch.prepare()
stopwatch.begin()
loader = DataLoader(stopwatch.Rows(128 * 12), batch_size=128)
for number, (inputs, classes) in enumerate(stopwatch.fetched(loader)):
    stopwatch.learn(optimizer, functools.partial(model, inputs), lambda output, to=classes: criterion(output, to))
    if number % 3 == 2 and number < 11:
        validate()
stopwatch.report()
