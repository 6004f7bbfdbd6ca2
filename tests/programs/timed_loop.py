"""A loop by hand: a loader in its own process, clipping, AdamW and a scheduler, over three epochs."""

import stopwatch
import torch
from stopwatch import part
from torch import nn
from torch.utils.data import DataLoader


def train(workers: int) -> None:
    model, criterion = stopwatch.Net(), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    loader = DataLoader(stopwatch.Rows(192 * 7), batch_size=192, num_workers=workers, shuffle=True)
    for _ in range(3):
        for inputs, classes in stopwatch.fetched(loader):
            with part("optimizer"):
                optimizer.zero_grad()
            with part("forward"):
                output = model(inputs)
            with part("loss"):
                loss = criterion(output, classes) + stopwatch.spread(output)
            with part("backward"):
                loss.backward()
            with part("optimizer"):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with part("optimizer"):
                optimizer.step()
            stopwatch.step()
            with part("optimizer"):
                scheduler.step()
    stopwatch.report()


if __name__ == "__main__":
    train(workers=0)
