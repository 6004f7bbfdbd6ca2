"""Two processes train one model, whose parameters they share; the parent evaluates it.

They take turns, so that the losses are the same in each run.
"""

from multiprocessing.synchronize import Event

import torch
import truth
from small_training import Net, train_epoch
from torch import multiprocessing


def train_child(number: int, model: Net, turn: Event, next_turn: Event) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(number)
    truth.watch(model)
    turn.wait()
    train_epoch(model, torch.optim.SGD(model.parameters(), lr=0.01), steps=3 + number)
    truth.report(f"child {number}")
    next_turn.set()


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    shared = Net()
    shared.share_memory()
    truth.watch(shared)
    context = multiprocessing.get_context("spawn")
    turns = [context.Event() for _ in range(3)]
    turns[0].set()
    children = [context.Process(target=train_child, args=(i, shared, turns[i], turns[i + 1])) for i in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0
    with torch.no_grad():
        truth.loss(shared(torch.ones(2, 4)).sum())
    truth.report("parent")
