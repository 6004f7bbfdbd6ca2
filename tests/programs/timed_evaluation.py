"""Evaluates after each fourth step and saves after each fifth, inside the training."""

import functools
import io

import stopwatch
import torch
from stopwatch import part
from torch import nn
from torch.utils.data import DataLoader


def evaluate() -> None:
    with part("evaluation"), torch.no_grad():
        model.eval()
        batches = iter(DataLoader(stopwatch.Rows(128), batch_size=64))
        inputs, classes = next(batches)
        criterion(model(inputs), classes)
        inputs, classes = next(batches)
        criterion(model(inputs), classes)
        model.train()


model, criterion = stopwatch.Net(), nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters())
batches = DataLoader(stopwatch.Rows(128 * 20), batch_size=128)
for number, (inputs, classes) in enumerate(stopwatch.fetched(batches)):
    stopwatch.learn(optimizer, functools.partial(model, inputs), lambda output, to=classes: criterion(output, to))
    if number % 4 == 3:
        evaluate()
    if number % 5 == 4:
        with part("saving"):
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, io.BytesIO())
stopwatch.report()
