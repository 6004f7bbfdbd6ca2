"""What the native engine adds to a backward pass, by the age of the oldest node that the pass reaches.

The same graph twice, but for one node: in the first it is as new as the others, in the second the thread has made many
nodes since. Passes with and without recording alternate; a figure is the median over the rounds of the difference.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import modtrace


def recording() -> modtrace.Recording:
    return modtrace.record(engine="native", capacity=1 << 16)


def pass_ns(loss: Tensor, context: AbstractContextManager[Any], passes: int) -> float:
    """Return the nanoseconds of the fastest of some passes."""
    times = []
    with context:
        loss.backward(retain_graph=True)
        for _ in range(passes):
            begin = time.perf_counter_ns()
            loss.backward(retain_graph=True)
            times.append(time.perf_counter_ns() - begin)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--age", type=int, default=1_000_000, help="nodes made since the oldest one")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--passes", type=int, default=100, help="passes per subject and round; the fastest one counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(options.layers)])
    one = torch.ones(8, requires_grad=True)
    with recording():
        old = one * 2
        for _ in range(options.age):
            one * 2
        losses = {"fresh": model(one * 2).sum(), "old": model(old).sum()}
    added: dict[str, list[float]] = {name: [] for name in losses}
    for _ in range(options.rounds):
        for name, loss in losses.items():
            bare = pass_ns(loss, nullcontext(), options.passes)
            added[name].append(pass_ns(loss, recording(), options.passes) - bare)
    fresh, old_us = (statistics.median(added[name]) / 1e3 for name in losses)
    print(f"added to a pass, oldest node fresh: {fresh:.2f} µs; {options.age:,} nodes back: {old_us:.2f} µs")
    print(f"ratio: {old_us / fresh:.2f}")


if __name__ == "__main__":
    main()
