"""Evaluates after each fourth step and saves after each fifth, inside the training."""

import io

import stopwatch
import torch
from stopwatch import part
from torch import nn
from torch.utils.data import DataLoader


def evaluate() -> None:
    model.eval()
    with torch.no_grad():
        for inputs, classes in DataLoader(stopwatch.Rows(128), batch_size=64):
            criterion(model(inputs), classes)
    model.train()


torch.manual_seed(0)
torch.set_num_threads(1)
model, criterion = stopwatch.Net(), nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters())
batches = DataLoader(stopwatch.Rows(128 * 20), batch_size=128)
for number, (inputs, classes) in enumerate(stopwatch.fetched(batches)):
    with part("optimizer"):
        optimizer.zero_grad(set_to_none=False)
    with part("forward"):
        output = model(inputs)
    with part("loss+backward"):
        loss = criterion(output, classes)
        loss.backward()
    with part("optimizer"):
        optimizer.step()
    stopwatch.step()
    if number % 4 == 3:
        with part("evaluation"):
            evaluate()
    if number % 5 == 4:
        with part("saving"):
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, io.BytesIO())
stopwatch.report()
