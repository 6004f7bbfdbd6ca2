"""The parent trains, two forked children train its model on, and the parent evaluates it once more."""

import multiprocessing

import torch
import truth
from small_training import Net, train_epoch

torch.manual_seed(0)
torch.set_num_threads(1)  # the child has no threads of the parent's
model = Net()
truth.watch(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train_epoch(model, optimizer, steps=2)


def train_child(number: int) -> None:
    truth.restart()
    train_epoch(model, optimizer, steps=3 + number)
    truth.report(f"child {number}")


context = multiprocessing.get_context("fork")
children = [context.Process(target=train_child, args=(number,)) for number in range(2)]
for child in children:
    child.start()
for child in children:
    child.join()
    assert child.exitcode == 0

with torch.no_grad():
    truth.loss(model(torch.ones(1, 4)).sum())
truth.report("parent")
