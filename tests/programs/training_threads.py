"""Three threads train a model each, with an optimizer each, at the same time."""

import threading

import torch
import truth
from small_training import Net
from torch import Tensor

STEPS = 20
torch.manual_seed(0)
torch.set_num_threads(1)
models = [Net() for _ in range(3)]
inputs = torch.randn(STEPS, 3, 4)
losses: list[list[Tensor]] = [[], [], []]
all_there = threading.Barrier(3)


def train(number: int) -> None:
    model = models[number]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    all_there.wait()
    for x in inputs:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        truth.step()
        losses[number].append(loss)


for model in models:
    truth.watch(model)
threads = [threading.Thread(target=train, args=(number,), name=f"trainer {number}") for number in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for thread_losses in losses:
    for loss in thread_losses:
        truth.loss(loss)
truth.report()
