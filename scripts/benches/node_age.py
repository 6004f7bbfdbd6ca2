"""The time that the native engine adds to a backward pass, by the age of the oldest node in the pass.

There are two equal graphs, except for one node: in the first graph it is as new as the others, in the second the thread
has made many nodes since. A round has a few passes of each, with and without recording. The added time is a median over
the rounds; the ratio's range covers 90 % of the bootstrap samples of the rounds.
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
    """Return the duration of the fastest pass, in ns."""
    times = []
    with context:
        loss.backward(retain_graph=True)
        for _ in range(passes):
            start_ns = time.perf_counter_ns()
            loss.backward(retain_graph=True)
            times.append(time.perf_counter_ns() - start_ns)
    return min(times)


def ratio_of(pairs: list[tuple[float, float]]) -> float:
    """Return the ratio of the median added times: with the old node, over with the fresh node."""
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
    leaf = torch.ones(8, requires_grad=True)
    with recording():
        old = leaf * 2
        for _ in range(options.age):
            leaf * 2
        losses = {"fresh": model(leaf * 2).sum(), "old": model(old).sum()}
    added_ns: dict[str, list[float]] = {name: [] for name in losses}
    for number in range(options.rounds):
        # In alternating order.
        for name, loss in sorted(losses.items(), reverse=number % 2 == 1):
            base_ns = pass_ns(loss, nullcontext(), options.passes)
            added_ns[name].append(pass_ns(loss, recording(), options.passes) - base_ns)
    fresh_us, old_us = (statistics.median(added_ns[name]) / 1e3 for name in losses)
    print(f"added to a pass, oldest node fresh: {fresh_us:.2f} µs; {options.age:,} nodes back: {old_us:.2f} µs")
    pairs = list(zip(added_ns["fresh"], added_ns["old"], strict=True))
    generator = random.Random(0)
    ratios = sorted(ratio_of(generator.choices(pairs, k=len(pairs))) for _ in range(1_000))
    print(f"ratio: {ratio_of(pairs):.2f} (90 %: {ratios[50]:.2f} to {ratios[-51]:.2f})")


if __name__ == "__main__":
    main()
