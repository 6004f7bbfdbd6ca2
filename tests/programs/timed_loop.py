"""A loop by hand: a loader in its own process, clipping, AdamW and a scheduler, over three epochs."""

import stopwatch
import torch
from stopwatch import part, turn_to
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
                turn_to("loss")
                loss = criterion(output, classes) + stopwatch.spread(output)
                turn_to("backward")
                loss.backward()
            with part("optimizer"):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with part("optimizer"):
                optimizer.step()
            del output, loss  # else the next forward ends with freeing this graph
            stopwatch.step()
            with part("optimizer"):
                scheduler.step()
    stopwatch.report()


if __name__ == "__main__":
    train(workers=0)
