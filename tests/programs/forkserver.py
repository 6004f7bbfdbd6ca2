"""Two processes of a fork server train; the parent imports torch and calls no module."""

import multiprocessing

import torch
import truth
from small_training import train


def train_child(number: int) -> None:
    train(steps=2 + number)
    truth.report(f"child {number}")


if __name__ == "__main__":
    assert torch.ones(1) == 1
    context = multiprocessing.get_context("forkserver")
    children = [context.Process(target=train_child, args=(number,)) for number in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0
