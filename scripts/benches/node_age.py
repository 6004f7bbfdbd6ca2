"""What the native engine adds to a backward pass, by the age of the oldest node that the pass reaches.

The same graph twice, but for one node: in the first it is as new as the others, in the second the thread has made many
nodes since. A round is a few passes of each, with and without recording, close to each other. What recording adds is a
median over the rounds; the ratio's range is of the middle 90 % of samples that are drawn from the rounds.
"""

from __future__ import annotations

import argparse
import random
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


def ratio_of(pairs: list[tuple[float, float]]) -> float:
    """Return the ratio of the medians of what is added: the old one's over the fresh one's."""
    return statistics.median(old for _, old in pairs) / statistics.median(fresh for fresh, _ in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--age", type=int, default=1_000_000, help="nodes made since the oldest one")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--passes", type=int, default=10, help="passes per subject and round; the fastest one counts")
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
    for number in range(options.rounds):
        # Each is the first as often.
        for name, loss in sorted(losses.items(), reverse=number % 2 == 1):
            bare = pass_ns(loss, nullcontext(), options.passes)
            added[name].append(pass_ns(loss, recording(), options.passes) - bare)
    fresh, old_us = (statistics.median(added[name]) / 1e3 for name in losses)
    print(f"added to a pass, oldest node fresh: {fresh:.2f} µs; {options.age:,} nodes back: {old_us:.2f} µs")
    pairs = list(zip(added["fresh"], added["old"], strict=True))
    drawn = random.Random(0)
    ratios = sorted(ratio_of(drawn.choices(pairs, k=len(pairs))) for _ in range(1_000))
    print(f"ratio: {ratio_of(pairs):.2f} (90 %: {ratios[50]:.2f} to {ratios[-51]:.2f})")


if __name__ == "__main__":
    main()
